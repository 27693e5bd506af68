//! What the full reconcile asks of a database: its runs, how far the scan of the chain has come, and the
//! rows that say what became of money.
//!
//! As everywhere in the store, nothing is decided here, every operation is one short transaction, and what
//! is large comes in pages.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::Address;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Lease, StoreError};
use crate::domain::{
    BlockRef, BlockTime, ChainId, Cursor, FlaggedPage, LedgerKey, LedgerPage, MalformedPayment,
    Payment, PaymentId, RawPayment, Receiver, ScannedTransfer, Timestamp, Transfer, Unbacked,
};

/// A full reconcile that is not finished.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Which.
    pub id: i64,
    /// When it was asked for.
    pub requested_at: Timestamp,
    /// When somebody first took it up.
    pub started_at: Option<Timestamp>,
    /// Until when somebody holds it, if somebody does.
    pub held_until: Option<Timestamp>,
    /// Where it stands, in the words of whoever runs it.
    pub progress: Option<Value>,
}

/// A full reconcile that is over.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedRun {
    /// Which.
    pub id: i64,
    /// When it started.
    pub started_at: Timestamp,
    /// When it ended.
    pub finished_at: Timestamp,
    /// What it found, in the words of whoever ran it.
    pub report: Value,
}

/// The runs that matter: the one that is not finished, and the last one that is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Runs {
    /// Under way, or waiting to be taken up.
    pub unfinished: Option<Run>,
    /// The newest that ended.
    pub finished: Option<FinishedRun>,
}

/// What a scan saw of a range of blocks, to be written down together with how far it came.
#[derive(Debug, Clone, PartialEq)]
pub struct ScanPage {
    /// The chain.
    pub chain_id: ChainId,
    /// Whose transfers were looked for.
    pub receivers: Vec<Receiver>,
    /// Where the cursors of all of them must stand: the last block before the range.
    pub from: BlockRef,
    /// Where they stand afterwards: the range's last block.
    pub to: BlockRef,
    /// Every transfer into them in the range.
    pub transfers: Vec<ScannedTransfer>,
}

/// What became of a page of the scan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ingested {
    /// Transfers the scan had not seen before.
    pub new: usize,
    /// Payments whose transfer was scanned once, and is not on the chain any more.
    pub vanished: Vec<PaymentId>,
}

/// A place in the order of settled payments; its time is in the database's own unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettledKey {
    /// When the row was written.
    pub at: i64,
    /// Its id.
    pub id: PaymentId,
}

/// One page of payments that the gateway calls settled.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct UnprovenPage {
    /// Those of the page that no transfer is known for.
    pub payments: Vec<Result<Payment, MalformedPayment>>,
    /// Where the next page starts; `None` when this was the last one.
    pub next: Option<SettledKey>,
}

/// What became of the transfers that were found for payments. A payment whose row is another now than the
/// one that was read about is neither.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FoundTransfers {
    /// These have their transfer.
    pub recorded: BTreeSet<PaymentId>,
    /// Of these it is another payment's.
    pub taken: BTreeSet<PaymentId>,
}

impl FoundTransfers {
    /// Of payments that are as they were read, those that have a transfer now and those that do not.
    pub(super) fn of(asked: &[(&PaymentId, &Transfer)], recorded: BTreeSet<PaymentId>) -> Self {
        let ids = asked.iter().map(|(id, _)| (*id).clone());
        let taken = ids.filter(|id| !recorded.contains(id)).collect();
        Self { recorded, taken }
    }
}

/// Those whose row still says what was read about: the gateway may have written over it since.
pub(super) fn still_so<'a>(
    found: &'a [(Payment, Transfer)],
    rows: &[RawPayment],
) -> Vec<(&'a PaymentId, &'a Transfer)> {
    let rows: BTreeMap<PaymentId, Payment> =
        rows.iter().filter_map(|row| row.parse().ok()).map(|p| (p.id.clone(), p)).collect();
    let is_so = |read: &Payment| {
        let row = rows.get(&read.id);
        row.is_some_and(|row| row.terms() == read.terms() && row.status == read.status)
    };
    found.iter().filter(|(read, _)| is_so(read)).map(|(read, t)| (&read.id, t)).collect()
}

/// What the full reconcile asks of a database.
#[async_trait]
pub trait LedgerStore: Send + Sync {
    /// Asks for a full reconcile. `false`: one is under way or asked for already.
    async fn request_run(&self, now: Timestamp) -> Result<bool, StoreError>;

    /// Takes up the unfinished run, if there is one that nobody else holds.
    async fn take_run(&self, lease: &Lease) -> Result<Option<Run>, StoreError>;

    /// Writes down where the run stands and renews the lease. `false`: the lease is lost.
    async fn keep_run(&self, lease: &Lease, run: i64, progress: &Value)
    -> Result<bool, StoreError>;

    /// Ends the run with its report. `false`: the lease is lost.
    async fn finish_run(
        &self,
        lease: &Lease,
        run: i64,
        report: &Value,
        now: Timestamp,
    ) -> Result<bool, StoreError>;

    /// Gives the run back, to be taken up where it stands. `false`: the lease is lost.
    async fn release_run(&self, lease: &Lease) -> Result<bool, StoreError>;

    /// The run that is not finished, and the last one that is.
    async fn runs(&self) -> Result<Runs, StoreError>;

    /// Where the scan of a chain stands, receiver by receiver.
    async fn cursors(&self, chain_id: ChainId) -> Result<Vec<Cursor>, StoreError>;

    /// Starts the scan of receivers that have no cursor; the others keep theirs.
    async fn open_cursors(
        &self,
        chain_id: ChainId,
        cursors: &[Cursor],
        now: Timestamp,
    ) -> Result<(), StoreError>;

    /// Writes down what a scan saw, and moves the cursors. What was scanned in that range before and was
    /// not seen now has left the chain: it is orphaned, or, if it is a payment's, left to that payment's own
    /// check. `None`: the cursors do not stand where the page starts, and nothing was written.
    async fn ingest(&self, page: &ScanPage, now: Timestamp)
    -> Result<Option<Ingested>, StoreError>;

    /// Sets cursors back from `from` to `to`. `false`: they do not stand there.
    async fn rewind(
        &self,
        chain_id: ChainId,
        receivers: &[Receiver],
        from: &BlockRef,
        to: &BlockRef,
        now: Timestamp,
    ) -> Result<bool, StoreError>;

    /// The next page of a chain's transfers in order of block time, from blocks up to `last_block`, with
    /// everything that says what became of their money, all from one snapshot.
    async fn ledger_page(
        &self,
        chain_id: ChainId,
        after: &LedgerKey,
        last_block: u64,
        limit: u32,
    ) -> Result<LedgerPage, StoreError>;

    /// The block time of the oldest transfer that is marked as not accounted for.
    async fn unaccounted_since(&self, chain_id: ChainId) -> Result<Option<BlockTime>, StoreError>;

    /// The oldest block, of those that the scan has passed, with a transfer that is marked as not accounted
    /// for because only its payment's check has seen it: the scan was shown too little there.
    async fn missed_by_scan(&self, chain_id: ChainId) -> Result<Option<u64>, StoreError>;

    /// Marks transfers as not accounted for, and takes the mark from others.
    async fn mark_unaccounted(
        &self,
        mark: &[i64],
        unmark: &[i64],
        now: Timestamp,
    ) -> Result<(), StoreError>;

    /// A page of open flags with ids beyond `after`, with the rows of the payments they are about, all from
    /// one snapshot.
    async fn flagged_page(&self, after: i64, limit: u32) -> Result<FlaggedPage, StoreError>;

    /// Marks as not accounted for, of the transfers with these logs, those that a payment seems to claim: so
    /// they are accounted for anew, however old they are. Returns how many there are.
    async fn mark_claimed(&self, subjects: &[String], now: Timestamp) -> Result<u64, StoreError>;

    /// Refund records made, and flags about money raised, since `since`, whose transfer is not known: at
    /// most `limit` of each.
    async fn unbacked(
        &self,
        chain_id: ChainId,
        since: Timestamp,
        limit: u32,
    ) -> Result<Vec<Unbacked>, StoreError>;

    /// Open payments of these payers, at most `limit`: who an unmatched transfer may have been meant by.
    async fn open_payments_of(
        &self,
        payers: &[Address],
        limit: u32,
    ) -> Result<Vec<(Address, PaymentId)>, StoreError>;

    /// A page of the payments that the gateway calls settled and wrote from `from` on and before `before`:
    /// at most `limit` are looked at, and those without a transfer returned.
    async fn unproven_page(
        &self,
        from: Timestamp,
        before: Timestamp,
        after: Option<&SettledKey>,
        limit: u32,
    ) -> Result<UnprovenPage, StoreError>;

    /// Records final transfers as payments', each log and each payment once, where the row is as it was
    /// read; another payment's stays that one's.
    async fn record_found(
        &self,
        found: &[(Payment, Transfer)],
        now: Timestamp,
    ) -> Result<FoundTransfers, StoreError>;
}
