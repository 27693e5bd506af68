//! From evidence to verdict (DESIGN section 6): what the evidence proves about one payment.

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};

use super::agreement::{Seen, agreed_block, any_contradiction, count_endpoints, observed};
use super::order::column_code;
use super::{
    Amount, BlockRef, ChainId, Consumption, ConsumptionKind, Evidence, Method, NonceState,
    Observation, PaidAfter, Payment, Policy, ReadFailureKind, Timestamp,
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
        /// How many endpoints showed that, at this very block.
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

    /// The transfer that consumed the payment's authorization, if one did.
    pub(super) fn consumed(payment: &Payment, consumption: &Consumption) -> Option<Self> {
        let ConsumptionKind::Transferred(seen) = consumption.kind else { return None };
        Some(Self {
            chain_id: payment.chain_id,
            token: seen.token,
            from: seen.from,
            to: seen.to,
            value: seen.value,
            block: consumption.log.block,
            tx_hash: consumption.log.tx_hash,
            log_index: seen.log_index,
        })
    }

    /// Whether this can be the transfer `payment` asked for. With Permit2 less may move than was asked
    /// for (`upto`): whether that was right is [`Consumption::pays`]'s business, which knows what was
    /// signed.
    pub fn pays(&self, payment: &Payment) -> bool {
        (self.chain_id, self.token, self.from, self.to)
            == (payment.chain_id, payment.token, payment.payer, payment.pay_to)
            && match payment.method {
                Method::Permit2 => self.value > Amount::ZERO && self.value <= payment.amount,
                Method::Eip3009 | Method::Tempo => self.value == payment.amount,
            }
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
    /// No endpoint gave evidence, or the state says used and how could not be read; why.
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

fn is_final(transfer: &Transfer, seen: &Observation) -> bool {
    seen.finalized.number >= transfer.block.number
}

fn is_deep_enough(transfer: &Transfer, seen: &Observation, paid_after: PaidAfter) -> bool {
    let number = transfer.block.number;
    match paid_after {
        PaidAfter::Confirmations(n) => {
            seen.head.number.saturating_sub(number).saturating_add(1) >= n
        }
        PaidAfter::Safe => {
            is_final(transfer, seen) || seen.safe.is_some_and(|safe| safe.number >= number)
        }
        PaidAfter::Finalized => is_final(transfer, seen),
    }
}

/// What `evidence` proves about `payment` (`method = eip3009` or `permit2`; the table of DESIGN section 6).
///
/// A positive needs `positive_quorum` endpoints that show the matched transfer at the `paid_after`
/// depth. A negative is given only about finalized facts, when `quorum` endpoints agree about one and the
/// same block and no two of those asked contradict each other. Everything else, silence above all, is
/// [`Verdict::Inconclusive`] (I2). The order of the readings does not matter.
pub fn judge(payment: &Payment, evidence: &Evidence, policy: &Policy) -> Verdict {
    let observed = observed(evidence);
    if observed.is_empty() {
        let failures = evidence.readings.iter().map(|reading| match &reading.outcome {
            Err(failure) => failure.kind,
            Ok(_) => ReadFailureKind::BadAnswer,
        });
        return Verdict::Inconclusive(
            first_by_name(failures).map_or(Inconclusive::NotAsked, Inconclusive::ReadFailed),
        );
    }
    judge_positive(payment, &observed, policy)
        .unwrap_or_else(|| judge_negative(payment, &observed, policy))
}

/// One of several failures, whatever the order of the readings.
fn first_by_name(failures: impl Iterator<Item = ReadFailureKind>) -> Option<ReadFailureKind> {
    failures.min_by_key(|kind| kind.code())
}

/// `Some` when at least one endpoint shows the payment's own transfer.
fn judge_positive(payment: &Payment, observed: &[Seen<'_>], policy: &Policy) -> Option<Verdict> {
    let matched: Vec<(Seen<'_>, Transfer)> = observed
        .iter()
        .filter_map(|seen| match &seen.at.nonce {
            NonceState::Used(consumption) if consumption.pays(payment) => {
                Some((*seen, Transfer::consumed(payment, consumption)?))
            }
            _ => None,
        })
        .collect();
    let has_quorum = |transfer: &Transfer, holds: &dyn Fn(&Observation) -> bool| {
        // The whole transfer: depth and finality go by the block's number, which a lie may make an old one.
        let shows = matched.iter().filter(|(seen, t)| t == transfer && holds(seen.at));
        count_endpoints(shows.map(|(seen, _)| *seen)) >= policy.positive_quorum.max(1)
    };
    let strength = |t: &Transfer| {
        let agreed = has_quorum(t, &|_| true);
        let deep = has_quorum(t, &|seen| is_deep_enough(t, seen, policy.paid_after));
        let is_final = has_quorum(t, &|seen| is_final(t, seen));
        (agreed, deep, is_final)
    };
    // Endpoints on different forks show it in different blocks: the best supported one is judged.
    let (_, transfer) = matched.iter().max_by_key(|(seen, t)| {
        (strength(t), seen.at.head.number, t.block.hash, t.tx_hash, t.log_index)
    })?;
    let (agreed, deep, is_final) = strength(transfer);
    if !agreed {
        let rival = matched.iter().any(|(_, t)| t != transfer);
        return Some(Verdict::Inconclusive(if rival {
            Inconclusive::EndpointsDisagree
        } else {
            Inconclusive::QuorumNotMet
        }));
    }
    if !deep {
        return Some(Verdict::Inconclusive(Inconclusive::TooShallow));
    }
    let finality = if is_final { Finality::Final } else { Finality::Tentative };
    Some(Verdict::Settled(Settlement { transfer: *transfer, finality }))
}

/// No endpoint shows the payment's own transfer: what can be said?
fn judge_negative(payment: &Payment, observed: &[Seen<'_>], policy: &Policy) -> Verdict {
    if any_contradiction(observed) {
        return Verdict::Inconclusive(Inconclusive::EndpointsDisagree);
    }
    let quorum = policy.quorum.max(1);
    let consumed = observed.iter().find_map(|seen| match seen.at.nonce {
        NonceState::Used(consumption) => Some(consumption),
        _ => None,
    });
    if let Some(consumption) = consumed {
        let reason = match consumption.kind {
            ConsumptionKind::Canceled => Unsettleable::Canceled,
            ConsumptionKind::Transferred(_) => Unsettleable::UsedElsewhere,
            ConsumptionKind::WithoutTransfer => {
                return Verdict::Inconclusive(Inconclusive::UsedWithoutTransfer);
            }
        };
        // None contradicts, so whoever shows a consumption shows this one.
        let finalized = observed.iter().copied().filter(|seen| {
            matches!(seen.at.nonce, NonceState::Used(_))
                && seen.at.finalized.number >= consumption.log.block.number
        });
        return match agreed_block(finalized, quorum) {
            None => Verdict::Inconclusive(Inconclusive::NotFinalized),
            Some((as_of, agreeing)) if agreeing >= quorum => {
                Verdict::Unsettleable { reason, as_of, consumption: Some(consumption) }
            }
            Some(_) => Verdict::Inconclusive(Inconclusive::QuorumNotMet),
        };
    }
    if observed.iter().any(|s| matches!(s.at.nonce, NonceState::UsedWithoutLog { .. })) {
        return Verdict::Inconclusive(Inconclusive::UsedWithoutLog);
    }
    let unread = observed.iter().filter_map(|seen| match &seen.at.nonce {
        NonceState::UsedUnread(failure) => Some(failure.kind),
        _ => None,
    });
    if let Some(kind) = first_by_name(unread) {
        return Verdict::Inconclusive(Inconclusive::ReadFailed(kind));
    }
    // Unused at every head. The head descends from the finalized block, so it was unused there too; and
    // once a finalized block is past the window, no later block can use it.
    let expired = observed.iter().copied().filter(|s| s.at.finalized.time >= payment.over_from());
    match agreed_block(expired, quorum) {
        Some((as_of, agreeing)) if agreeing >= quorum => {
            return Verdict::Unsettleable {
                reason: Unsettleable::Expired,
                as_of,
                consumption: None,
            };
        }
        _ => {}
    }
    match agreed_block(observed.iter().copied(), quorum) {
        Some((as_of, agreeing)) => Verdict::Pending { as_of, agreeing },
        None => Verdict::Inconclusive(Inconclusive::NotAsked),
    }
}
