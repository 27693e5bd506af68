//! Writes our own tables, set by set: transfers, refunds, events, resolutions, watches, checks.

use serde_json::Value;
use sqlx::PgConnection;
use sqlx::types::time::OffsetDateTime;

use super::apply::ApplyError;
use super::rows::{block_datetime, datetime, hex, texts};
use super::write::all_written;
use crate::domain::{
    Decided, EventKind, Judged, PaymentStatus, Phase, RefundChange, RefundOwed, Settlement,
    TransferChange, Verdict,
};
use crate::store::row::{check_detail, column_number, evidence_json};

pub(super) async fn write_transfers(
    connection: &mut PgConnection,
    decided: &[Decided],
    now: OffsetDateTime,
) -> Result<(), ApplyError> {
    let touched: Vec<&Decided> =
        decided.iter().filter(|d| d.resolution.transfer != TransferChange::Keep).collect();
    if touched.is_empty() {
        return Ok(());
    }
    let recorded: Vec<(&Decided, &Settlement)> = touched
        .iter()
        .filter_map(|d| match &d.resolution.transfer {
            TransferChange::Record(settlement) => Some((*d, settlement)),
            _ => None,
        })
        .collect();
    let payments = texts(recorded.iter().map(|(d, _)| &d.judged.payment_id));
    let of = |field: &dyn Fn(&Settlement) -> String| -> Vec<String> {
        recorded.iter().map(|(_, s)| field(s)).collect()
    };
    let number = |field: &dyn Fn(&Settlement) -> u64| -> Vec<i64> {
        recorded.iter().map(|(_, s)| column_number(field(s))).collect()
    };
    let chains = number(&|s| s.transfer.chain_id.get());
    let block_hashes = of(&|s| hex(&s.transfer.block.hash));
    let transactions = of(&|s| hex(&s.transfer.tx_hash));
    let indexes = number(&|s| s.transfer.log_index);

    // Whatever else was recorded for these payments is orphaned: all of it, or all but the same log.
    sqlx::query!(
        "UPDATE reconciled.transfers t SET orphaned_at = $2
          WHERE t.payment_id = ANY($1::text[]) AND t.orphaned_at IS NULL
            -- NOT IN is looked up in a hash table; NOT EXISTS compares every pair.
            AND (t.payment_id, t.chain_id, t.block_hash, t.tx_hash, t.log_index) NOT IN (
                SELECT * FROM unnest($3::text[], $4::bigint[], $5::text[], $6::text[],
                                     $7::bigint[]))",
        &texts(touched.iter().map(|d| &d.judged.payment_id)),
        now,
        &payments,
        &chains,
        &block_hashes,
        &transactions,
        &indexes,
    )
    .execute(&mut *connection)
    .await?;
    if recorded.is_empty() {
        return Ok(());
    }
    let times: Vec<OffsetDateTime> =
        recorded.iter().map(|(_, s)| block_datetime(s.transfer.block.time)).collect();
    let result = sqlx::query!(
        "INSERT INTO reconciled.transfers AS t
                (payment_id, chain_id, tx_hash, log_index, token, payer, pay_to, amount,
                 block_number, block_hash, block_time, finality, seen_at)
         SELECT c.payment_id, c.chain_id, c.tx_hash, c.log_index, c.token, c.payer, c.pay_to,
                c.amount::numeric, c.block_number, c.block_hash, c.block_time, c.finality, $13
           FROM unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[], $5::text[], $6::text[],
                       $7::text[], $8::text[], $9::bigint[], $10::text[], $11::timestamptz[],
                       $12::text[])
                AS c (payment_id, chain_id, tx_hash, log_index, token, payer, pay_to, amount,
                      block_number, block_hash, block_time, finality)
         ON CONFLICT (chain_id, block_hash, tx_hash, log_index) WHERE orphaned_at IS NULL
         DO UPDATE SET payment_id = excluded.payment_id, finality = excluded.finality
          -- A transfer that was seen before its payment was known has none yet.
          WHERE t.payment_id IS NULL OR t.payment_id = excluded.payment_id",
        &payments,
        &chains,
        &transactions,
        &indexes,
        &of(&|s| hex(&s.transfer.token)),
        &of(&|s| hex(&s.transfer.from)),
        &of(&|s| hex(&s.transfer.to)),
        &of(&|s| s.transfer.value.to_string()),
        &number(&|s| s.transfer.block.number),
        &block_hashes,
        &times,
        &of(&|s| s.finality.code().to_owned()),
        now,
    )
    .execute(connection)
    .await?;
    match all_written("reconciled.transfers", recorded.len(), &result) {
        Ok(()) => Ok(()),
        Err(_) => Err(ApplyError::TransferTaken),
    }
}

const REFUNDS: &str = "reconciled.refunds_owed";

/// Rows were locked before they were resolved: each takes its change, or nothing is written (I6).
pub(super) async fn write_refunds(
    connection: &mut PgConnection,
    decided: &[Decided],
) -> Result<(), ApplyError> {
    let mut owed = Vec::new();
    let mut followed = Vec::new();
    let mut voided = Vec::new();
    for d in decided {
        match &d.resolution.refund {
            RefundChange::Keep => {}
            RefundChange::Owe(refund) => owed.push(refund),
            RefundChange::Follow(settlement) => {
                followed.push((&d.judged.payment_id, settlement.transfer));
            }
            RefundChange::Void => voided.push(&d.judged.payment_id),
        }
    }
    if !owed.is_empty() {
        insert_refunds(connection, &owed).await?;
    }
    if !followed.is_empty() {
        let transactions: Vec<String> = followed.iter().map(|(_, t)| hex(&t.tx_hash)).collect();
        let indexes: Vec<i64> = followed.iter().map(|(_, t)| column_number(t.log_index)).collect();
        let amounts: Vec<String> = followed.iter().map(|(_, t)| t.value.to_string()).collect();
        let result = sqlx::query!(
            "UPDATE reconciled.refunds_owed r
                SET tx_hash = c.tx_hash, log_index = c.log_index,
                    amount = CASE WHEN r.status IN ('owed', 'blocked') THEN c.amount::numeric
                                  ELSE r.amount END
               FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[])
                        AS c (payment_id, tx_hash, log_index, amount)
              WHERE r.payment_id = c.payment_id",
            &texts(followed.iter().map(|(id, _)| *id)),
            &transactions,
            &indexes,
            &amounts,
        )
        .execute(&mut *connection)
        .await?;
        all_written(REFUNDS, followed.len(), &result)?;
    }
    if !voided.is_empty() {
        let result = sqlx::query!(
            "UPDATE reconciled.refunds_owed SET status = 'void', note = $2
              WHERE payment_id = ANY($1::text[]) AND status IN ('owed', 'blocked')",
            &texts(voided.iter().copied()),
            "the transfer vanished in a reorg",
        )
        .execute(connection)
        .await?;
        all_written(REFUNDS, voided.len(), &result)?;
    }
    Ok(())
}

async fn insert_refunds(
    connection: &mut PgConnection,
    owed: &[&RefundOwed],
) -> Result<(), ApplyError> {
    let of = |field: &dyn Fn(&RefundOwed) -> String| -> Vec<String> {
        owed.iter().map(|refund| field(refund)).collect()
    };
    let chains: Vec<i64> = owed.iter().map(|r| column_number(r.transfer.chain_id.get())).collect();
    let indexes: Vec<i64> = owed.iter().map(|r| column_number(r.transfer.log_index)).collect();
    let detected: Vec<OffsetDateTime> = owed.iter().map(|r| datetime(r.detected_at)).collect();
    let result = sqlx::query!(
        "INSERT INTO reconciled.refunds_owed AS r
                (payment_id, order_id, rail, chain_id, token, payer, amount, reason, tx_hash,
                 log_index, refund_nonce, detected_at, status)
         SELECT c.payment_id, c.order_id, c.rail, c.chain_id, c.token, c.payer, c.amount::numeric,
                c.reason, c.tx_hash, c.log_index, c.refund_nonce, c.detected_at, 'owed'
           FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::text[],
                       $7::text[], $8::text[], $9::text[], $10::bigint[], $11::text[],
                       $12::timestamptz[])
                AS c (payment_id, order_id, rail, chain_id, token, payer, amount, reason, tx_hash,
                      log_index, refund_nonce, detected_at)
         ON CONFLICT (payment_id) DO UPDATE
            SET order_id = excluded.order_id, rail = excluded.rail,
                chain_id = excluded.chain_id, token = excluded.token, payer = excluded.payer,
                amount = excluded.amount, reason = excluded.reason, tx_hash = excluded.tx_hash,
                log_index = excluded.log_index, refund_nonce = excluded.refund_nonce,
                detected_at = excluded.detected_at, status = 'owed', batch_id = NULL,
                claimed_by = NULL, claimed_at = NULL, note = NULL,
                -- What landed while it was void closes it now.
                searched_to = CASE WHEN r.closed_seen_at IS NULL THEN r.searched_to
                                   ELSE r.closed_from END,
                closed_seen_at = NULL, closed_from = NULL
          -- Owed once (I6): only a void record comes back.
          WHERE r.status = 'void'",
        &of(&|r| r.payment_id.to_string()),
        &of(&|r| r.order_id.to_string()),
        &of(&|r| r.rail.code().to_owned()),
        &chains,
        &of(&|r| hex(&r.transfer.token)),
        &of(&|r| hex(&r.transfer.from)),
        &of(&|r| r.transfer.value.to_string()),
        &of(&|r| r.reason.code().to_owned()),
        &of(&|r| hex(&r.transfer.tx_hash)),
        &indexes,
        &of(&|r| hex(&r.refund_nonce)),
        &detected,
    )
    .execute(connection)
    .await?;
    all_written(REFUNDS, owed.len(), &result)
}

pub(super) async fn write_events(
    connection: &mut PgConnection,
    decided: &[Decided],
    now: OffsetDateTime,
) -> Result<(), ApplyError> {
    let events: Vec<_> = decided.iter().flat_map(|d| &d.resolution.events).collect();
    if events.is_empty() {
        return Ok(());
    }
    let kinds: Vec<String> = events.iter().map(|e| EventKind::code(e.kind).to_owned()).collect();
    let orders: Vec<String> = events.iter().map(|e| e.order_id.to_string()).collect();
    let keys: Vec<String> = events.iter().map(|e| e.dedupe_key.clone()).collect();
    sqlx::query!(
        "INSERT INTO reconciled.events (kind, order_id, payment_id, dedupe_key, created_at)
         SELECT c.kind, c.order_id, c.payment_id, c.dedupe_key, $5
           FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
                    WITH ORDINALITY AS c (kind, order_id, payment_id, dedupe_key, position)
          ORDER BY c.position
         ON CONFLICT (dedupe_key) DO NOTHING",
        &kinds,
        &orders,
        &texts(events.iter().map(|e| &e.payment_id)),
        &keys,
        now,
    )
    .execute(connection)
    .await?;
    Ok(())
}

pub(super) async fn write_resolutions(
    connection: &mut PgConnection,
    decided: &[Decided],
    now: OffsetDateTime,
) -> Result<(), ApplyError> {
    let recorded: Vec<&Decided> = decided.iter().filter(|d| d.resolution.is_recorded()).collect();
    if recorded.is_empty() {
        return Ok(());
    }
    let orders: Vec<Option<String>> =
        recorded.iter().map(|d| d.order_id.as_ref().map(ToString::to_string)).collect();
    let outcomes: Vec<String> =
        recorded.iter().map(|d| d.resolution.outcome.code().to_owned()).collect();
    let verdicts: Vec<String> = recorded.iter().map(|d| d.judged.verdict_code()).collect();
    let evidence: Vec<String> =
        recorded.iter().map(|d| json_text(&evidence_json(&d.judged))).collect();
    let transactions: Vec<Option<String>> =
        recorded.iter().map(|d| d.transfer().map(|t| hex(&t.tx_hash))).collect();
    let indexes: Vec<Option<i64>> =
        recorded.iter().map(|d| d.transfer().map(|t| column_number(t.log_index))).collect();
    let blocks: Vec<_> = recorded.iter().map(|d| d.block()).collect();
    let numbers: Vec<Option<i64>> =
        blocks.iter().map(|b| b.map(|b| column_number(b.number))).collect();
    let hashes: Vec<Option<String>> = blocks.iter().map(|b| b.map(|b| hex(&b.hash))).collect();
    let times: Vec<Option<OffsetDateTime>> =
        blocks.iter().map(|b| b.map(|b| block_datetime(b.time))).collect();
    let settles: Vec<bool> =
        recorded.iter().map(|d| d.resolution.payment == Some(PaymentStatus::Settled)).collect();
    sqlx::query!(
        "INSERT INTO reconciled.resolutions
                (payment_id, order_id, outcome, verdict, evidence, tx_hash, log_index,
                 block_number, block_hash, block_time, resolved_at, detection_delay_ms, settles)
         SELECT c.payment_id, c.order_id, c.outcome, c.verdict, c.evidence::jsonb, c.tx_hash,
                c.log_index, c.block_number, c.block_hash, c.block_time, $11,
                CASE WHEN c.tx_hash IS NOT NULL
                     THEN greatest(0, extract(epoch FROM $11 - c.block_time) * 1000)::bigint END,
                c.settles
           FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[],
                       $7::bigint[], $8::bigint[], $9::text[], $10::timestamptz[], $12::bool[])
                WITH ORDINALITY
                AS c (payment_id, order_id, outcome, verdict, evidence, tx_hash, log_index,
                      block_number, block_hash, block_time, settles, position)
          ORDER BY c.position",
        &texts(recorded.iter().map(|d| &d.judged.payment_id)),
        &orders as &[Option<String>],
        &outcomes,
        &verdicts,
        &evidence,
        &transactions as &[Option<String>],
        &indexes as &[Option<i64>],
        &numbers as &[Option<i64>],
        &hashes as &[Option<String>],
        &times as &[Option<OffsetDateTime>],
        now,
        &settles,
    )
    .execute(connection)
    .await?;
    Ok(())
}

pub(super) async fn write_watches(
    connection: &mut PgConnection,
    decided: &[Decided],
    now: OffsetDateTime,
) -> Result<(), ApplyError> {
    let columns = CheckColumns::of(decided.iter().map(|d| &d.judged));
    let next: Vec<_> = decided.iter().map(|d| d.resolution.watch.next).collect();
    let phases: Vec<String> = next.iter().map(|n| n.phase.code().to_owned()).collect();
    let times: Vec<Option<OffsetDateTime>> =
        next.iter().map(|n| n.at.filter(|_| n.phase != Phase::Closed).map(datetime)).collect();
    let restarts: Vec<bool> = decided.iter().map(|d| d.resolution.watch.restart).collect();
    sqlx::query!(
        "UPDATE reconciled.watches w
            SET phase = c.phase,
                next_check_at = c.next_check_at,
                opened_at = CASE WHEN c.restart THEN $8 ELSE w.opened_at END,
                checks_done = CASE WHEN c.restart THEN 0 ELSE w.checks_done + 1 END,
                consecutive_inconclusive =
                    CASE WHEN c.inconclusive THEN w.consecutive_inconclusive + 1 ELSE 0 END,
                last_verdict = c.verdict,
                last_block = coalesce(c.block_number, w.last_block),
                -- A watch keeps the version it started on.
                schedule_id = CASE w.checks_done WHEN 0 THEN c.schedule_id ELSE w.schedule_id END,
                lease_token = NULL,
                lease_expires_at = NULL
           FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::bool[], $5::bool[],
                       $6::text[], $7::bigint[], $9::bigint[])
                AS c (payment_id, phase, next_check_at, restart, inconclusive, verdict,
                      block_number, schedule_id)
          WHERE w.payment_id = c.payment_id",
        &columns.payments,
        &phases,
        &times as &[Option<OffsetDateTime>],
        &restarts,
        &columns.inconclusive,
        &columns.verdicts,
        &columns.blocks as &[Option<i64>],
        now,
        &columns.schedules as &[Option<i64>],
    )
    .execute(&mut *connection)
    .await?;
    insert_checks(connection, &columns).await?;
    Ok(())
}

/// The columns of checks, one entry per check.
pub(super) struct CheckColumns {
    pub(super) payments: Vec<String>,
    pub(super) times: Vec<OffsetDateTime>,
    pub(super) verdicts: Vec<String>,
    pub(super) inconclusive: Vec<bool>,
    pub(super) blocks: Vec<Option<i64>>,
    pub(super) schedules: Vec<Option<i64>>,
    pub(super) details: Vec<Option<String>>,
}

impl CheckColumns {
    pub(super) fn of<'a>(checks: impl IntoIterator<Item = &'a Judged> + Clone) -> Self {
        let each = || checks.clone().into_iter();
        Self {
            payments: texts(each().map(|c| &c.payment_id)),
            times: each().map(|c| datetime(c.checked_at)).collect(),
            verdicts: each().map(Judged::verdict_code).collect(),
            inconclusive: each().map(|c| matches!(c.verdict, Verdict::Inconclusive(_))).collect(),
            blocks: each().map(|c| c.verdict.block().map(|b| column_number(b.number))).collect(),
            schedules: each().map(|c| c.due.schedule_id).collect(),
            details: each().map(check_detail).collect(),
        }
    }
}

/// Adds these checks' own rows.
pub(super) async fn insert_checks(
    connection: &mut PgConnection,
    columns: &CheckColumns,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "INSERT INTO reconciled.checks (payment_id, checked_at, verdict, block_number, detail)
         SELECT c.payment_id, c.checked_at, c.verdict, c.block_number, c.detail
           FROM unnest($1::text[], $2::timestamptz[], $3::text[], $4::bigint[], $5::text[])
                    AS c (payment_id, checked_at, verdict, block_number, detail)",
        &columns.payments,
        &columns.times,
        &columns.verdicts,
        &columns.blocks as &[Option<i64>],
        &columns.details as &[Option<String>],
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// JSON as text that `jsonb` takes: it holds no NUL, and an endpoint's words may.
pub(super) fn json_text(value: &Value) -> String {
    fn clean(value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(without_nul(text)),
            Value::Array(items) => Value::Array(items.iter().map(clean).collect()),
            Value::Object(fields) => Value::Object(
                fields.iter().map(|(key, value)| (without_nul(key), clean(value))).collect(),
            ),
            other => other.clone(),
        }
    }
    clean(value).to_string()
}

fn without_nul(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}
