//! Records of money without a transfer: payments called settled, refunds and flags.

use std::collections::BTreeSet;

use alloy_primitives::Address;
use sqlx::SqliteConnection;

use crate::domain::{
    Account, ChainId, FlagKind, Payment, PaymentId, RawPayment, Receiver, RefundStatus, Timestamp,
    Transfer, Unbacked,
};
use crate::store::ledger::still_so;
use crate::store::row::{coded, column_number, parsed, refund_amount, unbacked_flag};
use crate::store::sqlite::write::lower_hex;
use crate::store::sqlite::{SqliteStore, failed, finish, id_list, load};
use crate::store::{FoundTransfers, SettledKey, StoreError, UnprovenPage};

pub(super) async fn page(
    store: &SqliteStore,
    from: Timestamp,
    before: Timestamp,
    after: Option<&SettledKey>,
    limit: u32,
) -> Result<UnprovenPage, StoreError> {
    const OPERATION: &str = "to look through settled payments";
    let looked_at: Vec<(String, i64, bool)> = sqlx::query_as(
        "SELECT p.id, p.created_at,
            NOT EXISTS (SELECT 1 FROM reconciled_transfers t
                        WHERE t.payment_id = p.id AND t.orphaned_at IS NULL)
            AND NOT EXISTS (SELECT 1 FROM reconciled_transfers t
                        WHERE t.nonce = lower(p.nonce) AND t.orphaned_at IS NULL
                          AND t.nonce IS NOT NULL AND t.payment_id IS NULL
                          AND t.chain_id = p.chain_id
                          AND t.token = lower(p.token) AND t.payer = lower(p.payer)
                          AND t.pay_to = lower(p.pay_to)
                          AND t.amount = CAST(p.amount AS TEXT))
         FROM payments p
         WHERE p.status = 'settled' AND p.created_at >= ?1 AND p.created_at < ?2
           AND (p.created_at, p.id) > (?3, ?4)
           AND typeof(p.created_at) = 'integer' AND typeof(p.id) = 'text'
         ORDER BY p.created_at, p.id LIMIT ?5",
    )
    .bind(from.as_millis())
    .bind(before.as_millis())
    .bind(after.map_or(i64::MIN, |key| key.at))
    .bind(after.map_or("", |key| key.id.as_str()))
    .bind(limit)
    .fetch_all(&store.reader)
    .await
    .map_err(failed(OPERATION))?;
    let is_full = looked_at.len() >= usize::try_from(limit).unwrap_or(usize::MAX);
    let next = looked_at.last().filter(|_| is_full);
    let next = next.map(|(id, at, _)| SettledKey { at: *at, id: PaymentId::from(id.as_str()) });
    let unproven = looked_at.iter().filter(|(.., is_unproven)| *is_unproven);
    let ids = id_list(unproven.map(|(id, ..)| id.as_str()));
    let mut conn = store.reader.acquire().await.map_err(failed(OPERATION))?;
    let rows = load::raw_payments(&mut conn, &ids).await?;
    Ok(UnprovenPage { payments: rows.iter().map(RawPayment::parse).collect(), next })
}

pub(super) async fn record_found(
    store: &SqliteStore,
    found: &[(Payment, Transfer)],
    now: Timestamp,
) -> Result<FoundTransfers, StoreError> {
    const OPERATION: &str = "to record transfers";
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        let ids = id_list(found.iter().map(|(payment, _)| payment.id.as_str()));
        let asked = still_so(found, &load::raw_payments(&mut tx, &ids).await?);
        let mut recorded = BTreeSet::new();
        for (id, transfer) in asked.iter().copied() {
            record_one(&mut tx, id, transfer, now).await?;
            if has_transfer(&mut tx, id).await? {
                recorded.insert(id.clone());
            }
        }
        Ok(FoundTransfers::of(&asked, recorded))
    }
    .await;
    finish(tx, OPERATION, result).await
}

/// Also when a check of the payment's own recorded it meanwhile.
async fn has_transfer(conn: &mut SqliteConnection, id: &PaymentId) -> Result<bool, StoreError> {
    sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM reconciled_transfers
                        WHERE payment_id = ? AND orphaned_at IS NULL)",
    )
    .bind(id.as_str())
    .fetch_one(conn)
    .await
    .map_err(failed("to look for a transfer"))
}

/// Makes the transfer this payment's, unless it is another's or the payment has one.
async fn record_one(
    conn: &mut SqliteConnection,
    id: &PaymentId,
    transfer: &Transfer,
    now: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO reconciled_transfers
            (payment_id, chain_id, tx_hash, log_index, token, payer, pay_to, amount, block_number,
             block_hash, block_time, finality, seen_at)
         SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, 'final', ?12
         WHERE NOT EXISTS (SELECT 1 FROM reconciled_transfers
                           WHERE payment_id = ?1 AND orphaned_at IS NULL)
         ON CONFLICT (chain_id, block_hash, tx_hash, log_index) WHERE orphaned_at IS NULL
         DO UPDATE SET payment_id = excluded.payment_id
         WHERE payment_id IS NULL",
    )
    .bind(id.as_str())
    .bind(column_number(transfer.chain_id.get()))
    .bind(transfer.tx_hash.to_string())
    .bind(column_number(transfer.log_index))
    .bind(lower_hex(&transfer.token))
    .bind(lower_hex(&transfer.from))
    .bind(lower_hex(&transfer.to))
    .bind(transfer.value.to_string())
    .bind(column_number(transfer.block.number))
    .bind(transfer.block.hash.to_string())
    .bind(column_number(transfer.block.time.as_secs()))
    .bind(now.as_millis())
    .execute(conn)
    .await
    .map_err(failed("to record a transfer"))?;
    Ok(())
}

pub(super) async fn open_payments_of(
    store: &SqliteStore,
    payers: &[Address],
    limit: u32,
) -> Result<Vec<(Address, PaymentId)>, StoreError> {
    let payers: Vec<String> = payers.iter().map(lower_hex).collect();
    let rows: Vec<(String, String)> = sqlx::query_as(
        "SELECT id, lower(payer) FROM payments
         WHERE status IN ('settling', 'unknown', 'settle_failed') AND typeof(id) = 'text'
           AND lower(payer) IN (SELECT value FROM json_each(?))
         ORDER BY id LIMIT ?",
    )
    .bind(id_list(payers.iter().map(String::as_str)))
    .bind(limit)
    .fetch_all(&store.reader)
    .await
    .map_err(failed("to look for payments of a payer"))?;
    rows.into_iter()
        .map(|(id, payer)| Ok((parsed("payments", "payer", &payer)?, PaymentId::new(id))))
        .collect()
}

pub(super) async fn unbacked(
    store: &SqliteStore,
    chain_id: ChainId,
    since: Timestamp,
    limit: u32,
) -> Result<Vec<Unbacked>, StoreError> {
    let get = failed("to look for records without a transfer");
    let refunds: Vec<(String, String, String, String, Vec<u8>)> = sqlx::query_as(
        "SELECT r.payment_id, r.status, r.amount, r.token, CAST(lower(p.pay_to) AS BLOB)
         FROM reconciled_refunds_owed r JOIN payments p ON p.id = r.payment_id
         WHERE r.chain_id = ? AND r.detected_at >= ? AND r.status <> 'void'
           AND p.pay_to IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM reconciled_transfers t
                           WHERE t.payment_id = r.payment_id AND t.orphaned_at IS NULL)
         ORDER BY r.id LIMIT ?",
    )
    .bind(column_number(chain_id.get()))
    .bind(since.as_millis())
    .bind(limit)
    .fetch_all(&store.reader)
    .await
    .map_err(get)?;
    let mut found = Vec::with_capacity(refunds.len());
    for (subject, status, amount, token, pay_to) in refunds {
        const TABLE: &str = "refunds_owed";
        let status = coded(TABLE, "status", &status, RefundStatus::from_code)?;
        // A gateway's address that makes no sense is nobody's receiver.
        let Ok(pay_to) = String::from_utf8_lossy(&pay_to).parse() else { continue };
        found.push(Unbacked {
            receiver: Receiver { token: parsed(TABLE, "token", &token)?, pay_to },
            account: match status {
                RefundStatus::Paid => Account::Refunded,
                _ => Account::Owed,
            },
            amount: refund_amount(&subject, &amount),
            subject,
        });
    }
    let flags: Vec<(String, String)> = sqlx::query_as(
        "SELECT f.subject, f.detail FROM reconciled_flags f
         WHERE f.kind = ?1 AND f.payment_id = '' AND f.opened_at >= ?2
           AND f.cause_gone_at IS NULL AND f.subject LIKE ?3 || ':%'
           AND NOT EXISTS (SELECT 1 FROM reconciled_transfers t
                           WHERE t.tx_hash = json_extract(f.detail, '$.tx_hash')
                             AND t.log_index = json_extract(f.detail, '$.log_index')
                             AND t.chain_id = ?3 AND t.orphaned_at IS NULL)
         ORDER BY f.id LIMIT ?4",
    )
    .bind(FlagKind::UnmatchedTransfer.code())
    .bind(since.as_millis())
    .bind(column_number(chain_id.get()))
    .bind(limit)
    .fetch_all(&store.reader)
    .await
    .map_err(get)?;
    found.extend(flags.into_iter().filter_map(|(subject, detail)| unbacked_flag(subject, &detail)));
    Ok(found)
}
