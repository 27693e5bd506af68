//! PostgreSQL: `trait Store` on a shared server, the coordinator where replicas share the work.
//!
//! Statements are set-based and checked at compile time against the migrations (`.sqlx`). Whatever a
//! gateway may have written wrongly is read as text, so that one bad row fails its own parse and no
//! statement (I11). What is deliberately absent: timeouts on this side (the server's own bound every
//! statement), and LISTEN/NOTIFY (polling alone is enough).

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::migrate::Migrator;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions as _, Connection as _, PgPool, Postgres, Transaction};

use super::settled_page::SettledPage;
use super::{
    Applied, Discovered, Figures, Followed, Lease, OptionalTables, Store, StoreError, Story,
};
use crate::domain::{Judged, PaymentId, Policy, Timestamp};

mod apply;
mod flags;
mod ledger;
mod locked;
mod read;
mod record;
mod refunds;
mod rows;
mod samples;
mod schedules;
mod schema;
mod watches;
mod write;

/// The longest a connection attempt may take, and the longest wait for a free connection.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// Set on every connection. The server ends what takes longer, so that no future has to be dropped and
/// no lock outlives a process that hangs.
const SESSION: [(&str, &str); 7] = [
    // Times that are shown are shown as everywhere else.
    ("TimeZone", "UTC"),
    ("statement_timeout", "60s"),
    ("lock_timeout", "5s"),
    ("idle_in_transaction_session_timeout", "60s"),
    // Seconds: a client that vanished without a word is noticed in about a minute and a half.
    ("tcp_keepalives_idle", "30"),
    ("tcp_keepalives_interval", "10"),
    ("tcp_keepalives_count", "6"),
];

/// Several reads that fit together.
const SNAPSHOT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// A PostgreSQL database.
pub struct PostgresStore {
    pool: PgPool,
    /// As the schema was last verified.
    optional: Mutex<Option<OptionalTables>>,
    settled_page: SettledPage,
}

impl PostgresStore {
    /// Connects, with at most `connections_max` connections. Settings in the URL
    /// (`?options[search_path]=…`) are kept.
    pub async fn connect(url: &str, connections_max: u32) -> Result<Self, StoreError> {
        let options: PgConnectOptions = url.parse().map_err(|source: sqlx::Error| {
            // The parser's own words never hold the URL, only what is wrong with it.
            StoreError::Url(format!("cannot be parsed: {source}"))
        })?;
        let options = options.application_name("reconciled").options(SESSION);
        probe(&options).await?;
        let pool = PgPoolOptions::new()
            .max_connections(connections_max)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .connect_lazy_with(options);
        Ok(Self { pool, optional: Mutex::default(), settled_page: SettledPage::default() })
    }

    /// The gateway's optional tables; verifies the schema if nobody did.
    async fn optional(&self) -> Result<OptionalTables, StoreError> {
        let known = *self.optional.lock().unwrap_or_else(PoisonError::into_inner);
        match known {
            Some(optional) => Ok(optional),
            None => self.verify_schema().await,
        }
    }

    fn migrator() -> Migrator {
        let mut migrator = sqlx::migrate!("migrations/postgres");
        migrator.create_schema("reconciled");
        migrator.dangerous_set_table_name("reconciled.migrations");
        migrator
    }
}

/// Connects once, for the real reason when that fails: a pool tries a refused connection again until
/// its time is up, and then says only that.
async fn probe(options: &PgConnectOptions) -> Result<(), StoreError> {
    let options = options.clone();
    let attempt = tokio::spawn(async move { options.connect().await?.close().await });
    // Only the handle is given up here, never the attempt: it ends by itself.
    match tokio::time::timeout(ACQUIRE_TIMEOUT, attempt).await {
        Ok(Ok(answer)) => answer.map_err(|source| match source {
            // Cut in the middle of the handshake: a proxy with no server behind it yet.
            sqlx::Error::Protocol(_) => StoreError::Unreachable(source),
            _ => StoreError::from_sqlx("a connection", source),
        }),
        Ok(Err(_)) => Err(StoreError::Unreachable(sqlx::Error::WorkerCrashed)),
        Err(_) => Err(StoreError::Unreachable(sqlx::Error::PoolTimedOut)),
    }
}

/// Ends a transaction: commits what went well, rolls back what did not. The first error is the one
/// that tells; when even the rollback fails, the connection is gone and the server rolls back.
async fn finish<T, E>(
    transaction: Transaction<'_, Postgres>,
    result: Result<T, E>,
    refused: impl FnOnce(sqlx::Error) -> E,
) -> Result<T, E> {
    match result {
        Ok(value) => {
            transaction.commit().await.map_err(refused)?;
            Ok(value)
        }
        Err(error) => {
            if let Err(second) = transaction.rollback().await {
                tracing::debug!(error = %second, "a rollback failed; the connection is given up");
            }
            Err(error)
        }
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        Self::migrator().run(&self.pool).await.map_err(|source| match source {
            sqlx::migrate::MigrateError::Execute(source) => {
                StoreError::from_sqlx("to migrate", source)
            }
            other => StoreError::Migrate(Box::new(other)),
        })
    }

    async fn verify_schema(&self) -> Result<OptionalTables, StoreError> {
        let optional = schema::verify(&self.pool).await?;
        *self.optional.lock().unwrap_or_else(PoisonError::into_inner) = Some(optional);
        Ok(optional)
    }

    async fn ping(&self) -> Result<(), StoreError> {
        sqlx::query_scalar!(r#"SELECT 1 AS "one!""#)
            .fetch_one(&self.pool)
            .await
            .map(|_| ())
            .map_err(|source| StoreError::from_sqlx("a ping", source))
    }

    async fn discover(
        &self,
        now: Timestamp,
        stale_before: Timestamp,
        limit: u32,
    ) -> Result<Discovered, StoreError> {
        watches::discover(&self.pool, &self.settled_page, now, stale_before, limit).await
    }

    async fn lease_due(&self, lease: &Lease, limit: u32) -> Result<Vec<Followed>, StoreError> {
        watches::lease_due(&self.pool, lease, limit).await
    }

    async fn lease_page(
        &self,
        lease: &Lease,
        after: Option<&PaymentId>,
        limit: u32,
    ) -> Result<Vec<Followed>, StoreError> {
        watches::lease_page(&self.pool, lease, after, limit).await
    }

    async fn next_due_at(&self, now: Timestamp) -> Result<Option<Timestamp>, StoreError> {
        watches::next_due_at(&self.pool, now).await
    }

    async fn reschedule(&self, lease: &Lease, checks: &[Judged]) -> Result<usize, StoreError> {
        watches::reschedule(&self.pool, lease, checks).await
    }

    async fn apply(
        &self,
        lease: &Lease,
        batch: Vec<Judged>,
        policy: &Policy,
        now: Timestamp,
    ) -> Result<Vec<Applied>, StoreError> {
        let optional = self.optional().await?;
        apply::Applier { pool: &self.pool, optional, lease, policy, now }.apply(batch).await
    }

    async fn release(&self, lease: &Lease) -> Result<usize, StoreError> {
        watches::release(&self.pool, lease).await
    }

    async fn recheck(
        &self,
        ids: &[PaymentId],
        now: Timestamp,
    ) -> Result<Vec<PaymentId>, StoreError> {
        watches::recheck(&self.pool, ids, now).await
    }

    async fn payments_of_order(&self, order_id: &str) -> Result<Vec<PaymentId>, StoreError> {
        read::payments_of_order(&self.pool, order_id).await
    }

    async fn story(&self, id: &PaymentId) -> Result<Option<Story>, StoreError> {
        let optional = self.optional().await?;
        read::story(&self.pool, optional, id).await
    }

    async fn figures(&self, now: Timestamp) -> Result<Figures, StoreError> {
        read::figures(&self.pool, now).await
    }

    async fn prune(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
        read::prune(&self.pool, before, limit).await
    }
}
