//! SQLite: the embedded default, one process beside a small gateway.
//!
//! One connection writes, the others read. Every writing transaction is `BEGIN IMMEDIATE`, so the rows
//! it reads are as good as locked: nobody else, the gateway included, writes before it ends. Queries are
//! checked at runtime only; the conformance suite is what checks them.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Sqlite, Transaction};

use super::settled_page::SettledPage;
use super::{
    Applied, Discovered, Figures, Followed, Lease, OptionalTables, Store, StoreError, Story,
};
use crate::domain::{Judged, PaymentId, Policy, Timestamp};

mod apply;
mod flags;
mod ledger;
mod load;
mod read;
mod refunds;
mod samples;
mod schedules;
mod schema;
mod watches;
mod write;

/// How long a statement waits for another writer before the database counts as unreachable.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for a free connection of our own.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(30);

/// A store in one SQLite file.
#[derive(Debug)]
pub struct SqliteStore {
    reader: SqlitePool,
    writer: SqlitePool,
    has_stock: AtomicBool,
    has_identifiers: AtomicBool,
    settled_page: SettledPage,
}

impl SqliteStore {
    /// Opens the file at `url` (`sqlite:PATH`), creating an empty one where there is none. One connection
    /// writes, `connections_max - 1` read, at least one.
    pub async fn connect(url: &str, connections_max: u32) -> Result<Self, StoreError> {
        let options = SqliteConnectOptions::from_str(url)
            .map_err(|_| StoreError::Url("is not of the form sqlite:PATH".to_owned()))?;
        if url.contains(":memory:") || url.contains("mode=memory") {
            return Err(StoreError::Url(
                "must name a file: a database in memory cannot be shared with a gateway".to_owned(),
            ));
        }
        let options = options
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT)
            // The gateway may declare foreign keys; whether they are enforced is its own business.
            .foreign_keys(false);
        let pool = |connections: u32| {
            SqlitePoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(ACQUIRE_TIMEOUT)
                .connect_with(options.clone())
        };
        let writer = pool(1).await.map_err(StoreError::Unreachable)?;
        let reader = pool(connections_max.saturating_sub(1).max(1))
            .await
            .map_err(StoreError::Unreachable)?;
        Ok(Self {
            reader,
            writer,
            has_stock: AtomicBool::new(false),
            has_identifiers: AtomicBool::new(false),
            settled_page: SettledPage::default(),
        })
    }

    fn tables(&self) -> OptionalTables {
        OptionalTables {
            stock: self.has_stock.load(Ordering::Acquire),
            identifiers: self.has_identifiers.load(Ordering::Acquire),
        }
    }

    async fn begin(
        &self,
        operation: &'static str,
    ) -> Result<Transaction<'static, Sqlite>, StoreError> {
        self.writer.begin_with("BEGIN IMMEDIATE").await.map_err(failed(operation))
    }
}

/// Commits what went well and rolls back what did not.
async fn finish<T>(
    tx: Transaction<'static, Sqlite>,
    operation: &'static str,
    result: Result<T, StoreError>,
) -> Result<T, StoreError> {
    match result {
        Ok(value) => {
            tx.commit().await.map_err(failed(operation))?;
            Ok(value)
        }
        Err(error) => {
            if let Err(rollback) = tx.rollback().await {
                tracing::warn!(%rollback, operation, "a transaction could not be rolled back");
            }
            Err(error)
        }
    }
}

/// Sorts a driver's error; a file that another writer keeps locked is out of reach, not a refusal.
fn failed(operation: &'static str) -> impl Fn(sqlx::Error) -> StoreError + Copy {
    move |error| {
        const SQLITE_BUSY: i64 = 5;
        const SQLITE_LOCKED: i64 = 6;
        let code = error
            .as_database_error()
            .and_then(|e| e.code())
            .and_then(|code| code.parse::<i64>().ok())
            .map(|extended| extended & 0xff);
        match code {
            Some(SQLITE_BUSY | SQLITE_LOCKED) => StoreError::Unreachable(error),
            _ => StoreError::from_sqlx(operation, error),
        }
    }
}

/// Refuses a write that did not find the row it was decided on.
fn exactly_one(operation: &'static str, changed: usize) -> Result<(), StoreError> {
    match changed {
        1 => Ok(()),
        _ => Err(StoreError::Refused { operation, source: sqlx::Error::RowNotFound }),
    }
}

/// Ids as one bound value, for `json_each`.
fn id_list<'a>(ids: impl IntoIterator<Item = &'a str>) -> String {
    serde_json::Value::from(ids.into_iter().collect::<Vec<_>>()).to_string()
}

#[async_trait]
impl Store for SqliteStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        schema::migrate(&self.writer).await
    }

    async fn verify_schema(&self) -> Result<OptionalTables, StoreError> {
        let tables = schema::verify(&self.reader).await?;
        self.has_stock.store(tables.stock, Ordering::Release);
        self.has_identifiers.store(tables.identifiers, Ordering::Release);
        Ok(tables)
    }

    async fn ping(&self) -> Result<(), StoreError> {
        sqlx::query("SELECT 1").execute(&self.reader).await.map_err(failed("a ping"))?;
        Ok(())
    }

    async fn discover(
        &self,
        now: Timestamp,
        stale_before: Timestamp,
        limit: u32,
    ) -> Result<Discovered, StoreError> {
        watches::discover(self, now, stale_before, limit).await
    }

    async fn lease_due(&self, lease: &Lease, limit: u32) -> Result<Vec<Followed>, StoreError> {
        watches::lease_due(self, lease, limit).await
    }

    async fn lease_page(
        &self,
        lease: &Lease,
        after: Option<&PaymentId>,
        limit: u32,
    ) -> Result<Vec<Followed>, StoreError> {
        watches::lease_page(self, lease, after, limit).await
    }

    async fn next_due_at(&self, now: Timestamp) -> Result<Option<Timestamp>, StoreError> {
        watches::next_due_at(&self.reader, now).await
    }

    async fn reschedule(&self, lease: &Lease, checks: &[Judged]) -> Result<usize, StoreError> {
        watches::reschedule(self, lease, checks).await
    }

    async fn apply(
        &self,
        lease: &Lease,
        batch: Vec<Judged>,
        policy: &Policy,
        now: Timestamp,
    ) -> Result<Vec<Applied>, StoreError> {
        apply::apply(self, lease, batch, policy, now).await
    }

    async fn release(&self, lease: &Lease) -> Result<usize, StoreError> {
        watches::release(self, lease).await
    }

    async fn recheck(
        &self,
        ids: &[PaymentId],
        now: Timestamp,
    ) -> Result<Vec<PaymentId>, StoreError> {
        watches::recheck(self, ids, now).await
    }

    async fn payments_of_order(&self, order_id: &str) -> Result<Vec<PaymentId>, StoreError> {
        read::payments_of_order(&self.reader, order_id).await
    }

    async fn story(&self, id: &PaymentId) -> Result<Option<Story>, StoreError> {
        read::story(&self.reader, self.tables(), id).await
    }

    async fn figures(&self, now: Timestamp) -> Result<Figures, StoreError> {
        read::figures(&self.reader, now).await
    }

    async fn prune(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
        read::prune(self, before, limit).await
    }
}
