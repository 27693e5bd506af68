//! Flags: raised and closed with resolutions or on their own, and listed and closed by people.

use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;
use sqlx::PgConnection;
use sqlx::types::time::OffsetDateTime;

use super::record::json_text;
use super::rows::datetime;
use super::{PostgresStore, finish};
use crate::domain::{
    CLOSED_BY_ITSELF, FlagKind, GoneFlag, OrderId, PaymentId, RaisedFlag, StoredFlag, Timestamp,
};
use crate::store::StoreError;
use crate::store::flags::{CloseOutcome, FlagFilter, FlagStore, RawFlag, closing};

const LIST: &str = "to list flags";
const CLOSE: &str = "to close flags";
const ACCOUNT: &str = "to raise flags";

#[async_trait]
impl FlagStore for PostgresStore {
    async fn flags(&self, filter: &FlagFilter, limit: u32) -> Result<Vec<StoredFlag>, StoreError> {
        let rows = sqlx::query_as!(
            RawFlag,
            r#"SELECT id, kind, payment_id, order_id, subject, detail::text AS "detail!",
                      (extract(epoch FROM opened_at) * 1000)::bigint AS "opened_at!",
                      (extract(epoch FROM closed_at) * 1000)::bigint AS closed_at,
                      closed_by, note
                 FROM reconciled.flags
                WHERE ($1 OR closed_at IS NULL)
                  AND ($2::text IS NULL OR kind = $2)
                  AND ($3::text IS NULL OR payment_id = $3)
                ORDER BY opened_at, id LIMIT $4"#,
            filter.closed_too,
            filter.kind.map(FlagKind::code),
            filter.payment_id.as_ref().map(PaymentId::as_str),
            i64::from(limit),
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx(LIST, source))?;
        rows.into_iter().map(RawFlag::parse).collect()
    }

    async fn close_flags(
        &self,
        ids: &[i64],
        by: &str,
        note: &str,
        now: Timestamp,
    ) -> Result<Vec<CloseOutcome>, StoreError> {
        let refused = |source| StoreError::from_sqlx(CLOSE, source);
        let mut transaction = self.pool.begin().await.map_err(refused)?;
        let result = close(&mut transaction, ids, by, note, now).await.map_err(refused);
        finish(transaction, result, refused).await
    }

    async fn account_flags(
        &self,
        raise: &[RaisedFlag],
        gone: &[GoneFlag],
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let refused = |source| StoreError::from_sqlx(ACCOUNT, source);
        let mut transaction = self.pool.begin().await.map_err(refused)?;
        let result = write(&mut transaction, raise, gone, datetime(now)).await.map_err(refused);
        finish(transaction, result, refused).await
    }
}

async fn close(
    connection: &mut PgConnection,
    ids: &[i64],
    by: &str,
    note: &str,
    now: Timestamp,
) -> Result<Vec<CloseOutcome>, sqlx::Error> {
    let rows = sqlx::query!(
        r#"SELECT id, (extract(epoch FROM closed_at) * 1000)::bigint AS closed_at, closed_by, note
             FROM reconciled.flags WHERE id = ANY($1::bigint[]) ORDER BY id FOR UPDATE"#,
        ids,
    )
    .fetch_all(&mut *connection)
    .await?;
    let known: HashMap<i64, CloseOutcome> = rows
        .into_iter()
        .map(|row| {
            let before = closing(row.closed_at, row.closed_by, row.note);
            (row.id, before.map_or(CloseOutcome::Closed, CloseOutcome::ClosedBefore))
        })
        .collect();
    sqlx::query!(
        "UPDATE reconciled.flags SET closed_at = $2, closed_by = $3, note = $4
          WHERE id = ANY($1::bigint[]) AND closed_at IS NULL",
        ids,
        datetime(now),
        by,
        note,
    )
    .execute(connection)
    .await?;
    Ok(ids.iter().map(|id| known.get(id).cloned().unwrap_or(CloseOutcome::Unknown)).collect())
}

/// Closes what is gone, then raises.
pub(super) async fn write(
    connection: &mut PgConnection,
    raise: &[RaisedFlag],
    gone: &[GoneFlag],
    now: OffsetDateTime,
) -> Result<(), sqlx::Error> {
    if !gone.is_empty() {
        let payments: Vec<String> =
            gone.iter().map(|g| payment_column(g.payment_id.as_ref())).collect();
        let kinds: Vec<String> = gone.iter().map(|g| g.kind.code().to_owned()).collect();
        let subjects: Vec<Option<String>> = gone.iter().map(|g| g.subject.clone()).collect();
        let notes: Vec<String> = gone.iter().map(|g| g.note.clone()).collect();
        sqlx::query!(
            "UPDATE reconciled.flags f
                SET cause_gone_at = $5, closed_at = coalesce(f.closed_at, $5),
                    closed_by = CASE WHEN f.closed_at IS NULL THEN $6 ELSE f.closed_by END,
                    note = CASE WHEN f.closed_at IS NULL THEN c.note ELSE f.note END
               FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
                        AS c (payment_id, kind, subject, note)
              WHERE f.payment_id = c.payment_id AND f.kind = c.kind
                AND (c.subject IS NULL OR f.subject = c.subject) AND f.cause_gone_at IS NULL",
            &payments,
            &kinds,
            &subjects as &[Option<String>],
            &notes,
            now,
            CLOSED_BY_ITSELF,
        )
        .execute(&mut *connection)
        .await?;
    }
    // One statement must not raise one flag twice.
    let raised: BTreeMap<(String, FlagKind, &str), &RaisedFlag> = raise
        .iter()
        .map(|r| {
            let payment = payment_column(r.payment_id.as_ref());
            ((payment, r.flag.kind, r.flag.subject.as_str()), r)
        })
        .collect();
    if raised.is_empty() {
        return Ok(());
    }
    let payments: Vec<String> = raised.keys().map(|(payment, _, _)| payment.clone()).collect();
    let kinds: Vec<String> = raised.keys().map(|(_, kind, _)| kind.code().to_owned()).collect();
    let subjects: Vec<String> = raised.keys().map(|(_, _, s)| (*s).to_owned()).collect();
    let orders: Vec<Option<String>> =
        raised.values().map(|r| r.order_id.as_ref().map(OrderId::to_string)).collect();
    let details: Vec<String> = raised.values().map(|r| json_text(&r.flag.detail)).collect();
    sqlx::query!(
        "INSERT INTO reconciled.flags AS f (payment_id, kind, subject, order_id, detail, opened_at)
         SELECT c.payment_id, c.kind, c.subject, c.order_id, c.detail::jsonb, $6
           FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[])
                    AS c (payment_id, kind, subject, order_id, detail)
         ON CONFLICT (payment_id, kind, subject) WHERE cause_gone_at IS NULL DO UPDATE
            SET detail = excluded.detail, order_id = excluded.order_id
          -- What a person closed stays closed; what says the same stays as it is.
          WHERE f.closed_at IS NULL
            AND (f.detail, f.order_id) IS DISTINCT FROM (excluded.detail, excluded.order_id)",
        &payments,
        &kinds,
        &subjects,
        &orders as &[Option<String>],
        &details,
        now,
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// A flag about no payment has an empty column.
fn payment_column(payment_id: Option<&PaymentId>) -> String {
    payment_id.map(PaymentId::to_string).unwrap_or_default()
}
