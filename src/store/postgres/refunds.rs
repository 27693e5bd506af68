//! Refund records, for the search on chain.

use std::collections::{BTreeSet, HashSet};

use async_trait::async_trait;
use sqlx::types::time::OffsetDateTime;
use sqlx::{PgConnection, PgPool};

use super::record::json_text;
use super::rows::{block_datetime, datetime, hex, texts};
use super::{PostgresStore, finish, flags};
use crate::domain::{
    ChainId, EventKind, Outcome, PaymentId, RefundFinding, SearchProblem, Timestamp,
};
use crate::store::StoreError;
use crate::store::refunds::{
    MalformedRefund, RawRefund, RefundPage, RefundStore, SearchDue, UNSETTLED, gone, is_again,
    malformed_flags, page, paid_event_key, raised,
};
use crate::store::row::column_number;

const LIST: &str = "to read refund records";
const WRITE: &str = "to write down a search for refunds";

#[async_trait]
impl RefundStore for PostgresStore {
    async fn refunds_to_search(
        &self,
        chain_id: ChainId,
        due: SearchDue,
        limit: u32,
    ) -> Result<RefundPage, StoreError> {
        let open = open_due(&self.pool, chain_id, due, limit).await;
        let rows = match open {
            Ok(open) if open.is_empty() => closed_due(&self.pool, chain_id, due, limit).await,
            open => open,
        };
        Ok(page(rows.map_err(|source| StoreError::from_sqlx(LIST, source))?))
    }

    async fn refunds_unsettled(&self, chain_id: ChainId) -> Result<u64, StoreError> {
        let problems: Vec<String> = UNSETTLED.iter().map(ToString::to_string).collect();
        let count = sqlx::query_scalar!(
            r#"SELECT count(*) AS "count!" FROM reconciled.refunds_owed
                WHERE chain_id = $1 AND status IN ('owed', 'claimed', 'sent', 'blocked')
                  AND search_problem = ANY($2::text[])"#,
            column_number(chain_id.get()),
            &problems,
        )
        .fetch_one(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx(LIST, source))?;
        Ok(u64::try_from(count).unwrap_or(0))
    }

    async fn refunds_malformed(
        &self,
        malformed: &[MalformedRefund],
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let refused = |source| StoreError::from_sqlx(WRITE, source);
        let mut transaction = self.pool.begin().await.map_err(refused)?;
        let result = put_aside(&mut transaction, malformed, datetime(now)).await.map_err(refused);
        finish(transaction, result, refused).await
    }

    async fn refunds_searched(
        &self,
        findings: &[RefundFinding],
        now: Timestamp,
    ) -> Result<Vec<PaymentId>, StoreError> {
        let refused = |source| StoreError::from_sqlx(WRITE, source);
        let mut transaction = self.pool.begin().await.map_err(refused)?;
        let result = write(&mut transaction, findings, datetime(now)).await.map_err(refused);
        finish(transaction, result, refused).await
    }
}

macro_rules! select_refunds {
    ($rest:tt, $($bind:expr),+ $(,)?) => {
        sqlx::query_as!(
            RawRefund,
            r#"SELECT id, payment_id, order_id, chain_id, token, payer, amount::text AS "amount!",
                      refund_nonce, status, paid_tx,
                      (extract(epoch FROM detected_at) * 1000)::bigint AS "detected_at!",
                      searched_to,
                      (extract(epoch FROM search_begun_at) * 1000)::bigint AS search_begun_at,
                      search_use_seen, search_problem
                 FROM reconciled.refunds_owed "# + $rest,
            $($bind),+
        )
    };
}

async fn open_due(
    pool: &PgPool,
    chain_id: ChainId,
    due: SearchDue,
    limit: u32,
) -> Result<Vec<RawRefund>, sqlx::Error> {
    select_refunds!(
        "WHERE chain_id = $1 AND rail = 'x402'
           AND status IN ('owed', 'claimed', 'sent', 'blocked')
           AND (searched_at IS NULL
                OR searched_at <= CASE WHEN status IN ('claimed', 'sent')
                                       THEN $2::timestamptz ELSE $3::timestamptz END)
         ORDER BY searched_at NULLS FIRST, id LIMIT $4",
        column_number(chain_id.get()),
        datetime(due.in_hand_before),
        datetime(due.owed_before),
        i64::from(limit),
    )
    .fetch_all(pool)
    .await
}

async fn closed_due(
    pool: &PgPool,
    chain_id: ChainId,
    due: SearchDue,
    limit: u32,
) -> Result<Vec<RawRefund>, sqlx::Error> {
    select_refunds!(
        "WHERE chain_id = $1 AND rail = 'x402' AND status IN ('paid', 'void')
           AND (closed_seen_at IS NULL OR closed_seen_at > $2)
           AND (searched_at IS NULL OR searched_at <= $3)
         ORDER BY searched_at NULLS FIRST, id LIMIT $4",
        column_number(chain_id.get()),
        datetime(due.closed_after),
        datetime(due.owed_before),
        i64::from(limit),
    )
    .fetch_all(pool)
    .await
}

async fn put_aside(
    connection: &mut PgConnection,
    malformed: &[MalformedRefund],
    now: OffsetDateTime,
) -> Result<(), sqlx::Error> {
    let ids: Vec<i64> = malformed.iter().map(|one| one.id).collect();
    sqlx::query!(
        "UPDATE reconciled.refunds_owed
            SET searched_at = $2, search_problem = $3,
                closed_seen_at = CASE WHEN status IN ('paid', 'void')
                                      THEN coalesce(closed_seen_at, $2) END
          WHERE id = ANY($1::bigint[])",
        &ids,
        now,
        SearchProblem::Malformed.code(),
    )
    .execute(&mut *connection)
    .await?;
    flags::write(connection, &malformed_flags(malformed), &[], now).await
}

async fn write(
    connection: &mut PgConnection,
    findings: &[RefundFinding],
    now: OffsetDateTime,
) -> Result<Vec<PaymentId>, sqlx::Error> {
    let changed = write_records(connection, findings, now).await?;
    let standing: Vec<&RefundFinding> =
        findings.iter().filter(|finding| changed.contains(&finding.refund.id)).collect();
    let flagged: Vec<_> = standing.iter().flat_map(|finding| raised(finding)).collect();
    let gone: Vec<_> = standing.iter().flat_map(|finding| gone(finding)).collect();
    flags::write(connection, &flagged, &gone, now).await?;
    let again = standing.iter().filter(|finding| is_again(finding));
    mark_unaccounted(connection, &texts(again.map(|f| &f.refund.payment_id)), now).await?;
    let closed: Vec<&RefundFinding> =
        standing.into_iter().filter(|finding| finding.paid.is_some()).collect();
    if !closed.is_empty() {
        write_events(connection, &closed, now).await?;
        write_resolutions(connection, &closed, now).await?;
    }
    Ok(closed.into_iter().map(|finding| finding.refund.payment_id.clone()).collect())
}

async fn mark_unaccounted(
    connection: &mut PgConnection,
    payments: &[String],
    now: OffsetDateTime,
) -> Result<(), sqlx::Error> {
    if payments.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "UPDATE reconciled.transfers SET unaccounted_since = coalesce(unaccounted_since, $2)
          WHERE payment_id = ANY($1::text[]) AND orphaned_at IS NULL",
        payments,
        now,
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The records, each only if it is what it was. Returns the ids of those.
async fn write_records(
    connection: &mut PgConnection,
    findings: &[RefundFinding],
    now: OffsetDateTime,
) -> Result<HashSet<i64>, sqlx::Error> {
    // In the order in which resolutions lock them.
    let payments: BTreeSet<&PaymentId> = findings.iter().map(|f| &f.refund.payment_id).collect();
    sqlx::query_scalar!(
        "SELECT id FROM reconciled.refunds_owed WHERE payment_id = ANY($1::text[])
          ORDER BY payment_id FOR UPDATE",
        &texts(payments),
    )
    .fetch_all(&mut *connection)
    .await?;
    let ids: Vec<i64> = findings.iter().map(|f| f.refund.id).collect();
    let statuses: Vec<String> =
        findings.iter().map(|f| f.refund.status.code().to_owned()).collect();
    let nonces: Vec<String> = findings.iter().map(|f| hex(&f.refund.refund_nonce)).collect();
    let blocks: Vec<Option<i64>> =
        findings.iter().map(|f| f.searched_to.map(column_number)).collect();
    let complete: Vec<bool> = findings.iter().map(|f| f.is_complete).collect();
    let transactions: Vec<Option<String>> =
        findings.iter().map(|f| f.paid.as_ref().map(|paid| hex(&paid.log.tx_hash))).collect();
    let times: Vec<Option<OffsetDateTime>> =
        findings.iter().map(|f| f.paid.as_ref().map(|paid| block_datetime(paid.at()))).collect();
    let problems: Vec<Option<String>> =
        findings.iter().map(|f| f.problem.map(|problem| problem.code().to_owned())).collect();
    let restarts: Vec<bool> = findings.iter().map(|f| f.restart).collect();
    let uses_seen: Vec<bool> = findings.iter().map(|f| f.is_use_seen).collect();
    let changed = sqlx::query_scalar!(
        "UPDATE reconciled.refunds_owed r
            SET searched_to = CASE WHEN c.restart THEN NULL
                                   ELSE coalesce(c.searched_to, r.searched_to) END,
                searched_at = CASE WHEN c.complete OR c.problem IS NOT NULL THEN $8
                                   ELSE r.searched_at END,
                search_begun_at = CASE WHEN r.searched_to IS NULL THEN $8
                                       ELSE r.search_begun_at END,
                search_use_seen = NOT c.restart AND (r.search_use_seen OR c.use_seen),
                search_problem = CASE WHEN c.complete OR c.problem IS NOT NULL THEN c.problem
                                      ELSE r.search_problem END,
                status = CASE WHEN c.paid_tx IS NULL THEN r.status ELSE 'paid' END,
                closed_seen_at = CASE WHEN c.paid_tx IS NOT NULL OR r.status IN ('paid', 'void')
                                      THEN coalesce(r.closed_seen_at, $8) END,
                closed_from = CASE WHEN r.closed_seen_at IS NOT NULL THEN r.closed_from
                                   WHEN c.paid_tx IS NOT NULL OR r.status IN ('paid', 'void')
                                   THEN r.searched_to END,
                paid_tx = coalesce(c.paid_tx, r.paid_tx),
                paid_at = coalesce(c.paid_at, r.paid_at)
           FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bool[], $6::text[],
                       $7::timestamptz[], $9::text[], $10::bool[], $11::bool[])
                    AS c (id, status, refund_nonce, searched_to, complete, paid_tx, paid_at,
                          problem, restart, use_seen)
          WHERE r.id = c.id AND r.status = c.status
            AND lower(r.refund_nonce) = c.refund_nonce
         RETURNING r.id",
        &ids,
        &statuses,
        &nonces,
        &blocks as &[Option<i64>],
        &complete,
        &transactions as &[Option<String>],
        &times as &[Option<OffsetDateTime>],
        now,
        &problems as &[Option<String>],
        &restarts,
        &uses_seen,
    )
    .fetch_all(connection)
    .await?;
    Ok(changed.into_iter().collect())
}

async fn write_events(
    connection: &mut PgConnection,
    closed: &[&RefundFinding],
    now: OffsetDateTime,
) -> Result<(), sqlx::Error> {
    let orders: Vec<String> = closed.iter().map(|f| f.refund.order_id.to_string()).collect();
    let keys: Vec<String> = closed.iter().map(|f| paid_event_key(&f.refund)).collect();
    sqlx::query!(
        "INSERT INTO reconciled.events (kind, order_id, payment_id, dedupe_key, created_at)
         SELECT $1, c.order_id, c.payment_id, c.dedupe_key, $5
           FROM unnest($2::text[], $3::text[], $4::text[])
                    AS c (order_id, payment_id, dedupe_key)
         ON CONFLICT (dedupe_key) DO NOTHING",
        EventKind::RefundPaid.code(),
        &orders,
        &texts(closed.iter().map(|f| &f.refund.payment_id)),
        &keys,
        now,
    )
    .execute(connection)
    .await?;
    Ok(())
}

async fn write_resolutions(
    connection: &mut PgConnection,
    closed: &[&RefundFinding],
    now: OffsetDateTime,
) -> Result<(), sqlx::Error> {
    for finding in closed {
        let Some(paid) = &finding.paid else { continue };
        let block = paid.log.block;
        sqlx::query!(
            "INSERT INTO reconciled.resolutions
                    (payment_id, order_id, outcome, verdict, evidence, tx_hash, log_index,
                     block_number, block_hash, block_time, resolved_at)
             VALUES ($1, $2, $3, $3, $4::text::jsonb, $5, $6, $7, $8, $9, $10)",
            finding.refund.payment_id.as_str(),
            finding.refund.order_id.as_str(),
            Outcome::RefundPaid.code(),
            json_text(&paid.evidence),
            hex(&paid.log.tx_hash),
            column_number(paid.log.log_index),
            column_number(block.number),
            hex(&block.hash),
            block_datetime(block.time),
            now,
        )
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}
