//! The database: `trait Store` in the words of the domain, with PostgreSQL and SQLite behind it.
//!
//! Every operation works on a batch. No operation talks to a chain, and none leaves a transaction open
//! when it returns (I8). Callers must never drop these futures half way (no `timeout`, `select!` or
//! abort around them): the server's own statement and lock timeouts bound them instead.

use async_trait::async_trait;
use serde::Serialize;
use uuid::Uuid;

use crate::domain::{
    Judged, MalformedPayment, Outcome, Payment, PaymentId, Phase, Policy, RefundReason,
    RefundStatus, Timestamp, Watch,
};

pub(crate) mod contract;
pub mod error;
pub mod flags;
pub mod ledger;
pub mod postgres;
pub mod refunds;
mod row;
pub mod samples;
pub mod schedules;
mod settled_page;
pub mod sqlite;
mod url;

pub use error::StoreError;
pub use flags::{CloseOutcome, FlagFilter, FlagStore};
pub use ledger::{
    FinishedRun, FoundTransfers, Ingested, LedgerStore, Run, Runs, ScanPage, SettledKey,
    UnprovenPage,
};
pub use refunds::{MalformedRefund, RefundPage, RefundStore, SearchDue};
pub use samples::SampleStore;
pub use schedules::ScheduleStore;
pub use url::{DatabaseUrl, connect};

/// What a caller holds while it works on watches: a random token and when it runs out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Marks the rows.
    pub token: Uuid,
    /// The time at which the lease was asked for.
    pub now: Timestamp,
    /// From then on anybody may take the rows.
    pub expires_at: Timestamp,
}

/// A leased watch and its payment.
#[derive(Debug, Clone, PartialEq)]
pub struct Followed {
    /// Our row.
    pub watch: Watch,
    /// The gateway's row, or what is wrong with it.
    pub payment: Result<Payment, MalformedPayment>,
}

/// What a discovery found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Discovered {
    /// Watches opened for payments not seen before.
    pub opened: usize,
    /// Closed watches opened again, because the gateway wrote an open status over a resolved payment or
    /// its order became one that owes the money back.
    pub reopened: usize,
}

/// What became of one judged payment.
#[derive(Debug, Clone, PartialEq)]
pub struct Applied {
    /// The payment.
    pub payment_id: PaymentId,
    /// What was written, or why nothing was.
    pub result: Result<Resolved, ApplyFailure>,
}

/// What was written for one payment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolved {
    /// In one word.
    pub outcome: Outcome,
    /// Whether a row was added to `resolutions`.
    pub recorded: bool,
    /// Whether it is what settles the payment: a refund may be owed for one that settled long before.
    pub settles: bool,
    /// Why a refund is owed from now on, if it is.
    pub refund: Option<RefundReason>,
    /// Where the watch went.
    pub phase: Phase,
}

/// Why nothing was written for one payment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApplyFailure {
    /// The lease ran out and somebody else has the watch: their check counts.
    LeaseLost,
    /// The database refused; the text is for people. The next check tries again.
    Refused(String),
}

/// Which of the gateway's optional tables are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct OptionalTables {
    /// `stock_reservations` and `stock`, both or neither counted.
    pub stock: bool,
    /// `payment_identifiers`.
    pub identifiers: bool,
}

/// Figures that the database alone can tell, for metrics.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Figures {
    /// Open watches by phase; a phase without any is absent.
    pub open: Vec<(Phase, u64)>,
    /// When the oldest open payment's watch was first opened, by phase.
    pub oldest: Vec<(Phase, Timestamp)>,
    /// Refund records by reason and status.
    pub refunds: Vec<(RefundReason, RefundStatus, u64)>,
    /// Open flags by kind.
    pub flags: Vec<(crate::domain::FlagKind, u64)>,
    /// Open watches that are overdue at the moment asked about.
    pub overdue: u64,
}

/// Everything the database knows about one payment, for a person. Values are as stored, in display form.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Story {
    /// The payment's row, column by column, null columns left out.
    pub payment: serde_json::Value,
    /// Its order's row, if there is one.
    pub order: Option<serde_json::Value>,
    /// Ids and statuses of the order's other payments.
    pub siblings: Vec<serde_json::Value>,
    /// The order's stock reservations.
    pub reservations: Vec<serde_json::Value>,
    /// The payment's identifiers.
    pub identifiers: Vec<serde_json::Value>,
    /// Our watch, if the payment was ever followed.
    pub watch: Option<Watch>,
    /// Checks, oldest first, at most [`STORY_CHECKS_MAX`] of the newest.
    pub checks: Vec<StoryCheck>,
    /// Resolutions, oldest first, each with its evidence.
    pub resolutions: Vec<serde_json::Value>,
    /// The refund record.
    pub refund: Option<serde_json::Value>,
    /// Flags, open and closed.
    pub flags: Vec<serde_json::Value>,
    /// Events written to the outbox.
    pub events: Vec<serde_json::Value>,
}

/// The most checks a [`Story`] tells of.
pub const STORY_CHECKS_MAX: i64 = 200;

/// One check in a [`Story`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StoryCheck {
    /// When.
    pub at: Timestamp,
    /// `kind` or `kind:reason`.
    pub verdict: String,
    /// The block it speaks of.
    pub block: Option<u64>,
    /// Which endpoints answered or failed, in one line.
    pub detail: Option<String>,
}

/// What the daemon asks of a database. One conformance suite holds for every implementation.
#[async_trait]
pub trait Store:
    FlagStore + LedgerStore + RefundStore + SampleStore + ScheduleStore + Send + Sync + 'static
{
    /// Creates or upgrades our own tables, and the gateway's where they are absent.
    async fn migrate(&self) -> Result<(), StoreError>;

    /// Checks that every required table is there and says which optional ones are. Must have succeeded
    /// once before any operation below is called.
    async fn verify_schema(&self) -> Result<OptionalTables, StoreError>;

    /// Whether the database answers.
    async fn ping(&self) -> Result<(), StoreError>;

    /// Opens watches, in phase `targeted` and due at `now`, for at most `limit` payments that are
    /// `unknown`, `settle_failed`, or `settling` since before `stale_before`, and have no open watch;
    /// likewise for payments `settled` whose order is `undelivered`, or `paid` by another payment, and
    /// which have no refund record. Oldest first. A row that cannot be parsed gets its watch like any
    /// other (I11).
    async fn discover(
        &self,
        now: Timestamp,
        stale_before: Timestamp,
        limit: u32,
    ) -> Result<Discovered, StoreError>;

    /// Leases at most `limit` open watches that are due at `lease.now` and not leased, oldest due first.
    async fn lease_due(&self, lease: &Lease, limit: u32) -> Result<Vec<Followed>, StoreError>;

    /// Leases at most `limit` open watches, due or not and not leased by somebody else, with payment ids
    /// after `after`, in order of payment id: one page of a full reconcile.
    async fn lease_page(
        &self,
        lease: &Lease,
        after: Option<&PaymentId>,
        limit: u32,
    ) -> Result<Vec<Followed>, StoreError>;

    /// When the next open watch is due that is not leased at `now`.
    async fn next_due_at(&self, now: Timestamp) -> Result<Option<Timestamp>, StoreError>;

    /// Writes down checks that change nothing but their watch: `judged.due.open`, one more check done,
    /// one more inconclusive in a row or none, the check's own row; and gives the lease back. Watches
    /// that the lease no longer holds are skipped. Returns how many were written.
    async fn reschedule(&self, lease: &Lease, checks: &[Judged]) -> Result<usize, StoreError>;

    /// Resolves on freshly locked rows and writes everything or nothing (I7). A batch is one
    /// transaction; when the database refuses it, each order of it gets its own, so that one bad row
    /// stops nothing else (I11). Gives the lease back. Answers once per judged payment, in any order.
    async fn apply(
        &self,
        lease: &Lease,
        batch: Vec<Judged>,
        policy: &Policy,
        now: Timestamp,
    ) -> Result<Vec<Applied>, StoreError>;

    /// Gives back whatever the lease still holds, unchecked. Returns how many watches that were.
    async fn release(&self, lease: &Lease) -> Result<usize, StoreError>;

    /// Makes open watches of these payments due now, whoever asks; opens one where there is none.
    /// Returns the ids that were found.
    async fn recheck(
        &self,
        ids: &[PaymentId],
        now: Timestamp,
    ) -> Result<Vec<PaymentId>, StoreError>;

    /// The payments of an order, by id; empty when there is no such order.
    async fn payments_of_order(&self, order_id: &str) -> Result<Vec<PaymentId>, StoreError>;

    /// Everything known about one payment.
    async fn story(&self, id: &PaymentId) -> Result<Option<Story>, StoreError>;

    /// Figures for metrics, as of `now`.
    async fn figures(&self, now: Timestamp) -> Result<Figures, StoreError>;

    /// Deletes at most `limit` checks made before `before`, as many events acknowledged before it, and as
    /// many full reconciles that ended before it, the newest never. Returns the largest number. Resolutions, refunds and flags are kept for good.
    async fn prune(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError>;
}
