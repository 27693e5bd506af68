//! Finds payments to follow: polls the gateway's tables, whatever else may hint.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::driver::{Activation, Stop, Task};
use crate::clock::Clock;
use crate::store::{Discovered, Store, StoreError};

/// Opens watches for payments nobody follows yet, and wakes the targeted checks.
pub struct Discovery {
    /// The database.
    pub store: Arc<dyn Store>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// A `settling` row this old means that the gateway died.
    pub stale_after: Duration,
    /// The most watches opened in one statement.
    pub batch_max: u32,
    /// Woken when a watch was opened.
    pub wakes: Arc<Notify>,
}

/// The most batches in one activation; what is left is found by the next.
const BATCHES_MAX: u32 = 100;

impl Discovery {
    /// Opens watches until no payment is left without one.
    pub async fn discover(&self, stop: &Stop) -> Result<Discovered, StoreError> {
        let mut total = Discovered::default();
        for _ in 0..BATCHES_MAX {
            let now = self.clock.now();
            let stale_before = now.saturating_sub(self.stale_after);
            let found = self.store.discover(now, stale_before, self.batch_max).await?;
            total.opened += found.opened;
            total.reopened += found.reopened;
            if found.opened + found.reopened > 0 {
                self.wakes.notify_one();
            }
            let full = found.opened + found.reopened >= self.batch_max as usize;
            if !full || stop.is_requested() {
                break;
            }
        }
        Ok(total)
    }
}

#[async_trait]
impl Task for Discovery {
    fn name(&self) -> &'static str {
        "discovery"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        let found = self.discover(stop).await?;
        if found != Discovered::default() {
            let Discovered { opened, reopened } = found;
            tracing::info!(opened, reopened, "payments to follow were found");
        }
        Ok(Activation::default())
    }
}
