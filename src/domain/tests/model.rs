//! A whole shop in memory: a chain, a gateway and its database, the daemon's watches and reads.
//!
//! It only acts. What must hold is checked by [`super::histories`]. The chain accepts what a token would
//! accept; the gateway is careful (every write conditional on what it believes, as the contract asks) or
//! careless (any status over anything, at any time).

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::{Address, B256, keccak256};

use super::support::*;
use crate::domain::*;

/// Blocks from the head down to the finalized one.
pub(super) const FINALITY_LAG: u64 = 6;

/// Enough for every window and deadline to be over in a finalized block.
const CALM_BLOCKS: u64 = 200;

/// A signed permission to move money: the terms are the payer's, whatever a row says.
#[derive(Debug, Clone)]
pub(super) struct Authorization {
    pub(super) method: Method,
    pub(super) payer: Address,
    pub(super) nonce: B256,
    pub(super) value: Amount,
    /// What whoever settles chooses to move, at most `value` (Permit2's `upto`).
    pub(super) upto: Option<Amount>,
    pub(super) valid_before: BlockTime,
}

impl Authorization {
    fn holds_at(&self, time: BlockTime) -> bool {
        match self.method {
            Method::Permit2 => time <= self.valid_before,
            Method::Eip3009 | Method::Tempo => time < self.valid_before,
        }
    }
}

/// The chain as it is now: a fork id per block, and what consumed which authorization.
#[derive(Debug, Clone, Default)]
pub(super) struct Chain {
    forks: Vec<u64>,
    next_fork: u64,
    pub(super) finalized: u64,
    pub(super) consumed: BTreeMap<B256, Consumption>,
}

impl Chain {
    pub(super) fn head(&self) -> BlockRef {
        self.block(self.forks.len() as u64 - 1)
    }

    fn block(&self, number: u64) -> BlockRef {
        block_of_fork(number, self.forks[number as usize])
    }

    pub(super) fn mine(&mut self, blocks: u64) {
        for _ in 0..blocks {
            self.forks.push(self.next_fork);
        }
        self.finalized = self.finalized.max(self.head().number.saturating_sub(FINALITY_LAG));
    }

    /// Drops `depth` blocks, never a finalized one, and mines `regrow` on another fork.
    fn reorg(&mut self, depth: u64, regrow: u64) {
        let kept = self.head().number.saturating_sub(depth).max(self.finalized);
        self.forks.truncate(kept as usize + 1);
        self.next_fork += 1;
        self.consumed.retain(|_, c| c.log.block.number <= kept);
        self.mine(regrow);
    }

    /// Mines one transaction that uses these authorizations, as far as the token allows it.
    fn land(&mut self, authorizations: &[&Authorization], first_log_index: u64) {
        let tx_hash =
            keccak256(authorizations.iter().map(|a| a.nonce).collect::<Vec<_>>().concat());
        self.mine(1);
        let block = self.head();
        for (i, authorization) in authorizations.iter().enumerate() {
            let log_index = first_log_index + 2 * i as u64;
            if !authorization.holds_at(block.time) {
                continue;
            }
            self.consumed.entry(authorization.nonce).or_insert(Consumption {
                log: LogRef { block, tx_hash, log_index },
                kind: ConsumptionKind::Transferred(SeenTransfer {
                    log_index: log_index + 1,
                    token: TOKEN,
                    from: authorization.payer,
                    to: PAY_TO,
                    value: authorization.upto.unwrap_or(authorization.value),
                    at_most: authorization.upto.map(|_| authorization.value),
                }),
            });
        }
    }

    fn cancel(&mut self, authorization: &Authorization) {
        self.mine(1);
        let gone = canceled(self.head());
        self.consumed.entry(authorization.nonce).or_insert(gone);
    }

    /// What consumed the authorization as of block `number`.
    pub(super) fn consumed_at(&self, nonce: B256, number: u64) -> Option<Consumption> {
        self.consumed.get(&nonce).copied().filter(|c| c.log.block.number <= number)
    }

    /// What an endpoint shows that is `lag` blocks behind.
    fn seen(&self, nonce: B256, lag: u64) -> Observation {
        let head = self.block(self.head().number.saturating_sub(lag).max(self.finalized));
        let finalized = self.block(self.finalized.min(head.number.saturating_sub(lag)));
        let nonce =
            self.consumed_at(nonce, head.number).map_or(NonceState::Unused, NonceState::Used);
        Observation { head, safe: Some(finalized), finalized, nonce }
    }
}

/// What one endpoint makes of a read.
#[derive(Debug, Clone, Copy)]
pub(super) enum Endpoint {
    Honest {
        lag: u64,
    },
    Failing,
    /// Knows the state, not the logs.
    WithoutLogs,
    /// Knows the state, and refuses to search its logs.
    RefusesLogs,
    /// Says unused, whatever is the case. Taken for honest where lies could make up a quorum.
    SaysUnused,
}

/// A check between its read and its application.
#[derive(Debug, Clone)]
pub(super) struct Read {
    pub(super) judged: Judged,
    /// The chain when it was read.
    pub(super) chain: Chain,
}

/// What an overwriting gateway puts into `paid_by`.
#[derive(Debug, Clone, Copy)]
pub(super) enum PaidBy {
    Kept,
    Nobody,
    Payment(usize),
}

/// A term that a gateway writes over.
#[derive(Debug, Clone, Copy)]
pub(super) enum Term {
    Amount,
    Nonce,
    ValidBefore,
}

/// What a payer signs.
#[derive(Debug, Clone, Copy)]
pub(super) enum Signed {
    /// An authorization of the token.
    ForToken,
    /// A permit that moves what it is for.
    Permit,
    /// A permit of which so much is moved.
    PermitUpto(u64),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum RefundAct {
    Claim,
    Release,
    Send,
    Pay,
    Block,
    CallOff,
}

/// One thing that happens. Numbers pick among what there is, modulo how many there are.
#[derive(Debug, Clone)]
pub(super) enum Act {
    Mine(u64),
    Land {
        payments: Vec<usize>,
        first_log_index: u64,
    },
    CancelAuthorization(usize),
    Reorg {
        depth: u64,
        regrow: u64,
    },
    NewPayment {
        order: usize,
        reuse: Option<usize>,
        asks_more: bool,
        signed: Signed,
        valid_secs: u64,
        malformed: bool,
    },
    Mend(usize),
    Answer {
        payment: usize,
        failed: bool,
    },
    Settle(usize),
    Expire(usize),
    CancelOrder(usize),
    Undelivered(usize),
    Deliver(usize),
    OverwritePayment {
        payment: usize,
        status: PaymentStatus,
    },
    OverwriteOrder {
        order: usize,
        status: OrderStatus,
        paid_by: PaidBy,
    },
    ChangeTerms {
        payment: usize,
        term: Term,
    },
    DeleteOrder(usize),
    Reserve {
        order: usize,
    },
    Refund {
        payment: usize,
        act: RefundAct,
    },
    Discover,
    Read {
        payments: Vec<usize>,
        endpoints: Vec<Endpoint>,
    },
    Apply {
        count: usize,
        now: i64,
    },
    /// A quiet round: everything is discovered, read by honest endpoints, and applied.
    Check {
        batch: usize,
    },
    Kill,
}

/// What one transaction of the daemon did.
#[derive(Debug)]
pub(super) struct Applied {
    pub(super) before: Ledger,
    pub(super) reads: Vec<Read>,
    pub(super) resolved: Vec<(PaymentId, Resolution)>,
}

#[derive(Debug, Clone)]
pub(super) struct Shop {
    pub(super) careful: bool,
    pub(super) policy: Policy,
    pub(super) chain: Chain,
    pub(super) authorizations: BTreeMap<B256, Authorization>,
    /// The whole database.
    pub(super) db: Ledger,
    pub(super) malformed: BTreeSet<PaymentId>,
    pub(super) flags: BTreeSet<(PaymentId, FlagKind)>,
    /// Open watches.
    pub(super) watches: BTreeSet<PaymentId>,
    pub(super) reads: Vec<Read>,
}

fn nth<T: Clone>(items: impl Iterator<Item = T>, n: usize) -> Option<T> {
    let items: Vec<T> = items.collect();
    (!items.is_empty()).then(|| items[n % items.len()].clone())
}

impl Shop {
    /// Two orders with two skus between them, one call without stock, and nothing paid yet.
    pub(super) fn new(careful: bool, policy: Policy) -> Self {
        let orders = ["o1", "o2", "o3"].map(|id| order(id, OrderStatus::AwaitingPayment, None));
        let held = ReservationStatus::Held;
        let db = Ledger::of(&[], &orders)
            .with_stock("mug", Some(1))
            .with_stock("hat", Some(0))
            .with_reservation("o1", "mug", 2, held)
            .with_reservation("o1", "hat", 1, held)
            .with_reservation("o2", "mug", 1, held)
            .with_reservation("o2", "mug", 1, held);
        let mut chain = Chain::default();
        chain.mine(1);
        Self {
            careful,
            policy,
            chain,
            authorizations: BTreeMap::new(),
            db,
            malformed: BTreeSet::new(),
            flags: BTreeSet::new(),
            watches: BTreeSet::new(),
            reads: Vec::new(),
        }
    }

    fn payment_id(&self, n: usize) -> Option<PaymentId> {
        nth(self.db.payments.keys().cloned(), n)
    }

    fn payment_mut(&mut self, n: usize) -> Option<&mut Payment> {
        self.db.payments.get_mut(&self.payment_id(n)?)
    }

    fn order_mut(&mut self, n: usize) -> Option<&mut Order> {
        let id = nth(self.db.orders.keys().cloned(), n)?;
        self.db.orders.get_mut(&id)
    }

    fn authorization_of(&self, payment: usize) -> Option<&Authorization> {
        self.authorizations.get(&self.db.payments.get(&self.payment_id(payment)?)?.nonce)
    }

    fn now(&self) -> Timestamp {
        Timestamp::from(self.chain.head().time)
    }

    /// Something happens; `check` sees every transaction of the daemon. What cannot happen does not.
    pub(super) fn act(&mut self, act: &Act, mut check: impl FnMut(&Self, &Applied)) {
        match *act {
            Act::Read { ref payments, ref endpoints } => self.read(payments, endpoints),
            Act::Apply { count, now } => {
                if let Some(applied) = self.apply(count, Timestamp::from_millis(now)) {
                    check(self, &applied);
                }
            }
            Act::Check { batch } => self.check_all(batch, &mut check),
            Act::Discover => self.discover(),
            Act::Kill => self.reads.clear(),
            Act::Mine(blocks) => self.chain.mine(blocks),
            Act::Reorg { depth, regrow } => self.chain.reorg(depth, regrow),
            Act::Land { ref payments, first_log_index } => {
                let mut used: Vec<Authorization> = Vec::new();
                for authorization in payments.iter().filter_map(|n| self.authorization_of(*n)) {
                    let is_consumed = self.chain.consumed.contains_key(&authorization.nonce);
                    if !is_consumed && used.iter().all(|u| u.nonce != authorization.nonce) {
                        used.push(authorization.clone());
                    }
                }
                self.chain.land(&used.iter().collect::<Vec<_>>(), first_log_index);
            }
            Act::CancelAuthorization(n) => {
                if let Some(authorization) = self.authorization_of(n).cloned() {
                    self.chain.cancel(&authorization);
                }
            }
            Act::Refund { payment, act } => self.handle_refund(payment, act),
            _ => {
                self.gateway(act);
            }
        }
    }

    // ---- The gateway

    fn gateway(&mut self, act: &Act) -> Option<()> {
        match *act {
            Act::NewPayment { order, reuse, asks_more, signed, valid_secs, malformed } => {
                let row = self.new_payment(order, reuse, asks_more, signed, valid_secs)?;
                if malformed {
                    self.malformed.insert(row);
                }
            }
            Act::Mend(n) => {
                let id = self.payment_id(n)?;
                self.malformed.remove(&id);
            }
            Act::Answer { payment, failed } => {
                let row = self.payment_mut(payment)?;
                if row.status == PaymentStatus::Settling {
                    row.status =
                        if failed { PaymentStatus::SettleFailed } else { PaymentStatus::Unknown };
                    let order_id = row.order_id.clone();
                    let order = self.db.orders.get_mut(&order_id)?;
                    if failed && order.status == OrderStatus::Paying {
                        order.status = OrderStatus::PaymentFailed;
                    }
                }
            }
            Act::Settle(n) => self.settle(n)?,
            Act::Expire(n) => self.close(n, OrderStatus::Expired)?,
            Act::CancelOrder(n) => self.close(n, OrderStatus::Canceled)?,
            Act::Undelivered(n) => {
                let order = self.order_mut(n)?;
                if order.status == OrderStatus::Paid && order.delivered_at.is_none() {
                    order.status = OrderStatus::Undelivered;
                }
            }
            Act::Deliver(n) => {
                let order = self.order_mut(n)?;
                if order.status == OrderStatus::Paid {
                    order.delivered_at = Some(secs(1));
                }
            }
            _ if !self.careful => self.careless(act)?,
            _ => {}
        }
        self.sync();
        Some(())
    }

    fn careless(&mut self, act: &Act) -> Option<()> {
        match *act {
            Act::OverwritePayment { payment, status } => self.payment_mut(payment)?.status = status,
            Act::OverwriteOrder { order, status, paid_by } => {
                let paid_by = match paid_by {
                    PaidBy::Payment(n) => Some(self.payment_id(n)?),
                    PaidBy::Nobody => None,
                    PaidBy::Kept => self.order_mut(order)?.paid_by.clone(),
                };
                let order = self.order_mut(order)?;
                (order.status, order.paid_by) = (status, paid_by);
            }
            Act::ChangeTerms { payment, term } => {
                let row = self.payment_mut(payment)?;
                match term {
                    Term::Amount => row.amount = row.amount.saturating_add(amount(1)),
                    Term::Nonce => row.nonce = keccak256(row.nonce),
                    Term::ValidBefore => {
                        row.valid_before = BlockTime::from_secs(row.valid_before.as_secs() + 40);
                    }
                }
            }
            Act::DeleteOrder(n) => {
                let id = self.order_mut(n)?.id.clone();
                self.db.orders.remove(&id);
            }
            Act::Reserve { order } => {
                // Stock is taken for an order that is opened again; where there is none, none.
                let order = self.order_mut(order)?.id.clone();
                let on_shelf = self.db.stock.get_mut(&Sku::from("mug"))?;
                if *on_shelf > 0 {
                    *on_shelf -= 1;
                    let db = std::mem::take(&mut self.db);
                    self.db =
                        db.with_reservation(order.as_str(), "mug", 1, ReservationStatus::Held);
                }
            }
            _ => {}
        }
        Some(())
    }

    /// Every column the store would read twice says the same.
    fn sync(&mut self) {
        for payment in self.db.payments.values() {
            let status = (!self.malformed.contains(&payment.id)).then_some(payment.status);
            let (id, order_id) = (payment.id.clone(), payment.order_id.clone());
            self.db.siblings.insert(id.clone(), Sibling { id, order_id, status });
        }
    }

    fn new_payment(
        &mut self,
        order: usize,
        reuse: Option<usize>,
        asks_more: bool,
        signed: Signed,
        valid_secs: u64,
    ) -> Option<PaymentId> {
        let careful = self.careful;
        let id = format!("p{}", self.db.payments.len());
        let reused = reuse.and_then(|n| self.authorization_of(n)).cloned();
        let now = self.chain.head().time;
        let order = self.order_mut(order)?;
        let takes_payment =
            matches!(order.status, OrderStatus::AwaitingPayment | OrderStatus::PaymentFailed);
        if careful && !takes_payment {
            return None;
        }
        order.status = if order.status.is_open() { OrderStatus::Paying } else { order.status };
        let mut row = payment(&id, order.id.as_str());
        row.status = PaymentStatus::Settling;
        row.created_at = Timestamp::from(now);
        row.broadcast_at = Some(row.created_at);
        let authorization = reused.unwrap_or(Authorization {
            method: match signed {
                Signed::ForToken => Method::Eip3009,
                Signed::Permit | Signed::PermitUpto(_) => Method::Permit2,
            },
            payer: row.payer,
            nonce: row.nonce,
            value: row.amount,
            upto: match signed {
                Signed::PermitUpto(units) => Some(amount(units)),
                Signed::ForToken | Signed::Permit => None,
            },
            valid_before: BlockTime::from_secs(now.as_secs() + valid_secs),
        });
        (row.payer, row.nonce) = (authorization.payer, authorization.nonce);
        row.method = authorization.method;
        row.valid_before = authorization.valid_before;
        if asks_more {
            row.amount = row.amount.saturating_add(amount(7));
        }
        self.authorizations.insert(row.nonce, authorization);
        let db = std::mem::take(&mut self.db);
        self.db = db.with_identifier(&id, IdentifierStatus::InFlight);
        let id = row.id.clone();
        self.db.payments.insert(row.id.clone(), row);
        Some(id)
    }

    /// The gateway learns by itself that a payment settled. A careful one waits for finality, and leaves
    /// what it cannot pay an open order with to the daemon.
    fn settle(&mut self, n: usize) -> Option<()> {
        let careful = self.careful;
        let finalized = self.chain.finalized;
        let id = self.payment_id(n)?;
        let row = self.db.payments.get(&id)?;
        let has_landed = self.chain.consumed_at(row.nonce, finalized).is_some_and(|c| c.pays(row));
        let is_shared = self.db.payments.values().any(|p| p.id != id && p.same_authorization(row));
        let order = self.db.orders.get(&row.order_id)?;
        if careful && !(has_landed && !is_shared && row.status.is_open() && order.status.is_open())
        {
            return None;
        }
        let order_id = order.id.clone();
        self.db.payments.get_mut(&id)?.status = PaymentStatus::Settled;
        let order = self.db.orders.get_mut(&order_id)?;
        (order.status, order.paid_by) = (OrderStatus::Paid, Some(id));
        for reservation in self.db.reservations.values_mut() {
            if reservation.order_id == order_id && reservation.status == ReservationStatus::Held {
                reservation.status = ReservationStatus::Committed;
            }
        }
        Some(())
    }

    fn close(&mut self, n: usize, status: OrderStatus) -> Option<()> {
        let careful = self.careful;
        let order = self.order_mut(n)?;
        if careful && !order.status.is_open() {
            return None;
        }
        order.status = status;
        let order_id = order.id.clone();
        for reservation in self.db.reservations.values_mut() {
            if reservation.order_id == order_id && reservation.status == ReservationStatus::Held {
                reservation.status = ReservationStatus::Released;
                *self.db.stock.get_mut(&reservation.sku)? += reservation.quantity;
            }
        }
        Some(())
    }

    fn handle_refund(&mut self, n: usize, act: RefundAct) {
        use RefundStatus as R;
        let Some(id) = nth(self.db.refunds.keys().cloned(), n) else { return };
        let Some(status) = self.db.refunds.get_mut(&id) else { return };
        *status = match (act, *status) {
            (RefundAct::Claim, R::Owed) => R::Claimed,
            (RefundAct::Release, R::Claimed) => R::Owed,
            (RefundAct::Send, R::Claimed) => R::Sent,
            (RefundAct::Pay, R::Sent) => R::Paid,
            (RefundAct::Block, R::Owed | R::Claimed) => R::Blocked,
            (RefundAct::CallOff, R::Owed | R::Blocked) => R::Void,
            (_, status) => status,
        };
    }

    // ---- The daemon

    /// As `Store::discover` says.
    pub(super) fn discover(&mut self) {
        let found: Vec<PaymentId> = self
            .db
            .payments
            .values()
            .filter(|p| {
                let order = self.db.orders.get(&p.order_id);
                let owes = order.is_some_and(|o| match o.status {
                    OrderStatus::Undelivered => true,
                    OrderStatus::Paid => o.paid_by.as_ref().is_some_and(|by| *by != p.id),
                    _ => false,
                });
                let is_settled = p.status == PaymentStatus::Settled;
                p.status.is_open() || (is_settled && owes && !self.db.refunds.contains_key(&p.id))
            })
            .map(|p| p.id.clone())
            .collect();
        self.watches.extend(found);
    }

    /// Reads about open watches; one read of a payment at a time, as leases see to.
    fn read(&mut self, payments: &[usize], endpoints: &[Endpoint]) {
        let mut lies = self.policy.quorum - 1;
        let endpoints: Vec<Endpoint> = endpoints
            .iter()
            .map(|endpoint| match endpoint {
                Endpoint::SaysUnused if lies == 0 => Endpoint::Honest { lag: 0 },
                Endpoint::SaysUnused => {
                    lies -= 1;
                    Endpoint::SaysUnused
                }
                other => *other,
            })
            .collect();
        for n in payments {
            let Some(id) = nth(self.watches.iter().cloned(), *n) else { return };
            if self.reads.iter().all(|r| r.judged.payment_id != id) {
                self.read_one(&id, &endpoints);
            }
        }
    }

    pub(super) fn read_one(&mut self, id: &PaymentId, endpoints: &[Endpoint]) {
        let row = &self.db.payments[id];
        let views = endpoints.iter().map(|endpoint| match *endpoint {
            Endpoint::Honest { lag } => Ok(self.chain.seen(row.nonce, lag)),
            Endpoint::Failing => Err(ReadFailureKind::Unreachable),
            Endpoint::SaysUnused => {
                Ok(Observation { nonce: NonceState::Unused, ..self.chain.seen(row.nonce, 0) })
            }
            Endpoint::WithoutLogs => {
                let mut seen = self.chain.seen(row.nonce, 0);
                if let NonceState::Used(_) = seen.nonce {
                    seen.nonce = NonceState::UsedWithoutLog { from_block: 0, to_block: 0 };
                }
                Ok(seen)
            }
            Endpoint::RefusesLogs => {
                let mut seen = self.chain.seen(row.nonce, 0);
                if let NonceState::Used(_) = seen.nonce {
                    let failure = ReadFailure::new(ReadFailureKind::RateLimited, "slow down");
                    seen.nonce = NonceState::UsedUnread(failure);
                }
                Ok(seen)
            }
        });
        let evidence = evidence(views);
        let verdict = match self.malformed.contains(id) {
            true => Verdict::Inconclusive(Inconclusive::MalformedPayment),
            false => judge(row, &evidence, &self.policy),
        };
        let judged =
            Judged { terms: Some(row.terms()), evidence, ..judged_as(id.as_str(), verdict) };
        self.reads.push(Read { judged, chain: self.chain.clone() });
    }

    /// Applies the first `count` reads in one transaction, on the rows a store would lock.
    pub(super) fn apply(&mut self, count: usize, now: Timestamp) -> Option<Applied> {
        let reads: Vec<Read> = self.reads.drain(..count.min(self.reads.len())).collect();
        if reads.is_empty() {
            return None;
        }
        let before = self.db.clone();
        let mut locked = self.lock(&reads);
        let batch = reads.iter().map(|r| r.judged.clone()).collect();
        let resolved = locked.apply_all(batch, &self.policy, now);
        let touched: BTreeSet<&PaymentId> = locked.payments.keys().collect();
        self.db.transfers.retain(|t| !touched.contains(&t.payment_id));
        self.db
            .transfers
            .extend(locked.transfers.iter().filter(|t| touched.contains(&t.payment_id)).cloned());
        self.db.payments.extend(locked.payments);
        self.db.orders.extend(locked.orders);
        self.db.reservations.extend(locked.reservations);
        self.db.stock.extend(locked.stock);
        self.db.identifiers.extend(locked.identifiers);
        self.db.refunds.extend(locked.refunds);
        self.sync();
        for (id, resolution) in &resolved {
            match resolution.watch.next.phase {
                Phase::Closed => self.watches.remove(id),
                _ => self.watches.insert(id.clone()),
            };
            for kind in &resolution.close_flags {
                self.flags.remove(&(id.clone(), *kind));
            }
            self.flags.extend(resolution.flags.iter().map(|f| (id.clone(), f.kind)));
        }
        Some(Applied { before, reads, resolved })
    }

    /// Only the rows that [`Ledger`] documents: what a store must not forget to load.
    fn lock(&self, reads: &[Read]) -> Ledger {
        let db = &self.db;
        let checked: Vec<&Payment> =
            reads.iter().map(|r| &db.payments[&r.judged.payment_id]).collect();
        let claimants: Vec<&Payment> = db
            .payments
            .values()
            .filter(|p| checked.iter().any(|c| c.same_authorization(p)))
            .collect();
        let (malformed, readable): (Vec<&Payment>, Vec<&Payment>) =
            claimants.into_iter().partition(|p| self.malformed.contains(&p.id));
        let payments: BTreeMap<PaymentId, Payment> =
            readable.into_iter().map(|p| (p.id.clone(), p.clone())).collect();
        let of_checked = |order: &OrderId| checked.iter().any(|c| c.order_id == *order);
        let siblings: BTreeMap<PaymentId, Sibling> = db
            .siblings
            .iter()
            .filter(|(_, s)| of_checked(&s.order_id))
            .map(|(id, s)| (id.clone(), s.clone()))
            .collect();
        let is_spoken_of = |seen: &Transfer| {
            reads.iter().any(|r| match &r.judged.verdict {
                Verdict::Settled(s) => s.transfer.is_same_log(seen),
                _ => false,
            })
        };
        Ledger {
            malformed: malformed.into_iter().map(|p| (p.id.clone(), without_amount(p))).collect(),
            orders: clone_if(&db.orders, |o| of_checked(&o.id)),
            reservations: clone_if(&db.reservations, |r| of_checked(&r.order_id)),
            stock: db.stock.clone(),
            identifiers: clone_if(&db.identifiers, |i| payments.contains_key(&i.payment_id)),
            transfers: db
                .transfers
                .iter()
                .filter(|t| {
                    payments.contains_key(&t.payment_id)
                        || siblings.contains_key(&t.payment_id)
                        || is_spoken_of(&t.settlement.transfer)
                })
                .cloned()
                .collect(),
            refunds: db
                .refunds
                .iter()
                .filter(|(id, _)| payments.contains_key(*id) || siblings.contains_key(*id))
                .map(|(id, status)| (id.clone(), *status))
                .collect(),
            payments,
            siblings,
        }
    }

    fn check_all(&mut self, batch: usize, check: &mut impl FnMut(&Self, &Applied)) {
        self.discover();
        let honest = [Endpoint::Honest { lag: 0 }; 3];
        for id in self.watches.clone() {
            if self.reads.iter().all(|r| r.judged.payment_id != id) {
                self.read_one(&id, &honest);
            }
        }
        while let Some(applied) = self.apply(batch, self.now()) {
            check(self, &applied);
        }
    }

    /// The world calms down: every window closes, everything is final, and the daemon sees it all.
    pub(super) fn calm_down(&mut self, mut check: impl FnMut(&Self, &Applied)) {
        self.malformed.clear();
        self.sync();
        self.chain.mine(CALM_BLOCKS);
        // Each round may hand the next one something: a reorg noticed, then a failure, then a refund.
        const ROUNDS: usize = 6;
        for _ in 0..ROUNDS {
            self.check_all(2, &mut check);
        }
    }
}

fn clone_if<K: Ord + Clone, V: Clone>(
    rows: &BTreeMap<K, V>,
    wanted: impl Fn(&V) -> bool,
) -> BTreeMap<K, V> {
    rows.iter().filter(|(_, row)| wanted(row)).map(|(k, row)| (k.clone(), row.clone())).collect()
}
