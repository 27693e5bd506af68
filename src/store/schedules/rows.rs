//! From rows to values, the same for every database: only the queries differ.

use super::{NewVersion, Series, Version};
use crate::domain::{ChainId, Rail, Timestamp};
use crate::errors::error_chain;
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
    /// The version. What makes no sense in it, but for whose it is, is told of and counts as nothing: so it
    /// keeps its place, and the next fit follows it.
    fn version(self, timestamp: impl Fn(Time) -> Timestamp) -> Result<Version, StoreError> {
        const TABLE: &str = "schedules";
        let series = series(TABLE, &self.rail, self.chain_id)?;
        let policy = coded(TABLE, "policy", &self.policy, |text| serde_json::from_str(text).ok());
        Ok(Version {
            id: self.id,
            fitted: NewVersion {
                series,
                previous_id: Some(self.previous_id).filter(|id| *id != 0),
                policy: or_nothing(self.id, policy),
                sample_size: or_nothing(self.id, unsigned(TABLE, "sample_size", self.sample_size)),
                window_ms: or_nothing(self.id, unsigned(TABLE, "window_ms", self.window_ms)),
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

fn or_nothing<T: Default>(version: i64, column: Result<T, StoreError>) -> T {
    column.unwrap_or_else(|error| {
        tracing::warn!(
            schedule = version,
            error = error_chain(&error),
            "a column of this version of the schedule makes no sense"
        );
        T::default()
    })
}

/// The versions of these rows. One that nobody can say whose it is is told of and left out (I11).
pub(in crate::store) fn readable<Time>(
    rows: impl IntoIterator<Item = VersionRow<Time>>,
    timestamp: impl Fn(Time) -> Timestamp + Copy,
) -> Vec<Version> {
    let versions = rows.into_iter().filter_map(|row| {
        let id = row.id;
        let version = row.version(timestamp);
        version
            .inspect_err(|error| {
                tracing::warn!(
                    schedule = id,
                    error = error_chain(error),
                    "this version of a schedule cannot be read; it is left out"
                );
            })
            .ok()
    });
    versions.collect()
}
