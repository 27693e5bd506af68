//! From rows to values, the same for every database: only the queries differ.

use super::{NewVersion, Series, Version};
use crate::domain::{ChainId, Rail, Timestamp};
use crate::store::StoreError;
use crate::store::row::{coded, unsigned};

/// The series that two columns name.
pub(in crate::store) fn series(
    table: &'static str,
    rail: &str,
    chain_id: i64,
) -> Result<Series, StoreError> {
    Ok(Series {
        rail: coded(table, "rail", rail, Rail::from_code)?,
        chain_id: ChainId::new(unsigned(table, "chain_id", chain_id)?),
    })
}

/// A row of the versions; `Time` is how a database keeps one.
#[derive(sqlx::FromRow)]
pub(in crate::store) struct VersionRow<Time> {
    pub(in crate::store) id: i64,
    pub(in crate::store) rail: String,
    pub(in crate::store) chain_id: i64,
    pub(in crate::store) previous_id: i64,
    pub(in crate::store) policy: String,
    pub(in crate::store) sample_size: i64,
    pub(in crate::store) window_ms: i64,
    pub(in crate::store) expected_reads: f64,
    pub(in crate::store) expected_delay_ms: f64,
    pub(in crate::store) never_share: f64,
    pub(in crate::store) created_at: Time,
    pub(in crate::store) adopted_at: Option<Time>,
    pub(in crate::store) reason: String,
}

impl<Time> VersionRow<Time> {
    pub(in crate::store) fn version(
        self,
        timestamp: impl Fn(Time) -> Timestamp,
    ) -> Result<Version, StoreError> {
        const TABLE: &str = "schedules";
        Ok(Version {
            id: self.id,
            fitted: NewVersion {
                series: series(TABLE, &self.rail, self.chain_id)?,
                previous_id: Some(self.previous_id).filter(|id| *id != 0),
                policy: coded(TABLE, "policy", &self.policy, |t| serde_json::from_str(t).ok())?,
                sample_size: unsigned(TABLE, "sample_size", self.sample_size)?,
                window_ms: unsigned(TABLE, "window_ms", self.window_ms)?,
                expected_reads: self.expected_reads,
                expected_delay_ms: self.expected_delay_ms,
                never_share: self.never_share,
                adopted: self.adopted_at.is_some(),
                reason: self.reason,
            },
            created_at: timestamp(self.created_at),
        })
    }
}
