//! Our own row per followed payment: opening, leasing, rescheduling, giving back.

use std::collections::HashMap;

use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, Sqlite, SqliteConnection, SqlitePool};

use super::{SqliteStore, exactly_one, failed, finish, id_list, load};
use crate::domain::{Judged, PaymentId, Phase, Timestamp, Verdict, Watch};
use crate::store::row::{
    check_detail, coded, column_number, payment_is_gone, sound_watch, unsigned,
};
use crate::store::settled_page::SETTLED_PAGE_MAX;
use crate::store::{Discovered, Followed, Lease, StoreError};

/// Payments to follow that have no open watch, and whether they have a closed one.
///
/// A time that is not a number counts as long ago: such a row is flagged, not overlooked (I11). A settled
/// payment is followed again when its order became one that owes the money back. `CROSS JOIN` and the plus
/// keep SQLite from reading every settled payment instead of the few undelivered orders.
const CANDIDATES: &str = "
    WITH candidates AS (
        SELECT id, created_at FROM payments WHERE status IN ('unknown', 'settle_failed')
        UNION ALL
        SELECT id, created_at FROM payments
        WHERE status = 'settling'
          AND (created_at < ?1 OR typeof(created_at) NOT IN ('integer', 'real'))
        UNION ALL
        SELECT id, created_at FROM (
            SELECT p.id, p.created_at
            FROM orders o CROSS JOIN payments p ON p.order_id = o.id
            WHERE o.status = 'undelivered' AND +p.status = 'settled'
            UNION
            SELECT p.id, p.created_at
            FROM (SELECT id, order_id, status, created_at FROM payments
                  WHERE id > ?3 ORDER BY id LIMIT ?4) AS p
                JOIN orders o ON o.id = p.order_id
            WHERE o.status = 'paid' AND o.paid_by <> p.id AND o.paid_by <> ''
              AND p.status = 'settled') AS s
        WHERE NOT EXISTS (SELECT 1 FROM reconciled_refunds_owed r WHERE r.payment_id = s.id)
    )
    SELECT c.id, w.payment_id IS NOT NULL AS known
    FROM candidates c LEFT JOIN reconciled_watches w ON w.payment_id = c.id
    WHERE (w.payment_id IS NULL OR w.phase = 'closed') AND typeof(c.id) = 'text'
    ORDER BY c.created_at, c.id
    LIMIT ?2";

/// The last payment of the page, if there may be another page.
const PAGE_END: &str = "
    SELECT id FROM payments WHERE id > ?1 AND typeof(id) = 'text'
    ORDER BY id LIMIT 1 OFFSET ?2";

/// Opens a watch, or opens a closed one anew; an open one only becomes due. Its lease is over: whoever is
/// checking it right now must not overwrite when it is due.
const OPEN: &str = "
    INSERT INTO reconciled_watches (payment_id, phase, opened_at, next_check_at)
    SELECT DISTINCT p.id, 'targeted', ?1, ?1
    FROM json_each(?2) AS given JOIN payments p ON p.id = given.value
    WHERE true
    ON CONFLICT (payment_id) DO UPDATE SET
        next_check_at = excluded.next_check_at,
        lease_token = NULL,
        lease_expires_at = NULL,
        phase = CASE phase WHEN 'closed' THEN excluded.phase ELSE phase END,
        opened_at = CASE phase WHEN 'closed' THEN excluded.opened_at ELSE opened_at END,
        checks_done = CASE phase WHEN 'closed' THEN 0 ELSE checks_done END,
        consecutive_inconclusive =
            CASE phase WHEN 'closed' THEN 0 ELSE consecutive_inconclusive END
    RETURNING payment_id";

pub(super) async fn discover(
    store: &SqliteStore,
    now: Timestamp,
    stale_before: Timestamp,
    limit: u32,
) -> Result<Discovered, StoreError> {
    const OPERATION: &str = "to look for new payments";
    let after = store.settled_page.after();
    let page_end: Option<String> = sqlx::query_scalar(PAGE_END)
        .bind(&after)
        .bind(SETTLED_PAGE_MAX - 1)
        .fetch_optional(&store.reader)
        .await
        .map_err(failed(OPERATION))?;
    let query = Candidates { stale_before, limit, after };
    // Usually there is nothing new, and then nobody needs to wait for the write lock.
    let found = query.find(&store.reader).await.map_err(failed(OPERATION))?;
    if found.is_empty() {
        store.settled_page.move_on(page_end);
        return Ok(Discovered::default());
    }
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        let found = query.find(&mut *tx).await.map_err(failed(OPERATION))?;
        sqlx::query(OPEN)
            .bind(now.as_millis())
            .bind(id_list(found.iter().map(|(id, _)| id.as_str())))
            .fetch_all(&mut *tx)
            .await
            .map_err(failed(OPERATION))?;
        Ok(found)
    }
    .await;
    let found = finish(tx, OPERATION, result).await?;
    // A full answer may have cut the page off: then the same page comes again.
    if found.len() < usize::try_from(limit).unwrap_or(usize::MAX) {
        store.settled_page.move_on(page_end);
    }
    let reopened = found.iter().filter(|(_, known)| *known).count();
    Ok(Discovered { opened: found.len() - reopened, reopened })
}

struct Candidates {
    stale_before: Timestamp,
    limit: u32,
    after: String,
}

impl Candidates {
    async fn find<'e>(
        &self,
        executor: impl sqlx::Executor<'e, Database = sqlx::Sqlite>,
    ) -> Result<Vec<(String, bool)>, sqlx::Error> {
        sqlx::query_as(CANDIDATES)
            .bind(self.stale_before.as_millis())
            .bind(self.limit)
            .bind(&self.after)
            .bind(SETTLED_PAGE_MAX)
            .fetch_all(executor)
            .await
    }
}

pub(super) async fn recheck(
    store: &SqliteStore,
    ids: &[PaymentId],
    now: Timestamp,
) -> Result<Vec<PaymentId>, StoreError> {
    const OPERATION: &str = "to make payments due";
    let mut tx = store.begin(OPERATION).await?;
    let result = sqlx::query_scalar::<_, String>(OPEN)
        .bind(now.as_millis())
        .bind(id_list(ids.iter().map(PaymentId::as_str)))
        .fetch_all(&mut *tx)
        .await
        .map_err(failed(OPERATION));
    let mut found = finish(tx, OPERATION, result).await?;
    found.sort();
    Ok(found.into_iter().map(PaymentId::new).collect())
}

const LEASE_DUE: &str = "
    UPDATE reconciled_watches SET lease_token = ?1, lease_expires_at = ?2
    WHERE payment_id IN (
        SELECT payment_id FROM reconciled_watches
        WHERE phase <> 'closed' AND next_check_at <= ?3
          AND (lease_token IS NULL OR lease_expires_at <= ?3)
        ORDER BY next_check_at, payment_id
        LIMIT ?4)
    RETURNING *";

const LEASE_PAGE: &str = "
    UPDATE reconciled_watches SET lease_token = ?1, lease_expires_at = ?2
    WHERE payment_id IN (
        SELECT payment_id FROM reconciled_watches
        WHERE phase <> 'closed' AND payment_id > ?5
          AND (lease_token IS NULL OR lease_expires_at <= ?3 OR lease_token = ?1)
        ORDER BY payment_id
        LIMIT ?4)
    RETURNING *";

pub(super) async fn lease_due(
    store: &SqliteStore,
    lease: &Lease,
    limit: u32,
) -> Result<Vec<Followed>, StoreError> {
    // Usually nothing is due, and then nobody needs to wait for the write lock.
    let due: bool = sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM reconciled_watches
         WHERE phase <> 'closed' AND next_check_at <= ?1
           AND (lease_token IS NULL OR lease_expires_at <= ?1))",
    )
    .bind(lease.now.as_millis())
    .fetch_one(&store.reader)
    .await
    .map_err(failed("to look for due watches"))?;
    if !due {
        return Ok(Vec::new());
    }
    let mut watches = take(store, leasing(LEASE_DUE, lease, limit)).await?;
    watches.sort_by(|a, b| (a.next_check_at, &a.payment_id).cmp(&(b.next_check_at, &b.payment_id)));
    followed(store, watches).await
}

pub(super) async fn lease_page(
    store: &SqliteStore,
    lease: &Lease,
    after: Option<&PaymentId>,
    limit: u32,
) -> Result<Vec<Followed>, StoreError> {
    // The empty id comes before every other.
    let after = after.map(PaymentId::as_str).unwrap_or_default().to_owned();
    let query = leasing(LEASE_PAGE, lease, limit).bind(after);
    let mut watches = take(store, query).await?;
    watches.sort_by(|a, b| a.payment_id.cmp(&b.payment_id));
    followed(store, watches).await
}

type Leasing = Query<'static, Sqlite, SqliteArguments>;

fn leasing(statement: &'static str, lease: &Lease, limit: u32) -> Leasing {
    sqlx::query(statement)
        .bind(lease.token.to_string())
        .bind(lease.expires_at.as_millis())
        .bind(lease.now.as_millis())
        .bind(limit)
}

async fn take(store: &SqliteStore, query: Leasing) -> Result<Vec<Watch>, StoreError> {
    const OPERATION: &str = "to lease watches";
    let mut tx = store.begin(OPERATION).await?;
    let result = query.fetch_all(&mut *tx).await.map_err(failed(OPERATION));
    let rows = finish(tx, OPERATION, result).await?;
    let id = |row: &SqliteRow| row.try_get::<String, _>("payment_id").unwrap_or_default();
    Ok(rows.iter().filter_map(|row| sound_watch(&id(row), watch(row))).collect())
}

/// A row of `reconciled_watches`.
pub(super) fn watch(row: &SqliteRow) -> Result<Watch, StoreError> {
    const TABLE: &str = "watches";
    let get = failed("to read a watch");
    let phase: String = row.try_get("phase").map_err(get)?;
    let time = |column: &str| -> Result<Option<Timestamp>, StoreError> {
        let millis: Option<i64> = row.try_get(column).map_err(get)?;
        Ok(millis.map(Timestamp::from_millis))
    };
    Ok(Watch {
        payment_id: PaymentId::new(row.try_get::<String, _>("payment_id").map_err(get)?),
        phase: coded(TABLE, "phase", &phase, Phase::from_code)?,
        opened_at: Timestamp::from_millis(row.try_get("opened_at").map_err(get)?),
        next_check_at: time("next_check_at")?,
        checks_done: unsigned(TABLE, "checks_done", row.try_get("checks_done").map_err(get)?)?,
        consecutive_inconclusive: unsigned(
            TABLE,
            "consecutive_inconclusive",
            row.try_get("consecutive_inconclusive").map_err(get)?,
        )?,
        schedule_id: row.try_get("schedule_id").map_err(get)?,
        last_verdict: row.try_get("last_verdict").map_err(get)?,
    })
}

async fn followed(store: &SqliteStore, watches: Vec<Watch>) -> Result<Vec<Followed>, StoreError> {
    let ids = id_list(watches.iter().map(|w| w.payment_id.as_str()));
    let mut conn = store.reader.acquire().await.map_err(failed("to read payments"))?;
    let mut payments: HashMap<String, _> = load::raw_payments(&mut conn, &ids)
        .await?
        .into_iter()
        .map(|raw| (raw.id.clone(), raw.parse()))
        .collect();
    Ok(watches
        .into_iter()
        .map(|watch| {
            let id = watch.payment_id.as_str();
            let payment = payments.remove(id).unwrap_or_else(|| Err(payment_is_gone(id)));
            Followed { watch, payment }
        })
        .collect())
}

pub(super) async fn next_due_at(
    reader: &SqlitePool,
    now: Timestamp,
) -> Result<Option<Timestamp>, StoreError> {
    let millis: Option<i64> = sqlx::query_scalar(
        "SELECT min(next_check_at) FROM reconciled_watches
         WHERE phase <> 'closed' AND (lease_token IS NULL OR lease_expires_at <= ?)",
    )
    .bind(now.as_millis())
    .fetch_one(reader)
    .await
    .map_err(failed("to tell when the next watch is due"))?;
    Ok(millis.map(Timestamp::from_millis))
}

pub(super) async fn release(store: &SqliteStore, lease: &Lease) -> Result<usize, StoreError> {
    const OPERATION: &str = "to release watches";
    let mut tx = store.begin(OPERATION).await?;
    let result = sqlx::query(
        "UPDATE reconciled_watches SET lease_token = NULL, lease_expires_at = NULL
         WHERE phase <> 'closed' AND lease_token = ?",
    )
    .bind(lease.token.to_string())
    .execute(&mut *tx)
    .await
    .map(|done| usize::try_from(done.rows_affected()).unwrap_or(usize::MAX))
    .map_err(failed(OPERATION));
    finish(tx, OPERATION, result).await
}

/// What a check does to its watch.
pub(super) struct WatchWrite {
    /// The new phase; `None` keeps it.
    pub(super) phase: Option<Phase>,
    /// When to look next.
    pub(super) next_check_at: Option<Timestamp>,
    /// Start the repeats anew at this moment.
    pub(super) restart_at: Option<Timestamp>,
}

pub(super) async fn reschedule(
    store: &SqliteStore,
    lease: &Lease,
    checks: &[Judged],
) -> Result<usize, StoreError> {
    const OPERATION: &str = "to reschedule watches";
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        let mut written = 0;
        for judged in checks {
            let next = judged.due.open;
            let write =
                WatchWrite { phase: Some(next.phase), next_check_at: next.at, restart_at: None };
            if write_watch(&mut tx, lease, judged, &write).await? {
                write_check(&mut tx, judged, check_detail(judged).as_deref()).await?;
                written += 1;
            }
        }
        Ok(written)
    }
    .await;
    finish(tx, OPERATION, result).await
}

/// Writes one more check to its watch and gives the lease back. `false`: the lease no longer holds it.
pub(super) async fn write_watch(
    conn: &mut SqliteConnection,
    lease: &Lease,
    judged: &Judged,
    write: &WatchWrite,
) -> Result<bool, StoreError> {
    let changed = sqlx::query(
        "UPDATE reconciled_watches SET
            phase = coalesce(?1, phase),
            next_check_at = ?2,
            opened_at = coalesce(?3, opened_at),
            checks_done = CASE WHEN ?3 IS NULL THEN checks_done + 1 ELSE 0 END,
            consecutive_inconclusive = CASE WHEN ?4 THEN consecutive_inconclusive + 1 ELSE 0 END,
            last_verdict = ?5,
            last_block = coalesce(?6, last_block),
            -- A watch keeps the version it started on.
            schedule_id = CASE checks_done WHEN 0 THEN ?9 ELSE schedule_id END,
            lease_token = NULL,
            lease_expires_at = NULL
         WHERE payment_id = ?7 AND lease_token = ?8",
    )
    .bind(write.phase.map(Phase::code))
    .bind(write.next_check_at.map(Timestamp::as_millis))
    .bind(write.restart_at.map(Timestamp::as_millis))
    .bind(matches!(judged.verdict, Verdict::Inconclusive(_)))
    .bind(judged.verdict_code())
    .bind(judged.verdict.block().map(|block| column_number(block.number)))
    .bind(judged.payment_id.as_str())
    .bind(lease.token.to_string())
    .bind(judged.due.schedule_id)
    .execute(conn)
    .await
    .map_err(failed("to update a watch"))?
    .rows_affected();
    Ok(changed == 1)
}

/// Adds the check's own row.
pub(super) async fn write_check(
    conn: &mut SqliteConnection,
    judged: &Judged,
    detail: Option<&str>,
) -> Result<(), StoreError> {
    const OPERATION: &str = "to record a check";
    let added = sqlx::query(
        "INSERT INTO reconciled_checks (payment_id, checked_at, verdict, block_number, detail)
         VALUES (?, ?, ?, ?, ?)",
    )
    .bind(judged.payment_id.as_str())
    .bind(judged.checked_at.as_millis())
    .bind(judged.verdict_code())
    .bind(judged.verdict.block().map(|block| column_number(block.number)))
    .bind(detail)
    .execute(conn)
    .await
    .map_err(failed(OPERATION))?
    .rows_affected();
    exactly_one(OPERATION, usize::try_from(added).unwrap_or(usize::MAX))
}
