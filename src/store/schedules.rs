//! The versions of repeat schedules, as a database keeps them. What a version's policy says is the caller's to
//! know.

mod rows;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::Value;

pub(super) use self::rows::{VersionRow, readable, series};
use super::StoreError;
use crate::domain::{ChainId, Rail, Timestamp};

/// Whose latencies: schedules are fitted per rail and chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Series {
    /// The protocol payments came by.
    pub rail: Rail,
    /// The chain they settle on.
    pub chain_id: ChainId,
}

/// A fitted schedule on its way to being a version.
#[derive(Debug, Clone, PartialEq)]
pub struct NewVersion {
    /// Whose.
    pub series: Series,
    /// The newest version there was when it was fitted, adopted or not.
    pub previous_id: Option<i64>,
    /// When to check.
    pub policy: Value,
    /// Settled payments it was fitted to.
    pub sample_size: u64,
    /// From how far back they are, in milliseconds.
    pub window_ms: u64,
    /// Reads that are expected per payment that had not settled when it was found; of one that never settles as
    /// well.
    pub expected_reads: f64,
    /// The detection delay that is expected, in milliseconds: of the payments that the repeats find, as it is
    /// observed.
    pub expected_delay_ms: f64,
    /// The share of payments that never settle.
    pub never_share: f64,
    /// Whether new watches take it.
    pub adopted: bool,
    /// Why, or why not.
    pub reason: String,
}

/// A stored version of a schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Version {
    /// Its number.
    pub id: i64,
    /// What was fitted.
    pub fitted: NewVersion,
    /// When.
    pub created_at: Timestamp,
}

/// Versions of schedules.
#[async_trait]
pub trait ScheduleStore: Send + Sync + 'static {
    /// Adds a version. `None`: it is not the newest version's successor any more, and nothing was written:
    /// another replica fitted meanwhile (I10).
    async fn add_version(
        &self,
        version: &NewVersion,
        now: Timestamp,
    ) -> Result<Option<i64>, StoreError>;

    /// Of every series the newest version that was adopted and the newest that was not. A row that makes no
    /// sense is told of and keeps no other from being read (I11).
    async fn newest_versions(&self) -> Result<Vec<Version>, StoreError>;

    /// The versions with these ids, those that exist and can be read.
    async fn versions(&self, ids: &[i64]) -> Result<Vec<Version>, StoreError>;

    /// Deletes at most `limit` versions created before `before` that no open watch follows, and that are neither
    /// the newest of their series nor were in use at `before`: a watch that started then may not be written yet.
    /// Returns how many.
    async fn prune_schedules(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError>;
}
