//! How far the scan has come, and what it saw: rows and cursors move in one transaction.

use std::collections::BTreeSet;

use sqlx::{Row, SqliteConnection};

use crate::domain::{BlockRef, ChainId, Cursor, PaymentId, Receiver, ScannedTransfer, Timestamp};
use crate::store::row::{RawCursor, column_number, left_the_chain};
use crate::store::sqlite::write::lower_hex;
use crate::store::sqlite::{SqliteStore, failed, finish, flags};
use crate::store::{Ingested, ScanPage, StoreError};

pub(super) async fn cursors(
    store: &SqliteStore,
    chain_id: ChainId,
) -> Result<Vec<Cursor>, StoreError> {
    let rows: Vec<(String, String, i64, i64, String, i64)> = sqlx::query_as(
        "SELECT token, pay_to, first_block, block_number, block_hash, block_time
         FROM reconciled_cursors WHERE chain_id = ? ORDER BY token, pay_to",
    )
    .bind(column_number(chain_id.get()))
    .fetch_all(&store.reader)
    .await
    .map_err(failed("to read cursors"))?;
    let raw = rows.into_iter().map(
        |(token, pay_to, first_block, block_number, block_hash, block_time)| RawCursor {
            token,
            pay_to,
            first_block,
            block_number,
            block_hash,
            block_time,
        },
    );
    raw.map(RawCursor::parse).collect()
}

pub(super) async fn open_cursors(
    store: &SqliteStore,
    chain_id: ChainId,
    cursors: &[Cursor],
    now: Timestamp,
) -> Result<(), StoreError> {
    const OPERATION: &str = "to start a scan";
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        for cursor in cursors {
            sqlx::query(
                "INSERT INTO reconciled_cursors
                    (chain_id, token, pay_to, first_block, block_number, block_hash, block_time,
                     updated_at)
                 VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            )
            .bind(column_number(chain_id.get()))
            .bind(lower_hex(&cursor.receiver.token))
            .bind(lower_hex(&cursor.receiver.pay_to))
            .bind(column_number(cursor.first_block))
            .bind(column_number(cursor.block.number))
            .bind(cursor.block.hash.to_string())
            .bind(column_number(cursor.block.time.as_secs()))
            .bind(now.as_millis())
            .execute(&mut *tx)
            .await
            .map_err(failed(OPERATION))?;
        }
        Ok(())
    }
    .await;
    finish(tx, OPERATION, result).await
}

pub(super) async fn ingest(
    store: &SqliteStore,
    page: &ScanPage,
    now: Timestamp,
) -> Result<Option<Ingested>, StoreError> {
    const OPERATION: &str = "to write down a scan";
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        let ScanPage { chain_id, receivers, from, to, .. } = page;
        if !move_cursors(&mut tx, *chain_id, receivers, from, to, now).await? {
            return Ok(None);
        }
        let mut new = 0;
        for scanned in &page.transfers {
            new += usize::from(insert(&mut tx, scanned, now).await?);
        }
        Ok(Some(Ingested { new, vanished: take_back(&mut tx, page, now).await? }))
    }
    .await;
    finish(tx, OPERATION, result).await
}

/// Moves all of them or none.
async fn move_cursors(
    conn: &mut SqliteConnection,
    chain_id: ChainId,
    receivers: &[Receiver],
    from: &BlockRef,
    to: &BlockRef,
    now: Timestamp,
) -> Result<bool, StoreError> {
    const OPERATION: &str = "to move a cursor";
    let chain = column_number(chain_id.get());
    let mut standing = 0;
    for Receiver { token, pay_to } in receivers {
        let stands: Option<bool> = sqlx::query_scalar(
            "SELECT block_number = ? AND block_hash = ? FROM reconciled_cursors
             WHERE chain_id = ? AND token = ? AND pay_to = ?",
        )
        .bind(column_number(from.number))
        .bind(from.hash.to_string())
        .bind(chain)
        .bind(lower_hex(token))
        .bind(lower_hex(pay_to))
        .fetch_optional(&mut *conn)
        .await
        .map_err(failed(OPERATION))?;
        standing += usize::from(stands == Some(true));
    }
    if standing != receivers.len() {
        return Ok(false);
    }
    for Receiver { token, pay_to } in receivers {
        sqlx::query(
            "UPDATE reconciled_cursors
             SET block_number = ?, block_hash = ?, block_time = ?, updated_at = ?
             WHERE chain_id = ? AND token = ? AND pay_to = ?",
        )
        .bind(column_number(to.number))
        .bind(to.hash.to_string())
        .bind(column_number(to.time.as_secs()))
        .bind(now.as_millis())
        .bind(chain)
        .bind(lower_hex(token))
        .bind(lower_hex(pay_to))
        .execute(&mut *conn)
        .await
        .map_err(failed(OPERATION))?;
    }
    Ok(true)
}

/// Whether the scan had not seen it before.
async fn insert(
    conn: &mut SqliteConnection,
    scanned: &ScannedTransfer,
    now: Timestamp,
) -> Result<bool, StoreError> {
    const OPERATION: &str = "to write down a scanned transfer";
    let t = &scanned.transfer;
    let known: Option<bool> = sqlx::query_scalar(
        "SELECT scanned_at IS NOT NULL FROM reconciled_transfers
         WHERE chain_id = ? AND block_hash = ? AND tx_hash = ? AND log_index = ?
           AND orphaned_at IS NULL",
    )
    .bind(column_number(t.chain_id.get()))
    .bind(t.block.hash.to_string())
    .bind(t.tx_hash.to_string())
    .bind(column_number(t.log_index))
    .fetch_optional(&mut *conn)
    .await
    .map_err(failed(OPERATION))?;
    sqlx::query(
        "INSERT INTO reconciled_transfers
            (chain_id, tx_hash, log_index, token, payer, pay_to, amount, block_number, block_hash,
             block_time, nonce, finality, seen_at, scanned_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, 'final', ?12, ?12)
         ON CONFLICT (chain_id, block_hash, tx_hash, log_index) WHERE orphaned_at IS NULL
         DO UPDATE SET scanned_at = coalesce(scanned_at, excluded.scanned_at),
                       nonce = excluded.nonce",
    )
    .bind(column_number(t.chain_id.get()))
    .bind(t.tx_hash.to_string())
    .bind(column_number(t.log_index))
    .bind(lower_hex(&t.token))
    .bind(lower_hex(&t.from))
    .bind(lower_hex(&t.to))
    .bind(t.value.to_string())
    .bind(column_number(t.block.number))
    .bind(t.block.hash.to_string())
    .bind(column_number(t.block.time.as_secs()))
    .bind(scanned.nonce.map(|nonce| nonce.to_string()))
    .bind(now.as_millis())
    .execute(conn)
    .await
    .map_err(failed(OPERATION))?;
    Ok(known != Some(true))
}

/// What was scanned in the range before, and was not seen now. Returns the payments it belongs to.
async fn take_back(
    conn: &mut SqliteConnection,
    page: &ScanPage,
    now: Timestamp,
) -> Result<Vec<PaymentId>, StoreError> {
    const OPERATION: &str = "to take back what left the chain";
    let seen: BTreeSet<(String, String, i64)> = page
        .transfers
        .iter()
        .map(|s| {
            let t = &s.transfer;
            (t.block.hash.to_string(), t.tx_hash.to_string(), column_number(t.log_index))
        })
        .collect();
    let receivers: BTreeSet<(String, String)> =
        page.receivers.iter().map(|r| (lower_hex(&r.token), lower_hex(&r.pay_to))).collect();
    let rows = sqlx::query(
        "SELECT id, payment_id, token, pay_to, block_hash, tx_hash, log_index
         FROM reconciled_transfers
         WHERE chain_id = ? AND block_number > ? AND block_number <= ?
           AND orphaned_at IS NULL AND scanned_at IS NOT NULL",
    )
    .bind(column_number(page.chain_id.get()))
    .bind(column_number(page.from.number))
    .bind(column_number(page.to.number))
    .fetch_all(&mut *conn)
    .await
    .map_err(failed(OPERATION))?;
    let mut vanished = Vec::new();
    for row in rows {
        let text = |column: &str| row.try_get::<String, _>(column).map_err(failed(OPERATION));
        let log = (
            text("block_hash")?,
            text("tx_hash")?,
            row.try_get::<i64, _>("log_index").map_err(failed(OPERATION))?,
        );
        if seen.contains(&log) || !receivers.contains(&(text("token")?, text("pay_to")?)) {
            continue;
        }
        let id: i64 = row.try_get("id").map_err(failed(OPERATION))?;
        let payment: Option<String> = row.try_get("payment_id").map_err(failed(OPERATION))?;
        sqlx::query(
            "UPDATE reconciled_transfers
             SET scanned_at = NULL, orphaned_at = CASE WHEN payment_id IS NULL THEN ? END
             WHERE id = ?",
        )
        .bind(now.as_millis())
        .bind(id)
        .execute(&mut *conn)
        .await
        .map_err(failed(OPERATION))?;
        match payment {
            Some(payment) => vanished.push(PaymentId::new(payment)),
            None => {
                let subject = format!("{}:{}:{}", page.chain_id, log.1, log.2);
                flags::write(conn, &[], &[left_the_chain(&subject)], now).await?;
            }
        }
    }
    Ok(vanished)
}

pub(super) async fn rewind(
    store: &SqliteStore,
    chain_id: ChainId,
    receivers: &[Receiver],
    from: &BlockRef,
    to: &BlockRef,
    now: Timestamp,
) -> Result<bool, StoreError> {
    const OPERATION: &str = "to set a scan back";
    let mut tx = store.begin(OPERATION).await?;
    let result = move_cursors(&mut tx, chain_id, receivers, from, to, now).await;
    finish(tx, OPERATION, result).await
}
