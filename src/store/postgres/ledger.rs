//! The full reconcile's side of PostgreSQL: see [`crate::store::LedgerStore`].

use alloy_primitives::Address;
use async_trait::async_trait;
use serde_json::Value;

use super::PostgresStore;
use crate::domain::{
    BlockRef, BlockTime, ChainId, Cursor, FlaggedPage, LedgerKey, LedgerPage, Payment, PaymentId,
    Receiver, Timestamp, Transfer, Unbacked,
};
use crate::store::{
    FoundTransfers, Ingested, Lease, LedgerStore, Run, Runs, ScanPage, SettledKey, StoreError,
    UnprovenPage,
};

mod accounts;
mod flagged;
mod runs;
mod scan;
mod unproven;

#[async_trait]
impl LedgerStore for PostgresStore {
    async fn request_run(&self, now: Timestamp) -> Result<bool, StoreError> {
        runs::request(&self.pool, now).await
    }

    async fn take_run(&self, lease: &Lease) -> Result<Option<Run>, StoreError> {
        runs::take(&self.pool, lease).await
    }

    async fn keep_run(
        &self,
        lease: &Lease,
        run: i64,
        progress: &Value,
    ) -> Result<bool, StoreError> {
        runs::keep(&self.pool, lease, run, progress).await
    }

    async fn finish_run(
        &self,
        lease: &Lease,
        run: i64,
        report: &Value,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        runs::finish(&self.pool, lease, run, report, now).await
    }

    async fn release_run(&self, lease: &Lease) -> Result<bool, StoreError> {
        runs::release(&self.pool, lease).await
    }

    async fn runs(&self) -> Result<Runs, StoreError> {
        runs::read(&self.pool).await
    }

    async fn cursors(&self, chain_id: ChainId) -> Result<Vec<Cursor>, StoreError> {
        scan::cursors(&self.pool, chain_id).await
    }

    async fn open_cursors(
        &self,
        chain_id: ChainId,
        cursors: &[Cursor],
        now: Timestamp,
    ) -> Result<(), StoreError> {
        scan::open_cursors(&self.pool, chain_id, cursors, now).await
    }

    async fn ingest(
        &self,
        page: &ScanPage,
        now: Timestamp,
    ) -> Result<Option<Ingested>, StoreError> {
        scan::ingest(&self.pool, page, now).await
    }

    async fn rewind(
        &self,
        chain_id: ChainId,
        receivers: &[Receiver],
        from: &BlockRef,
        to: &BlockRef,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        scan::rewind(&self.pool, chain_id, receivers, from, to, now).await
    }

    async fn ledger_page(
        &self,
        chain_id: ChainId,
        after: &LedgerKey,
        last_block: u64,
        limit: u32,
    ) -> Result<LedgerPage, StoreError> {
        accounts::page(&self.pool, chain_id, after, last_block, limit).await
    }

    async fn unaccounted_since(&self, chain_id: ChainId) -> Result<Option<BlockTime>, StoreError> {
        accounts::unaccounted_since(&self.pool, chain_id).await
    }

    async fn missed_by_scan(&self, chain_id: ChainId) -> Result<Option<u64>, StoreError> {
        accounts::missed_by_scan(&self.pool, chain_id).await
    }

    async fn mark_unaccounted(
        &self,
        mark: &[i64],
        unmark: &[i64],
        now: Timestamp,
    ) -> Result<(), StoreError> {
        accounts::mark(&self.pool, mark, unmark, now).await
    }

    async fn flagged_page(&self, after: i64, limit: u32) -> Result<FlaggedPage, StoreError> {
        flagged::page(&self.pool, after, limit).await
    }

    async fn mark_claimed(&self, subjects: &[String], now: Timestamp) -> Result<u64, StoreError> {
        flagged::mark_claimed(&self.pool, subjects, now).await
    }

    async fn unbacked(
        &self,
        chain_id: ChainId,
        since: Timestamp,
        limit: u32,
    ) -> Result<Vec<Unbacked>, StoreError> {
        unproven::unbacked(&self.pool, chain_id, since, limit).await
    }

    async fn open_payments_of(
        &self,
        payers: &[Address],
        limit: u32,
    ) -> Result<Vec<(Address, PaymentId)>, StoreError> {
        unproven::open_payments_of(&self.pool, payers, limit).await
    }

    async fn unproven_page(
        &self,
        from: Timestamp,
        before: Timestamp,
        after: Option<&SettledKey>,
        limit: u32,
    ) -> Result<UnprovenPage, StoreError> {
        unproven::page(&self.pool, from, before, after, limit).await
    }

    async fn record_found(
        &self,
        found: &[(Payment, Transfer)],
        now: Timestamp,
    ) -> Result<FoundTransfers, StoreError> {
        unproven::record_found(&self.pool, found, now).await
    }
}
