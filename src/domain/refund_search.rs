//! What a search of the chain says about refund records (DESIGN section 10): paid, misused, or nothing.
//!
//! The rule of payments, mirrored: that a refund was not found changes nothing about its record, ever; only
//! the refund itself closes it, found in a final block. A claim falls back to nobody. A record that is closed
//! is watched for a while longer: money that goes back a second time is a person's to get back (I6).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use alloy_primitives::{Address, B256};
use serde::Serialize;
use serde_json::{Value, json};

use super::order::column_code;
use super::{
    Amount, BlockRef, BlockTime, ChainId, Consumption, ConsumptionKind, EndpointName, Flag,
    FlagKind, LogRef, OrderId, PaymentId, ReadFailure, RefundStatus, SeenTransfer, Timestamp,
};

/// A refund record, as far as the search for its refund is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchedRefund {
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
    /// The transaction that it is said to have been paid in, as written: by hand it may be anything.
    pub paid_tx: Option<String>,
    /// When it was noticed that the money must go back: it was not paid long before.
    pub detected_at: Timestamp,
    /// The last block that was searched for it; `None`: none yet.
    pub searched_to: Option<u64>,
    /// When the search that began with the first block began.
    pub begun_at: Option<Timestamp>,
    /// Whether a use of its nonce was seen since then.
    pub is_use_seen: bool,
    /// Whether its row made no sense when it was last looked at.
    pub was_malformed: bool,
}

impl SearchedRefund {
    /// Whether somebody may be paying it just now.
    pub const fn is_in_hand(&self) -> bool {
        matches!(self.status, RefundStatus::Claimed | RefundStatus::Sent)
    }

    /// Which of these refunds, in the chain's order, is the one that the record ends or ended with: where it
    /// is said which transaction paid it, the one there; else the first one, unless it was called off.
    fn end_among(&self, paying: &[Seen<'_>]) -> Option<usize> {
        match (self.status, &self.paid_tx) {
            (RefundStatus::Void, _) => None,
            (RefundStatus::Paid, Some(written)) => paying.iter().position(|(used, _)| {
                written.parse::<B256>().is_ok_and(|hash| hash == used.consumption.log.tx_hash)
            }),
            _ => (!paying.is_empty()).then_some(0),
        }
    }

    /// How far it was searched for, as far as that can be true where `finalized` is the newest final block
    /// and endpoints are at most `slack` blocks apart. Whoever claims more was wrong about the chain, and
    /// what was passed over then is searched again.
    pub fn reached(&self, finalized: u64, slack: u64) -> Option<u64> {
        let believable = self.searched_to.filter(|block| *block <= finalized.saturating_add(slack));
        believable.map(|block| block.min(finalized))
    }
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
    /// How far two endpoints may be apart, in blocks.
    pub slack: u64,
    /// Every use of one of the nonces in these blocks.
    pub uses: Vec<NonceUse>,
    /// Nonces used so often in these blocks that their uses were not looked into.
    pub flooded: BTreeSet<B256>,
    /// Records whose nonce one of the wallets used by now, whether or not a log says so.
    pub consumed: BTreeSet<i64>,
    /// Records in somebody's hands of which that could not be read, and all that the endpoint is not believed
    /// about: nothing was searched for those.
    pub unread: BTreeSet<i64>,
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
    pub refund: SearchedRefund,
    /// The last block that has been searched now; `None`: nothing was.
    pub searched_to: Option<u64>,
    /// Whether that is the newest final block.
    pub is_complete: bool,
    /// Why these blocks could not be settled for it. It is not held to be searched for, and goes to the back
    /// so that it holds up no other (I11).
    pub problem: Option<SearchProblem>,
    /// Whether it is to be searched for from its first block on, the next time.
    pub restart: bool,
    /// Whether a use of the nonce was seen.
    pub is_use_seen: bool,
    /// The refund itself, of a record that does not name it yet.
    pub paid: Option<RefundPaid>,
    /// What a person has to look at.
    pub flags: Vec<Flag>,
}

column_code! {
    /// Why a search did not get anywhere for one record.
    SearchProblem {
        /// Endpoints show different uses of its nonce.
        Disagreement = "disagreement",
        /// The nonce was used, and how is not to be seen: a limited node, or one that keeps logs back.
        NotShown = "not_shown",
        /// Its nonce was used more often than is looked into; a flag says so.
        TooManyUses = "too_many_uses",
        /// The row makes no sense; a flag says so.
        Malformed = "malformed",
    }
}

/// So long after a search began with the first block it begins there again, when a nonce is used and no log
/// says how: the log may be in blocks that an endpoint passed over.
const RESTART_AFTER_NOT_SHOWN: Duration = Duration::from_secs(60 * 60);

/// The same for every record in somebody's hands where no wallets are named: nothing tells there that an
/// endpoint kept a log back.
const RESTART_WITHOUT_WALLETS: Duration = Duration::from_secs(24 * 60 * 60);

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
    refund: &SearchedRefund,
    readings: &[RefundReading],
    policy: &RefundPolicy,
    now: Timestamp,
) -> RefundFinding {
    let mut finding = RefundFinding {
        refund: refund.clone(),
        searched_to: None,
        is_complete: false,
        problem: None,
        restart: false,
        is_use_seen: false,
        paid: None,
        flags: Vec::new(),
    };
    let quorum = policy.quorum.max(1);
    // One that answers twice agrees only with itself.
    let searches: BTreeMap<&EndpointName, &RefundSearch> =
        readings.iter().filter_map(|r| Some((&r.endpoint, r.outcome.as_ref().ok()?))).collect();
    if searches.len() < quorum {
        return finding;
    }
    let Some(range) = Range::common(&searches) else { return finding };
    let mut seen_by: Vec<Seen<'_>> = Vec::new();
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
    // a limited node may show it: those blocks are searched again. Only of blocks that all have searched can
    // one have missed anything.
    let is_whole = |used: &NonceUse| used.consumption.kind != ConsumptionKind::WithoutTransfer;
    let compared = || seen_by.iter().filter(|(used, _)| range.contains(used));
    // Another endpoint showed what the first one left out.
    let is_told = |half: &NonceUse| {
        seen_by.iter().any(|(used, by)| {
            is_agreed(by) && is_whole(used) && used.consumption.log == half.consumption.log
        })
    };
    let is_over = range.last >= range.finalized;
    finding.is_use_seen = seen_by.iter().any(|(_, by)| is_agreed(by));
    let is_shown = refund.is_use_seen || finding.is_use_seen;
    let is_consumed = searches.values().any(|search| search.consumed.contains(&refund.id));
    let is_read = |search: &&&RefundSearch| !search.unread.contains(&refund.id);
    let is_hidden =
        is_consumed && is_over && !is_shown || searches.values().filter(is_read).count() < quorum;
    finding.problem = if searches.values().any(|s| s.flooded.contains(&refund.refund_nonce)) {
        Some(SearchProblem::TooManyUses)
    } else if compared().any(|(_, by)| !is_agreed(by)) {
        Some(SearchProblem::Disagreement)
    } else if is_hidden || compared().any(|(used, _)| !is_whole(used) && !is_told(used)) {
        Some(SearchProblem::NotShown)
    } else {
        None
    };
    if finding.problem.is_none() {
        let reached = refund.reached(range.finalized, range.slack);
        finding.searched_to = Some(reached.map_or(range.last, |block| block.max(range.last)));
        finding.is_complete = is_over;
    }
    finding.restart = must_restart(&finding, policy, now);
    seen_by.retain(|(used, by)| is_agreed(by) && is_whole(used));
    seen_by.sort_by_key(|(used, _)| place(used));

    let (mut paying, others): (Vec<Seen<'_>>, Vec<Seen<'_>>) =
        seen_by.into_iter().partition(|(used, _)| payment_of(refund, used).is_some());
    if let Some(index) = refund.end_among(&paying) {
        let (used, by) = paying.remove(index);
        if !(refund.status == RefundStatus::Paid && refund.paid_tx.is_some()) {
            finding.paid = payment_of(refund, &used).map(|transfer| RefundPaid {
                log: LogRef { log_index: transfer.log_index, ..used.consumption.log },
                evidence: json!({ "used": used, "shown_by": by }),
            });
            (finding.problem, finding.restart) = (None, false);
        }
    }
    let strangers = policy.wallets.is_empty();
    finding.flags.extend(again(refund, &paying, strangers));
    // Once the buyer has his money, what else strangers do with the nonce is nobody's business.
    let is_over = finding.paid.is_some() || refund.status.is_closed();
    if !(others.is_empty() || strangers && is_over) {
        finding.flags.extend(mismatches(refund, &others, strangers));
    }
    if finding.problem == Some(SearchProblem::TooManyUses) && refund.status.is_unfinished() {
        finding.flags.push(flood(refund));
    }
    finding
}

/// A use, and who showed it.
type Seen<'a> = (NonceUse, BTreeSet<&'a EndpointName>);

/// The blocks that every endpoint has searched.
struct Range {
    first: u64,
    last: u64,
    /// The newest block that is final to all of them.
    finalized: u64,
    slack: u64,
}

impl Range {
    fn common(searches: &BTreeMap<&EndpointName, &RefundSearch>) -> Option<Self> {
        let all = || searches.values();
        Some(Self {
            first: all().map(|search| search.from_block).max()?,
            last: all().map(|search| search.to_block).min()?,
            finalized: all().map(|search| search.finalized.number).min()?,
            slack: all().map(|search| search.slack).max()?,
        })
    }

    fn contains(&self, used: &NonceUse) -> bool {
        (self.first..=self.last).contains(&used.consumption.log.block.number)
    }
}

/// Whether blocks that were passed over must be searched again, for a record that somebody may have paid.
fn must_restart(finding: &RefundFinding, policy: &RefundPolicy, now: Timestamp) -> bool {
    let refund = &finding.refund;
    if !refund.is_in_hand() || refund.is_use_seen || finding.is_use_seen {
        return false;
    }
    let after = match finding.problem {
        Some(SearchProblem::NotShown) => RESTART_AFTER_NOT_SHOWN,
        None if finding.is_complete && policy.wallets.is_empty() => RESTART_WITHOUT_WALLETS,
        _ => return false,
    };
    refund.begun_at.is_some_and(|begun| begun <= now && now.since(begun) >= after)
}

/// Whether this is a use of the record's nonce that can be its refund, or a mistake in paying it.
fn concerns(
    refund: &SearchedRefund,
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
fn payment_of(refund: &SearchedRefund, used: &NonceUse) -> Option<SeenTransfer> {
    match used.consumption.kind {
        ConsumptionKind::Transferred(seen)
            if (seen.token, seen.to, seen.value) == (refund.token, refund.payer, refund.amount) =>
        {
            Some(seen)
        }
        _ => None,
    }
}

/// The buyer has got the money although he was not to any more. From a wallet of ours each time is an occasion
/// of its own. Where none are named it may as well be the buyer, who pays himself from another address, for
/// nothing: then there is one flag, so that he cannot flood a person with them.
fn again(refund: &SearchedRefund, paying: &[Seen<'_>], strangers: bool) -> Vec<Flag> {
    let flag = |subject: String, uses: &[Seen<'_>]| {
        let uses: Vec<Value> = uses
            .iter()
            .take(USES_TOLD_MAX)
            .map(|(used, by)| json!({ "used": used, "shown_by": by }))
            .collect();
        let detail = json!({
            "refund": owed(refund), "paid_tx": refund.paid_tx, "sent_again": uses
        });
        Flag { kind: FlagKind::RefundedAgain, subject, detail }
    };
    match (paying, strangers) {
        ([], _) => Vec::new(),
        (uses, true) => vec![flag(String::new(), uses)],
        (uses, false) => uses
            .iter()
            .map(|seen| {
                let LogRef { tx_hash, log_index, .. } = seen.0.consumption.log;
                flag(
                    format!("{}:{tx_hash:#x}:{log_index}", refund.chain_id),
                    std::slice::from_ref(seen),
                )
            })
            .collect(),
    }
}

/// One flag per wallet, each of which can use the nonce once. Of strangers, any number can: they share one
/// flag, so that nobody can flood a person with them.
fn mismatches(refund: &SearchedRefund, uses: &[Seen<'_>], strangers: bool) -> Vec<Flag> {
    let mut by_subject: BTreeMap<String, Vec<&NonceUse>> = BTreeMap::new();
    for (used, _) in uses {
        let subject = if strangers { String::new() } else { used.authorizer.to_string() };
        by_subject.entry(subject).or_default().push(used);
    }
    let owed = owed(refund);
    by_subject
        .into_iter()
        .map(|(subject, mut uses)| {
            uses.truncate(USES_TOLD_MAX);
            let detail = json!({ "owed": owed, "used_for": uses });
            Flag { kind: FlagKind::RefundMismatch, subject, detail }
        })
        .collect()
}

/// The occasion of the flag about a nonce that is used too often.
const FLOOD: &str = "too_many_uses";

/// Nobody but a person closes this record now, and he must know.
fn flood(refund: &SearchedRefund) -> Flag {
    let hint = "the nonce was used more often than is looked into: look for the refund by hand, and name \
                the wallets that pay refunds in refund_wallets";
    let detail = json!({ "owed": owed(refund), "problem": hint });
    Flag { kind: FlagKind::RefundMismatch, subject: FLOOD.to_owned(), detail }
}

fn owed(refund: &SearchedRefund) -> Value {
    json!({
        "refund": refund.id,
        "status": refund.status,
        "token": refund.token,
        "payer": refund.payer,
        "amount": refund.amount,
        "refund_nonce": refund.refund_nonce,
    })
}
