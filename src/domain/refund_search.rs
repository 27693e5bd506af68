//! What a search of the chain says about refund records (DESIGN section 10): paid, misused, or nothing.
//!
//! The rule of payments, mirrored: that a refund was not found changes nothing about its record, ever; only
//! the refund itself closes it, found in a final block. A claim falls back to nobody.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::{Address, B256};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    Amount, BlockRef, BlockTime, ChainId, Consumption, ConsumptionKind, EndpointName, Flag,
    FlagKind, LogRef, OrderId, PaymentId, ReadFailure, RefundStatus, SeenTransfer, Timestamp,
};

/// A refund record that is not closed, as far as the search for it is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenRefund {
    /// The record.
    pub id: i64,
    /// The payment whose money it is.
    pub payment_id: PaymentId,
    /// The order it was meant for.
    pub order_id: OrderId,
    /// The chain.
    pub chain_id: ChainId,
    /// What is to be paid.
    pub token: Address,
    /// To whom.
    pub payer: Address,
    /// How much.
    pub amount: Amount,
    /// The nonce it is paid with.
    pub refund_nonce: B256,
    /// Where it stands.
    pub status: RefundStatus,
    /// When it was noticed that the money must go back: it was not paid long before.
    pub detected_at: Timestamp,
    /// The last block that was searched for it; `None`: none yet.
    pub searched_to: Option<u64>,
}

/// Somebody used, or canceled, an authorization with a nonce that was searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct NonceUse {
    /// The token.
    pub token: Address,
    /// Whose authorization. Each address has nonces of its own: the same one may be used by many.
    pub authorizer: Address,
    /// The nonce.
    pub nonce: B256,
    /// What came of it.
    pub consumption: Consumption,
}

/// What one endpoint showed of a range of final blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefundSearch {
    /// The first block searched.
    pub from_block: u64,
    /// The last block searched, which is final.
    pub to_block: u64,
    /// The newest final block.
    pub finalized: BlockRef,
    /// Every use of one of the nonces in these blocks.
    pub uses: Vec<NonceUse>,
}

/// One endpoint's answer to a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefundReading {
    /// Who was asked.
    pub endpoint: EndpointName,
    /// What it showed, or why it showed nothing.
    pub outcome: Result<RefundSearch, ReadFailure>,
}

/// Whom to believe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefundPolicy {
    /// The wallets that pay refunds; empty: whoever pays the buyer pays.
    pub wallets: Vec<Address>,
    /// How many endpoints must show it.
    pub quorum: usize,
}

/// What a search comes to for one record.
#[derive(Debug, Clone, PartialEq)]
pub struct RefundFinding {
    /// The record as it was when it was asked about: it is changed only while it is so.
    pub refund: OpenRefund,
    /// The last block that has been searched now; `None`: nothing was.
    pub searched_to: Option<u64>,
    /// Whether that is the newest final block.
    pub is_complete: bool,
    /// The refund itself.
    pub paid: Option<RefundPaid>,
    /// What a person has to look at.
    pub flags: Vec<Flag>,
}

/// A refund that was paid, in a final block.
#[derive(Debug, Clone, PartialEq)]
pub struct RefundPaid {
    /// The transfer's log.
    pub log: LogRef,
    /// What it was concluded from (I12).
    pub evidence: Value,
}

impl RefundPaid {
    /// When its block was made.
    pub fn at(&self) -> BlockTime {
        self.log.block.time
    }
}

/// The most uses of one nonce that a flag tells of.
const USES_TOLD_MAX: usize = 8;

/// What the readings of one search say about one record. The order of the readings does not matter.
///
/// The refund is the transfer that stands directly behind a use of the record's nonce and brings exactly
/// what is owed to exactly whom it is owed. Without configured wallets it does not matter whose money that
/// is: it reached the buyer, and nobody else has a use for paying him. The buyer himself is no such payer,
/// from that address: paying oneself is free. With wallets configured, only theirs counts, and whatever
/// else they used the nonce for is flagged.
pub fn judge_refund(
    refund: &OpenRefund,
    readings: &[RefundReading],
    policy: &RefundPolicy,
) -> RefundFinding {
    let mut finding = RefundFinding {
        refund: refund.clone(),
        searched_to: None,
        is_complete: false,
        paid: None,
        flags: Vec::new(),
    };
    let quorum = policy.quorum.max(1);
    // One that answers twice agrees only with itself.
    let searches: BTreeMap<&EndpointName, &RefundSearch> =
        readings.iter().filter_map(|r| Some((&r.endpoint, r.outcome.as_ref().ok()?))).collect();
    if searches.len() < quorum || !refund.status.is_unfinished() {
        return finding;
    }
    let mut seen_by: Vec<(NonceUse, BTreeSet<&EndpointName>)> = Vec::new();
    for (endpoint, search) in &searches {
        for used in search.uses.iter().filter(|used| concerns(refund, used, search, policy)) {
            match seen_by.iter_mut().find(|(other, _)| other == used) {
                Some((_, by)) => {
                    by.insert(*endpoint);
                }
                None => seen_by.push((*used, BTreeSet::from([*endpoint]))),
            }
        }
    }
    let is_agreed = |by: &BTreeSet<&EndpointName>| by.len() >= quorum;
    // What too few show is neither believed nor passed over, nor is a use whose transfer is not to be seen, as
    // a limited node may show it: those blocks are searched again.
    let is_whole = |used: &NonceUse| used.consumption.kind != ConsumptionKind::WithoutTransfer;
    if seen_by.iter().all(|(used, by)| is_agreed(by) && is_whole(used)) {
        finding.searched_to = searches.values().map(|search| search.to_block).min();
        finding.is_complete = searches.values().all(|s| s.to_block >= s.finalized.number);
    }
    seen_by.retain(|(used, by)| is_agreed(by) && is_whole(used));
    seen_by.sort_by_key(|(used, _)| place(used));

    let pays = seen_by.iter().position(|(used, _)| payment_of(refund, used).is_some());
    if let Some(index) = pays {
        let (used, by) = seen_by.remove(index);
        finding.paid = payment_of(refund, &used).map(|transfer| RefundPaid {
            log: LogRef { log_index: transfer.log_index, ..used.consumption.log },
            evidence: json!({ "used": used, "shown_by": by }),
        });
    }
    let strangers = policy.wallets.is_empty();
    // Once the buyer has his money, what strangers do with the nonce is nobody's business.
    if !(seen_by.is_empty() || strangers && finding.paid.is_some()) {
        finding.flags = mismatches(refund, &seen_by, strangers);
    }
    finding
}

/// Whether this is a use of the record's nonce that can be its refund, or a mistake in paying it.
fn concerns(
    refund: &OpenRefund,
    used: &NonceUse,
    search: &RefundSearch,
    policy: &RefundPolicy,
) -> bool {
    let counts = policy.wallets.is_empty() || policy.wallets.contains(&used.authorizer);
    (used.token, used.nonce) == (refund.token, refund.refund_nonce)
        && counts
        && used.authorizer != refund.payer
        && used.consumption.log.block.number <= search.finalized.number
}

fn place(used: &NonceUse) -> (u64, u64) {
    (used.consumption.log.block.number, used.consumption.log.log_index)
}

/// The transfer, if it is this record's refund.
fn payment_of(refund: &OpenRefund, used: &NonceUse) -> Option<SeenTransfer> {
    match used.consumption.kind {
        ConsumptionKind::Transferred(seen)
            if (seen.token, seen.to, seen.value) == (refund.token, refund.payer, refund.amount) =>
        {
            Some(seen)
        }
        _ => None,
    }
}

/// One flag per wallet, each of which can use the nonce once. Of strangers, any number can: they share one
/// flag, so that nobody can flood a person with them.
fn mismatches(
    refund: &OpenRefund,
    uses: &[(NonceUse, BTreeSet<&EndpointName>)],
    strangers: bool,
) -> Vec<Flag> {
    let mut by_subject: BTreeMap<String, Vec<&NonceUse>> = BTreeMap::new();
    for (used, _) in uses {
        let subject = if strangers { String::new() } else { used.authorizer.to_string() };
        by_subject.entry(subject).or_default().push(used);
    }
    let owed = json!({
        "refund": refund.id,
        "status": refund.status,
        "token": refund.token,
        "payer": refund.payer,
        "amount": refund.amount,
        "refund_nonce": refund.refund_nonce,
    });
    by_subject
        .into_iter()
        .map(|(subject, mut uses)| {
            uses.truncate(USES_TOLD_MAX);
            let detail = json!({ "owed": owed, "used_for": uses });
            Flag { kind: FlagKind::RefundMismatch, subject, detail }
        })
        .collect()
}
