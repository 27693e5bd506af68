//! Watches: opening them, leasing them, and writing down checks that change nothing else.

use std::collections::HashMap;

use sqlx::types::time::OffsetDateTime;
use sqlx::{PgConnection, PgPool};

use super::finish;
use super::locked::lock_watches;
use super::record::{CheckColumns, insert_checks};
use super::rows::{WatchRow, datetime, parse_payment, select_payments, texts};
use crate::domain::{Judged, PaymentId, Phase, RawPayment, Timestamp};
use crate::store::row::{one_line, sound_watch};
use crate::store::settled_page::{SETTLED_PAGE_MAX, SettledPage};
use crate::store::{Discovered, Followed, Lease, StoreError};

/// Opens watches: see [`crate::store::Store::discover`].
pub(super) async fn discover(
    pool: &PgPool,
    page: &SettledPage,
    now: Timestamp,
    stale_before: Timestamp,
    limit: u32,
) -> Result<Discovered, StoreError> {
    let after = page.after();
    let found = sqlx::query!(
        // `unwatched` has no limit of its own: with one, every open payment is looked up by itself,
        // instead of both sides being read once in order.
        r#"WITH unwatched AS MATERIALIZED (
               SELECT p.id, p.created_at
                 FROM payments p
                WHERE p.status IN ('settling', 'unknown', 'settle_failed')
                  AND (p.status <> 'settling' OR coalesce(p.created_at, '-infinity') < $2)
                  AND NOT EXISTS (
                      SELECT FROM reconciled.watches w
                       WHERE w.payment_id = p.id AND w.phase <> 'closed')
           ), page AS MATERIALIZED (
               SELECT id, order_id, status, created_at
                 FROM payments WHERE id > $4 ORDER BY id LIMIT $5
           ), settled AS (
               SELECT p.id, p.created_at
                 FROM orders o JOIN payments p ON p.order_id = o.id
                WHERE o.status = 'undelivered' AND p.status = 'settled'
                UNION
               SELECT p.id, p.created_at
                 FROM page p JOIN orders o ON o.id = p.order_id
                WHERE o.status = 'paid' AND o.paid_by <> p.id AND o.paid_by <> ''
                  AND p.status = 'settled'
           ), found AS (
               SELECT id, created_at FROM unwatched
                UNION ALL
               SELECT id, created_at FROM settled s
                WHERE NOT EXISTS (
                      SELECT FROM reconciled.watches w
                       WHERE w.payment_id = s.id AND w.phase <> 'closed')
                  AND NOT EXISTS (
                      SELECT FROM reconciled.refunds_owed r WHERE r.payment_id = s.id)
                ORDER BY created_at NULLS FIRST, id
                LIMIT $3
           ), written AS (
               INSERT INTO reconciled.watches AS w (payment_id, phase, opened_at, next_check_at)
               SELECT id, 'targeted', $1, $1 FROM found ORDER BY id
               ON CONFLICT (payment_id) DO UPDATE
                  SET phase = 'targeted', opened_at = $1, next_check_at = $1, checks_done = 0,
                      consecutive_inconclusive = 0, lease_token = NULL, lease_expires_at = NULL
                WHERE w.phase = 'closed'
               -- A row that was there before carries the lock under which it was updated.
               RETURNING w.xmax = 0 AS is_new
           )
           SELECT (SELECT count(*) FROM written WHERE is_new) AS "opened!",
                  (SELECT count(*) FROM written WHERE NOT is_new) AS "reopened!",
                  (SELECT count(*) FROM found) AS "found!",
                  CASE WHEN (SELECT count(*) FROM page) = $5
                       THEN (SELECT max(id) FROM page) END AS last"#,
        datetime(now),
        datetime(stale_before),
        i64::from(limit),
        after,
        SETTLED_PAGE_MAX,
    )
    .fetch_one(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to open watches", source))?;
    // A full answer may have cut the page off: then the same page comes again.
    if found.found < i64::from(limit) {
        page.move_on(found.last);
    }
    let count = |n: i64| usize::try_from(n).unwrap_or(usize::MAX);
    Ok(Discovered { opened: count(found.opened), reopened: count(found.reopened) })
}

/// Leases what is due: see [`crate::store::Store::lease_due`].
pub(super) async fn lease_due(
    pool: &PgPool,
    lease: &Lease,
    limit: u32,
) -> Result<Vec<Followed>, StoreError> {
    let mut rows = sqlx::query_as!(
        WatchRow,
        // An array is looked up by index; a join may read the whole table instead.
        r#"WITH due AS MATERIALIZED (
               SELECT payment_id
                 FROM reconciled.watches
                WHERE phase <> 'closed' AND next_check_at <= $2
                  AND (lease_expires_at IS NULL OR lease_expires_at <= $2)
                ORDER BY next_check_at, payment_id
                LIMIT $4
                  FOR UPDATE SKIP LOCKED
           )
           UPDATE reconciled.watches w
              SET lease_token = $1, lease_expires_at = $3
            WHERE w.payment_id = ANY (ARRAY(SELECT payment_id FROM due))
           RETURNING w.payment_id, w.phase, w.opened_at, w.next_check_at, w.checks_done,
                     w.consecutive_inconclusive, w.schedule_id, w.last_verdict"#,
        lease.token,
        datetime(lease.now),
        datetime(lease.expires_at),
        i64::from(limit),
    )
    .fetch_all(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to lease due watches", source))?;
    rows.sort_by(|a, b| (a.next_check_at, &a.payment_id).cmp(&(b.next_check_at, &b.payment_id)));
    with_payments(pool, rows).await
}

/// Leases one page of a full reconcile: see [`crate::store::Store::lease_page`].
pub(super) async fn lease_page(
    pool: &PgPool,
    lease: &Lease,
    after: Option<&PaymentId>,
    limit: u32,
) -> Result<Vec<Followed>, StoreError> {
    // The order of ids is the database's own, whatever its collation: pages are sorted there.
    let rows = sqlx::query_as!(
        WatchRow,
        r#"WITH page AS MATERIALIZED (
               SELECT payment_id
                 FROM reconciled.watches
                WHERE phase <> 'closed' AND payment_id > $5
                  AND (lease_expires_at IS NULL OR lease_expires_at <= $2 OR lease_token = $1)
                ORDER BY payment_id
                LIMIT $4
                  FOR UPDATE SKIP LOCKED
           ), leased AS (
               UPDATE reconciled.watches w
                  SET lease_token = $1, lease_expires_at = $3
                WHERE w.payment_id = ANY (ARRAY(SELECT payment_id FROM page))
               RETURNING w.*
           )
           SELECT payment_id AS "payment_id!", phase AS "phase!", opened_at AS "opened_at!",
                  next_check_at, checks_done AS "checks_done!",
                  consecutive_inconclusive AS "consecutive_inconclusive!", schedule_id,
                  last_verdict
             FROM leased
            ORDER BY payment_id"#,
        lease.token,
        datetime(lease.now),
        datetime(lease.expires_at),
        i64::from(limit),
        after.map_or("", PaymentId::as_str),
    )
    .fetch_all(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to lease a page of watches", source))?;
    with_payments(pool, rows).await
}

/// The payments of leased watches, in the watches' order. Read after the lease is committed: what
/// decides is read again, locked, when a verdict is applied.
async fn with_payments(pool: &PgPool, rows: Vec<WatchRow>) -> Result<Vec<Followed>, StoreError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<String> = rows.iter().map(|row| row.payment_id.clone()).collect();
    let payments: HashMap<String, RawPayment> =
        select_payments!("WHERE id = ANY($1::text[])", &ids)
            .fetch_all(pool)
            .await
            .map_err(|source| StoreError::from_sqlx("to read payments", source))?
            .into_iter()
            .map(|row| (row.id.clone(), row))
            .collect();
    let watches = ids.iter().zip(rows).filter_map(|(id, row)| sound_watch(id, row.try_into()));
    Ok(watches
        .map(|watch| {
            let row = payments.get(watch.payment_id.as_str());
            let payment = parse_payment(&watch.payment_id, row);
            Followed { watch, payment }
        })
        .collect())
}

/// When the next watch is due: see [`crate::store::Store::next_due_at`].
pub(super) async fn next_due_at(
    pool: &PgPool,
    now: Timestamp,
) -> Result<Option<Timestamp>, StoreError> {
    let next = sqlx::query_scalar!(
        r#"SELECT next_check_at AS "at!"
             FROM reconciled.watches
            WHERE phase <> 'closed' AND next_check_at IS NOT NULL
              AND (lease_expires_at IS NULL OR lease_expires_at <= $1)
            ORDER BY next_check_at
            LIMIT 1"#,
        datetime(now),
    )
    .fetch_optional(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to read when a watch is due", source))?;
    Ok(next.map(Timestamp::from))
}

/// Writes down checks that change nothing but their watch: see [`crate::store::Store::reschedule`].
pub(super) async fn reschedule(
    pool: &PgPool,
    lease: &Lease,
    checks: &[Judged],
) -> Result<usize, StoreError> {
    let next = |c: &Judged| Next { phase: Some(c.due.open.phase), at: c.due.open.at };
    write_checks(pool, lease, checks, next, None).await
}

/// Writes down checks whose resolution the database refused, with its words: nothing but the watch
/// changes, which stays in its phase and is due when it would have been.
pub(super) async fn refuse(
    pool: &PgPool,
    lease: &Lease,
    checks: &[Judged],
    problem: &str,
) -> Result<(), StoreError> {
    let next = |c: &Judged| Next { phase: None, at: Some(c.due.open.at.unwrap_or(c.due.finality)) };
    let detail = one_line(&format!("not applied: {problem}"));
    write_checks(pool, lease, checks, next, Some(detail)).await.map(|_| ())
}

/// What becomes of a watch; no phase keeps the one it has.
struct Next {
    phase: Option<Phase>,
    at: Option<Timestamp>,
}

async fn write_checks(
    pool: &PgPool,
    lease: &Lease,
    checks: &[Judged],
    next: impl Fn(&Judged) -> Next,
    detail: Option<String>,
) -> Result<usize, StoreError> {
    if checks.is_empty() {
        return Ok(0);
    }
    let refused = |source| StoreError::from_sqlx("to write checks", source);
    let mut transaction = pool.begin().await.map_err(refused)?;
    let written =
        write_checks_in(&mut transaction, lease, checks, next, detail).await.map_err(refused);
    finish(transaction, written, refused).await
}

async fn write_checks_in(
    connection: &mut PgConnection,
    lease: &Lease,
    checks: &[Judged],
    next: impl Fn(&Judged) -> Next,
    detail: Option<String>,
) -> Result<usize, sqlx::Error> {
    // Rows are locked in order of id here as everywhere, so that nobody waits in a circle.
    let held = lock_watches(connection, lease, checks).await?;
    let checks: Vec<&Judged> =
        checks.iter().filter(|c| held.contains(c.payment_id.as_str())).collect();
    if checks.is_empty() {
        return Ok(0);
    }
    let next: Vec<Next> = checks.iter().map(|c| next(c)).collect();
    let phases: Vec<Option<String>> =
        next.iter().map(|n| n.phase.map(|phase| phase.code().to_owned())).collect();
    let times: Vec<Option<OffsetDateTime>> = next.iter().map(|n| n.at.map(datetime)).collect();
    let mut columns = CheckColumns::of(checks);
    if detail.is_some() {
        columns.details.fill(detail);
    }
    let written = sqlx::query!(
        "UPDATE reconciled.watches w
            SET phase = coalesce(c.phase, w.phase),
                next_check_at = c.next_check_at,
                checks_done = w.checks_done + 1,
                consecutive_inconclusive =
                    CASE WHEN c.inconclusive THEN w.consecutive_inconclusive + 1 ELSE 0 END,
                last_verdict = c.verdict,
                last_block = coalesce(c.block_number, w.last_block),
                -- A watch keeps the version it started on.
                schedule_id = CASE w.checks_done WHEN 0 THEN c.schedule_id ELSE w.schedule_id END,
                lease_token = NULL,
                lease_expires_at = NULL
           FROM unnest($2::text[], $3::text[], $4::timestamptz[], $5::bool[], $6::text[],
                       $7::bigint[], $8::bigint[])
                    AS c (payment_id, phase, next_check_at, inconclusive, verdict, block_number,
                          schedule_id)
          WHERE w.payment_id = c.payment_id AND w.lease_token = $1",
        lease.token,
        &columns.payments,
        &phases as &[Option<String>],
        &times as &[Option<OffsetDateTime>],
        &columns.inconclusive,
        &columns.verdicts,
        &columns.blocks as &[Option<i64>],
        &columns.schedules as &[Option<i64>],
    )
    .execute(&mut *connection)
    .await?
    .rows_affected();
    insert_checks(connection, &columns).await?;
    Ok(usize::try_from(written).unwrap_or(usize::MAX))
}

/// Gives the lease back: see [`crate::store::Store::release`].
pub(super) async fn release(pool: &PgPool, lease: &Lease) -> Result<usize, StoreError> {
    let done = sqlx::query!(
        "WITH held AS MATERIALIZED (
             SELECT payment_id FROM reconciled.watches
              WHERE phase <> 'closed' AND lease_token = $1
              ORDER BY payment_id
                FOR UPDATE
         )
         UPDATE reconciled.watches w
            SET lease_token = NULL, lease_expires_at = NULL
           FROM held
          WHERE w.payment_id = held.payment_id",
        lease.token,
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to give a lease back", source))?;
    Ok(usize::try_from(done.rows_affected()).unwrap_or(usize::MAX))
}

/// Makes watches due now: see [`crate::store::Store::recheck`].
pub(super) async fn recheck(
    pool: &PgPool,
    ids: &[PaymentId],
    now: Timestamp,
) -> Result<Vec<PaymentId>, StoreError> {
    let found = sqlx::query_scalar!(
        r#"INSERT INTO reconciled.watches AS w (payment_id, phase, opened_at, next_check_at)
           SELECT id, 'targeted', $2::timestamptz, $2
             FROM payments WHERE id = ANY($1::text[]) ORDER BY id
           ON CONFLICT (payment_id) DO UPDATE
              SET next_check_at = $2,
                  -- Whoever is checking it right now must not overwrite when it is due.
                  lease_token = NULL,
                  lease_expires_at = NULL,
                  phase = CASE WHEN w.phase = 'closed' THEN 'targeted' ELSE w.phase END,
                  opened_at = CASE WHEN w.phase = 'closed' THEN $2 ELSE w.opened_at END,
                  checks_done = CASE WHEN w.phase = 'closed' THEN 0 ELSE w.checks_done END,
                  consecutive_inconclusive = CASE WHEN w.phase = 'closed' THEN 0
                                                  ELSE w.consecutive_inconclusive END
           RETURNING payment_id"#,
        &texts(ids),
        datetime(now),
    )
    .fetch_all(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to make watches due", source))?;
    Ok(found.into_iter().map(PaymentId::new).collect())
}
