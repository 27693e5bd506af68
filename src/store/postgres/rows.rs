//! Between the rows of PostgreSQL and the values of the domain.

use std::fmt::LowerHex;

use sqlx::types::time::OffsetDateTime;

use crate::domain::{
    BlockTime, MalformedPayment, Payment, PaymentId, Phase, RawPayment, Timestamp, Watch,
};
use crate::store::StoreError;
use crate::store::row::{coded, payment_is_gone, unsigned};

/// Selects rows of `payments` as [`RawPayment`]s, every column as text: a value that makes no sense
/// (`NaN`, `infinity`) fails its own row's parse and not the statement (I11).
macro_rules! select_payments {
    ($rest:tt $(, $arg:expr)* $(,)?) => {
        sqlx::query_as!(
            crate::domain::RawPayment,
            r#"SELECT id AS "id!",
                      order_id::text AS "order_id?",
                      rail::text AS "rail?",
                      method::text AS "method?",
                      chain_id::text AS "chain_id?",
                      token::text AS "token?",
                      payer::text AS "payer?",
                      pay_to::text AS "pay_to?",
                      amount::text AS "amount?",
                      nonce::text AS "nonce?",
                      valid_after::text AS "valid_after?",
                      valid_before::text AS "valid_before?",
                      tx_hash::text AS "tx_hash?",
                      status::text AS "status?",
                      trunc(extract(epoch FROM created_at) * 1000)::text AS "created_at?",
                      trunc(extract(epoch FROM broadcast_at) * 1000)::text AS "broadcast_at?"
                 FROM payments "# + $rest
            $(, $arg)*
        )
    };
}
pub(super) use select_payments;

/// One row of `reconciled.watches`.
#[derive(Debug)]
pub(super) struct WatchRow {
    pub(super) payment_id: String,
    pub(super) phase: String,
    pub(super) opened_at: OffsetDateTime,
    pub(super) next_check_at: Option<OffsetDateTime>,
    pub(super) checks_done: i32,
    pub(super) consecutive_inconclusive: i32,
    pub(super) schedule_id: Option<i64>,
    pub(super) last_verdict: Option<String>,
}

impl TryFrom<WatchRow> for Watch {
    type Error = StoreError;

    fn try_from(row: WatchRow) -> Result<Self, StoreError> {
        const TABLE: &str = "reconciled.watches";
        let count = |column, n: i32| unsigned(TABLE, column, i64::from(n));
        Ok(Self {
            phase: coded(TABLE, "phase", &row.phase, Phase::from_code)?,
            opened_at: row.opened_at.into(),
            next_check_at: row.next_check_at.map(Into::into),
            checks_done: count("checks_done", row.checks_done)?,
            consecutive_inconclusive: count(
                "consecutive_inconclusive",
                row.consecutive_inconclusive,
            )?,
            schedule_id: row.schedule_id,
            last_verdict: row.last_verdict,
            payment_id: PaymentId::new(row.payment_id),
        })
    }
}

/// The payment of a watch, whose row may be gone.
pub(super) fn parse_payment(
    id: &PaymentId,
    row: Option<&RawPayment>,
) -> Result<Payment, MalformedPayment> {
    match row {
        Some(row) => row.parse(),
        None => Err(payment_is_gone(id.as_str())),
    }
}

/// The calendar form of a moment. Beyond the years a calendar covers, the last or first that it does:
/// a `valid_before` of 2^64 means "never", and any far day says the same.
pub(super) fn datetime(moment: Timestamp) -> OffsetDateTime {
    const FIRST: OffsetDateTime = time::macros::datetime!(1-01-01 0:00 UTC);
    const LAST: OffsetDateTime = time::macros::datetime!(9999-12-31 0:00 UTC);
    let nearest = if moment.as_millis() < 0 { FIRST } else { LAST };
    moment.to_datetime().map_or(nearest, |t| t.clamp(FIRST, LAST))
}

/// A block's time as a moment.
pub(super) fn block_datetime(time: BlockTime) -> OffsetDateTime {
    datetime(time.into())
}

/// 0x and lower-case hex, the form of our own tables.
pub(super) fn hex(bytes: &impl LowerHex) -> String {
    format!("{bytes:#x}")
}

/// The ids as text, for `= ANY`.
pub(super) fn texts<'a>(ids: impl IntoIterator<Item = &'a PaymentId>) -> Vec<String> {
    ids.into_iter().map(|id| id.as_str().to_owned()).collect()
}
