//! From evidence to verdict (DESIGN section 6): what the evidence proves about one payment.

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};

use super::order::column_code;
use super::{
    Amount, BlockRef, ChainId, Consumption, ConsumptionKind, Evidence, NonceState, Observation,
    PaidAfter, Payment, Policy, ReadFailureKind, Timestamp,
};

/// What the evidence proves about one payment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The money moved, and it is this payment's.
    Settled(Settlement),
    /// It has not moved, and still can.
    Pending {
        /// The head at which the authorization was unused.
        as_of: BlockRef,
        /// How many endpoints showed that.
        agreeing: usize,
    },
    /// It never can.
    Unsettleable {
        /// Why not.
        reason: Unsettleable,
        /// The head at which that was seen.
        as_of: BlockRef,
        /// What consumed the authorization, if something did.
        consumption: Option<Consumption>,
    },
    /// The check proves nothing.
    Inconclusive(Inconclusive),
}

/// A transfer that is a payment's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settlement {
    /// The money that moved.
    pub transfer: Transfer,
    /// Whether a reorg could still undo it.
    pub finality: Finality,
}

/// Money that moved on chain. Its identity is (chain, transaction, log index).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// The chain.
    pub chain_id: ChainId,
    /// The token.
    pub token: Address,
    /// Who paid.
    pub from: Address,
    /// Who was paid.
    pub to: Address,
    /// How much moved: observed, never claimed (I6).
    pub value: Amount,
    /// The block that holds it.
    pub block: BlockRef,
    /// The transaction.
    pub tx_hash: B256,
    /// The `Transfer` log's index within the block.
    pub log_index: u64,
}

impl Transfer {
    /// Whether this is one and the same log in one and the same block.
    pub fn is_same_log(&self, other: &Self) -> bool {
        (self.chain_id, self.block.hash, self.tx_hash, self.log_index)
            == (other.chain_id, other.block.hash, other.tx_hash, other.log_index)
    }

    fn consumed(payment: &Payment, consumption: &Consumption) -> Option<Self> {
        let ConsumptionKind::Transferred(seen) = consumption.kind else { return None };
        Some(Self {
            chain_id: payment.chain_id,
            token: payment.token,
            from: seen.from,
            to: seen.to,
            value: seen.value,
            block: consumption.log.block,
            tx_hash: consumption.log.tx_hash,
            log_index: seen.log_index,
        })
    }

    /// Whether this is the transfer `payment` asked for.
    pub fn pays(&self, payment: &Payment) -> bool {
        (self.chain_id, self.token, self.from, self.to, self.value)
            == (payment.chain_id, payment.token, payment.payer, payment.pay_to, payment.amount)
    }
}

column_code! {
    /// Whether a reorg could still undo a transfer.
    Finality {
        /// Deep enough to pay, not yet finalized.
        Tentative = "tentative",
        /// In a finalized, canonical block.
        Final = "final",
    }
}

column_code! {
    /// Why a payment can never settle.
    Unsettleable {
        /// Its window closed while unused, as of a finalized block.
        Expired = "expired",
        /// The payer canceled the authorization.
        Canceled = "canceled",
        /// The authorization moved other money than this payment's.
        UsedElsewhere = "used_elsewhere",
        /// Its nonce was consumed by another transaction (Tempo).
        NonceConsumed = "nonce_consumed",
    }
}

/// Why a check proves nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Inconclusive {
    /// The row cannot be parsed.
    MalformedPayment,
    /// The payment's chain is not in the configuration.
    ChainNotConfigured,
    /// This payment method cannot be read yet.
    UnsupportedMethod,
    /// No endpoint was asked.
    NotAsked,
    /// No endpoint gave evidence; the first one's reason.
    ReadFailed(ReadFailureKind),
    /// Used or canceled, and no endpoint could show the log.
    UsedWithoutLog,
    /// Used, and no transfer directly behind it: the token does not follow EIP-3009.
    UsedWithoutTransfer,
    /// Endpoints contradict each other.
    EndpointsDisagree,
    /// Too few endpoints showed it.
    QuorumNotMet,
    /// The transfer is there, but not yet deep enough to pay.
    TooShallow,
    /// Consumed by something else, in a block that is not finalized.
    NotFinalized,
}

impl Inconclusive {
    /// A flat code, for columns, labels and people.
    pub const fn code(self) -> &'static str {
        match self {
            Self::MalformedPayment => "malformed_payment",
            Self::ChainNotConfigured => "chain_not_configured",
            Self::UnsupportedMethod => "unsupported_method",
            Self::NotAsked => "not_asked",
            Self::ReadFailed(kind) => kind.code(),
            Self::UsedWithoutLog => "used_without_log",
            Self::UsedWithoutTransfer => "used_without_transfer",
            Self::EndpointsDisagree => "endpoints_disagree",
            Self::QuorumNotMet => "quorum_not_met",
            Self::TooShallow => "too_shallow",
            Self::NotFinalized => "not_finalized",
        }
    }
}

impl Verdict {
    /// The four words, for labels: every one of them.
    pub const KINDS: [&'static str; 4] = ["settled", "pending", "unsettleable", "inconclusive"];

    /// The word for this verdict.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Settled(_) => "settled",
            Self::Pending { .. } => "pending",
            Self::Unsettleable { .. } => "unsettleable",
            Self::Inconclusive(_) => "inconclusive",
        }
    }

    /// The finer reason within the word, if there is one.
    pub const fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Settled(settlement) => Some(settlement.finality.code()),
            Self::Pending { .. } => None,
            Self::Unsettleable { reason, .. } => Some(reason.code()),
            Self::Inconclusive(reason) => Some(reason.code()),
        }
    }

    /// The block the verdict speaks of: the transfer's, or the head the state was read at.
    pub const fn block(&self) -> Option<BlockRef> {
        match self {
            Self::Settled(settlement) => Some(settlement.transfer.block),
            Self::Pending { as_of, .. } | Self::Unsettleable { as_of, .. } => Some(*as_of),
            Self::Inconclusive(_) => None,
        }
    }

    /// Whether `deadline` has passed as far as this verdict can tell: by block time where it knows a
    /// block, else by the local clock (which can only flag, never fail: I2).
    pub fn is_past(&self, deadline: Timestamp, now: Timestamp) -> bool {
        match self.block() {
            Some(block) => block.time.reached(deadline),
            None => now >= deadline,
        }
    }
}

fn is_deep_enough(transfer: &Transfer, seen: &Observation, paid_after: PaidAfter) -> bool {
    let number = transfer.block.number;
    match paid_after {
        PaidAfter::Confirmations(n) => (seen.head.number + 1).saturating_sub(number) >= n,
        PaidAfter::Safe => seen.safe.is_some_and(|safe| safe.number >= number),
        PaidAfter::Finalized => seen.finalized.number >= number,
    }
}

/// What `evidence` proves about `payment` (`method = eip3009`; the table of DESIGN section 6).
///
/// A positive needs `positive_quorum` endpoints that show the matched transfer. A negative is given only
/// about finalized facts and when `quorum` endpoints agree and none contradicts. Everything else,
/// silence above all, is [`Verdict::Inconclusive`] (I2).
pub fn judge(payment: &Payment, evidence: &Evidence, policy: &Policy) -> Verdict {
    let observed: Vec<&Observation> =
        evidence.readings.iter().filter_map(|r| r.outcome.as_ref().ok()).collect();
    if observed.is_empty() {
        let failure = evidence.readings.iter().find_map(|r| r.outcome.as_ref().err());
        return Verdict::Inconclusive(match failure {
            Some(failure) => Inconclusive::ReadFailed(failure.kind),
            None => Inconclusive::NotAsked,
        });
    }
    judge_positive(payment, &observed, policy)
        .unwrap_or_else(|| judge_negative(payment, &observed, policy))
}

/// `Some` when at least one endpoint shows the payment's own transfer.
fn judge_positive(
    payment: &Payment,
    observed: &[&Observation],
    policy: &Policy,
) -> Option<Verdict> {
    let matched: Vec<(&Observation, Transfer)> = observed
        .iter()
        .filter_map(|seen| match &seen.nonce {
            NonceState::Used(consumption) => {
                Some((*seen, Transfer::consumed(payment, consumption)?))
            }
            _ => None,
        })
        .filter(|(_, transfer)| transfer.pays(payment))
        .collect();
    let (_, transfer) = *matched.iter().max_by_key(|(seen, _)| seen.head.number)?;
    let agreeing = matched.iter().filter(|(_, t)| t.is_same_log(&transfer));
    if agreeing.clone().count() < policy.positive_quorum.max(1) {
        let rival = matched.iter().any(|(_, t)| !t.is_same_log(&transfer));
        return Some(Verdict::Inconclusive(if rival {
            Inconclusive::EndpointsDisagree
        } else {
            Inconclusive::QuorumNotMet
        }));
    }
    if !agreeing.clone().any(|(seen, t)| is_deep_enough(t, seen, policy.paid_after)) {
        return Some(Verdict::Inconclusive(Inconclusive::TooShallow));
    }
    let is_final = agreeing.clone().any(|(seen, t)| seen.finalized.number >= t.block.number);
    let finality = if is_final { Finality::Final } else { Finality::Tentative };
    Some(Verdict::Settled(Settlement { transfer, finality }))
}

/// No endpoint shows the payment's own transfer: what can be said?
fn judge_negative(payment: &Payment, observed: &[&Observation], policy: &Policy) -> Verdict {
    let quorum = policy.quorum.max(1);
    // The newest head speaks; `observed` is never empty here.
    let Some(newest) = observed.iter().max_by_key(|seen| seen.head.number) else {
        return Verdict::Inconclusive(Inconclusive::NotAsked);
    };
    let consumed: Vec<(&Observation, Consumption)> = observed
        .iter()
        .filter_map(|seen| match seen.nonce {
            NonceState::Used(consumption) => Some((*seen, consumption)),
            _ => None,
        })
        .collect();
    let without_log = observed.iter().any(|s| matches!(s.nonce, NonceState::UsedWithoutLog { .. }));

    if let Some((_, consumption)) = consumed.iter().max_by_key(|(seen, _)| seen.head.number) {
        let block = consumption.log.block;
        // An endpoint whose head is older than the consumption cannot know of it: that is lag, and
        // neither agreement nor contradiction.
        let contradicted =
            observed.iter().any(|s| s.nonce == NonceState::Unused && s.head.number >= block.number)
                || consumed.iter().any(|(_, other)| other.log.block.hash != block.hash);
        if contradicted {
            return Verdict::Inconclusive(Inconclusive::EndpointsDisagree);
        }
        let reason = match consumption.kind {
            ConsumptionKind::Canceled => Unsettleable::Canceled,
            ConsumptionKind::Transferred(_) => Unsettleable::UsedElsewhere,
            ConsumptionKind::WithoutTransfer => {
                return Verdict::Inconclusive(Inconclusive::UsedWithoutTransfer);
            }
        };
        let finalized =
            consumed.iter().filter(|(seen, _)| seen.finalized.number >= block.number).count();
        if finalized == 0 {
            return Verdict::Inconclusive(Inconclusive::NotFinalized);
        }
        if finalized < quorum {
            return Verdict::Inconclusive(Inconclusive::QuorumNotMet);
        }
        return Verdict::Unsettleable {
            reason,
            as_of: newest.head,
            consumption: Some(*consumption),
        };
    }
    if without_log {
        let contradicted = observed.iter().any(|s| s.nonce == NonceState::Unused);
        return Verdict::Inconclusive(if contradicted {
            Inconclusive::EndpointsDisagree
        } else {
            Inconclusive::UsedWithoutLog
        });
    }
    // Unused at every head. The head descends from the finalized block, so it was unused there too; and
    // once a finalized block is past the window, no later block can use it.
    let expired = observed.iter().filter(|s| s.finalized.time >= payment.valid_before).count();
    if expired >= quorum {
        return Verdict::Unsettleable {
            reason: Unsettleable::Expired,
            as_of: newest.head,
            consumption: None,
        };
    }
    Verdict::Pending { as_of: newest.head, agreeing: observed.len() }
}
