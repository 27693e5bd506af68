//! Where discovery reads on in its search for settled payments whose order another payment pays.
//!
//! No index finds those. So each discovery looks through a page of payments, the next one reads on where
//! it ended, and all of them come by in turn: a discovery reads the same few rows whatever the size of the
//! table. The position is kept in memory only; after a restart the search begins anew.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many payments one discovery looks through.
pub(super) const SETTLED_PAGE_MAX: i64 = 2_000;

/// Where the next discovery reads on.
#[derive(Debug, Default)]
pub(super) struct SettledPage(Mutex<String>);

impl SettledPage {
    /// The page holds the payments with ids after this one; the empty id comes before every other.
    pub(super) fn after(&self) -> String {
        self.position().clone()
    }

    /// Reads on after `last`, or from the start when the page was the last one.
    pub(super) fn move_on(&self, last: Option<String>) {
        *self.position() = last.unwrap_or_default();
    }

    fn position(&self) -> MutexGuard<'_, String> {
        // A position is whole whoever wrote it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
