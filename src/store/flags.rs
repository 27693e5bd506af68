//! Flags as people work through them: listed, closed with a note, and raised from outside a resolution.
//!
//! When a flag's cause is gone is the domain's to say ([`crate::domain::FlagKind`]); a store only keeps
//! what stands apart from what is history.

use async_trait::async_trait;
use serde::Serialize;

use super::StoreError;
use super::row::coded;
use crate::domain::{
    Closing, Decided, Flag, FlagKind, GoneFlag, OrderId, PaymentId, RaisedFlag, StoredFlag,
    Timestamp,
};

/// Which flags to list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlagFilter {
    /// Of this kind only.
    pub kind: Option<FlagKind>,
    /// About this payment only.
    pub payment_id: Option<PaymentId>,
    /// Closed ones too.
    pub closed_too: bool,
}

/// What became of one flag that was to be closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CloseOutcome {
    /// It is closed now.
    Closed,
    /// It was closed before, and stays as it was.
    ClosedBefore(Closing),
    /// There is no such flag.
    Unknown,
}

/// Flags, outside a resolution.
#[async_trait]
pub trait FlagStore {
    /// At most `limit` flags, oldest first.
    async fn flags(&self, filter: &FlagFilter, limit: u32) -> Result<Vec<StoredFlag>, StoreError>;

    /// Closes open flags in a person's name. One answer per id, in the order given.
    async fn close_flags(
        &self,
        ids: &[i64],
        by: &str,
        note: &str,
        now: Timestamp,
    ) -> Result<Vec<CloseOutcome>, StoreError>;

    /// First closes flags whose cause is gone, then raises others, all in one transaction. A flag that
    /// stands is not raised again: an open one takes over the new detail and keeps its age, and one that
    /// a person closed stays closed.
    async fn account_flags(
        &self,
        raise: &[RaisedFlag],
        gone: &[GoneFlag],
        now: Timestamp,
    ) -> Result<(), StoreError>;
}

/// A row of `flags` as the backends read it; times are Unix milliseconds.
#[derive(Debug)]
pub(super) struct RawFlag {
    pub(super) id: i64,
    pub(super) kind: String,
    pub(super) payment_id: String,
    pub(super) order_id: Option<String>,
    pub(super) subject: String,
    pub(super) detail: String,
    pub(super) opened_at: i64,
    pub(super) closed_at: Option<i64>,
    pub(super) closed_by: Option<String>,
    pub(super) note: Option<String>,
}

impl RawFlag {
    pub(super) fn parse(self) -> Result<StoredFlag, StoreError> {
        Ok(StoredFlag {
            id: self.id,
            kind: coded("flags", "kind", &self.kind, FlagKind::from_code)?,
            payment_id: (!self.payment_id.is_empty()).then(|| PaymentId::new(self.payment_id)),
            order_id: self.order_id.map(OrderId::new),
            subject: self.subject,
            detail: coded("flags", "detail", &self.detail, |text| serde_json::from_str(text).ok())?,
            opened_at: Timestamp::from_millis(self.opened_at),
            closed: closing(self.closed_at, self.closed_by, self.note),
        })
    }
}

/// The kinds of flags there are: what somebody wrote by hand may be of another, and is left alone.
pub(super) fn known_kinds() -> Vec<String> {
    FlagKind::ALL.iter().map(|kind| kind.code().to_owned()).collect()
}

/// A flag closed by hand, by SQL, may lack a name or a note.
pub(super) fn closing(
    at: Option<i64>,
    by: Option<String>,
    note: Option<String>,
) -> Option<Closing> {
    Some(Closing {
        at: Timestamp::from_millis(at?),
        by: by.unwrap_or_default(),
        note: note.unwrap_or_default(),
    })
}

/// What a batch of resolutions raises and closes.
pub(super) fn of_resolutions(decided: &[Decided]) -> (Vec<RaisedFlag>, Vec<GoneFlag>) {
    let raised = decided.iter().flat_map(|one| {
        one.resolution.flags.iter().map(|flag: &Flag| RaisedFlag {
            payment_id: Some(one.judged.payment_id.clone()),
            order_id: one.order_id.clone(),
            flag: flag.clone(),
        })
    });
    let gone = decided.iter().flat_map(|one| {
        one.resolution.close_flags.iter().map(|kind| GoneFlag {
            kind: *kind,
            payment_id: Some(one.judged.payment_id.clone()),
            subject: None,
            note: kind.cause_gone().unwrap_or_default().to_owned(),
        })
    });
    (raised.collect(), gone.collect())
}
