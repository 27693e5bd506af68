//! Short ways to say payments, blocks and evidence. Block `n` has the time `2 n` seconds.

use alloy_primitives::{Address, B256, U256};

use crate::domain::*;

pub(super) const CHAIN: ChainId = ChainId::new(8453);
pub(super) const TOKEN: Address = Address::repeat_byte(0x11);
pub(super) const PAY_TO: Address = Address::repeat_byte(0x22);
pub(super) const BLOCK_SECS: u64 = 2;

/// What one endpoint answers.
pub(super) type View = Result<Observation, ReadFailureKind>;

pub(super) fn secs(secs: u64) -> Timestamp {
    Timestamp::from(BlockTime::from_secs(secs))
}

pub(super) fn amount(units: u64) -> Amount {
    Amount::new(U256::from(units))
}

/// A payment of `order`, in flight since second 0 and valid for one minute.
pub(super) fn payment(id: &str, order: &str) -> Payment {
    let nonce = alloy_primitives::keccak256(id);
    Payment {
        id: PaymentId::from(id),
        order_id: OrderId::from(order),
        rail: Rail::X402,
        method: Method::Eip3009,
        chain_id: CHAIN,
        token: TOKEN,
        payer: Address::from_word(nonce),
        pay_to: PAY_TO,
        amount: amount(1_000_000),
        nonce,
        valid_after: BlockTime::from_secs(0),
        valid_before: BlockTime::from_secs(60),
        tx_hash: None,
        status: PaymentStatus::Unknown,
        created_at: secs(0),
        broadcast_at: Some(secs(0)),
    }
}

/// Block `number` of fork `fork`.
pub(super) fn block_of_fork(number: u64, fork: u64) -> BlockRef {
    let hash = B256::from(U256::from(number) + (U256::from(fork) << 64));
    BlockRef { number, hash, time: BlockTime::from_secs(number * BLOCK_SECS) }
}

pub(super) fn block(number: u64) -> BlockRef {
    block_of_fork(number, 0)
}

/// The payment's own transfer, in `block` behind log `log_index`.
pub(super) fn paying(payment: &Payment, block: BlockRef, log_index: u64) -> Consumption {
    Consumption {
        log: LogRef { block, tx_hash: B256::repeat_byte(0x77), log_index },
        kind: ConsumptionKind::Transferred(SeenTransfer {
            log_index: log_index + 1,
            from: payment.payer,
            to: payment.pay_to,
            value: payment.amount,
        }),
    }
}

/// The authorization used for one unit less than the payment asked for.
pub(super) fn paying_less(payment: &Payment, block: BlockRef) -> Consumption {
    let mut consumption = paying(payment, block, 0);
    if let ConsumptionKind::Transferred(seen) = &mut consumption.kind {
        seen.value = amount(999_999);
    }
    consumption
}

pub(super) fn canceled(block: BlockRef) -> Consumption {
    let log = LogRef { block, tx_hash: B256::repeat_byte(0x78), log_index: 0 };
    Consumption { log, kind: ConsumptionKind::Canceled }
}

pub(super) fn transfer_of(payment: &Payment, block: BlockRef, log_index: u64) -> Transfer {
    Transfer {
        chain_id: payment.chain_id,
        token: payment.token,
        from: payment.payer,
        to: payment.pay_to,
        value: payment.amount,
        block,
        tx_hash: B256::repeat_byte(0x77),
        log_index,
    }
}

/// A view at head `head` whose finalized block is `finalized`.
pub(super) fn view(head: u64, finalized: u64, nonce: NonceState) -> Observation {
    Observation { head: block(head), safe: None, finalized: block(finalized), nonce }
}

pub(super) fn reading(endpoint: &str, outcome: View) -> Reading {
    Reading {
        endpoint: EndpointName::new(endpoint),
        outcome: outcome.map_err(|kind| ReadFailure::new(kind, "test")),
    }
}

/// One reading per view, by endpoints `a`, `b`, `c` and so on.
pub(super) fn evidence(views: impl IntoIterator<Item = View>) -> Evidence {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    Evidence { readings: names.iter().zip(views).map(|(n, view)| reading(n, view)).collect() }
}
