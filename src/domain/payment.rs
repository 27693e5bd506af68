//! A payment row: as text from the database, and parsed into something that makes sense.
//!
//! A row that cannot be parsed is a [`MalformedPayment`] that names the column, never a panic and never
//! a reason to stop the rest (I11).

use std::fmt;
use std::str::FromStr;

use alloy_primitives::{Address, B256, U256};
use serde::Serialize;

use super::order::column_code;
use super::{Amount, BlockTime, ChainId, OrderId, PaymentId, Timestamp};

column_code! {
    /// The protocol a payment came by.
    Rail {
        /// x402 (EIP-3009 or Permit2 on an EVM chain).
        X402 = "x402",
        /// MPP (TIP-20 on Tempo).
        Mpp = "mpp",
    }
}

column_code! {
    /// How the money is moved on chain.
    Method {
        /// `transferWithAuthorization` and its siblings.
        Eip3009 = "eip3009",
        /// Uniswap's Permit2 through an x402 proxy.
        Permit2 = "permit2",
        /// A Tempo transaction.
        Tempo = "tempo",
    }
}

column_code! {
    /// Where a payment stands (the gateway contract, DESIGN section 5).
    PaymentStatus {
        /// Written before the broadcast.
        Settling = "settling",
        /// The settle call gave no answer.
        Unknown = "unknown",
        /// The settle call answered with a failure.
        SettleFailed = "settle_failed",
        /// The money moved.
        Settled = "settled",
        /// It did not, and the order no longer waits for it.
        Failed = "failed",
    }
}

impl PaymentStatus {
    /// Whether nobody knows yet what became of the payment.
    pub const fn is_open(self) -> bool {
        matches!(self, Self::Settling | Self::Unknown | Self::SettleFailed)
    }
}

/// One signed attempt to pay one order. On chain it is (chain, token, payer, nonce), and with Permit2
/// (chain, payer, nonce): one nonce of an owner serves for one transfer of whatever token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Payment {
    /// The gateway's id.
    pub id: PaymentId,
    /// The order it pays.
    pub order_id: OrderId,
    /// The protocol it came by.
    pub rail: Rail,
    /// How the money is moved.
    pub method: Method,
    /// The chain the token lives on.
    pub chain_id: ChainId,
    /// The token contract.
    pub token: Address,
    /// Who pays.
    pub payer: Address,
    /// Who is to be paid.
    pub pay_to: Address,
    /// How much was asked for.
    pub amount: Amount,
    /// The authorization's nonce; Permit2's number as 32 bytes.
    pub nonce: B256,
    /// The authorization holds strictly after this block time (EIP-3009), or from it on (Permit2).
    pub valid_after: BlockTime,
    /// The authorization holds strictly before this block time (EIP-3009), or up to it (Permit2's
    /// deadline); saturated when larger.
    pub valid_before: BlockTime,
    /// The transaction the gateway knows of: a hint, never evidence.
    pub tx_hash: Option<B256>,
    /// Where it stands.
    pub status: PaymentStatus,
    /// When the gateway wrote the row.
    pub created_at: Timestamp,
    /// When the gateway broadcast the settlement.
    pub broadcast_at: Option<Timestamp>,
}

/// The columns of a payment that a verdict is about: where one of them has changed since, it is about
/// another payment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the payment's of the same name")]
pub struct Terms {
    pub method: Method,
    pub chain_id: ChainId,
    pub token: Address,
    pub payer: Address,
    pub pay_to: Address,
    pub amount: Amount,
    pub nonce: B256,
    pub valid_after: BlockTime,
    pub valid_before: BlockTime,
}

impl Payment {
    /// Where the clock of this payment starts: the broadcast, else the row itself.
    pub fn started_at(&self) -> Timestamp {
        self.broadcast_at.unwrap_or(self.created_at)
    }

    /// What was signed and asked for.
    pub const fn terms(&self) -> Terms {
        Terms {
            method: self.method,
            chain_id: self.chain_id,
            token: self.token,
            payer: self.payer,
            pay_to: self.pay_to,
            amount: self.amount,
            nonce: self.nonce,
            valid_after: self.valid_after,
            valid_before: self.valid_before,
        }
    }

    /// Whether both claim one on-chain authorization.
    pub fn same_authorization(&self, other: &Self) -> bool {
        self.authorization() == other.authorization()
    }

    /// What the chain accepts once. Permit2's nonces are another book than any token's, and one for all
    /// tokens.
    fn authorization(&self) -> (bool, ChainId, Option<Address>, Address, B256) {
        let by_permit2 = self.method == Method::Permit2;
        let token = (!by_permit2).then_some(self.token);
        (by_permit2, self.chain_id, token, self.payer, self.nonce)
    }

    /// The first block time that is too late for the authorization.
    pub fn over_from(&self) -> BlockTime {
        match self.method {
            Method::Permit2 => BlockTime::from_secs(self.valid_before.as_secs().saturating_add(1)),
            Method::Eip3009 | Method::Tempo => self.valid_before,
        }
    }
}

/// A payment row as text, column by column; times are Unix milliseconds, addresses and hashes 0x-hex.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "each field is the column of the same name in the gateway contract")]
pub struct RawPayment {
    pub id: String,
    pub order_id: Option<String>,
    pub rail: Option<String>,
    pub method: Option<String>,
    pub chain_id: Option<String>,
    pub token: Option<String>,
    pub payer: Option<String>,
    pub pay_to: Option<String>,
    pub amount: Option<String>,
    pub nonce: Option<String>,
    pub valid_after: Option<String>,
    pub valid_before: Option<String>,
    pub tx_hash: Option<String>,
    pub status: Option<String>,
    pub created_at: Option<String>,
    pub broadcast_at: Option<String>,
}

/// What is wrong with a row, for the person who has to mend it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize)]
#[error("payment {payment_id}: column {column} is {found}; it must be {expected}")]
pub struct MalformedPayment {
    /// The row.
    pub payment_id: PaymentId,
    /// The column at fault.
    pub column: &'static str,
    /// What stands there, cut short.
    pub found: String,
    /// What should.
    pub expected: &'static str,
}

/// How much of a bad value a message repeats.
const FOUND_CHARS_MAX: usize = 80;

struct Columns<'a> {
    id: &'a str,
}

impl Columns<'_> {
    fn bad(
        &self,
        column: &'static str,
        found: Option<&str>,
        expected: &'static str,
    ) -> MalformedPayment {
        let found = match found {
            None => "missing".to_owned(),
            Some(text) => format!("{:?}", text.chars().take(FOUND_CHARS_MAX).collect::<String>()),
        };
        MalformedPayment { payment_id: PaymentId::from(self.id), column, found, expected }
    }

    fn required<T>(
        &self,
        column: &'static str,
        value: Option<&str>,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, MalformedPayment> {
        value.and_then(parse).ok_or_else(|| self.bad(column, value, expected))
    }

    fn optional<T>(
        &self,
        column: &'static str,
        value: Option<&str>,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, MalformedPayment> {
        value.map(|text| self.required(column, Some(text), expected, parse)).transpose()
    }
}

fn hex<T: FromStr>(text: &str) -> Option<T> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))?;
    // The parser would take a second prefix.
    digits.bytes().all(|b| b.is_ascii_hexdigit()).then(|| digits.parse().ok())?
}

fn chain_id(text: &str) -> Option<ChainId> {
    let is_number = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|id| is_number && *id > 0).map(ChainId::new)
}

fn bound(text: &str) -> Option<BlockTime> {
    let secs: Amount = text.parse().ok()?;
    Some(BlockTime::from_secs(secs.get().min(U256::from(u64::MAX)).to::<u64>()))
}

/// Times before 1973 or after 9999 are refused: whoever writes seconds for milliseconds would otherwise
/// have every deadline long past, and payments failed that can still land.
const TIME_MILLIS: std::ops::RangeInclusive<i64> = 100_000_000_000..=253_402_300_799_999;

fn millis(text: &str) -> Option<Timestamp> {
    let millis = text.parse().ok()?;
    TIME_MILLIS.contains(&millis).then(|| Timestamp::from_millis(millis))
}

impl RawPayment {
    /// Whether the transfer of `payment` may be this row's already: it has the same nonce, and nothing that
    /// can be read of it says that it names another authorization or has not settled (I4).
    pub fn may_have_settled_by(&self, payment: &Payment) -> bool {
        fn allows<T>(
            column: Option<&str>,
            parse: impl FnOnce(&str) -> Option<T>,
            test: impl FnOnce(T) -> bool,
        ) -> bool {
            column.and_then(parse).is_none_or(test)
        }
        let text = Option::as_deref;
        let by_permit2 = payment.method == Method::Permit2;
        text(&self.nonce).and_then(hex::<B256>) == Some(payment.nonce)
            && allows(text(&self.payer), hex, |payer: Address| payer == payment.payer)
            && allows(text(&self.chain_id), chain_id, |id| id == payment.chain_id)
            && allows(text(&self.token), hex, |t: Address| by_permit2 || t == payment.token)
            && allows(text(&self.method), Method::from_code, |method| {
                (method == Method::Permit2) == by_permit2
            })
            && allows(text(&self.status), PaymentStatus::from_code, |status| {
                status == PaymentStatus::Settled
            })
    }

    /// Reads every column, or says which one makes no sense.
    pub fn parse(&self) -> Result<Payment, MalformedPayment> {
        const ADDRESS: &str = "0x and 40 hexadecimal digits";
        const HASH: &str = "0x and 64 hexadecimal digits (32 bytes)";
        const NONCE: &str =
            "0x and 64 hexadecimal digits (32 bytes; Permit2's number in hexadecimal, padded)";
        const SECONDS: &str = "Unix seconds in decimal";
        const TIME: &str = "a time (on SQLite: Unix milliseconds)";
        let c = Columns { id: &self.id };
        let text = Option::as_deref;
        let payment = Payment {
            id: PaymentId::from(self.id.as_str()),
            order_id: c.required("order_id", text(&self.order_id), "an order's id", |t| {
                (!t.is_empty()).then(|| OrderId::from(t))
            })?,
            rail: c.required("rail", text(&self.rail), "x402 or mpp", Rail::from_code)?,
            method: c.required(
                "method",
                text(&self.method),
                "eip3009, permit2 or tempo",
                Method::from_code,
            )?,
            chain_id: c.required(
                "chain_id",
                text(&self.chain_id),
                "an EIP-155 chain id, at least 1",
                chain_id,
            )?,
            token: c.required("token", text(&self.token), ADDRESS, hex::<Address>)?,
            payer: c.required("payer", text(&self.payer), ADDRESS, hex::<Address>)?,
            pay_to: c.required("pay_to", text(&self.pay_to), ADDRESS, hex::<Address>)?,
            amount: c.required(
                "amount",
                text(&self.amount),
                "a whole number of base units in decimal",
                |t| t.parse().ok(),
            )?,
            // One spelling only, Permit2's numbers too: rows that claim one nonce are found by it.
            nonce: c.required("nonce", text(&self.nonce), NONCE, hex::<B256>)?,
            valid_after: c
                .optional("valid_after", text(&self.valid_after), SECONDS, bound)?
                .unwrap_or(BlockTime::from_secs(0)),
            valid_before: c.required("valid_before", text(&self.valid_before), SECONDS, bound)?,
            tx_hash: c.optional(
                "tx_hash",
                text(&self.tx_hash).filter(|t| !t.is_empty()),
                HASH,
                hex,
            )?,
            status: c.required(
                "status",
                text(&self.status),
                "settling, unknown, settle_failed, settled or failed",
                PaymentStatus::from_code,
            )?,
            created_at: c.required("created_at", text(&self.created_at), TIME, millis)?,
            broadcast_at: c.optional("broadcast_at", text(&self.broadcast_at), TIME, millis)?,
        };
        Ok(payment)
    }
}

/// Another payment of the same order, as far as the order's fate depends on it.
///
/// It is read leniently: a sibling whose row is malformed still counts, as an open one, so that an order
/// is never failed over a payment nobody could read (I2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sibling {
    /// The payment.
    pub id: PaymentId,
    /// The order both belong to.
    pub order_id: OrderId,
    /// Where it stands; `None` when the column makes no sense.
    pub status: Option<PaymentStatus>,
}

impl Sibling {
    /// Whether the order may still be paid by it, or already is.
    pub fn keeps_order_alive(&self) -> bool {
        self.status.is_none_or(|s| s.is_open() || s == PaymentStatus::Settled)
    }
}

impl fmt::Display for Payment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "payment {} of order {}", self.id, self.order_id)
    }
}
