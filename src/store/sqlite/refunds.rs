//! Refund records, for the search on chain.

use async_trait::async_trait;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{FromRow, Row};

use super::{SqliteStore, failed, finish, flags};
use crate::domain::{
    ChainId, EventKind, Outcome, PaymentId, RefundFinding, RefundPaid, RefundStatus, SearchProblem,
    SearchedRefund, Timestamp,
};
use crate::store::StoreError;
use crate::store::refunds::{
    MalformedRefund, RawRefund, RefundPage, RefundStore, SearchDue, UNSETTLED, gone, is_again,
    malformed_flags, page, paid_event_key, raised,
};
use crate::store::row::column_number;

const LIST: &str = "to read refund records";
const WRITE: &str = "to write down a search for refunds";

impl FromRow<'_, SqliteRow> for RawRefund {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            payment_id: row.try_get("payment_id")?,
            order_id: row.try_get("order_id")?,
            chain_id: row.try_get("chain_id")?,
            token: row.try_get("token")?,
            payer: row.try_get("payer")?,
            amount: row.try_get("amount")?,
            refund_nonce: row.try_get("refund_nonce")?,
            status: row.try_get("status")?,
            paid_tx: row.try_get("paid_tx")?,
            detected_at: row.try_get("detected_at")?,
            searched_to: row.try_get("searched_to")?,
            search_begun_at: row.try_get("search_begun_at")?,
            search_use_seen: row.try_get("search_use_seen")?,
            search_problem: row.try_get("search_problem")?,
        })
    }
}

#[async_trait]
impl RefundStore for SqliteStore {
    async fn refunds_to_search(
        &self,
        chain_id: ChainId,
        due: SearchDue,
        limit: u32,
    ) -> Result<RefundPage, StoreError> {
        let mut rows: Vec<RawRefund> = sqlx::query_as(
            "SELECT * FROM reconciled_refunds_owed
             WHERE chain_id = ? AND rail = 'x402'
               AND status IN ('owed', 'claimed', 'sent', 'blocked')
               AND (searched_at IS NULL
                    OR searched_at <= CASE WHEN status IN ('claimed', 'sent') THEN ? ELSE ? END)
             ORDER BY searched_at NULLS FIRST, id LIMIT ?",
        )
        .bind(column_number(chain_id.get()))
        .bind(due.in_hand_before.as_millis())
        .bind(due.owed_before.as_millis())
        .bind(limit)
        .fetch_all(&self.reader)
        .await
        .map_err(failed(LIST))?;
        if rows.is_empty() {
            rows = sqlx::query_as(
                "SELECT * FROM reconciled_refunds_owed
                 WHERE chain_id = ? AND rail = 'x402' AND status IN ('paid', 'void')
                   AND (closed_seen_at IS NULL OR closed_seen_at > ?)
                   AND (searched_at IS NULL OR searched_at <= ?)
                 ORDER BY searched_at NULLS FIRST, id LIMIT ?",
            )
            .bind(column_number(chain_id.get()))
            .bind(due.closed_after.as_millis())
            .bind(due.owed_before.as_millis())
            .bind(limit)
            .fetch_all(&self.reader)
            .await
            .map_err(failed(LIST))?;
        }
        Ok(page(rows))
    }

    async fn refunds_unsettled(&self, chain_id: ChainId) -> Result<u64, StoreError> {
        let [one, other] = UNSETTLED;
        let count: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM reconciled_refunds_owed
             WHERE chain_id = ? AND status IN ('owed', 'claimed', 'sent', 'blocked')
               AND search_problem IN (?, ?)",
        )
        .bind(column_number(chain_id.get()))
        .bind(one.code())
        .bind(other.code())
        .fetch_one(&self.reader)
        .await
        .map_err(failed(LIST))?;
        Ok(u64::try_from(count).unwrap_or(0))
    }

    async fn refunds_malformed(
        &self,
        malformed: &[MalformedRefund],
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let mut tx = self.begin(WRITE).await?;
        let result = put_aside(&mut tx, malformed, now).await;
        finish(tx, WRITE, result).await
    }

    async fn refunds_searched(
        &self,
        findings: &[RefundFinding],
        now: Timestamp,
    ) -> Result<Vec<PaymentId>, StoreError> {
        let mut tx = self.begin(WRITE).await?;
        let result = write(&mut tx, findings, now).await;
        finish(tx, WRITE, result).await
    }
}

async fn put_aside(
    conn: &mut SqliteConnection,
    malformed: &[MalformedRefund],
    now: Timestamp,
) -> Result<(), StoreError> {
    for one in malformed {
        sqlx::query(
            "UPDATE reconciled_refunds_owed
             SET searched_at = ?1, search_problem = ?2,
                 closed_seen_at = CASE WHEN status IN ('paid', 'void')
                                       THEN coalesce(closed_seen_at, ?1) END
             WHERE id = ?3",
        )
        .bind(now.as_millis())
        .bind(SearchProblem::Malformed.code())
        .bind(one.id)
        .execute(&mut *conn)
        .await
        .map_err(failed(WRITE))?;
    }
    flags::write(conn, &malformed_flags(malformed), &[], now).await
}

async fn write(
    conn: &mut SqliteConnection,
    findings: &[RefundFinding],
    now: Timestamp,
) -> Result<Vec<PaymentId>, StoreError> {
    let mut closed = Vec::new();
    for finding in findings {
        if !write_record(conn, finding, now).await.map_err(failed(WRITE))? {
            continue;
        }
        let flagged: Vec<_> = raised(finding).collect();
        let gone: Vec<_> = gone(finding).collect();
        flags::write(conn, &flagged, &gone, now).await?;
        if is_again(finding) {
            mark_unaccounted(conn, &finding.refund.payment_id, now).await.map_err(failed(WRITE))?;
        }
        if let Some(paid) = &finding.paid {
            write_paid(conn, &finding.refund, paid, now).await.map_err(failed(WRITE))?;
            closed.push(finding.refund.payment_id.clone());
        }
    }
    Ok(closed)
}

async fn mark_unaccounted(
    conn: &mut SqliteConnection,
    payment_id: &PaymentId,
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "UPDATE reconciled_transfers SET unaccounted_since = coalesce(unaccounted_since, ?)
         WHERE payment_id = ? AND orphaned_at IS NULL",
    )
    .bind(now.as_millis())
    .bind(payment_id.as_str())
    .execute(conn)
    .await?;
    Ok(())
}

/// The record, if it is what it was; `false` when it is not.
async fn write_record(
    conn: &mut SqliteConnection,
    finding: &RefundFinding,
    now: Timestamp,
) -> Result<bool, sqlx::Error> {
    let paid = finding.paid.as_ref();
    let changed = sqlx::query(
        "UPDATE reconciled_refunds_owed
         SET searched_to = CASE WHEN ?11 THEN NULL ELSE coalesce(?1, searched_to) END,
             searched_at = CASE WHEN ?2 OR ?10 IS NOT NULL THEN ?3 ELSE searched_at END,
             search_begun_at = CASE WHEN searched_to IS NULL THEN ?3 ELSE search_begun_at END,
             search_use_seen = NOT ?11 AND (search_use_seen OR ?12),
             search_problem = CASE WHEN ?2 OR ?10 IS NOT NULL THEN ?10 ELSE search_problem END,
             status = CASE WHEN ?4 IS NULL THEN status ELSE ?5 END,
             closed_seen_at = CASE WHEN ?4 IS NOT NULL OR status IN ('paid', 'void')
                                   THEN coalesce(closed_seen_at, ?3) END,
             closed_from = CASE WHEN closed_seen_at IS NOT NULL THEN closed_from
                                WHEN ?4 IS NOT NULL OR status IN ('paid', 'void')
                                THEN searched_to END,
             paid_tx = coalesce(?4, paid_tx), paid_at = coalesce(?6, paid_at)
         WHERE id = ?7 AND status = ?8 AND lower(refund_nonce) = ?9",
    )
    .bind(finding.searched_to.map(column_number))
    .bind(finding.is_complete)
    .bind(now.as_millis())
    .bind(paid.map(|paid| paid.log.tx_hash.to_string()))
    .bind(RefundStatus::Paid.code())
    .bind(paid.map(|paid| Timestamp::from(paid.at()).as_millis()))
    .bind(finding.refund.id)
    .bind(finding.refund.status.code())
    .bind(finding.refund.refund_nonce.to_string())
    .bind(finding.problem.map(SearchProblem::code))
    .bind(finding.restart)
    .bind(finding.is_use_seen)
    .execute(conn)
    .await?;
    Ok(changed.rows_affected() == 1)
}

/// What others are told of a refund that was paid, and what that rests on.
async fn write_paid(
    conn: &mut SqliteConnection,
    refund: &SearchedRefund,
    paid: &RefundPaid,
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT INTO reconciled_events (kind, order_id, payment_id, dedupe_key, created_at)
         VALUES (?, ?, ?, ?, ?) ON CONFLICT (dedupe_key) DO NOTHING",
    )
    .bind(EventKind::RefundPaid.code())
    .bind(refund.order_id.as_str())
    .bind(refund.payment_id.as_str())
    .bind(paid_event_key(refund))
    .bind(now.as_millis())
    .execute(&mut *conn)
    .await?;
    let block = paid.log.block;
    sqlx::query(
        "INSERT INTO reconciled_resolutions
            (payment_id, order_id, outcome, verdict, evidence, tx_hash, log_index, block_number,
             block_hash, block_time, resolved_at)
         VALUES (?1, ?2, ?3, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
    )
    .bind(refund.payment_id.as_str())
    .bind(refund.order_id.as_str())
    .bind(Outcome::RefundPaid.code())
    .bind(paid.evidence.to_string())
    .bind(paid.log.tx_hash.to_string())
    .bind(column_number(paid.log.log_index))
    .bind(column_number(block.number))
    .bind(block.hash.to_string())
    .bind(column_number(block.time.as_secs()))
    .bind(now.as_millis())
    .execute(conn)
    .await?;
    Ok(())
}
