//! Plays the gateway on either backend: writes its tables as a gateway would, and reads back what it and
//! its consumers would see. For the demo, the drill and tests.
//!
//! Everything is text, so that rows that make no sense can be written too. It knows nothing of `Store`:
//! a test that compares both must not share code with what it tests.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, PgPool, Row, SqlitePool};

use crate::domain::{RawPayment, Timestamp};
use crate::store::DatabaseUrl;
use crate::store::contract::OWN;

/// The gateway needs few connections: it writes now and then.
const CONNECTIONS_MAX: u32 = 4;

/// How long a write waits for another writer on SQLite.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// The gateway's side of the database.
#[derive(Debug, Clone)]
pub enum GatewayDb {
    /// A file beside the gateway.
    Sqlite(SqlitePool),
    /// A server.
    Postgres(PgPool),
}

/// An order to write.
#[derive(Debug, Clone)]
pub struct NewOrder {
    /// The id.
    pub id: String,
    /// `order` or `call`, or nonsense.
    pub kind: String,
    /// A status, or nonsense.
    pub status: String,
    /// Who pays it.
    pub paid_by: Option<String>,
    /// When the quote runs out.
    pub quote_expires_at: Option<Timestamp>,
    /// When the result was handed over.
    pub delivered_at: Option<Timestamp>,
    /// When the row is written.
    pub created_at: Timestamp,
    /// Stock held for it: sku and quantity. The shelf is not touched: see [`GatewayDb::put_stock`].
    pub held: Vec<(String, i64)>,
}

impl NewOrder {
    /// An order that a payment is under way for, and that holds no stock.
    pub fn paying(id: &str, created_at: Timestamp) -> Self {
        Self {
            id: id.to_owned(),
            kind: "order".to_owned(),
            status: "paying".to_owned(),
            paid_by: None,
            quote_expires_at: None,
            delivered_at: None,
            created_at,
            held: Vec::new(),
        }
    }
}

/// What the gateway changes about an order; `None` leaves it.
#[derive(Debug, Clone, Default)]
pub struct OrderUpdate {
    /// A new status.
    pub status: Option<String>,
    /// Who pays it from now on.
    pub paid_by: Option<String>,
    /// When the result was handed over.
    pub delivered_at: Option<Timestamp>,
    /// Put what it holds back on the shelf.
    pub release_stock: bool,
}

/// A refund record, as its consumers see it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SeenRefund {
    /// Whose money it is.
    pub payment_id: String,
    /// Why it goes back.
    pub reason: String,
    /// How much.
    pub amount: String,
    /// Where it stands.
    pub status: String,
}

/// A recorded transfer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SeenTransferRow {
    /// Whose it is, if anybody's.
    pub payment_id: Option<String>,
    /// The transaction.
    pub tx_hash: String,
    /// The log.
    pub log_index: String,
    /// How much moved.
    pub amount: String,
    /// `tentative` or `final`.
    pub finality: String,
    /// Whether a reorg took it away.
    pub orphaned: bool,
}

type TextRow = Vec<Option<String>>;

impl GatewayDb {
    /// Connects with a few connections of its own. The tables must be there already.
    pub async fn connect(url: &DatabaseUrl) -> Result<Self, sqlx::Error> {
        match url {
            DatabaseUrl::Sqlite(url) => {
                let options = SqliteConnectOptions::from_str(url)?
                    .journal_mode(SqliteJournalMode::Wal)
                    .busy_timeout(BUSY_TIMEOUT)
                    .foreign_keys(false);
                let pool = SqlitePoolOptions::new()
                    .max_connections(CONNECTIONS_MAX)
                    .connect_with(options)
                    .await?;
                Ok(Self::Sqlite(pool))
            }
            DatabaseUrl::Postgres(url) => {
                let pool =
                    PgPoolOptions::new().max_connections(CONNECTIONS_MAX).connect(url).await?;
                Ok(Self::Postgres(pool))
            }
        }
    }

    /// Closes its connections.
    pub async fn close(&self) {
        match self {
            Self::Sqlite(pool) => pool.close().await,
            Self::Postgres(pool) => pool.close().await,
        }
    }

    // ---- Writing

    /// Writes an order, and its reservations as `held`, with ids `ORDER/SKU`.
    pub async fn insert_order(&self, order: &NewOrder) -> Result<(), sqlx::Error> {
        let created_at = millis(order.created_at);
        self.execute(
            "INSERT INTO orders (id, kind, status, paid_by, quote_expires_at, delivered_at, \
             created_at, updated_at) VALUES (?, ?, ?, ?, ?t, ?t, ?t, ?t)",
            &[
                Some(&order.id),
                Some(&order.kind),
                Some(&order.status),
                order.paid_by.as_deref(),
                order.quote_expires_at.map(millis).as_deref(),
                order.delivered_at.map(millis).as_deref(),
                Some(&created_at),
                Some(&created_at),
            ],
        )
        .await?;
        for (sku, quantity) in &order.held {
            self.insert_reservation(&order.id, sku, *quantity, "held").await?;
        }
        Ok(())
    }

    /// Writes a reservation with the id `ORDER/SKU`.
    pub async fn insert_reservation(
        &self,
        order: &str,
        sku: &str,
        quantity: i64,
        status: &str,
    ) -> Result<(), sqlx::Error> {
        self.execute(
            "INSERT INTO stock_reservations (id, order_id, sku, quantity, status) \
             VALUES (?, ?, ?, ?i, ?)",
            &[
                Some(&format!("{order}/{sku}")),
                Some(order),
                Some(sku),
                Some(&quantity.to_string()),
                Some(status),
            ],
        )
        .await?;
        Ok(())
    }

    /// Says how much of a sku is on the shelf.
    pub async fn put_stock(&self, sku: &str, available: i64) -> Result<(), sqlx::Error> {
        self.execute(
            "INSERT INTO stock (sku, available) VALUES (?, ?i) \
             ON CONFLICT (sku) DO UPDATE SET available = excluded.available",
            &[Some(sku), Some(&available.to_string())],
        )
        .await?;
        Ok(())
    }

    /// Writes a payment row, column by column as given.
    pub async fn insert_payment(&self, payment: &RawPayment) -> Result<(), sqlx::Error> {
        let p = payment;
        self.execute(
            "INSERT INTO payments (id, order_id, rail, method, chain_id, token, payer, pay_to, \
             amount, nonce, valid_after, valid_before, tx_hash, status, created_at, broadcast_at, \
             updated_at) VALUES (?, ?, ?, ?, ?i, ?, ?, ?, ?n, ?, ?n, ?n, ?, ?, ?t, ?t, ?t)",
            &[
                Some(&p.id),
                p.order_id.as_deref(),
                p.rail.as_deref(),
                p.method.as_deref(),
                p.chain_id.as_deref(),
                p.token.as_deref(),
                p.payer.as_deref(),
                p.pay_to.as_deref(),
                p.amount.as_deref(),
                p.nonce.as_deref(),
                p.valid_after.as_deref(),
                p.valid_before.as_deref(),
                p.tx_hash.as_deref(),
                p.status.as_deref(),
                p.created_at.as_deref(),
                p.broadcast_at.as_deref(),
                p.created_at.as_deref(),
            ],
        )
        .await?;
        Ok(())
    }

    /// Writes a client's idempotency key.
    pub async fn insert_identifier(
        &self,
        id: &str,
        payment: &str,
        status: &str,
        response: Option<&str>,
    ) -> Result<(), sqlx::Error> {
        self.execute(
            "INSERT INTO payment_identifiers (id, payment_id, status, response) VALUES (?, ?, ?, ?)",
            &[Some(id), Some(payment), Some(status), response],
        )
        .await?;
        Ok(())
    }

    /// Changes an order, whatever we said about it.
    pub async fn update_order(&self, id: &str, update: &OrderUpdate) -> Result<u64, sqlx::Error> {
        if update.release_stock {
            self.execute(
                "UPDATE stock SET available = available + (SELECT sum(r.quantity) \
                 FROM stock_reservations r WHERE r.order_id = ? AND r.status = 'held' \
                 AND r.sku = stock.sku) WHERE sku IN (SELECT r.sku FROM stock_reservations r \
                 WHERE r.order_id = ? AND r.status = 'held')",
                &[Some(id), Some(id)],
            )
            .await?;
            self.execute(
                "UPDATE stock_reservations SET status = 'released' \
                 WHERE order_id = ? AND status = 'held'",
                &[Some(id)],
            )
            .await?;
        }
        self.execute(
            "UPDATE orders SET status = coalesce(?, status), paid_by = coalesce(?, paid_by), \
             delivered_at = coalesce(?t, delivered_at) WHERE id = ?",
            &[
                update.status.as_deref(),
                update.paid_by.as_deref(),
                update.delivered_at.map(millis).as_deref(),
                Some(id),
            ],
        )
        .await
    }

    /// Writes a status over a payment's, whatever we said about it.
    pub async fn set_payment_status(&self, id: &str, status: &str) -> Result<u64, sqlx::Error> {
        self.execute("UPDATE payments SET status = ? WHERE id = ?", &[Some(status), Some(id)]).await
    }

    /// Writes a status over an identifier's.
    pub async fn set_identifier_status(&self, id: &str, status: &str) -> Result<u64, sqlx::Error> {
        self.execute(
            "UPDATE payment_identifiers SET status = ? WHERE id = ?",
            &[Some(status), Some(id)],
        )
        .await
    }

    // ---- Reading back

    /// Orders: id to status and payer.
    pub async fn orders(&self) -> Result<BTreeMap<String, (String, Option<String>)>, sqlx::Error> {
        let rows = self.rows("SELECT id, status, paid_by FROM orders", &[], 3).await?;
        Ok(rows
            .into_iter()
            .map(|row| {
                let [id, status, paid_by] = columns(row);
                (id.unwrap_or_default(), (status.unwrap_or_default(), paid_by))
            })
            .collect())
    }

    /// Payments: id to status.
    pub async fn payments(&self) -> Result<BTreeMap<String, String>, sqlx::Error> {
        self.pairs("SELECT id, status FROM payments").await
    }

    /// Reservations: id to status.
    pub async fn reservations(&self) -> Result<BTreeMap<String, String>, sqlx::Error> {
        self.pairs("SELECT id, status FROM stock_reservations").await
    }

    /// Reservations: order to status; where an order's differ, all of them, joined by `+`.
    pub async fn reservations_by_order(&self) -> Result<BTreeMap<String, String>, sqlx::Error> {
        let sql = "SELECT DISTINCT order_id, status FROM stock_reservations ORDER BY 1, 2";
        let mut by_order: BTreeMap<String, String> = BTreeMap::new();
        for row in self.rows(sql, &[], 2).await? {
            let [order, status] = columns(row);
            let statuses = by_order.entry(order.unwrap_or_default()).or_default();
            if !statuses.is_empty() {
                statuses.push('+');
            }
            statuses.push_str(&status.unwrap_or_default());
        }
        Ok(by_order)
    }

    /// Stock: sku to how much is on the shelf.
    pub async fn stock(&self) -> Result<BTreeMap<String, String>, sqlx::Error> {
        self.pairs("SELECT sku, CAST(available AS TEXT) FROM stock").await
    }

    /// Identifiers: id to status.
    pub async fn identifiers(&self) -> Result<BTreeMap<String, String>, sqlx::Error> {
        self.pairs("SELECT id, status FROM payment_identifiers").await
    }

    /// Refund records, by payment.
    pub async fn refunds(&self) -> Result<Vec<SeenRefund>, sqlx::Error> {
        let rows = self
            .rows(
                "SELECT payment_id, reason, CAST(amount AS TEXT), status FROM {refunds_owed} \
                 ORDER BY payment_id",
                &[],
                4,
            )
            .await?;
        Ok(rows
            .into_iter()
            .map(|row| {
                let [payment_id, reason, amount, status] = columns(row);
                SeenRefund {
                    payment_id: payment_id.unwrap_or_default(),
                    reason: reason.unwrap_or_default(),
                    amount: amount.unwrap_or_default(),
                    status: status.unwrap_or_default(),
                }
            })
            .collect())
    }

    /// Open flags as `kind:payment`, sorted; of a flag about no payment, `kind:`.
    pub async fn open_flags(&self) -> Result<Vec<String>, sqlx::Error> {
        let sql = "SELECT kind, coalesce(payment_id, '') FROM {flags} WHERE closed_at IS NULL";
        let mut flags = self.joined(sql).await?;
        flags.sort();
        Ok(flags)
    }

    /// Events as `kind:order`, in the order written.
    pub async fn events(&self) -> Result<Vec<String>, sqlx::Error> {
        self.joined("SELECT kind, order_id FROM {events} ORDER BY id").await
    }

    /// Every transfer recorded, orphaned ones too, in the order recorded.
    pub async fn transfers(&self) -> Result<Vec<SeenTransferRow>, sqlx::Error> {
        let rows = self
            .rows(
                "SELECT payment_id, tx_hash, CAST(log_index AS TEXT), CAST(amount AS TEXT), \
                 finality, CASE WHEN orphaned_at IS NULL THEN '' ELSE 'orphaned' END \
                 FROM {transfers} ORDER BY id",
                &[],
                6,
            )
            .await?;
        Ok(rows
            .into_iter()
            .map(|row| {
                let [payment_id, tx_hash, log_index, amount, finality, orphaned] = columns(row);
                SeenTransferRow {
                    payment_id,
                    tx_hash: tx_hash.unwrap_or_default(),
                    log_index: log_index.unwrap_or_default(),
                    amount: amount.unwrap_or_default(),
                    finality: finality.unwrap_or_default(),
                    orphaned: orphaned.as_deref() == Some("orphaned"),
                }
            })
            .collect())
    }

    /// How many rows a table has. Our own tables are named in braces: `{checks}`.
    pub async fn count(&self, table: &str) -> Result<u64, sqlx::Error> {
        let sql = format!("SELECT CAST(count(*) AS TEXT) FROM {table}");
        let rows = self.rows(&sql, &[], 1).await?;
        let count = rows.into_iter().flatten().flatten().next();
        Ok(count.and_then(|text| text.parse().ok()).unwrap_or(0))
    }

    // ---- Statements that both backends understand

    /// Runs one statement and returns how many rows it changed.
    ///
    /// `{watches}` and its like name our own tables. A placeholder is `?` for text, `?t` for a time given
    /// in Unix milliseconds, `?n` for a `numeric`, `?i` for a `bigint`; values are given as text.
    pub async fn execute(&self, sql: &str, binds: &[Option<&str>]) -> Result<u64, sqlx::Error> {
        match self {
            Self::Sqlite(pool) => {
                let mut query = sqlx::query(AssertSqlSafe(self.render(sql)));
                for bind in binds {
                    query = query.bind(bind.map(str::to_owned));
                }
                Ok(query.execute(pool).await?.rows_affected())
            }
            Self::Postgres(pool) => {
                let mut query = sqlx::query(AssertSqlSafe(self.render(sql)));
                for bind in binds {
                    query = query.bind(bind.map(str::to_owned));
                }
                Ok(query.execute(pool).await?.rows_affected())
            }
        }
    }

    /// Runs one query whose `width` columns are all text; statements as for [`GatewayDb::execute`].
    pub async fn rows(
        &self,
        sql: &str,
        binds: &[Option<&str>],
        width: usize,
    ) -> Result<Vec<TextRow>, sqlx::Error> {
        match self {
            Self::Sqlite(pool) => {
                let mut query = sqlx::query(AssertSqlSafe(self.render(sql)));
                for bind in binds {
                    query = query.bind(bind.map(str::to_owned));
                }
                let rows = query.fetch_all(pool).await?;
                rows.iter().map(|row| (0..width).map(|i| row.try_get(i)).collect()).collect()
            }
            Self::Postgres(pool) => {
                let mut query = sqlx::query(AssertSqlSafe(self.render(sql)));
                for bind in binds {
                    query = query.bind(bind.map(str::to_owned));
                }
                let rows = query.fetch_all(pool).await?;
                rows.iter().map(|row| (0..width).map(|i| row.try_get(i)).collect()).collect()
            }
        }
    }

    async fn pairs(&self, sql: &str) -> Result<BTreeMap<String, String>, sqlx::Error> {
        let rows = self.rows(sql, &[], 2).await?;
        Ok(rows
            .into_iter()
            .map(|row| {
                let [key, value] = columns(row);
                (key.unwrap_or_default(), value.unwrap_or_default())
            })
            .collect())
    }

    async fn joined(&self, sql: &str) -> Result<Vec<String>, sqlx::Error> {
        let rows = self.rows(sql, &[], 2).await?;
        Ok(rows
            .into_iter()
            .map(|row| {
                let [left, right] = columns(row);
                format!("{}:{}", left.unwrap_or_default(), right.unwrap_or_default())
            })
            .collect())
    }

    fn render(&self, sql: &str) -> String {
        let mut sql = sql.to_owned();
        for table in OWN {
            let name = match self {
                Self::Sqlite(_) => format!("reconciled_{table}"),
                Self::Postgres(_) => format!("reconciled.{table}"),
            };
            sql = sql.replace(&format!("{{{table}}}"), &name);
        }
        let mut rendered = String::with_capacity(sql.len() + 64);
        let mut number = 0;
        let mut rest = sql.as_str();
        while let Some(at) = rest.find('?') {
            rendered.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            number += 1;
            let kind = rest.chars().next().filter(|c| "tni".contains(*c));
            rest = &rest[kind.map_or(0, char::len_utf8)..];
            rendered.push_str(&match (self, kind) {
                (Self::Sqlite(_), _) => "?".to_owned(),
                (_, Some('t')) => format!("to_timestamp(${number}::double precision / 1000)"),
                (_, Some('n')) => format!("${number}::numeric"),
                (_, Some('i')) => format!("${number}::bigint"),
                (_, _) => format!("${number}::text"),
            });
        }
        rendered.push_str(rest);
        rendered
    }
}

fn millis(time: Timestamp) -> String {
    time.as_millis().to_string()
}

/// A row's columns by position; a column that is not there is NULL.
fn columns<const N: usize>(row: TextRow) -> [Option<String>; N] {
    let mut row = row.into_iter();
    std::array::from_fn(|_| row.next().flatten())
}
