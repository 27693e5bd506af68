//! Records of money without a transfer: payments called settled, refunds and flags.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::Address;
use sqlx::types::time::OffsetDateTime;
use sqlx::{PgConnection, PgPool};

use crate::domain::{
    Account, ChainId, FlagKind, Payment, PaymentId, RawPayment, Receiver, RefundStatus, Timestamp,
    Transfer, Unbacked,
};
use crate::store::ledger::still_so;
use crate::store::postgres::rows::{block_datetime, datetime, hex, select_payments, texts};
use crate::store::row::{coded, column_number, parsed, refund_amount, unbacked_flag};
use crate::store::{FoundTransfers, SettledKey, StoreError, UnprovenPage};

pub(super) async fn page(
    pool: &PgPool,
    from: Timestamp,
    before: Timestamp,
    after: Option<&SettledKey>,
    limit: u32,
) -> Result<UnprovenPage, StoreError> {
    let refused = |source| StoreError::from_sqlx("to look through settled payments", source);
    // Microseconds tell every row of a page from every other; milliseconds do not.
    let looked_at = sqlx::query!(
        r#"WITH page AS MATERIALIZED (
               SELECT id, created_at, chain_id::text AS chain_id, lower(token::text) AS token,
                      lower(payer::text) AS payer, lower(pay_to::text) AS pay_to,
                      amount::text AS amount, lower(nonce) AS nonce
                 FROM payments
                WHERE status = 'settled' AND created_at >= $1 AND created_at < $2
                  AND (created_at, id)
                      > ('epoch'::timestamptz + $3::bigint * interval '1 microsecond', $4::text)
                ORDER BY created_at, id
                LIMIT $5
           )
           SELECT p.id AS "id!",
                  (extract(epoch FROM p.created_at) * 1000000)::bigint AS "micros!",
                  NOT EXISTS (
                      SELECT FROM reconciled.transfers t
                       WHERE t.payment_id = p.id AND t.orphaned_at IS NULL)
                  AND NOT EXISTS (
                      SELECT FROM reconciled.transfers t
                       WHERE t.nonce = p.nonce AND t.orphaned_at IS NULL
                         AND t.payment_id IS NULL
                         AND t.chain_id::text = p.chain_id AND t.token = p.token
                         AND t.payer = p.payer AND t.pay_to = p.pay_to
                         AND t.amount::text = p.amount) AS "is_unproven!"
             FROM page p
            ORDER BY p.created_at, p.id"#,
        datetime(from),
        datetime(before),
        after.map_or(-1, |key| key.at),
        after.map_or("", |key| key.id.as_str()),
        i64::from(limit),
    )
    .fetch_all(pool)
    .await
    .map_err(refused)?;
    let is_full = looked_at.len() >= usize::try_from(limit).unwrap_or(usize::MAX);
    let next = looked_at.last().filter(|_| is_full);
    let next = next.map(|row| SettledKey { at: row.micros, id: PaymentId::from(row.id.as_str()) });
    let ids: Vec<String> =
        looked_at.into_iter().filter(|row| row.is_unproven).map(|row| row.id).collect();
    let mut payments = Vec::new();
    if !ids.is_empty() {
        payments = select_payments!("WHERE id = ANY($1::text[]) ORDER BY created_at, id", &ids)
            .fetch_all(pool)
            .await
            .map_err(refused)?
            .iter()
            .map(RawPayment::parse)
            .collect();
    }
    Ok(UnprovenPage { payments, next })
}

pub(super) async fn record_found(
    pool: &PgPool,
    found: &[(Payment, Transfer)],
    now: Timestamp,
) -> Result<FoundTransfers, StoreError> {
    let refused = |source| StoreError::from_sqlx("to record transfers", source);
    let mut transaction = pool.begin().await.map_err(refused)?;
    let done = record(&mut transaction, found, now).await.map_err(refused)?;
    transaction.commit().await.map_err(refused)?;
    Ok(done)
}

async fn record(
    connection: &mut PgConnection,
    found: &[(Payment, Transfer)],
    now: Timestamp,
) -> Result<FoundTransfers, sqlx::Error> {
    let locked = select_payments!(
        "WHERE id = ANY($1::text[]) ORDER BY id FOR UPDATE",
        &texts(found.iter().map(|(payment, _)| &payment.id)),
    )
    .fetch_all(&mut *connection)
    .await?;
    let asked = still_so(found, &locked);
    // One row per log and per payment: a statement cannot write one twice.
    let mut payments = BTreeSet::new();
    let mut logs = BTreeMap::new();
    for (id, transfer) in asked.iter().copied() {
        let key = (transfer.block.hash, transfer.tx_hash, transfer.log_index);
        if !logs.contains_key(&key) && payments.insert(id) {
            logs.insert(key, (id, transfer));
        }
    }
    let rows: Vec<(&PaymentId, &Transfer)> = logs.into_values().collect();
    let of = |field: &dyn Fn(&Transfer) -> String| -> Vec<String> {
        rows.iter().map(|(_, transfer)| field(transfer)).collect()
    };
    let number = |field: &dyn Fn(&Transfer) -> u64| -> Vec<i64> {
        rows.iter().map(|(_, transfer)| column_number(field(transfer))).collect()
    };
    let times: Vec<OffsetDateTime> =
        rows.iter().map(|(_, transfer)| block_datetime(transfer.block.time)).collect();
    sqlx::query!(
        r#"INSERT INTO reconciled.transfers AS t
                  (payment_id, chain_id, tx_hash, log_index, token, payer, pay_to, amount,
                   block_number, block_hash, block_time, finality, seen_at)
           SELECT c.payment_id, c.chain_id, c.tx_hash, c.log_index, c.token, c.payer, c.pay_to,
                  c.amount::numeric, c.block_number, c.block_hash, c.block_time, 'final', $12
             FROM unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[], $5::text[],
                         $6::text[], $7::text[], $8::text[], $9::bigint[], $10::text[],
                         $11::timestamptz[])
                      AS c (payment_id, chain_id, tx_hash, log_index, token, payer, pay_to, amount,
                            block_number, block_hash, block_time)
            -- A payment has one transfer.
            WHERE NOT EXISTS (
                      SELECT FROM reconciled.transfers o
                       WHERE o.payment_id = c.payment_id AND o.orphaned_at IS NULL)
           ON CONFLICT (chain_id, block_hash, tx_hash, log_index) WHERE orphaned_at IS NULL
           DO UPDATE SET payment_id = excluded.payment_id
            WHERE t.payment_id IS NULL"#,
        &texts(rows.iter().map(|(id, _)| *id)),
        &number(&|t| t.chain_id.get()),
        &of(&|t| hex(&t.tx_hash)),
        &number(&|t| t.log_index),
        &of(&|t| hex(&t.token)),
        &of(&|t| hex(&t.from)),
        &of(&|t| hex(&t.to)),
        &of(&|t| t.value.to_string()),
        &number(&|t| t.block.number),
        &of(&|t| hex(&t.block.hash)),
        &times,
        datetime(now),
    )
    .execute(&mut *connection)
    .await?;
    // A check of the payment's own may have recorded it meanwhile.
    let recorded = sqlx::query_scalar!(
        r#"SELECT payment_id AS "payment_id!" FROM reconciled.transfers
            WHERE payment_id = ANY($1::text[]) AND orphaned_at IS NULL"#,
        &texts(asked.iter().map(|(id, _)| *id)),
    )
    .fetch_all(connection)
    .await?;
    Ok(FoundTransfers::of(&asked, recorded.into_iter().map(PaymentId::new).collect()))
}

pub(super) async fn open_payments_of(
    pool: &PgPool,
    payers: &[Address],
    limit: u32,
) -> Result<Vec<(Address, PaymentId)>, StoreError> {
    let payers: Vec<String> = payers.iter().map(hex).collect();
    let rows = sqlx::query!(
        r#"SELECT id AS "id!", lower(payer) AS "payer!" FROM payments
            WHERE status IN ('settling', 'unknown', 'settle_failed')
              AND lower(payer) = ANY($1::text[])
            ORDER BY id LIMIT $2"#,
        &payers,
        i64::from(limit),
    )
    .fetch_all(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to look for payments of a payer", source))?;
    rows.into_iter()
        .map(|row| Ok((parsed("payments", "payer", &row.payer)?, PaymentId::new(row.id))))
        .collect()
}

pub(super) async fn unbacked(
    pool: &PgPool,
    chain_id: ChainId,
    since: Timestamp,
    limit: u32,
) -> Result<Vec<Unbacked>, StoreError> {
    let refused = |source| StoreError::from_sqlx("to look for records without a transfer", source);
    let refunds = sqlx::query!(
        r#"SELECT r.payment_id, r.status, r.amount::text AS "amount!", r.token,
                  lower(p.pay_to) AS "pay_to!"
             FROM reconciled.refunds_owed r JOIN payments p ON p.id = r.payment_id
            WHERE r.chain_id = $1 AND r.detected_at >= $2 AND r.status <> 'void'
              AND NOT EXISTS (
                      SELECT FROM reconciled.transfers t
                       WHERE t.payment_id = r.payment_id AND t.orphaned_at IS NULL)
            ORDER BY r.id LIMIT $3"#,
        column_number(chain_id.get()),
        datetime(since),
        i64::from(limit),
    )
    .fetch_all(pool)
    .await
    .map_err(refused)?;
    let mut found = Vec::with_capacity(refunds.len());
    for row in refunds {
        const TABLE: &str = "refunds_owed";
        let status = coded(TABLE, "status", &row.status, RefundStatus::from_code)?;
        // A gateway's address that makes no sense is nobody's receiver.
        let Ok(pay_to) = row.pay_to.parse() else { continue };
        found.push(Unbacked {
            receiver: Receiver { token: parsed(TABLE, "token", &row.token)?, pay_to },
            account: match status {
                RefundStatus::Paid => Account::Refunded,
                _ => Account::Owed,
            },
            amount: refund_amount(&row.payment_id, &row.amount),
            subject: row.payment_id,
        });
    }
    let flags = sqlx::query!(
        r#"SELECT f.subject, f.detail::text AS "detail!"
             FROM reconciled.flags f
            WHERE f.kind = $1 AND f.payment_id = '' AND f.opened_at >= $2
              AND f.cause_gone_at IS NULL
              AND split_part(f.subject, ':', 1) = $3
              AND NOT EXISTS (
                      SELECT FROM reconciled.transfers t
                       WHERE t.tx_hash = split_part(f.subject, ':', 2)
                         AND t.log_index::text = split_part(f.subject, ':', 3)
                         AND t.chain_id = $4 AND t.orphaned_at IS NULL)
            ORDER BY f.id LIMIT $5"#,
        FlagKind::UnmatchedTransfer.code(),
        datetime(since),
        chain_id.to_string(),
        column_number(chain_id.get()),
        i64::from(limit),
    )
    .fetch_all(pool)
    .await
    .map_err(refused)?;
    found.extend(flags.into_iter().filter_map(|row| unbacked_flag(row.subject, &row.detail)));
    Ok(found)
}
