//! How far the scan has come, and what it saw: rows and cursors move in one transaction.

use sqlx::types::time::OffsetDateTime;
use sqlx::{PgConnection, PgPool};

use crate::domain::{
    BlockRef, ChainId, Cursor, GoneFlag, PaymentId, Receiver, ScannedTransfer, Timestamp,
};
use crate::store::postgres::rows::{block_datetime, datetime, hex};
use crate::store::postgres::{finish, flags};
use crate::store::row::{RawCursor, column_number, left_the_chain};
use crate::store::{Ingested, ScanPage, StoreError};

pub(super) async fn cursors(pool: &PgPool, chain_id: ChainId) -> Result<Vec<Cursor>, StoreError> {
    let rows = sqlx::query_as!(
        RawCursor,
        r#"SELECT token, pay_to, first_block, block_number, block_hash,
                  extract(epoch FROM block_time)::bigint AS "block_time!"
             FROM reconciled.cursors WHERE chain_id = $1 ORDER BY token, pay_to"#,
        column_number(chain_id.get()),
    )
    .fetch_all(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to read cursors", source))?;
    rows.into_iter().map(RawCursor::parse).collect()
}

pub(super) async fn open_cursors(
    pool: &PgPool,
    chain_id: ChainId,
    cursors: &[Cursor],
    now: Timestamp,
) -> Result<(), StoreError> {
    let (tokens, pay_tos) = columns(cursors.iter().map(|cursor| &cursor.receiver));
    let firsts: Vec<i64> = cursors.iter().map(|c| column_number(c.first_block)).collect();
    let numbers: Vec<i64> = cursors.iter().map(|c| column_number(c.block.number)).collect();
    let hashes: Vec<String> = cursors.iter().map(|c| hex(&c.block.hash)).collect();
    let times: Vec<OffsetDateTime> = cursors.iter().map(|c| block_datetime(c.block.time)).collect();
    sqlx::query!(
        "INSERT INTO reconciled.cursors
                (chain_id, token, pay_to, first_block, block_number, block_hash, block_time,
                 updated_at)
         SELECT $1, c.token, c.pay_to, c.first_block, c.block_number, c.block_hash, c.block_time, $8
           FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::text[],
                       $7::timestamptz[])
                    AS c (token, pay_to, first_block, block_number, block_hash, block_time)
         ON CONFLICT DO NOTHING",
        column_number(chain_id.get()),
        &tokens,
        &pay_tos,
        &firsts,
        &numbers,
        &hashes,
        &times,
        datetime(now),
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to start a scan", source))?;
    Ok(())
}

fn columns<'a>(receivers: impl Iterator<Item = &'a Receiver>) -> (Vec<String>, Vec<String>) {
    receivers.map(|receiver| (hex(&receiver.token), hex(&receiver.pay_to))).unzip()
}

pub(super) async fn ingest(
    pool: &PgPool,
    page: &ScanPage,
    now: Timestamp,
) -> Result<Option<Ingested>, StoreError> {
    let refused = |source| StoreError::from_sqlx("to write down a scan", source);
    let mut transaction = pool.begin().await.map_err(refused)?;
    let written = ingest_in(&mut transaction, page, now).await.map_err(refused);
    finish(transaction, written, refused).await
}

async fn ingest_in(
    connection: &mut PgConnection,
    page: &ScanPage,
    now: Timestamp,
) -> Result<Option<Ingested>, sqlx::Error> {
    let ScanPage { chain_id, receivers, from, to, transfers } = page;
    if !move_cursors(connection, *chain_id, receivers, from, to, now).await? {
        return Ok(None);
    }
    let new = insert(connection, *chain_id, transfers, now).await?;
    let vanished = take_back(connection, page, now).await?;
    Ok(Some(Ingested { new, vanished }))
}

/// Moves all of them or none.
async fn move_cursors(
    connection: &mut PgConnection,
    chain_id: ChainId,
    receivers: &[Receiver],
    from: &BlockRef,
    to: &BlockRef,
    now: Timestamp,
) -> Result<bool, sqlx::Error> {
    let (tokens, pay_tos) = columns(receivers.iter());
    let chain_id = column_number(chain_id.get());
    let standing = sqlx::query_scalar!(
        "SELECT c.block_number = $4 AND c.block_hash = $5
           FROM reconciled.cursors c
           JOIN unnest($2::text[], $3::text[]) AS r (token, pay_to)
             ON c.token = r.token AND c.pay_to = r.pay_to
          WHERE c.chain_id = $1
          ORDER BY c.token, c.pay_to
            FOR UPDATE OF c",
        chain_id,
        &tokens,
        &pay_tos,
        column_number(from.number),
        hex(&from.hash),
    )
    .fetch_all(&mut *connection)
    .await?;
    if standing.len() != receivers.len() || standing.iter().any(|stands| *stands != Some(true)) {
        return Ok(false);
    }
    sqlx::query!(
        "UPDATE reconciled.cursors c
            SET block_number = $4, block_hash = $5, block_time = $6, updated_at = $7
           FROM unnest($2::text[], $3::text[]) AS r (token, pay_to)
          WHERE c.chain_id = $1 AND c.token = r.token AND c.pay_to = r.pay_to",
        chain_id,
        &tokens,
        &pay_tos,
        column_number(to.number),
        hex(&to.hash),
        block_datetime(to.time),
        datetime(now),
    )
    .execute(connection)
    .await?;
    Ok(true)
}

/// Returns how many the scan had not seen before.
async fn insert(
    connection: &mut PgConnection,
    chain_id: ChainId,
    scanned: &[ScannedTransfer],
    now: Timestamp,
) -> Result<usize, sqlx::Error> {
    if scanned.is_empty() {
        return Ok(0);
    }
    let of = |field: &dyn Fn(&ScannedTransfer) -> String| -> Vec<String> {
        scanned.iter().map(field).collect()
    };
    let indexes: Vec<i64> = scanned.iter().map(|s| column_number(s.transfer.log_index)).collect();
    let numbers: Vec<i64> =
        scanned.iter().map(|s| column_number(s.transfer.block.number)).collect();
    let times: Vec<OffsetDateTime> =
        scanned.iter().map(|s| block_datetime(s.transfer.block.time)).collect();
    let nonces: Vec<Option<String>> = scanned.iter().map(|s| s.nonce.as_ref().map(hex)).collect();
    let new = sqlx::query_scalar!(
        r#"WITH seen AS (
               SELECT c.*, NOT EXISTS (
                          SELECT FROM reconciled.transfers t
                           WHERE t.chain_id = $1 AND t.block_hash = c.block_hash
                             AND t.tx_hash = c.tx_hash AND t.log_index = c.log_index
                             AND t.orphaned_at IS NULL AND t.scanned_at IS NOT NULL) AS is_new
                 FROM unnest($2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[],
                             $7::text[], $8::bigint[], $9::text[], $10::timestamptz[], $11::text[])
                          AS c (tx_hash, log_index, token, payer, pay_to, amount, block_number,
                                block_hash, block_time, nonce)
           ), written AS (
               INSERT INTO reconciled.transfers AS t
                      (chain_id, tx_hash, log_index, token, payer, pay_to, amount, block_number,
                       block_hash, block_time, nonce, finality, seen_at, scanned_at)
               SELECT $1, tx_hash, log_index, token, payer, pay_to, amount::numeric, block_number,
                      block_hash, block_time, nonce, 'final', $12, $12
                 FROM seen
               ON CONFLICT (chain_id, block_hash, tx_hash, log_index) WHERE orphaned_at IS NULL
               DO UPDATE SET scanned_at = coalesce(t.scanned_at, excluded.scanned_at),
                             nonce = excluded.nonce
           )
           SELECT count(*) AS "new!" FROM seen WHERE is_new"#,
        column_number(chain_id.get()),
        &of(&|s| hex(&s.transfer.tx_hash)),
        &indexes,
        &of(&|s| hex(&s.transfer.token)),
        &of(&|s| hex(&s.transfer.from)),
        &of(&|s| hex(&s.transfer.to)),
        &of(&|s| s.transfer.value.to_string()),
        &numbers,
        &of(&|s| hex(&s.transfer.block.hash)),
        &times,
        &nonces as &[Option<String>],
        datetime(now),
    )
    .fetch_one(connection)
    .await?;
    Ok(usize::try_from(new).unwrap_or(usize::MAX))
}

/// What was scanned in the range before, and was not seen now. Returns the payments it belongs to.
async fn take_back(
    connection: &mut PgConnection,
    page: &ScanPage,
    now: Timestamp,
) -> Result<Vec<PaymentId>, sqlx::Error> {
    let (tokens, pay_tos) = columns(page.receivers.iter());
    let hashes: Vec<String> = page.transfers.iter().map(|s| hex(&s.transfer.block.hash)).collect();
    let transactions: Vec<String> =
        page.transfers.iter().map(|s| hex(&s.transfer.tx_hash)).collect();
    let indexes: Vec<i64> =
        page.transfers.iter().map(|s| column_number(s.transfer.log_index)).collect();
    let gone = sqlx::query!(
        r#"UPDATE reconciled.transfers t
              SET scanned_at = NULL,
                  orphaned_at = CASE WHEN t.payment_id IS NULL THEN $9::timestamptz END
             FROM unnest($2::text[], $3::text[]) AS r (token, pay_to)
            WHERE t.chain_id = $1 AND t.token = r.token AND t.pay_to = r.pay_to
              AND t.block_number > $4 AND t.block_number <= $5
              AND t.orphaned_at IS NULL AND t.scanned_at IS NOT NULL
              AND (t.block_hash, t.tx_hash, t.log_index) NOT IN (
                  SELECT * FROM unnest($6::text[], $7::text[], $8::bigint[]))
        RETURNING t.payment_id,
                  t.chain_id || ':' || t.tx_hash || ':' || t.log_index AS "subject!""#,
        column_number(page.chain_id.get()),
        &tokens,
        &pay_tos,
        column_number(page.from.number),
        column_number(page.to.number),
        &hashes,
        &transactions,
        &indexes,
        datetime(now),
    )
    .fetch_all(&mut *connection)
    .await?;
    let nobody_s = gone.iter().filter(|row| row.payment_id.is_none());
    let flags: Vec<GoneFlag> = nobody_s.map(|row| left_the_chain(&row.subject)).collect();
    flags::write(connection, &[], &flags, datetime(now)).await?;
    Ok(gone.into_iter().filter_map(|row| row.payment_id).map(PaymentId::new).collect())
}

pub(super) async fn rewind(
    pool: &PgPool,
    chain_id: ChainId,
    receivers: &[Receiver],
    from: &BlockRef,
    to: &BlockRef,
    now: Timestamp,
) -> Result<bool, StoreError> {
    let refused = |source| StoreError::from_sqlx("to set a scan back", source);
    let mut transaction = pool.begin().await.map_err(refused)?;
    let moved =
        move_cursors(&mut transaction, chain_id, receivers, from, to, now).await.map_err(refused);
    finish(transaction, moved, refused).await
}
