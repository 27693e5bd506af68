//! Flags about money: raised and closed by what they are about.

use sqlx::SqliteConnection;

use crate::domain::{CLOSED_BY_ITSELF, LedgerFlag, MootFlag, PaymentId, Timestamp};
use crate::store::StoreError;
use crate::store::sqlite::{SqliteStore, failed, finish};

const OPERATION: &str = "to raise flags";

pub(super) async fn account(
    store: &SqliteStore,
    raise: &[LedgerFlag],
    close: &[MootFlag],
    now: Timestamp,
) -> Result<usize, StoreError> {
    if raise.is_empty() && close.is_empty() {
        return Ok(0);
    }
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        for flag in close {
            sqlx::query(
                "UPDATE reconciled_flags SET closed_at = ?, closed_by = ?, note = ?
                 WHERE payment_id = ? AND kind = ? AND subject = ? AND closed_at IS NULL",
            )
            .bind(now.as_millis())
            .bind(CLOSED_BY_ITSELF)
            .bind(&flag.note)
            .bind(flag.payment_id.as_ref().map_or("", PaymentId::as_str))
            .bind(flag.kind.code())
            .bind(&flag.subject)
            .execute(&mut *tx)
            .await
            .map_err(failed(OPERATION))?;
        }
        let mut raised = 0;
        for flag in raise {
            raised += usize::from(raise_one(&mut tx, flag, now).await?);
        }
        Ok(raised)
    }
    .await;
    finish(tx, OPERATION, result).await
}

/// Whether it was not open before, and is now. What a person closed stays closed.
async fn raise_one(
    conn: &mut SqliteConnection,
    flag: &LedgerFlag,
    now: Timestamp,
) -> Result<bool, StoreError> {
    let payment = flag.payment_id.as_ref().map_or("", PaymentId::as_str);
    let was_open: bool = sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM reconciled_flags
          WHERE kind = ? AND payment_id = ? AND subject = ? AND closed_at IS NULL)",
    )
    .bind(flag.kind.code())
    .bind(payment)
    .bind(&flag.subject)
    .fetch_one(&mut *conn)
    .await
    .map_err(failed(OPERATION))?;
    let changed = sqlx::query(
        "INSERT INTO reconciled_flags (kind, payment_id, subject, order_id, detail, opened_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)
         ON CONFLICT (kind, payment_id, subject) DO UPDATE SET
            detail = excluded.detail,
            order_id = excluded.order_id,
            opened_at = CASE WHEN closed_at IS NULL THEN opened_at ELSE excluded.opened_at END,
            note = CASE WHEN closed_at IS NULL THEN note END,
            closed_at = NULL,
            closed_by = NULL
         WHERE closed_at IS NULL OR closed_by = ?7",
    )
    .bind(flag.kind.code())
    .bind(payment)
    .bind(&flag.subject)
    .bind(flag.order_id.as_ref().map(|id| id.as_str()))
    .bind(flag.detail.to_string())
    .bind(now.as_millis())
    .bind(CLOSED_BY_ITSELF)
    .execute(conn)
    .await
    .map_err(failed(OPERATION))?
    .rows_affected();
    Ok(changed == 1 && !was_open)
}
