//! Between rows and values: what both backends read and write in the same words.
//!
//! The gateway's rows are read leniently, as text, and one that makes no sense is a value that says so
//! (I11). Our own rows are read strictly: one that makes no sense is [`StoreError::Inconsistent`].

use std::str::FromStr;

use alloy_primitives::Address;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::domain::{
    Account, Amount, BlockRef, BlockTime, ChainId, ConsumptionKind, Cursor, Finality, FlagKind,
    GoneFlag, Judged, MalformedPayment, NonceState, Order, OrderId, OrderKind, OrderStatus,
    PaymentId, Reading, Receiver, RecordedTransfer, Reservation, ReservationStatus, Settlement,
    Sku, Timestamp, Transfer, Unbacked, Watch, disagreements,
};
use crate::errors::error_chain;

use super::StoreError;

/// How much a check's row may say.
const DETAIL_CHARS_MAX: usize = 1_000;

/// The flag about a log that is on the chain no more.
pub(super) fn left_the_chain(subject: &str) -> GoneFlag {
    GoneFlag {
        kind: FlagKind::UnmatchedTransfer,
        payment_id: None,
        subject: Some(subject.to_owned()),
        note: "the transfer left the chain in a reorg".to_owned(),
    }
}

/// An order's row as text; times are Unix milliseconds.
#[derive(Debug, Default)]
pub(super) struct RawOrder {
    pub(super) id: String,
    pub(super) kind: Option<String>,
    pub(super) status: Option<String>,
    pub(super) paid_by: Option<String>,
    pub(super) delivered_at: Option<String>,
}

impl RawOrder {
    /// `None` when a column makes no sense: the order then counts as unreadable.
    pub(super) fn parse(self) -> Option<Order> {
        Some(Order {
            id: OrderId::new(self.id),
            kind: OrderKind::from_code(self.kind.as_deref()?)?,
            status: OrderStatus::from_code(self.status.as_deref()?)?,
            paid_by: self.paid_by.filter(|id| !id.is_empty()).map(PaymentId::new),
            delivered_at: match self.delivered_at {
                None => None,
                Some(text) => Some(Timestamp::from_millis(text.parse().ok()?)),
            },
        })
    }
}

/// A reservation's row as text.
#[derive(Debug, Default)]
pub(super) struct RawReservation {
    pub(super) id: String,
    pub(super) order_id: String,
    pub(super) sku: Option<String>,
    pub(super) quantity: Option<String>,
    pub(super) status: Option<String>,
}

impl RawReservation {
    /// `Err` names the order, which counts as unreadable when a column makes no sense.
    pub(super) fn parse(self) -> Result<Reservation, OrderId> {
        let read = || {
            Some((
                self.sku.as_deref().map(Sku::from)?,
                self.quantity.as_deref()?.parse::<i64>().ok().filter(|n| *n >= 0)?,
                ReservationStatus::from_code(self.status.as_deref()?)?,
            ))
        };
        match read() {
            Some((sku, quantity, status)) => Ok(Reservation {
                id: self.id,
                order_id: OrderId::new(self.order_id),
                sku,
                quantity,
                status,
            }),
            None => Err(OrderId::new(self.order_id)),
        }
    }
}

/// A row of `transfers` that belongs to a payment.
#[derive(Debug)]
pub(super) struct RawTransfer {
    pub(super) payment_id: String,
    pub(super) chain_id: i64,
    pub(super) token: String,
    pub(super) payer: String,
    pub(super) pay_to: String,
    pub(super) amount: String,
    pub(super) block_number: i64,
    pub(super) block_hash: String,
    pub(super) block_time: i64,
    pub(super) tx_hash: String,
    pub(super) log_index: i64,
    pub(super) finality: String,
    /// Unix milliseconds.
    pub(super) seen_at: i64,
}

impl RawTransfer {
    pub(super) fn parse(self) -> Result<RecordedTransfer, StoreError> {
        const TABLE: &str = "transfers";
        let block = BlockRef {
            number: unsigned(TABLE, "block_number", self.block_number)?,
            hash: parsed(TABLE, "block_hash", &self.block_hash)?,
            time: BlockTime::from_secs(unsigned(TABLE, "block_time", self.block_time)?),
        };
        let transfer = Transfer {
            chain_id: ChainId::new(unsigned(TABLE, "chain_id", self.chain_id)?),
            token: parsed(TABLE, "token", &self.token)?,
            from: parsed(TABLE, "payer", &self.payer)?,
            to: parsed(TABLE, "pay_to", &self.pay_to)?,
            value: parsed(TABLE, "amount", &self.amount)?,
            block,
            tx_hash: parsed(TABLE, "tx_hash", &self.tx_hash)?,
            log_index: unsigned(TABLE, "log_index", self.log_index)?,
        };
        let finality = coded(TABLE, "finality", &self.finality, Finality::from_code)?;
        Ok(RecordedTransfer {
            payment_id: PaymentId::new(self.payment_id),
            settlement: Settlement { transfer, finality },
            seen_at: Timestamp::from_millis(self.seen_at),
        })
    }
}

/// A row of `cursors`.
#[derive(Debug)]
pub(super) struct RawCursor {
    pub(super) token: String,
    pub(super) pay_to: String,
    pub(super) first_block: i64,
    pub(super) block_number: i64,
    pub(super) block_hash: String,
    /// Unix seconds.
    pub(super) block_time: i64,
}

impl RawCursor {
    pub(super) fn parse(self) -> Result<Cursor, StoreError> {
        const TABLE: &str = "cursors";
        Ok(Cursor {
            receiver: Receiver {
                token: parsed(TABLE, "token", &self.token)?,
                pay_to: parsed(TABLE, "pay_to", &self.pay_to)?,
            },
            first_block: unsigned(TABLE, "first_block", self.first_block)?,
            block: BlockRef {
                number: unsigned(TABLE, "block_number", self.block_number)?,
                hash: parsed(TABLE, "block_hash", &self.block_hash)?,
                time: BlockTime::from_secs(unsigned(TABLE, "block_time", self.block_time)?),
            },
        })
    }
}

/// One of our own columns that holds a code.
pub(super) fn coded<T>(
    table: &'static str,
    column: &'static str,
    text: &str,
    from_code: impl FnOnce(&str) -> Option<T>,
) -> Result<T, StoreError> {
    from_code(text).ok_or_else(|| StoreError::Inconsistent {
        table,
        column,
        found: text.to_owned(),
    })
}

/// One of our own columns that holds a number that is never negative.
pub(super) fn unsigned<T: TryFrom<i64>>(
    table: &'static str,
    column: &'static str,
    number: i64,
) -> Result<T, StoreError> {
    T::try_from(number).map_err(|_| StoreError::Inconsistent {
        table,
        column,
        found: number.to_string(),
    })
}

pub(super) fn parsed<T: FromStr>(
    table: &'static str,
    column: &'static str,
    text: &str,
) -> Result<T, StoreError> {
    coded(table, column, text, |text| text.parse().ok())
}

/// The amount of a refund record, which people edit: one that makes no sense accounts for nothing, so that
/// its money shows as missing and holds up nobody else's.
pub(super) fn refund_amount(payment_id: &str, text: &str) -> Amount {
    text.parse().unwrap_or_else(|_| {
        tracing::error!(
            payment_id,
            amount = text,
            "the amount of this refund record makes no sense"
        );
        Amount::ZERO
    })
}

/// A leased watch, unless its row makes no sense: that one is left out, so that it holds up no other. It
/// stays leased until the lease runs out, and is told of whenever it is leased again.
pub(super) fn sound_watch(payment_id: &str, watch: Result<Watch, StoreError>) -> Option<Watch> {
    watch
        .inspect_err(|error| {
            tracing::error!(
                payment_id,
                error = error_chain(error),
                "the watch of this payment makes no sense and is not checked"
            );
        })
        .ok()
}

/// A flag about a log that is not known; `None` when it does not say whose money it is about.
pub(super) fn unbacked_flag(subject: String, detail: &str) -> Option<Unbacked> {
    #[derive(serde::Deserialize)]
    struct Detail {
        token: Address,
        pay_to: Address,
        amount: Amount,
    }
    let Detail { token, pay_to, amount } = serde_json::from_str(detail).ok()?;
    let receiver = Receiver { token, pay_to };
    Some(Unbacked { receiver, account: Account::Flagged, amount, subject })
}

/// What is wrong with a payment whose row is gone.
pub(super) fn payment_is_gone(id: &str) -> MalformedPayment {
    MalformedPayment {
        payment_id: PaymentId::from(id),
        column: "id",
        found: "missing".to_owned(),
        expected: "a row in payments",
    }
}

/// A number of a chain as a column holds it; no chain gets as far as the bound.
pub(super) fn column_number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// What a check's row says in one line: who contradicts whom, every endpoint and what it answered, or the problem.
pub(super) fn check_detail(judged: &Judged) -> Option<String> {
    let line = match &judged.problem {
        Some(problem) => problem.clone(),
        None => {
            let contradictions = disagreements(&judged.evidence)
                .into_iter()
                .map(|(one, other)| format!("{one} contradicts {other}"));
            let readings = judged.evidence.readings.iter().map(reading_detail);
            contradictions.chain(readings).collect::<Vec<String>>().join("; ")
        }
    };
    (!line.is_empty()).then(|| one_line(&line))
}

/// Cut short, and on one line whatever an endpoint sent.
pub(super) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(DETAIL_CHARS_MAX).collect()
}

fn reading_detail(reading: &Reading) -> String {
    let endpoint = &reading.endpoint;
    let seen = match &reading.outcome {
        Ok(seen) => seen,
        Err(failure) => return format!("{endpoint}: {failure}"),
    };
    let head = seen.head.number;
    match &seen.nonce {
        NonceState::Unused => format!("{endpoint}: unused at block {head} ({:#})", seen.head.hash),
        NonceState::UsedWithoutLog { from_block, to_block } => {
            format!("{endpoint}: used at block {head}, no log in blocks {from_block} to {to_block}")
        }
        NonceState::UsedUnread(failure) => {
            format!("{endpoint}: used at block {head}, and how could not be read: {failure}")
        }
        NonceState::Used(consumption) => {
            let log = consumption.log;
            let what = match consumption.kind {
                ConsumptionKind::Canceled => "canceled".to_owned(),
                ConsumptionKind::WithoutTransfer => "used without a transfer".to_owned(),
                ConsumptionKind::Transferred(t) => {
                    format!("transferred {} to {}", t.value, t.to)
                }
            };
            format!(
                "{endpoint}: {what} in block {} by {} (log {}), head {head}",
                log.block.number, log.tx_hash, log.log_index
            )
        }
    }
}

/// What a resolution was based on (I12).
pub(super) fn evidence_json(judged: &Judged) -> serde_json::Value {
    json!({ "verdict": judged.verdict, "evidence": judged.evidence, "problem": judged.problem })
}

/// The SHA-256 in lower-case hex, without a prefix.
pub(super) fn sha256_hex(bytes: &[u8]) -> String {
    alloy_primitives::hex::encode(Sha256::digest(bytes))
}
