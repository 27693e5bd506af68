//! Checks what is due, batch after batch, oldest due first.

use std::sync::Arc;

use async_trait::async_trait;

use super::check::Checker;
use super::driver::{Activation, Stop, Task};
use crate::store::StoreError;

/// The targeted checks, the mandatory ones, and the looks for finality: whatever is due.
pub struct Targeted {
    /// Does the work.
    pub checker: Arc<Checker>,
    /// The most watches in one batch.
    pub batch_max: u32,
}

/// The most batches in one activation, so that a stop or a status is never far.
const BATCHES_MAX: u32 = 1_000;

impl Targeted {
    /// Checks until nothing is due. Returns how many watches were checked.
    pub async fn check_all_due(&self, stop: &Stop) -> Result<usize, StoreError> {
        let mut checked = 0;
        for _ in 0..BATCHES_MAX {
            if stop.is_requested() {
                break;
            }
            let batch = self.checker.lease_due(self.batch_max).await?;
            let leased = batch.followed().len();
            self.checker.finish(batch, stop).await?;
            checked += leased;
            if leased < self.batch_max as usize {
                break;
            }
        }
        Ok(checked)
    }
}

#[async_trait]
impl Task for Targeted {
    fn name(&self) -> &'static str {
        "targeted"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        let checked = self.check_all_due(stop).await?;
        if checked > 0 {
            tracing::debug!(checked, "targeted checks done");
        }
        let now = self.checker.clock().now();
        let again_at = self.checker.store().next_due_at(now).await?;
        Ok(Activation { again_in: again_at.map(|at| at.since(now)) })
    }
}
