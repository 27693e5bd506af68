//! Flags whose cause went away while nobody followed what they are about.
//!
//! Of a payment that is followed, its resolutions close the flags. This looks through the others, a page at a
//! time. Money that was nobody's is only marked, to be accounted for anew: the accounting closes its flag.

use std::collections::BTreeSet;

use super::progress::{Progress, Stage};
use super::{Reconciler, Step};
use crate::domain::ChainId;
use crate::store::StoreError;

impl Reconciler {
    pub(super) async fn flags_step(
        &self,
        progress: &mut Progress,
        after: i64,
    ) -> Result<Step, StoreError> {
        let size = self.settings.page_size;
        let page = self.store().flagged_page(after, size).await?;
        let now = self.now();
        let configured: BTreeSet<ChainId> = self.checker.chains().keys().copied().collect();
        let gone = page.gone(&configured);
        if !gone.is_empty() {
            let closed = self.store().account_flags(&[], &gone, now).await;
            if progress.or_told(progress.stage.name(), closed)?.is_some() {
                tracing::info!(flags = gone.len(), "the cause of flags is gone: they are closed");
                progress.counts.flags_closed += gone.len() as u64;
            }
        }
        let unmatched = page.unmatched();
        if !unmatched.is_empty() {
            let marked = self.store().mark_claimed(&unmatched, now).await;
            progress.or_told(progress.stage.name(), marked)?;
        }
        let is_last = page.flags.len() < usize::try_from(size).unwrap_or(usize::MAX);
        progress.stage = match page.flags.last().filter(|_| !is_last) {
            Some(last) => Stage::Flags { after: last.id },
            None => self.first_account(0),
        };
        Ok(Step::More)
    }
}
