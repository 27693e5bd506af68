//! Flags: raised and closed with resolutions or on their own, and listed and closed by people.

use async_trait::async_trait;
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{FromRow, Row};

use super::{SqliteStore, failed, finish};
use crate::domain::{
    CLOSED_BY_ITSELF, FlagKind, GoneFlag, OrderId, PaymentId, RaisedFlag, StoredFlag, Timestamp,
};
use crate::store::StoreError;
use crate::store::flags::{CloseOutcome, FlagFilter, FlagStore, RawFlag, closing};

const LIST: &str = "to list flags";
const LIST_OPEN: &str = "SELECT * FROM reconciled_flags
    WHERE closed_at IS NULL AND (?1 IS NULL OR kind = ?1) AND (?2 IS NULL OR payment_id = ?2)
    ORDER BY opened_at, id LIMIT ?3";
const LIST_ALL: &str = "SELECT * FROM reconciled_flags
    WHERE (?1 IS NULL OR kind = ?1) AND (?2 IS NULL OR payment_id = ?2)
    ORDER BY opened_at, id LIMIT ?3";
const CLOSE: &str = "to close a flag";
const RAISE: &str = "to raise a flag";

impl FromRow<'_, SqliteRow> for RawFlag {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            kind: row.try_get("kind")?,
            payment_id: row.try_get("payment_id")?,
            order_id: row.try_get("order_id")?,
            subject: row.try_get("subject")?,
            detail: row.try_get("detail")?,
            opened_at: row.try_get("opened_at")?,
            closed_at: row.try_get("closed_at")?,
            closed_by: row.try_get("closed_by")?,
            note: row.try_get("note")?,
        })
    }
}

#[async_trait]
impl FlagStore for SqliteStore {
    async fn flags(&self, filter: &FlagFilter, limit: u32) -> Result<Vec<StoredFlag>, StoreError> {
        // Two texts: SQLite takes the index of open flags only where the text itself says that they are open.
        let text = if filter.closed_too { LIST_ALL } else { LIST_OPEN };
        let rows: Vec<RawFlag> = sqlx::query_as(text)
            .bind(filter.kind.map(FlagKind::code))
            .bind(filter.payment_id.as_ref().map(PaymentId::as_str))
            .bind(limit)
            .fetch_all(&self.reader)
            .await
            .map_err(failed(LIST))?;
        rows.into_iter().map(RawFlag::parse).collect()
    }

    async fn close_flags(
        &self,
        ids: &[i64],
        by: &str,
        note: &str,
        now: Timestamp,
    ) -> Result<Vec<CloseOutcome>, StoreError> {
        let mut tx = self.begin(CLOSE).await?;
        let result = async {
            let mut outcomes = Vec::with_capacity(ids.len());
            for id in ids {
                outcomes.push(close(&mut tx, *id, by, note, now).await.map_err(failed(CLOSE))?);
            }
            Ok(outcomes)
        }
        .await;
        finish(tx, CLOSE, result).await
    }

    async fn account_flags(
        &self,
        raise: &[RaisedFlag],
        gone: &[GoneFlag],
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let mut tx = self.begin(RAISE).await?;
        let result = write(&mut tx, raise, gone, now).await;
        finish(tx, RAISE, result).await
    }
}

async fn close(
    conn: &mut SqliteConnection,
    id: i64,
    by: &str,
    note: &str,
    now: Timestamp,
) -> Result<CloseOutcome, sqlx::Error> {
    let row: Option<(Option<i64>, Option<String>, Option<String>)> =
        sqlx::query_as("SELECT closed_at, closed_by, note FROM reconciled_flags WHERE id = ?")
            .bind(id)
            .fetch_optional(&mut *conn)
            .await?;
    let Some((closed_at, closed_by, old_note)) = row else { return Ok(CloseOutcome::Unknown) };
    if let Some(before) = closing(closed_at, closed_by, old_note) {
        return Ok(CloseOutcome::ClosedBefore(before));
    }
    sqlx::query("UPDATE reconciled_flags SET closed_at = ?, closed_by = ?, note = ? WHERE id = ?")
        .bind(now.as_millis())
        .bind(by)
        .bind(note)
        .bind(id)
        .execute(conn)
        .await?;
    Ok(CloseOutcome::Closed)
}

/// Closes what is gone, then raises.
pub(super) async fn write(
    conn: &mut SqliteConnection,
    raise: &[RaisedFlag],
    gone: &[GoneFlag],
    now: Timestamp,
) -> Result<(), StoreError> {
    if !gone.is_empty() {
        let list: Vec<Value> = gone
            .iter()
            .map(|flag| {
                json!({
                    "payment": payment_column(flag.payment_id.as_ref()),
                    "kind": flag.kind,
                    "subject": flag.subject,
                    "note": flag.note,
                })
            })
            .collect();
        sqlx::query(
            "UPDATE reconciled_flags AS f
             SET cause_gone_at = ?1, closed_at = coalesce(closed_at, ?1),
                 closed_by = CASE WHEN closed_at IS NULL THEN ?2 ELSE closed_by END,
                 note = CASE WHEN closed_at IS NULL THEN c.gone_note ELSE note END
             FROM (SELECT value ->> 'payment' AS gone_payment, value ->> 'kind' AS gone_kind,
                          value ->> 'subject' AS gone_subject, value ->> 'note' AS gone_note
                   FROM json_each(?3)) AS c
             WHERE f.payment_id = c.gone_payment AND f.kind = c.gone_kind
               AND (c.gone_subject IS NULL OR f.subject = c.gone_subject)
               AND f.cause_gone_at IS NULL",
        )
        .bind(now.as_millis())
        .bind(CLOSED_BY_ITSELF)
        .bind(Value::from(list).to_string())
        .execute(&mut *conn)
        .await
        .map_err(failed(CLOSE))?;
    }
    for RaisedFlag { payment_id, order_id, flag } in raise {
        sqlx::query(
            "INSERT INTO reconciled_flags (kind, payment_id, subject, order_id, detail, opened_at)
             VALUES (?, ?, ?, ?, ?, ?)
             ON CONFLICT (payment_id, kind, subject) WHERE cause_gone_at IS NULL DO UPDATE
                SET detail = excluded.detail, order_id = excluded.order_id
              -- What a person closed stays closed.
              WHERE closed_at IS NULL",
        )
        .bind(flag.kind.code())
        .bind(payment_column(payment_id.as_ref()))
        .bind(&flag.subject)
        .bind(order_id.as_ref().map(OrderId::as_str))
        .bind(flag.detail.to_string())
        .bind(now.as_millis())
        .execute(&mut *conn)
        .await
        .map_err(failed(RAISE))?;
    }
    Ok(())
}

/// A flag about no payment has an empty column.
fn payment_column(payment_id: Option<&PaymentId>) -> &str {
    payment_id.map(PaymentId::as_str).unwrap_or_default()
}
