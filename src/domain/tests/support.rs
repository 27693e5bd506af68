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

/// The payment's own transfer, in a transaction of its own in `block`, behind log `log_index`.
pub(super) fn paying(payment: &Payment, block: BlockRef, log_index: u64) -> Consumption {
    Consumption {
        log: LogRef { block, tx_hash: payment.nonce, log_index },
        kind: ConsumptionKind::Transferred(SeenTransfer {
            log_index: log_index + 1,
            token: payment.token,
            from: payment.payer,
            to: payment.pay_to,
            value: payment.amount,
            at_most: None,
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
        tx_hash: payment.nonce,
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

// ---- Rows and verdicts

pub(super) fn order(id: &str, status: OrderStatus, paid_by: Option<&str>) -> Order {
    Order {
        id: OrderId::from(id),
        kind: OrderKind::Order,
        status,
        paid_by: paid_by.map(PaymentId::from),
        delivered_at: None,
    }
}

/// The first block at the deadline of a payment broadcast at second 0, under the default policy.
pub(super) const DEADLINE_BLOCK: u64 = 24 * 60 * 60 / BLOCK_SECS;

pub(super) fn settled(payment: &Payment, block_number: u64, finality: Finality) -> Verdict {
    let transfer = transfer_of(payment, block(block_number), 5);
    Verdict::Settled(Settlement { transfer, finality })
}

pub(super) fn pending(block_number: u64) -> Verdict {
    Verdict::Pending { as_of: block(block_number), agreeing: 1 }
}

pub(super) fn unsettleable(reason: Unsettleable, block_number: u64) -> Verdict {
    Verdict::Unsettleable { reason, as_of: block(block_number), consumption: None }
}

pub(super) fn due() -> DueTimes {
    let targeted = NextCheck { phase: Phase::Targeted, at: Some(secs(1)) };
    DueTimes {
        open: targeted,
        late: Some(secs(2)),
        finality: secs(3),
        reopened: secs(0),
        schedule_id: None,
    }
}

pub(super) fn judged_as(id: &str, verdict: Verdict) -> Judged {
    Judged {
        payment_id: PaymentId::from(id),
        checked_at: secs(0),
        terms: None,
        evidence: Evidence::default(),
        verdict,
        problem: None,
        due: due(),
    }
}

impl Ledger {
    /// These rows and nothing else.
    pub(super) fn of(payments: &[Payment], orders: &[Order]) -> Self {
        let sibling = |p: &Payment| Sibling {
            id: p.id.clone(),
            order_id: p.order_id.clone(),
            status: Some(p.status),
        };
        Self {
            payments: payments.iter().map(|p| (p.id.clone(), p.clone())).collect(),
            orders: orders.iter().map(|o| (o.id.clone(), o.clone())).collect(),
            siblings: payments.iter().map(|p| (p.id.clone(), sibling(p))).collect(),
            ..Self::default()
        }
    }

    pub(super) fn with_stock(mut self, sku: &str, available: Option<i64>) -> Self {
        self.stock.extend(available.map(|n| (Sku::from(sku), n)));
        self
    }

    pub(super) fn with_reservation(
        mut self,
        order: &str,
        sku: &str,
        quantity: i64,
        status: ReservationStatus,
    ) -> Self {
        let id = format!("r{}", self.reservations.len());
        let (order_id, sku) = (OrderId::from(order), Sku::from(sku));
        self.reservations.insert(id.clone(), Reservation { id, order_id, sku, quantity, status });
        self
    }

    pub(super) fn with_identifier(mut self, payment: &str, status: IdentifierStatus) -> Self {
        let id = format!("i{}", self.identifiers.len());
        let payment_id = PaymentId::from(payment);
        self.identifiers.insert(id.clone(), Identifier { id, payment_id, status });
        self
    }

    pub(super) fn with_refund(mut self, payment: &str, status: RefundStatus) -> Self {
        self.refunds.insert(PaymentId::from(payment), status);
        self
    }

    /// The payment's transfer, recorded as [`settled`] would have it.
    pub(super) fn with_record(mut self, payment: &Payment, n: u64, finality: Finality) -> Self {
        let Verdict::Settled(settlement) = settled(payment, n, finality) else { unreachable!() };
        let (payment_id, seen_at) = (payment.id.clone(), secs(n * BLOCK_SECS));
        self.transfers.push(RecordedTransfer { payment_id, settlement, seen_at });
        self
    }

    /// Resolves a batch as a store does, and says what changed.
    pub(super) fn apply_all(
        &mut self,
        batch: Vec<Judged>,
        policy: &Policy,
        now: Timestamp,
    ) -> Vec<(PaymentId, Resolution)> {
        let resolved = self.resolve_all(batch, policy, now);
        resolved.into_iter().map(|d| (d.judged.payment_id, d.resolution)).collect()
    }

    /// Resolves one verdict and says what changed.
    pub(super) fn apply(&mut self, id: &str, verdict: Verdict, policy: &Policy) -> Resolution {
        let now = secs(DEADLINE_BLOCK * BLOCK_SECS);
        self.apply_all(vec![judged_as(id, verdict)], policy, now).remove(0).1
    }

    /// Every status in one line, to compare with.
    pub(super) fn told(&self) -> String {
        let mut words: Vec<String> = Vec::new();
        words.extend(self.payments.values().map(|p| format!("{}={}", p.id, p.status)));
        words.extend(self.orders.values().map(|o| match &o.paid_by {
            Some(by) => format!("{}={} by {by}", o.id, o.status),
            None => format!("{}={}", o.id, o.status),
        }));
        words.extend(self.reservations.values().map(|r| format!("{}={}", r.id, r.status)));
        words.extend(self.stock.iter().map(|(sku, n)| format!("{sku}={n}")));
        words.extend(self.identifiers.values().map(|i| format!("{}={}", i.id, i.status)));
        words.extend(self.refunds.iter().map(|(p, status)| format!("refund {p}={status}")));
        words.join(", ")
    }
}

/// The payment's row, with an amount that nobody can read.
pub(super) fn without_amount(payment: &Payment) -> RawPayment {
    let text = |value: &dyn ToString| Some(value.to_string());
    RawPayment {
        id: payment.id.to_string(),
        order_id: text(&payment.order_id),
        rail: text(&payment.rail),
        method: text(&payment.method),
        chain_id: text(&payment.chain_id),
        token: text(&payment.token),
        payer: text(&payment.payer),
        pay_to: text(&payment.pay_to),
        amount: None,
        nonce: text(&payment.nonce),
        valid_after: None,
        valid_before: text(&payment.valid_before.as_secs()),
        tx_hash: None,
        status: text(&payment.status),
        created_at: text(&payment.created_at.as_millis()),
        broadcast_at: None,
    }
}

pub(super) fn flags(resolution: &Resolution) -> Vec<&'static str> {
    resolution.flags.iter().map(|f| f.kind.code()).collect()
}

pub(super) fn events(resolution: &Resolution) -> Vec<&'static str> {
    resolution.events.iter().map(|e| e.kind.code()).collect()
}
