//! Ledger to chain: payments that the gateway calls settled must have their transfer.
//!
//! Only those are read that no transfer is known for, once the scan must have seen it. The read goes through
//! the same quorum as every negative, and what is inconclusive flags nothing (I2). A transfer that is found
//! is recorded, and its payment is not read again; one that is flagged is, in every run of the window.

use std::collections::BTreeMap;

use serde_json::json;

use super::progress::{AccountsPlace, Progress, Stage};
use super::{Budget, Reconciler, Step, unless_stopped};
use crate::chain::Breadth;
use crate::domain::{
    BlockTime, CLOSED_BY_ITSELF, ChainId, Evidence, Finality, FlagKind, GoneFlag, LedgerKey,
    Method, Payment, Policy, RaisedFlag, Receiver, Settlement, Timestamp, Transfer, Verdict, judge,
    pays_another, settled_without_transfer,
};
use crate::store::{FlagFilter, FoundTransfers, SettledKey, StoreError};
use crate::worker::WatchedChain;
use crate::worker::driver::Stop;

/// Flags of one kind and payment that are looked at: history can only be so long.
const FLAGS_MAX: u32 = 100;

/// A payment with what was read about it.
type Judgement = (Payment, Verdict, Evidence);

impl Reconciler {
    pub(super) async fn unproven_step(
        &self,
        progress: &mut Progress,
        after: Option<SettledKey>,
        stop: &Stop,
    ) -> Result<Step, StoreError> {
        let now = self.now();
        let from = now.saturating_sub(self.settings.window);
        let size = self.settings.page_size;
        let page = self.store().unproven_page(from, now, after.as_ref(), size).await?;
        let mut by_chain: BTreeMap<ChainId, Vec<Payment>> = BTreeMap::new();
        let scanned = self.scanned_until(progress).await?;
        // A row that makes no sense says nothing that could be compared with the chain.
        for payment in page.payments.into_iter().flatten() {
            if self.is_due(&payment, &scanned, now) {
                by_chain.entry(payment.chain_id).or_default().push(payment);
            }
        }
        let (budget, mut unread) = (self.budget(), by_chain.len());
        for (chain_id, payments) in by_chain {
            let share = budget.within(unread);
            unread -= 1;
            let Some(watched) = self.checker.chain(chain_id) else { continue };
            progress.counts.settled_read += payments.len() as u64;
            let reading = self.judge_settled(watched, payments, share);
            let Some(judged) = unless_stopped(stop, reading).await else {
                return Ok(Step::Stopped);
            };
            let settled = self.settle_books(watched, judged).await;
            let part = format!("{}, chain {chain_id}", progress.stage.name());
            progress.counts.flags_raised += progress.or_told(&part, settled)?.unwrap_or(0);
        }
        progress.stage = match page.next {
            Some(next) => Stage::Unproven { after: Some(next) },
            None => Stage::Flags { after: 0 },
        };
        Ok(Step::More)
    }

    pub(super) fn first_account(&self, round: u8) -> Stage {
        let start = LedgerKey { time: BlockTime::from_secs(0), id: i64::MIN };
        let since = BlockTime::from_secs(0);
        Stage::Accounts(AccountsPlace { round, chain: None, since, after: start })
    }

    /// Up to when the transfers into each receiver are known.
    async fn scanned_until(
        &self,
        progress: &mut Progress,
    ) -> Result<BTreeMap<(ChainId, Receiver), BlockTime>, StoreError> {
        let mut until = BTreeMap::new();
        for (chain_id, _, receivers) in self.scanned_chains() {
            // A receiver whose scan has not started knows of nothing yet.
            let never = BlockTime::from_secs(0);
            until.extend(receivers.iter().map(|w| ((chain_id, w.receiver), never)));
            let cursors = self.store().cursors(chain_id).await;
            let part = format!("{}, chain {chain_id}", progress.stage.name());
            for cursor in progress.or_told(&part, cursors)?.unwrap_or_default() {
                if let Some(time) = until.get_mut(&(chain_id, cursor.receiver)) {
                    *time = cursor.block.time;
                }
            }
        }
        Ok(until)
    }

    /// Whether its transfer, if there is one, must be final by now, and seen by the scan if that looks for it.
    fn is_due(
        &self,
        payment: &Payment,
        scanned: &BTreeMap<(ChainId, Receiver), BlockTime>,
        now: Timestamp,
    ) -> bool {
        let Some(watched) = self.checker.chain(payment.chain_id) else { return false };
        let receiver = Receiver { token: payment.token, pay_to: payment.pay_to };
        let known_until = scanned.get(&(payment.chain_id, receiver));
        let known_until = known_until.map_or(now, |time| Timestamp::from(*time).min(now));
        let settled_by = payment.started_at().max(payment.created_at);
        payment.method != Method::Tempo
            && settled_by.saturating_add(watched.timing.finality_margin) <= known_until
    }

    /// One endpoint first, and all of them where that gave no transfer.
    async fn judge_settled(
        &self,
        watched: &WatchedChain,
        payments: Vec<Payment>,
        budget: Budget,
    ) -> Vec<Judgement> {
        let policy = &watched.policy;
        let is_alone = watched.chain.settings().endpoints.len() == 1;
        let mut judged = Vec::with_capacity(payments.len());
        let mut doubtful = Vec::new();
        let breadth = match policy.positive_quorum {
            1 => Breadth::FirstAnswer,
            _ => Breadth::All,
        };
        let is_only_read = is_alone || breadth == Breadth::All;
        let within = budget.part(if is_only_read { 1 } else { 2 });
        let read = watched.chain.read(&payments, breadth, self.now(), within).await;
        for (payment, evidence) in payments.into_iter().zip(read) {
            let verdict = judge(&payment, &evidence, policy);
            if matches!(verdict, Verdict::Settled(_)) || is_only_read {
                judged.push((payment, verdict, evidence));
            } else {
                doubtful.push(payment);
            }
        }
        let within = budget.part(1);
        let read = watched.chain.read(&doubtful, Breadth::All, self.now(), within).await;
        judged.extend(doubtful.into_iter().zip(read).map(|(payment, evidence)| {
            let verdict = judge(&payment, &evidence, policy);
            (payment, verdict, evidence)
        }));
        judged
    }

    /// Records what was found and flags what was not. Returns how many flags were raised.
    async fn settle_books(
        &self,
        watched: &WatchedChain,
        judged: Vec<Judgement>,
    ) -> Result<u64, StoreError> {
        let now = self.now();
        let mut found: Vec<(Payment, Transfer)> = Vec::new();
        let mut raise = Vec::new();
        for (payment, verdict, evidence) in judged {
            match &verdict {
                Verdict::Settled(Settlement { transfer, finality: Finality::Final }) => {
                    found.push((payment, *transfer));
                }
                verdict if proves_nothing_moved(verdict, &payment, &watched.policy) => {
                    let detail = json!({ "verdict": verdict, "evidence": evidence });
                    raise.push(settled_without_transfer(&payment, detail));
                }
                _ => {}
            }
        }
        let books = match found.is_empty() {
            true => FoundTransfers::default(),
            false => self.store().record_found(&found, now).await?,
        };
        let taken = found.iter().filter(|(payment, _)| books.taken.contains(&payment.id));
        raise.extend(taken.map(|(payment, transfer)| pays_another(payment, transfer)));
        let gone: Vec<GoneFlag> = books
            .recorded
            .into_iter()
            .map(|id| GoneFlag {
                kind: FlagKind::SettledWithoutTransfer,
                payment_id: Some(id),
                subject: None,
                note: "its transfer was found".to_owned(),
            })
            .collect();
        let mut new = Vec::with_capacity(raise.len());
        for raised in raise {
            if !self.stands(&raised).await? {
                new.push(raised);
            }
        }
        if !new.is_empty() || !gone.is_empty() {
            self.store().account_flags(&new, &gone, now).await?;
        }
        Ok(new.len() as u64)
    }

    /// Whether the payment has such a flag, open or closed by a person.
    async fn stands(&self, raised: &RaisedFlag) -> Result<bool, StoreError> {
        let filter = FlagFilter {
            closed_too: true,
            kind: Some(raised.flag.kind),
            payment_id: raised.payment_id.clone(),
        };
        let flags = self.store().flags(&filter, FLAGS_MAX).await?;
        Ok(flags.iter().any(|f| f.closed.as_ref().is_none_or(|c| c.by != CLOSED_BY_ITSELF)))
    }
}

/// Whether it is certain that this payment's money did not move: it never can, or could and had not by the
/// deadline. Silence is not (I2).
fn proves_nothing_moved(verdict: &Verdict, payment: &Payment, policy: &Policy) -> bool {
    match verdict {
        Verdict::Unsettleable { .. } => true,
        Verdict::Pending { as_of, agreeing } => {
            *agreeing >= policy.quorum && as_of.time.reached(policy.deadline(payment))
        }
        Verdict::Settled(_) | Verdict::Inconclusive(_) => false,
    }
}
