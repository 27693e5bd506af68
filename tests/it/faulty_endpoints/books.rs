//! The ending of a story: every order is right, and the books agree with the chain to the last unit (I4).

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::U256;
use reconciled::domain::{Account, Amount, Totals};

use super::fates::{AMOUNT, PAY_TO, Play};
use super::ground::Ground;
use super::story::{Endpoints, Story};
use super::truth::{Moved, Truth};
use crate::support::fault_proxy::faults::Fault;

/// What the database says in the end.
struct Books {
    orders: BTreeMap<String, (String, Option<String>)>,
    payments: BTreeMap<String, String>,
    refunds: BTreeMap<String, Refund>,
    /// Payment to the transaction and log index recorded as its transfer.
    transfers: BTreeMap<String, (String, u64)>,
    flags: BTreeSet<String>,
    /// Transaction and log index of the money that is flagged as nobody's.
    unmatched: BTreeSet<(String, u64)>,
    open_watches: Vec<Vec<Option<String>>>,
}

/// A refund record.
struct Refund {
    reason: String,
    status: String,
    amount: u64,
    /// The transaction and log index of the money that goes back.
    place: (String, u64),
}

impl Books {
    async fn of(story: &Story<impl Ground>) -> Self {
        let gateway = &story.worker.gateway;
        let texts = async |sql: &str, columns| -> Vec<Vec<String>> {
            let rows = gateway.rows(sql, &[], columns).await.unwrap();
            rows.into_iter().map(|row| row.into_iter().map(Option::unwrap).collect()).collect()
        };
        let refunds = "SELECT payment_id, reason, status, CAST(amount AS TEXT), tx_hash, \
                       CAST(log_index AS TEXT) FROM {refunds_owed} WHERE status <> 'void'";
        let transfers = "SELECT payment_id, tx_hash, CAST(log_index AS TEXT) FROM {transfers} \
                         WHERE orphaned_at IS NULL AND payment_id IS NOT NULL";
        let unmatched = "SELECT subject FROM {flags} \
                         WHERE kind = 'unmatched_transfer' AND closed_at IS NULL";
        let open = "SELECT payment_id, phase, last_verdict FROM {watches} WHERE phase <> 'closed'";
        Self {
            orders: gateway.orders().await.unwrap(),
            payments: gateway.payments().await.unwrap(),
            refunds: texts(refunds, 6)
                .await
                .into_iter()
                .map(|r| {
                    let [payment, reason, status, amount, tx_hash, log_index] =
                        <[String; 6]>::try_from(r).unwrap();
                    let amount = amount.parse().unwrap();
                    let place = (tx_hash, log_index.parse().unwrap());
                    (payment, Refund { reason, status, amount, place })
                })
                .collect(),
            transfers: texts(transfers, 3)
                .await
                .into_iter()
                .map(|r| (r[0].clone(), (r[1].clone(), r[2].parse().unwrap())))
                .collect(),
            unmatched: texts(unmatched, 1).await.into_iter().map(|r| place(&r[0])).collect(),
            flags: gateway.open_flags().await.unwrap().into_iter().collect(),
            open_watches: gateway.rows(open, &[], 3).await.unwrap(),
        }
    }
}

/// The transaction and log index that a flag is about.
fn place(subject: &str) -> (String, u64) {
    let mut parts = subject.split(':').skip(1);
    (parts.next().unwrap().to_owned(), parts.next().unwrap().parse().unwrap())
}

impl<G: Ground> Story<G> {
    /// Holds the whole database against the whole chain.
    pub(super) async fn check_ending(&mut self) {
        let refunded = self.pay_refunds().await;
        let report = self.reconcile_to_the_end(refunded.len()).await;
        let truth = Truth::of(&self.chain).await;
        let books = Books::of(self).await;
        let mut wrong = Vec::new();
        if !books.open_watches.is_empty() {
            wrong.push(format!("still open: {:?}", books.open_watches));
        }
        let mut by_order: BTreeMap<&str, Vec<&Play>> = BTreeMap::new();
        for play in &self.script.plays {
            by_order.entry(&play.order).or_default().push(play);
        }
        for (order, plays) in by_order {
            wrong.extend(self.wrong_about(order, &plays, &truth, &books));
        }
        let open = |flag: &&String| flag.starts_with("inconclusive_at_deadline");
        wrong.extend(books.flags.iter().filter(open).map(|flag| format!("still flagged: {flag}")));
        let (sums, more) = sums(&truth, &books);
        wrong.extend(more);
        if (report.totals, report.drift.is_zero()) != (sums, true) {
            wrong.push(format!("{sums:?} are in the books, and the reconcile says {report:?}"));
        }
        let paid_back = books.refunds.iter().filter(|(_, refund)| refund.status == "paid");
        let paid_back: BTreeSet<String> = paid_back.map(|(payment, _)| payment.clone()).collect();
        if paid_back != refunded {
            wrong.push(format!("{refunded:?} were refunded, and {paid_back:?} are said to be"));
        }
        let is_rich = [sums.paid, sums.owed, sums.refunded, sums.flagged]
            .iter()
            .all(|sum| *sum != Amount::ZERO);
        if !is_rich || self.failed_once.is_empty() {
            wrong.push(format!("too little happened: {sums:?}"));
        }
        assert!(wrong.is_empty(), "seed {}: {wrong:#?}\n{}", self.seed, self.figures());
        self.check_that_much_was_played();
    }

    fn wrong_about(
        &self,
        order: &str,
        plays: &[&Play],
        truth: &Truth,
        books: &Books,
    ) -> Option<String> {
        let (status, paid_by) = &books.orders[order];
        let mut settled = Vec::new();
        let mut problems = Vec::new();
        for play in plays {
            let payment = books.payments[&play.id].as_str();
            let landed = self.landed(play, truth);
            let owner = self.owner(play, books);
            match landed {
                Some(moved) if owner == Some(&play.id) || owner.is_none() => {
                    settled.push(&play.id);
                    let place = (moved.tx_hash.clone(), moved.log_index);
                    if payment != "settled" || books.transfers.get(&play.id) != Some(&place) {
                        problems.push(format!("{} landed: {payment}", play.id));
                    }
                }
                Some(_) => {
                    // The other payment with this authorization has the transfer.
                    let flagged =
                        books.flags.contains(&format!("authorization_reused:{}", play.id));
                    if payment != "failed" || !flagged {
                        problems.push(format!("{} is reused: {payment}", play.id));
                    }
                }
                None if payment != "failed" || books.transfers.contains_key(&play.id) => {
                    problems.push(format!("{} did not land: {payment}", play.id));
                }
                None => {}
            }
        }
        let owed: Vec<&String> =
            settled.iter().filter(|id| books.refunds.contains_key(id.as_str())).copied().collect();
        let pays = paid_by.as_ref().filter(|_| status == "paid");
        let right = match (settled.len(), pays) {
            // One pays, the others are owed back.
            (count, Some(by)) => {
                settled.contains(&by) && owed.len() == count - 1 && !owed.contains(&by)
            }
            (0, None) => matches!(status.as_str(), "failed" | "canceled"),
            // The order was over before the money came.
            (count, None) => {
                // Or a reorg took the money of the payment that paid it, for good.
                let is_twin =
                    |id: &String| books.refunds.get(id).is_some_and(|r| r.reason == "duplicate");
                let was_over = status == "canceled"
                    || status == "failed"
                        && settled.iter().all(|id| self.was_late(id) || is_twin(id));
                was_over && owed.len() == count
            }
        };
        if right && problems.is_empty() {
            return None;
        }
        Some(format!("{order} is {status} by {paid_by:?}, settled {settled:?}: {problems:?}"))
    }

    fn landed<'a>(&self, play: &Play, truth: &'a Truth) -> Option<&'a Moved> {
        let moved = truth.consumed.get(&(play.claimed.payer, play.claimed.nonce))?.as_ref();
        moved.filter(|moved| moved.to == PAY_TO && moved.value == AMOUNT)
    }

    /// Which payment has the transfer of this one's authorization.
    fn owner<'a>(&self, play: &Play, books: &'a Books) -> Option<&'a String> {
        let same = |other: &&Play| other.claimed.nonce == play.claimed.nonce;
        let mut ids = self.script.plays.iter().filter(same).map(|other| &other.id);
        ids.find_map(|id| books.transfers.get_key_value(id)).map(|(id, _)| id)
    }

    /// Whether it landed after its order had been failed at the deadline.
    fn was_late(&self, id: &str) -> bool {
        self.failed_once.contains(id)
    }

    /// A test of faults that never happened would prove nothing. A rare one may be missing: each is
    /// tested by itself as well.
    fn check_that_much_was_played(&self) {
        let played = self.played();
        let faults = Fault::QUICK.iter().filter(|f| played.contains(&format!("{f:?}"))).count();
        let enough = Fault::QUICK.len() * 3 / 4;
        assert!(faults >= enough, "seed {}: {faults} kinds of {played:?}", self.seed);
        if self.endpoints() == Endpoints::OneLies {
            let told = |lie: &str| played.iter().any(|name| name.starts_with(lie));
            let lies = ["Unused", "Used", "Paid", "AllFinal", "Later"].map(told);
            let lies = lies.iter().filter(|told| **told).count();
            assert!(lies >= 4, "seed {}: {lies} kinds of lies in {played:?}", self.seed);
        }
        assert!(self.lost > 0, "seed {}: no reorg took anything", self.seed);
    }
}

/// What each account must hold, summed up from the chain and the books' own rows, and what is wrong with it:
/// each transfer to the merchant pays one order, is owed back once, or is flagged; nothing is left over.
fn sums(truth: &Truth, books: &Books) -> (Totals, Vec<String>) {
    let mut wrong = Vec::new();
    let mut sums = Totals::default();
    let mut accounted: BTreeMap<(String, u64), Vec<String>> = BTreeMap::new();
    for (order, (status, paid_by)) in &books.orders {
        let Some(by) = paid_by.as_ref().filter(|_| status == "paid") else { continue };
        sums.add(Account::Paid, amount(AMOUNT));
        match books.transfers.get(by) {
            Some(place) => {
                accounted.entry(place.clone()).or_default().push(format!("pays {order}"));
            }
            None => wrong.push(format!("{order} is paid by {by}, which has no transfer")),
        }
    }
    for (payment, refund) in &books.refunds {
        let account = if refund.status == "paid" { Account::Refunded } else { Account::Owed };
        sums.add(account, amount(refund.amount));
        let told = format!("{} for {payment}", refund.status);
        accounted.entry(refund.place.clone()).or_default().push(told);
    }
    for (place, value) in truth.received(PAY_TO) {
        sums.chain = sums.chain.saturating_add(amount(value));
        let mut uses = accounted.remove(place).unwrap_or_default();
        if books.unmatched.contains(place) {
            sums.add(Account::Flagged, amount(value));
            uses.push("flagged".to_owned());
        }
        if uses.len() != 1 {
            wrong.push(format!("{value} at {place:?}: {uses:?}"));
        }
    }
    if !accounted.is_empty() {
        wrong.push(format!("not on the chain: {accounted:?}"));
    }
    if !sums.drift().is_zero() {
        wrong.push(format!("drift {}: {sums:?}", sums.drift()));
    }
    (sums, wrong)
}

fn amount(units: u64) -> Amount {
    Amount::new(U256::from(units))
}
