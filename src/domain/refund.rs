//! Refund-owed records: money that moved and must go back (DESIGN section 10).

use alloy_primitives::{B256, keccak256};
use serde::{Deserialize, Serialize};

use super::order::column_code;
use super::{Method, OrderId, Payment, PaymentId, Rail, Timestamp, Transfer};

column_code! {
    /// Why money must go back.
    RefundReason {
        /// Another payment pays the order.
        Duplicate = "duplicate",
        /// It arrived for an order that was over.
        Late = "late",
        /// The work failed for good after the money moved.
        Undelivered = "undelivered",
    }
}

column_code! {
    /// Where a refund stands.
    RefundStatus {
        /// To be paid.
        Owed = "owed",
        /// A batch has taken it.
        Claimed = "claimed",
        /// A batch has sent it.
        Sent = "sent",
        /// The chain shows it paid.
        Paid = "paid",
        /// The transfer behind it vanished, or a person called it off.
        Void = "void",
        /// It cannot be paid (a blacklisted payer).
        Blocked = "blocked",
    }
}

impl RefundStatus {
    /// Whether the money has not gone back, and is to.
    pub const fn is_unfinished(self) -> bool {
        matches!(self, Self::Owed | Self::Claimed | Self::Sent | Self::Blocked)
    }

    /// Whether nothing is to go back any more.
    pub const fn is_closed(self) -> bool {
        !self.is_unfinished()
    }

    /// Whether somebody has taken it to pay it, or has paid it.
    pub const fn is_in_other_hands(self) -> bool {
        matches!(self, Self::Claimed | Self::Sent | Self::Paid)
    }
}

/// Money that moved and must go back: the observed value to the observed payer (I6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefundOwed {
    /// The payment whose money it is; at most one record each.
    pub payment_id: PaymentId,
    /// The order it was meant for.
    pub order_id: OrderId,
    /// The protocol it came by.
    pub rail: Rail,
    /// What moved.
    pub transfer: Transfer,
    /// Why it must go back.
    pub reason: RefundReason,
    /// The single-use nonce (EIP-3009) or memo (Tempo) a batch pays it with.
    pub refund_nonce: B256,
    /// When it was noticed.
    pub detected_at: Timestamp,
}

/// The single-use nonce with which `payment` is refunded: a function of the payment's on-chain identity
/// alone, so that every attempt to pay one refund carries the same one and at most one can land.
///
/// keccak256 of a tag, then chain id (8 bytes, big-endian), token, payer, nonce. The tag is
/// `"reconciled/refund/v1"`; for Permit2, whose nonces are another book than the token's and can be equal,
/// `"reconciled/refund/v1/permit2"`.
pub fn refund_nonce(payment: &Payment) -> B256 {
    let tag: &[u8] = match payment.method {
        Method::Permit2 => b"reconciled/refund/v1/permit2",
        Method::Eip3009 | Method::Tempo => b"reconciled/refund/v1",
    };
    let mut bytes = Vec::with_capacity(tag.len() + 8 + 20 + 20 + 32);
    bytes.extend_from_slice(tag);
    bytes.extend_from_slice(&payment.chain_id.get().to_be_bytes());
    bytes.extend_from_slice(payment.token.as_slice());
    bytes.extend_from_slice(payment.payer.as_slice());
    bytes.extend_from_slice(payment.nonce.as_slice());
    keccak256(bytes)
}
