//! Reading one chain about a batch: which endpoints to ask, and when something is known well enough to be
//! sent on.
//!
//! A transfer is known as soon as enough endpoints have shown it. A negative that may end a payment needs
//! all of them (DESIGN section 6, trust in endpoints), and what is known already does not wait for that.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;

use super::check::WatchedChain;
use super::schedules::Schedules;
use crate::chain::Breadth;
use crate::clock::Clock;
use crate::domain::{
    Evidence, Inconclusive, Judged, OrderId, Payment, Phase, Policy, Verdict, disagreements, judge,
};
use crate::schedule::due_times;
use crate::store::Followed;
use crate::store::schedules::Series;
use crate::telemetry::Metrics;

/// The share of the time that asking one endpoint may take where all of them may have to be asked after it.
const NARROW_SHARE: f64 = 0.5;

/// Payments of one chain that were judged, with the policy to resolve them by.
pub(super) struct Part {
    pub(super) policy: Policy,
    /// Verdicts that change nothing but their watch.
    pub(super) unchanged: Vec<Judged>,
    /// Verdicts to resolve.
    pub(super) to_resolve: Vec<Judged>,
}

/// Reads one chain about some payments, and sends on each of them once.
pub(super) struct ChainReader {
    pub(super) watched: Arc<WatchedChain>,
    pub(super) schedules: Arc<Schedules>,
    pub(super) group: Vec<(Followed, Payment)>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) metrics: Metrics,
}

impl ChainReader {
    /// Reads in at most `budget`. A first read asks one endpoint; what may end badly is asked of all.
    pub(super) async fn read(&self, budget: Duration, sender: UnboundedSender<Part>) {
        let started = tokio::time::Instant::now();
        let several = self.watched.chain.settings().endpoints.len() > 1;
        let all: Vec<usize> = (0..self.group.len()).collect();
        let (wide, narrow): (Vec<usize>, Vec<usize>) =
            all.into_iter().partition(|i| several && self.needs_all(&self.group[*i]));
        let shared = self.shared_orders();
        let (mut ending, mut done, mut held) = (wide, Vec::new(), Vec::new());
        let within = if several { budget.mul_f64(NARROW_SHARE) } else { budget };
        for judged in self.ask(narrow, Breadth::FirstAnswer, within, &sender).await {
            let (i, _, verdict) = &judged;
            let (followed, payment) = &self.group[*i];
            if several && may_end_badly(verdict, followed, payment, &self.watched.policy) {
                ending.push(*i);
            } else if shared.contains(&payment.order_id) {
                held.push(judged);
            } else {
                done.push(judged);
            }
        }
        self.send(done, &sender);
        let left = budget.saturating_sub(started.elapsed());
        held.extend(self.ask(ending, Breadth::All, left, &sender).await);
        self.send(held, &sender);
    }

    /// The orders of which several payments are read here. Those are sent on together, at the end: of
    /// several transfers the first on the chain pays, not the first that was heard of (DESIGN section 7).
    fn shared_orders(&self) -> BTreeSet<&OrderId> {
        let mut seen = BTreeSet::new();
        let orders = self.group.iter().map(|(_, payment)| &payment.order_id);
        orders.filter(|order| !seen.insert(*order)).collect()
    }

    /// Asks about these. What is settled is sent on as soon as that is known, unless its order has other
    /// payments here; the rest is returned.
    async fn ask(
        &self,
        asked: Vec<usize>,
        breadth: Breadth,
        within: Duration,
        sender: &UnboundedSender<Part>,
    ) -> Vec<(usize, Evidence, Verdict)> {
        let policy = &self.watched.policy;
        let payments: Vec<Payment> = asked.iter().map(|i| self.group[*i].1.clone()).collect();
        let shared = self.shared_orders();
        let mut sent = vec![false; asked.len()];
        let hear = |so_far: &[Evidence]| {
            let mut settled = Vec::new();
            for (place, evidence) in so_far.iter().enumerate().filter(|(place, _)| !sent[*place]) {
                let verdict = judge(&payments[place], evidence, policy);
                let is_shared = shared.contains(&payments[place].order_id);
                if matches!(verdict, Verdict::Settled(_)) && !is_shared {
                    settled.push((place, evidence.clone(), verdict));
                }
            }
            for (place, ..) in &settled {
                sent[*place] = true;
            }
            let by_payment = |(place, e, v): (usize, Evidence, Verdict)| (asked[place], e, v);
            self.send(settled.into_iter().map(by_payment).collect(), sender);
        };
        let now = self.clock.now();
        let read = self.watched.chain.read_and_hear(&payments, breadth, now, within, hear).await;
        // All that was heard, also of what was sent on before the last had answered.
        let chain_id = self.watched.chain.settings().chain_id;
        for (one, other) in read.iter().flat_map(disagreements) {
            self.metrics.endpoints_disagree(chain_id, &one, &other);
        }
        let mut rest = Vec::new();
        for (place, evidence) in read.into_iter().enumerate().filter(|(place, _)| !sent[*place]) {
            let verdict = judge(&payments[place], &evidence, policy);
            rest.push((asked[place], evidence, verdict));
        }
        rest
    }

    /// Whether all endpoints will be asked whatever one of them says, unless it shows a transfer: then asking
    /// one first would only cost requests.
    fn needs_all(&self, (followed, payment): &(Followed, Payment)) -> bool {
        let policy = &self.watched.policy;
        let at_the_end = self.clock.now() >= policy.deadline(payment) || !payment.status.is_open();
        policy.positive_quorum > 1 || at_the_end && !was_settled(followed)
    }

    /// Sends on what these payments' verdicts are, with the next checks.
    fn send(&self, judged: Vec<(usize, Evidence, Verdict)>, sender: &UnboundedSender<Part>) {
        let WatchedChain { schedule, timing, policy, .. } = &*self.watched;
        let now = self.clock.now();
        let mut part =
            Part { policy: policy.clone(), unchanged: Vec::new(), to_resolve: Vec::new() };
        for (i, evidence, verdict) in judged {
            self.metrics.checks.with_label_values(&[verdict.kind()]).inc();
            let (followed, payment) = &self.group[i];
            let series = Series { rail: payment.rail, chain_id: payment.chain_id };
            let version = self.schedules.of(&followed.watch, series);
            let schedule = version.as_deref().unwrap_or(schedule);
            let opened_at = followed.watch.opened_at;
            let judged = Judged {
                payment_id: payment.id.clone(),
                checked_at: now,
                terms: Some(payment.terms()),
                due: due_times(schedule, opened_at, payment, &verdict, policy, timing, now),
                evidence,
                verdict,
                problem: None,
            };
            if needs_resolving(&judged, followed, payment, policy) {
                part.to_resolve.push(judged);
            } else {
                part.unchanged.push(judged);
            }
        }
        // Nobody receives any more when the batch was given back: then nothing is to be written.
        let _ = sender.send(part);
    }
}

/// Whether this verdict may fail a payment, or wait on a reorg: then one endpoint's word is not enough.
fn may_end_badly(
    verdict: &Verdict,
    followed: &Followed,
    payment: &Payment,
    policy: &Policy,
) -> bool {
    match verdict {
        Verdict::Unsettleable { .. } => true,
        // Another endpoint may show the transfer after all.
        Verdict::Inconclusive(Inconclusive::QuorumNotMet | Inconclusive::EndpointsDisagree) => true,
        Verdict::Pending { as_of, .. } => {
            as_of.time.reached(policy.deadline(payment))
                || !payment.status.is_open()
                || was_settled(followed)
        }
        Verdict::Settled(_) | Verdict::Inconclusive(_) => false,
    }
}

/// Whether a transfer was seen before: if it cannot be seen any more, that may be a reorg.
fn was_settled(followed: &Followed) -> bool {
    let verdict = followed.watch.last_verdict.as_deref();
    followed.watch.phase == Phase::Finality || verdict.is_some_and(|v| v.starts_with("settled"))
}

/// Whether the verdict could change anything but its watch. When in doubt it is resolved, on fresh rows.
fn needs_resolving(
    judged: &Judged,
    followed: &Followed,
    payment: &Payment,
    policy: &Policy,
) -> bool {
    match &judged.verdict {
        Verdict::Settled(_) | Verdict::Unsettleable { .. } => true,
        Verdict::Pending { .. } | Verdict::Inconclusive(_) => {
            let earlier = followed.watch.last_verdict.as_deref();
            let was_unreadable = [
                Inconclusive::MalformedPayment,
                Inconclusive::ChainNotConfigured,
                Inconclusive::UnsupportedMethod,
            ]
            .iter()
            .any(|reason| earlier == Some(&format!("inconclusive:{}", reason.code())));
            was_unreadable
                || was_settled(followed)
                || !payment.status.is_open()
                || !matches!(followed.watch.phase, Phase::Targeted | Phase::Reconcile)
                || judged.verdict.is_past(policy.deadline(payment), judged.checked_at)
        }
    }
}
