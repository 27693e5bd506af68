//! Flags about money: raised and closed by what they are about.

use std::collections::BTreeMap;

use sqlx::{PgConnection, PgPool};

use crate::domain::{CLOSED_BY_ITSELF, LedgerFlag, MootFlag, PaymentId, Timestamp};
use crate::store::StoreError;
use crate::store::postgres::finish;
use crate::store::postgres::record::json_text;
use crate::store::postgres::rows::datetime;

pub(super) async fn account(
    pool: &PgPool,
    raise: &[LedgerFlag],
    close: &[MootFlag],
    now: Timestamp,
) -> Result<usize, StoreError> {
    if raise.is_empty() && close.is_empty() {
        return Ok(0);
    }
    let refused = |source| StoreError::from_sqlx("to raise flags", source);
    let mut transaction = pool.begin().await.map_err(refused)?;
    let raised = account_in(&mut transaction, raise, close, now).await.map_err(refused);
    finish(transaction, raised, refused).await
}

fn id_text(id: Option<&PaymentId>) -> String {
    id.map_or_else(String::new, ToString::to_string)
}

async fn account_in(
    connection: &mut PgConnection,
    raise: &[LedgerFlag],
    close: &[MootFlag],
    now: Timestamp,
) -> Result<usize, sqlx::Error> {
    let closing: BTreeMap<_, &MootFlag> = close
        .iter()
        .map(|f| ((id_text(f.payment_id.as_ref()), f.kind, f.subject.as_str()), f))
        .collect();
    let payments: Vec<String> = closing.keys().map(|(id, ..)| id.clone()).collect();
    let kinds: Vec<String> = closing.keys().map(|(_, kind, _)| kind.code().to_owned()).collect();
    let subjects: Vec<String> = closing.keys().map(|(.., s)| (*s).to_owned()).collect();
    let notes: Vec<String> = closing.values().map(|flag| flag.note.clone()).collect();
    sqlx::query!(
        "UPDATE reconciled.flags f SET closed_at = $5, closed_by = $6, note = c.note
           FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
                    AS c (payment_id, kind, subject, note)
          WHERE f.payment_id = c.payment_id AND f.kind = c.kind AND f.subject = c.subject
            AND f.closed_at IS NULL",
        &payments,
        &kinds,
        &subjects,
        &notes,
        datetime(now),
        CLOSED_BY_ITSELF,
    )
    .execute(&mut *connection)
    .await?;

    let raising: BTreeMap<_, &LedgerFlag> = raise
        .iter()
        .map(|f| ((id_text(f.payment_id.as_ref()), f.kind, f.subject.as_str()), f))
        .collect();
    let payments: Vec<String> = raising.keys().map(|(id, ..)| id.clone()).collect();
    let kinds: Vec<String> = raising.keys().map(|(_, kind, _)| kind.code().to_owned()).collect();
    let subjects: Vec<String> = raising.keys().map(|(.., s)| (*s).to_owned()).collect();
    let orders: Vec<Option<String>> =
        raising.values().map(|flag| flag.order_id.as_ref().map(ToString::to_string)).collect();
    let details: Vec<String> = raising.values().map(|flag| json_text(&flag.detail)).collect();
    let raised = sqlx::query_scalar!(
        r#"WITH given AS (
               SELECT c.*, coalesce(f.closed_at IS NULL AND f.id IS NOT NULL, false) AS was_open
                 FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[])
                          AS c (payment_id, kind, subject, order_id, detail)
                 LEFT JOIN reconciled.flags f
                   ON f.payment_id = c.payment_id AND f.kind = c.kind AND f.subject = c.subject
           ), written AS (
               INSERT INTO reconciled.flags AS f
                      (payment_id, kind, subject, order_id, detail, opened_at)
               SELECT payment_id, kind, subject, order_id, detail::jsonb, $6 FROM given
               ON CONFLICT (payment_id, kind, subject) DO UPDATE
                  SET detail = excluded.detail, order_id = excluded.order_id,
                      opened_at = CASE WHEN f.closed_at IS NULL THEN f.opened_at
                                       ELSE excluded.opened_at END,
                      note = CASE WHEN f.closed_at IS NULL THEN f.note END,
                      closed_at = NULL, closed_by = NULL
                -- What a person closed stays closed.
                WHERE f.closed_at IS NULL OR f.closed_by = $7
               RETURNING f.payment_id, f.kind, f.subject
           )
           SELECT count(*) AS "raised!"
             FROM written JOIN given USING (payment_id, kind, subject)
            WHERE NOT given.was_open"#,
        &payments,
        &kinds,
        &subjects,
        &orders as &[Option<String>],
        &details,
        datetime(now),
        CLOSED_BY_ITSELF,
    )
    .fetch_one(connection)
    .await?;
    Ok(usize::try_from(raised).unwrap_or(usize::MAX))
}
