//! What a running process learns about the chain, to ask endpoints about.

use std::collections::BTreeSet;
use std::time::Duration;

use alloy_primitives::Address;

use super::KnownUsed;
use crate::chain::Chain;
use crate::chain::heads::Heads;
use crate::domain::{Evidence, Method, NonceState, Payment, Timestamp};

/// What is known of the chain beforehand, beyond what is configured.
#[derive(Debug, Default)]
pub(in crate::chain) struct Learnt {
    /// Seen used in a final block by one endpoint; the next probe asks all of them.
    pub(super) candidate: Option<KnownUsed>,
    pub(super) confirmed: Option<Confirmed>,
    /// The tokens of the first payments that were read: nobody has used a random nonce there.
    pub(super) tokens: BTreeSet<Address>,
}

/// An authorization that endpoints have shown used.
#[derive(Debug, Clone)]
pub(super) struct Confirmed {
    pub(super) known: KnownUsed,
    at: Timestamp,
    /// Which endpoints may be asked about it, by their places.
    pub(super) askable: BTreeSet<usize>,
}

impl Confirmed {
    pub(super) fn is_younger_than(&self, age_max: Duration, now: Timestamp) -> bool {
        self.at <= now && now.since(self.at) < age_max
    }
}

/// The most tokens that are learnt. One could be anybody's; several tell its fault from the endpoint's.
const TOKENS_MAX: usize = 4;

/// What was learnt is replaced after this long, so that no endpoint need keep its log for longer.
const LEARN_AGAIN: Duration = Duration::from_secs(6 * 3_600);

/// What was learnt and could not be replaced is no longer asked after this long; but an endpoint that
/// failed it is asked until it answers rightly.
pub(super) const LEARNT_AGE_MAX: Duration = Duration::from_secs(24 * 3_600);

impl Chain {
    /// Takes note of tokens, and of an authorization that is used for good, to ask all endpoints about.
    pub(in crate::chain) fn learn(
        &self,
        payments: &[Payment],
        evidence: &[Evidence],
        now: Timestamp,
    ) {
        let mut learnt = self.learnt();
        for (payment, evidence) in payments.iter().zip(evidence) {
            if learnt.tokens.len() >= TOKENS_MAX {
                break;
            }
            // One that calls everything used may be the token's fault, and not the endpoint's.
            let shown = evidence.readings.iter().flat_map(|reading| &reading.outcome);
            let is_read = payment.method == Method::Eip3009
                && shown
                    .into_iter()
                    .any(|seen| !matches!(seen.nonce, NonceState::UsedWithoutLog { .. }));
            if is_read {
                learnt.tokens.insert(payment.token);
            }
        }
        let is_recent = |confirmed: &Confirmed| confirmed.is_younger_than(LEARN_AGAIN, now);
        if !self.settings.learn_known_used
            || learnt.candidate.is_some()
            || learnt.confirmed.as_ref().is_some_and(is_recent)
        {
            return;
        }
        learnt.candidate = payments.iter().zip(evidence).find_map(|(payment, evidence)| {
            let block = evidence.readings.iter().flat_map(|r| &r.outcome).find_map(|seen| {
                let NonceState::Used(consumption) = seen.nonce else { return None };
                let block = consumption.log.block.number;
                (seen.finalized.number >= block).then_some(block)
            })?;
            let Payment { token, payer, nonce, .. } = *payment;
            (payment.method == Method::Eip3009).then_some(KnownUsed { token, payer, nonce, block })
        });
    }

    /// Asks the endpoints that stand about the candidate. What two of them show, and fewer deny, all can be
    /// asked about from then on; else those that showed it: what one of them made up must not make the
    /// others sick, and one that is down or keeps no logs must not keep the others from learning. What one
    /// alone shows does not take the place of what several have shown.
    pub(super) async fn confirm_candidate(&self, standing: &[(usize, Heads)], now: Timestamp) {
        let Some(known) = self.learnt().candidate.take() else { return };
        let (mut shown, mut denied) = (BTreeSet::new(), 0);
        for (place, heads) in standing {
            if known.block > heads.finalized.number {
                continue;
            }
            let endpoint = &self.endpoints[*place];
            match endpoint.states(&self.settings, &[known.asked()], &heads.head).await.as_slice() {
                [Ok(true)] if endpoint.shows_log(&self.settings, &known).await.is_ok() => {
                    shown.insert(*place);
                }
                [Ok(false)] => denied += 1,
                _ => {}
            }
        }
        let mut learnt = self.learnt();
        let is_shared = |confirmed: &Confirmed| {
            confirmed.askable.len() > 1 && confirmed.is_younger_than(LEARNT_AGE_MAX, now)
        };
        if shown.is_empty() || shown.len() == 1 && learnt.confirmed.as_ref().is_some_and(is_shared)
        {
            return;
        }
        let askable = match shown.len() > 1 && shown.len() > denied {
            true => (0..self.endpoints.len()).collect(),
            false => shown,
        };
        learnt.confirmed = Some(Confirmed { known, at: now, askable });
    }
}
