//! Conservation (I4): every transfer that reached a receiver is accounted for exactly once.
//!
//! The chain's side is what the scan saw. The other side is what orders, refund records and flags say of
//! each transfer. [`LedgerPage::account`] compares the two, transfer by transfer, and says what is still to
//! be done about those nobody accounts for. Pure: a store fills a [`LedgerPage`] from one snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use alloy_primitives::{Address, B256, U256};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::order::column_code;
use super::{
    Amount, BlockTime, Flag, FlagKind, GoneFlag, Method, Order, OrderId, OrderStatus, Payment,
    PaymentId, PaymentStatus, RaisedFlag, RefundStatus, Transfer,
};

/// Who is paid: one address of the shop, in one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Receiver {
    /// The token contract.
    pub token: Address,
    /// The address.
    pub pay_to: Address,
}

impl Receiver {
    /// Whom this transfer reached.
    pub fn of(transfer: &Transfer) -> Self {
        Self { token: transfer.token, pay_to: transfer.to }
    }
}

/// The name of one log in flags: chain, transaction and log index.
pub fn log_subject(transfer: &Transfer) -> String {
    format!("{}:{:#x}:{}", transfer.chain_id, transfer.tx_hash, transfer.log_index)
}

/// A row of the transfers that are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownTransfer {
    /// The row.
    pub id: i64,
    /// What moved.
    pub transfer: Transfer,
    /// Whose it was found to be, by a check of that payment.
    pub payment_id: Option<PaymentId>,
    /// The nonce, where the scan saw one.
    pub nonce: Option<B256>,
    /// Whether the scan saw it.
    pub scanned: bool,
    /// Whether it was marked as not accounted for.
    pub marked: bool,
}

column_code! {
    /// What became of money that reached a receiver.
    Account {
        /// It pays an order.
        Paid = "paid",
        /// A refund of it is owed, or on its way.
        Owed = "owed",
        /// It was refunded.
        Refunded = "refunded",
        /// Its refund was called off by a person.
        CalledOff = "called_off",
        /// A person has to decide about it, or did.
        Flagged = "flagged",
        /// Its payment is being followed, and not resolved yet.
        Open = "open",
    }
}

/// Totals of one receiver, in base units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Totals {
    /// What the scan saw arrive.
    pub chain: Amount,
    /// What pays orders.
    pub paid: Amount,
    /// What is owed back.
    pub owed: Amount,
    /// What was refunded.
    pub refunded: Amount,
    /// What was owed back until a person called it off.
    pub called_off: Amount,
    /// What a person has to decide about, or did.
    pub flagged: Amount,
    /// What belongs to payments that are still being followed.
    pub open: Amount,
}

impl Totals {
    /// Adds an amount to an account.
    pub fn add(&mut self, account: Account, amount: Amount) {
        let total = match account {
            Account::Paid => &mut self.paid,
            Account::Owed => &mut self.owed,
            Account::Refunded => &mut self.refunded,
            Account::CalledOff => &mut self.called_off,
            Account::Flagged => &mut self.flagged,
            Account::Open => &mut self.open,
        };
        *total = total.saturating_add(amount);
    }

    /// An account's total.
    pub fn of(&self, account: Account) -> Amount {
        match account {
            Account::Paid => self.paid,
            Account::Owed => self.owed,
            Account::Refunded => self.refunded,
            Account::CalledOff => self.called_off,
            Account::Flagged => self.flagged,
            Account::Open => self.open,
        }
    }

    /// Adds the totals of another page.
    pub fn merge(&mut self, other: &Self) {
        self.chain = self.chain.saturating_add(other.chain);
        for account in Account::ALL {
            self.add(*account, other.of(*account));
        }
    }

    /// What arrived less what is accounted for.
    pub fn drift(&self) -> Drift {
        let accounts = Account::ALL.iter().map(|account| self.of(*account));
        let books = accounts.fold(Amount::ZERO, Amount::saturating_add);
        Drift::between(self.chain, books)
    }
}

/// A difference in base units, with its sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Drift {
    is_negative: bool,
    size: U256,
}

impl Drift {
    /// `chain - books`.
    pub fn between(chain: Amount, books: Amount) -> Self {
        let (chain, books) = (chain.get(), books.get());
        Self { is_negative: chain < books, size: chain.abs_diff(books) }
    }

    /// Whether everything is accounted for once.
    pub fn is_zero(self) -> bool {
        self.size.is_zero()
    }

    /// As a float, for metrics: exact up to 2^53 base units.
    pub fn as_f64(self) -> f64 {
        let size = f64::from(self.size);
        if self.is_negative { -size } else { size }
    }
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.is_negative { "-" } else { "" };
        write!(f, "{sign}{}", self.size)
    }
}

impl Serialize for Drift {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Drift {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let (is_negative, digits) = match text.strip_prefix('-') {
            Some(digits) => (true, digits),
            None => (false, text.as_str()),
        };
        let size: Amount = digits.parse().map_err(serde::de::Error::custom)?;
        Ok(Self { is_negative, size: size.get() })
    }
}

/// The blocks of a receiver that the scan has read: both ends belong to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scanned {
    /// The first.
    pub first: u64,
    /// The last.
    pub last: u64,
}

/// Where a flag stands that accounts for money: one whose cause is gone accounts for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlagState {
    /// A person has to decide.
    Open,
    /// A person did.
    Decided,
}

/// Refunds of one payment that landed and were not to, as flags tell of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RefundsAgain {
    /// A person has to decide about so many.
    pub open: u32,
    /// A person did about so many.
    pub decided: u32,
}

impl RefundsAgain {
    /// Counts one more.
    pub fn count(&mut self, state: FlagState) {
        match state {
            FlagState::Open => self.open += 1,
            FlagState::Decided => self.decided += 1,
        }
    }
}

/// One page of transfers in order of block time, and every row that says something of their money.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LedgerPage {
    /// The transfers.
    pub transfers: Vec<KnownTransfer>,
    /// The payments they were found to be, and every payment with one of their nonces.
    pub payments: BTreeMap<PaymentId, Payment>,
    /// Those payments' orders, as far as they can be read.
    pub orders: BTreeMap<OrderId, Order>,
    /// The refund records of those payments.
    pub refunds: BTreeMap<PaymentId, (RefundStatus, Amount)>,
    /// Flags of those payments, by the payment's id, and of those logs, by their subject.
    pub flags: BTreeMap<(FlagKind, String), FlagState>,
    /// Refunds of those payments that landed and were not to.
    pub again: BTreeMap<PaymentId, RefundsAgain>,
    /// Those of the payments whose watch is open.
    pub watched: BTreeSet<PaymentId>,
}

/// Money that is not accounted for exactly once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unaccounted {
    /// The log, as flags name it; for a record without a transfer, the payment.
    pub subject: String,
    /// Whose it is, if that is known.
    pub payment_id: Option<PaymentId>,
    /// What arrived less what is accounted for.
    pub drift: Drift,
}

/// What a page comes to.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PageAccount {
    /// Totals by receiver.
    pub totals: BTreeMap<Receiver, Totals>,
    /// Payments to check now: their money is there and nobody has resolved that.
    pub take_up: BTreeSet<PaymentId>,
    /// Flags to raise.
    pub raise: Vec<RaisedFlag>,
    /// Flags to close.
    pub close: Vec<GoneFlag>,
    /// Transfers that are not accounted for exactly once.
    pub unaccounted: Vec<Unaccounted>,
    /// Rows to mark as not accounted for.
    pub mark: Vec<i64>,
    /// Rows to take that mark from.
    pub unmark: Vec<i64>,
}

/// What one transfer comes to.
#[derive(Default)]
struct OneAccount {
    accounts: Vec<(Account, Amount)>,
    take_up: BTreeSet<PaymentId>,
    raise: Vec<RaisedFlag>,
    close: Vec<GoneFlag>,
}

/// Flags by which a person is asked what becomes of a payment's money.
const MONEY_FLAGS: [FlagKind; 5] = [
    FlagKind::AuthorizationContested,
    FlagKind::PaidByUnknown,
    FlagKind::OrderUnreadable,
    FlagKind::MalformedPayment,
    FlagKind::SettledOrderOver,
];

impl LedgerPage {
    /// Accounts for the page's transfers, those in blocks that the scan has read.
    pub fn account(&self, scanned: &BTreeMap<Receiver, Scanned>) -> PageAccount {
        let mut page = PageAccount::default();
        for known in &self.transfers {
            let receiver = Receiver::of(&known.transfer);
            let number = known.transfer.block.number;
            let is_read =
                scanned.get(&receiver).is_some_and(|s| (s.first..=s.last).contains(&number));
            if !is_read {
                continue;
            }
            let one = self.account_one(known);
            let mut totals = Totals::default();
            if known.scanned {
                totals.chain = known.transfer.value;
            }
            for (account, amount) in one.accounts {
                totals.add(account, amount);
            }
            let drift = totals.drift();
            match (drift.is_zero(), known.marked) {
                (true, true) => page.unmark.push(known.id),
                (false, false) => page.mark.push(known.id),
                _ => {}
            }
            if !drift.is_zero() {
                let payment_id = self.owner(known).map(|payment| payment.id.clone());
                let subject = log_subject(&known.transfer);
                let payment_id = known.payment_id.clone().or(payment_id);
                page.unaccounted.push(Unaccounted { subject, payment_id, drift });
            }
            page.totals.entry(receiver).or_default().merge(&totals);
            page.take_up.extend(one.take_up);
            page.raise.extend(one.raise);
            page.close.extend(one.close);
        }
        page
    }

    /// The payments that claim the transfer's authorization and are paid by it.
    fn claimants(&self, known: &KnownTransfer) -> Vec<&Payment> {
        let claims = |p: &&Payment| Some(p.nonce) == known.nonce && known.transfer.pays(p);
        self.payments.values().filter(claims).collect()
    }

    /// Whose transfer it is: the payment it was found to be; else, of those that claim it, the one whose
    /// order it pays, one that is settled, or the one created first that has not failed.
    fn owner(&self, known: &KnownTransfer) -> Option<&Payment> {
        if let Some(id) = &known.payment_id {
            return self.payments.get(id);
        }
        let rank = |p: &&Payment| {
            let settled = p.status == PaymentStatus::Settled;
            let failed = p.status == PaymentStatus::Failed;
            (!self.pays_its_order(p), !settled, failed, p.created_at, p.id.clone())
        };
        self.claimants(known).into_iter().min_by_key(rank)
    }

    fn pays_its_order(&self, payment: &Payment) -> bool {
        self.orders.get(&payment.order_id).is_some_and(|order| {
            order.status == OrderStatus::Paid && order.paid_by.as_ref() == Some(&payment.id)
        })
    }

    fn flag(&self, kind: FlagKind, about: &str) -> Option<FlagState> {
        self.flags.get(&(kind, about.to_owned())).copied()
    }

    fn account_one(&self, known: &KnownTransfer) -> OneAccount {
        let owner = self.owner(known);
        let mut one = match (owner, &known.payment_id) {
            (Some(payment), _) => self.account_matched(known, payment),
            (None, Some(id)) => self.account_of_record(known, id, None),
            (None, None) => self.account_unmatched(known),
        };
        let owner = known.payment_id.as_ref().or(owner.map(|payment| &payment.id));
        one.raise.extend(owner.iter().flat_map(|owner| self.without_their_own(known, owner)));
        one
    }

    /// The others that claim the owner's transfer and were taken for settled by it: one transfer pays one
    /// order (I3).
    fn without_their_own(&self, known: &KnownTransfer, owner: &PaymentId) -> Vec<RaisedFlag> {
        let kind = FlagKind::SettledWithoutTransfer;
        self.claimants(known)
            .into_iter()
            .filter(|p| p.id != *owner)
            .filter(|p| p.status == PaymentStatus::Settled || self.pays_its_order(p))
            .filter(|p| self.flag(kind, p.id.as_str()).is_none())
            .map(|p| pays_another(p, &known.transfer))
            .collect()
    }

    /// Money that a payment claims.
    fn account_matched(&self, known: &KnownTransfer, payment: &Payment) -> OneAccount {
        let mut one = self.account_of_record(known, &payment.id, Some(payment));
        let subject = log_subject(&known.transfer);
        if self.flag(FlagKind::UnmatchedTransfer, &subject) == Some(FlagState::Open) {
            let note = format!("payment {} claims it", payment.id);
            one.close.push(GoneFlag {
                kind: FlagKind::UnmatchedTransfer,
                payment_id: None,
                subject: Some(subject),
                note,
            });
        }
        let mut no_longer = |kind: FlagKind, note: &str| {
            if self.flag(kind, payment.id.as_str()) == Some(FlagState::Open) {
                one.close.push(GoneFlag {
                    kind,
                    payment_id: Some(payment.id.clone()),
                    subject: None,
                    note: note.to_owned(),
                });
            }
        };
        no_longer(FlagKind::SettledWithoutTransfer, "its transfer was found");
        if self.pays_its_order(payment) || self.refunds.contains_key(&payment.id) {
            no_longer(FlagKind::SettledOrderOver, "it pays its order, or its refund is recorded");
        }
        one
    }

    /// What is said of a payment's money. The payment is `None` when its row is gone or makes no sense.
    fn account_of_record(
        &self,
        known: &KnownTransfer,
        id: &PaymentId,
        payment: Option<&Payment>,
    ) -> OneAccount {
        let mut one = OneAccount::default();
        let moved = known.transfer.value;
        let pays = payment.is_some_and(|payment| self.pays_its_order(payment));
        if let (true, Some(payment)) = (pays, payment) {
            // What was found to be this payment's moved the observed amount, and a permit may move less
            // than it asked for; else its own row says what the gateway took it for.
            let is_observed = known.payment_id.is_some() || payment.method == Method::Permit2;
            let amount = if is_observed { moved } else { payment.amount };
            one.accounts.push((Account::Paid, amount));
        }
        if let Some((status, amount)) = self.refunds.get(id) {
            let again = self.again.get(id).copied().unwrap_or_default();
            // What went back once too often is missing until a person has decided about it.
            let mut missing = if status.is_closed() { again.open } else { 0 };
            match status {
                RefundStatus::Void if pays => {}
                // It was called off, and went back all the same: once, as it came.
                RefundStatus::Void if again != RefundsAgain::default() => {
                    one.accounts.push((Account::Flagged, *amount));
                    missing = missing.min(again.open + again.decided - 1);
                }
                RefundStatus::Void => one.accounts.push((Account::CalledOff, *amount)),
                RefundStatus::Paid => one.accounts.push((Account::Refunded, *amount)),
                _ => one.accounts.push((Account::Owed, *amount)),
            }
            one.accounts.extend((0..missing).map(|_| (Account::Flagged, *amount)));
        }
        if !one.accounts.is_empty() {
            return one;
        }
        if MONEY_FLAGS.iter().any(|kind| self.flag(*kind, id.as_str()).is_some()) {
            one.accounts.push((Account::Flagged, moved));
        } else if self.watched.contains(id) {
            one.accounts.push((Account::Open, moved));
        } else if let Some(payment) = payment {
            let order = self.orders.get(&payment.order_id);
            match order.filter(|order| is_settled_and_over(payment, order)) {
                Some(order) => {
                    one.raise.push(settled_order_over(known, payment, order));
                    one.accounts.push((Account::Flagged, moved));
                }
                None => {
                    one.take_up.insert(payment.id.clone());
                    one.take_up.extend(self.claimants(known).into_iter().map(|p| p.id.clone()));
                }
            }
        }
        one
    }

    /// Money that no payment claims.
    fn account_unmatched(&self, known: &KnownTransfer) -> OneAccount {
        let mut one = OneAccount::default();
        let subject = log_subject(&known.transfer);
        if self.flag(FlagKind::UnmatchedTransfer, &subject).is_none() {
            one.raise.push(self.unmatched(known, subject));
        }
        one.accounts.push((Account::Flagged, known.transfer.value));
        one
    }

    fn unmatched(&self, known: &KnownTransfer, subject: String) -> RaisedFlag {
        let t = &known.transfer;
        let same_nonce = self.payments.values().filter(|p| Some(p.nonce) == known.nonce);
        let candidates: Vec<Value> = same_nonce
            .map(|p| json!({ "payment": p.id, "why": "the same nonce, and other details" }))
            .collect();
        RaisedFlag {
            payment_id: None,
            order_id: None,
            flag: Flag {
                kind: FlagKind::UnmatchedTransfer,
                subject,
                detail: json!({
                    "chain_id": t.chain_id,
                    "token": t.token,
                    "from": t.from,
                    "pay_to": t.to,
                    "amount": t.value,
                    "block": t.block,
                    "time": t.block.time.to_string(),
                    "tx_hash": t.tx_hash,
                    "log_index": t.log_index,
                    "nonce": known.nonce,
                    "candidates": candidates,
                }),
            },
        }
    }
}

/// The gateway settled it itself, and then ended its order another way. Whether the money went back since
/// is written nowhere: a refund owed could be a second one.
fn is_settled_and_over(payment: &Payment, order: &Order) -> bool {
    let is_over =
        matches!(order.status, OrderStatus::Failed | OrderStatus::Expired | OrderStatus::Canceled);
    payment.status == PaymentStatus::Settled && is_over
}

fn settled_order_over(known: &KnownTransfer, payment: &Payment, order: &Order) -> RaisedFlag {
    RaisedFlag {
        payment_id: Some(payment.id.clone()),
        order_id: Some(order.id.clone()),
        flag: Flag {
            kind: FlagKind::SettledOrderOver,
            subject: String::new(),
            detail: json!({ "order_status": order.status, "transfer": known.transfer }),
        },
    }
}

/// A payment was called settled, and the only transfer of its authorization is another payment's.
pub fn pays_another(payment: &Payment, transfer: &Transfer) -> RaisedFlag {
    settled_without_transfer(payment, json!({ "pays_another_payment": transfer }))
}

/// A payment was called settled, and its money did not move.
pub fn settled_without_transfer(payment: &Payment, detail: Value) -> RaisedFlag {
    let kind = FlagKind::SettledWithoutTransfer;
    RaisedFlag {
        payment_id: Some(payment.id.clone()),
        order_id: Some(payment.order_id.clone()),
        flag: Flag { kind, subject: String::new(), detail },
    }
}

/// A record of money that names no transfer there is: a refund owed for, or a flag about, something that
/// nobody can see any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unbacked {
    /// Where the money was.
    pub receiver: Receiver,
    /// The account it is in.
    pub account: Account,
    /// How much.
    pub amount: Amount,
    /// The payment, or the log as the flag names it.
    pub subject: String,
}

impl Unbacked {
    /// Adds it to the totals of its receiver, which then drift by it.
    pub fn add_to(&self, totals: &mut BTreeMap<Receiver, Totals>) -> Unaccounted {
        totals.entry(self.receiver).or_default().add(self.account, self.amount);
        Unaccounted {
            subject: self.subject.clone(),
            payment_id: None,
            drift: Drift::between(Amount::ZERO, self.amount),
        }
    }
}

/// Where a walk through transfers has come to: block time and row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerKey {
    /// The block's time.
    pub time: BlockTime,
    /// The row.
    pub id: i64,
}

impl KnownTransfer {
    /// Its place in the walk.
    pub fn key(&self) -> LedgerKey {
        LedgerKey { time: self.transfer.block.time, id: self.id }
    }
}
