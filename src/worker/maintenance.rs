//! Prunes the attempt log and the outbox. Resolutions, refunds and flags are kept for good.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::driver::{Activation, Stop, Task};
use crate::clock::Clock;
use crate::store::Store;

/// Deletes old rows of `checks`, and of `events` once acknowledged.
pub struct Maintenance {
    /// The database.
    pub store: Arc<dyn Store>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// How long checks, and events since they were acknowledged, are kept.
    pub keep_for: Duration,
}

/// Rows deleted in one statement, so that no lock is held for long.
const PRUNE_BATCH: u32 = 5_000;
/// The most statements in one activation.
const BATCHES_MAX: u32 = 200;

#[async_trait]
impl Task for Maintenance {
    fn name(&self) -> &'static str {
        "maintenance"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        let before = self.clock.now().saturating_sub(self.keep_for);
        let mut pruned = 0;
        for _ in 0..BATCHES_MAX {
            let deleted = self.store.prune(before, PRUNE_BATCH).await?;
            pruned += deleted;
            if deleted < u64::from(PRUNE_BATCH) || stop.is_requested() {
                break;
            }
        }
        if pruned > 0 {
            tracing::info!(rows = pruned, "old checks and acknowledged events were pruned");
        }
        Ok(Activation::default())
    }
}
