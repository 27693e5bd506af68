//! The full reconcile: every open watch, whatever its schedule says (DESIGN section 9, direction 1).
//!
//! It goes page by page in order of payment id, so its memory is one page, and a page that is stopped
//! half way is simply read again by the next run.

use std::sync::Arc;

use async_trait::async_trait;

use super::check::Checker;
use super::driver::{Activation, Stop, Task};
use crate::store::StoreError;

/// The backstop behind the targeted checks.
pub struct Reconcile {
    /// Does the work.
    pub checker: Arc<Checker>,
    /// Watches per page.
    pub page_size: u32,
}

impl Reconcile {
    /// Reads every open watch once. Returns how many. A page that cannot be written does not keep the
    /// others from being read (I11); the first such error is returned at the end.
    pub async fn reconcile(&self, stop: &Stop) -> Result<usize, StoreError> {
        let mut read = 0;
        let mut after = None;
        let mut first_error = None;
        while !stop.is_requested() {
            let leased = self.checker.lease_page(after.as_ref(), self.page_size).await?;
            let Some(last) = leased.followed().last() else { break };
            after = Some(last.watch.payment_id.clone());
            read += leased.followed().len();
            if let Err(error) = self.checker.finish(leased, stop).await {
                first_error.get_or_insert(error);
            }
        }
        match first_error {
            Some(error) => Err(error),
            None => Ok(read),
        }
    }
}

#[async_trait]
impl Task for Reconcile {
    fn name(&self) -> &'static str {
        "reconcile"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        let read = self.reconcile(stop).await?;
        tracing::info!(payments = read, "full reconcile done");
        Ok(Activation::default())
    }
}
