//! Refund records as the search on chain works through them: which are due, and what was found.

use async_trait::async_trait;
use serde_json::json;

use super::StoreError;
use super::row::{coded, unsigned};
use crate::domain::{
    ChainId, EventKind, Flag, FlagKind, GoneFlag, OrderId, PaymentId, RaisedFlag, RefundFinding,
    RefundStatus, SearchProblem, SearchedRefund, Timestamp,
};

/// Which refund records are to be searched for: those last searched for at or before these times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SearchDue {
    /// Records in somebody's hands: claimed or sent.
    pub in_hand_before: Timestamp,
    /// The others: owed or blocked, or closed.
    pub owed_before: Timestamp,
    /// Of the closed ones, those that were first seen closed after this.
    pub closed_after: Timestamp,
}

/// Refund records that are due.
#[derive(Debug, Default)]
pub struct RefundPage {
    /// To be searched for.
    pub refunds: Vec<SearchedRefund>,
    /// These make no sense.
    pub malformed: Vec<MalformedRefund>,
}

impl RefundPage {
    /// Whether nothing is due.
    pub fn is_empty(&self) -> bool {
        self.refunds.is_empty() && self.malformed.is_empty()
    }
}

/// A refund record that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MalformedRefund {
    /// The record.
    pub id: i64,
    /// The payment whose money it is.
    pub payment_id: PaymentId,
    /// The order it was meant for.
    pub order_id: OrderId,
    /// What is wrong, with the column's name.
    pub problem: String,
}

/// Refund records, for the search on chain.
#[async_trait]
pub trait RefundStore {
    /// At most `limit` records of this chain and of the rail x402 that are due for a search, those longest
    /// without one first: closed ones only when no others are.
    async fn refunds_to_search(
        &self,
        chain_id: ChainId,
        due: SearchDue,
        limit: u32,
    ) -> Result<RefundPage, StoreError>;

    /// How many records of this chain were given up for now when they were last searched for, and no flag
    /// says so.
    async fn refunds_unsettled(&self, chain_id: ChainId) -> Result<u64, StoreError>;

    /// Flags records that make no sense, and moves them to the back, so that they hold up no other (I11).
    async fn refunds_malformed(
        &self,
        malformed: &[MalformedRefund],
        now: Timestamp,
    ) -> Result<(), StoreError>;

    /// Writes down what a search came to, in one transaction: how far it went, and of a refund that was
    /// paid the record's end, the event `refund.paid` and the evidence (I12); and raises its flags. A
    /// record that is not what it was when it was asked about is left alone (I9, I10). The transfer of a
    /// payment whose money went back once too often is marked as not accounted for. Returns the
    /// payments whose refund records were closed.
    async fn refunds_searched(
        &self,
        findings: &[RefundFinding],
        now: Timestamp,
    ) -> Result<Vec<PaymentId>, StoreError>;
}

/// A row of `refunds_owed` as the backends read it; times are Unix milliseconds.
#[derive(Debug)]
pub(super) struct RawRefund {
    pub(super) id: i64,
    pub(super) payment_id: String,
    pub(super) order_id: String,
    pub(super) chain_id: i64,
    pub(super) token: String,
    pub(super) payer: String,
    pub(super) amount: String,
    pub(super) refund_nonce: String,
    pub(super) status: String,
    pub(super) paid_tx: Option<String>,
    pub(super) detected_at: i64,
    pub(super) searched_to: Option<i64>,
    pub(super) search_begun_at: Option<i64>,
    pub(super) search_use_seen: bool,
    pub(super) search_problem: Option<String>,
}

impl RawRefund {
    pub(super) fn parse(self) -> Result<SearchedRefund, StoreError> {
        const TABLE: &str = "refunds_owed";
        Ok(SearchedRefund {
            id: self.id,
            payment_id: PaymentId::new(self.payment_id),
            order_id: OrderId::new(self.order_id),
            chain_id: ChainId::new(unsigned(TABLE, "chain_id", self.chain_id)?),
            token: coded(TABLE, "token", &self.token, |text| text.parse().ok())?,
            payer: coded(TABLE, "payer", &self.payer, |text| text.parse().ok())?,
            amount: coded(TABLE, "amount", &self.amount, |text| text.parse().ok())?,
            refund_nonce: coded(TABLE, "refund_nonce", &self.refund_nonce, |t| t.parse().ok())?,
            status: coded(TABLE, "status", &self.status, RefundStatus::from_code)?,
            paid_tx: self.paid_tx,
            detected_at: Timestamp::from_millis(self.detected_at),
            searched_to: self
                .searched_to
                .map(|number| unsigned(TABLE, "searched_to", number))
                .transpose()?,
            begun_at: self.search_begun_at.map(Timestamp::from_millis),
            is_use_seen: self.search_use_seen,
            was_malformed: self.search_problem.as_deref() == Some(SearchProblem::Malformed.code()),
        })
    }
}

/// Those that make no sense apart from the others.
pub(super) fn page(rows: Vec<RawRefund>) -> RefundPage {
    let mut page = RefundPage::default();
    for row in rows {
        let (id, payment_id) = (row.id, PaymentId::new(row.payment_id.clone()));
        let order_id = OrderId::new(row.order_id.clone());
        match row.parse() {
            Ok(refund) => page.refunds.push(refund),
            Err(error) => {
                let problem = crate::errors::error_chain(&error).to_string();
                tracing::error!(refund = id, problem, "a refund record makes no sense");
                page.malformed.push(MalformedRefund { id, payment_id, order_id, problem });
            }
        }
    }
    page
}

/// The flags about records that make no sense.
pub(super) fn malformed_flags(malformed: &[MalformedRefund]) -> Vec<RaisedFlag> {
    let flag = |one: &MalformedRefund| Flag {
        kind: FlagKind::MalformedRefund,
        subject: String::new(),
        detail: json!({ "refund": one.id, "problem": one.problem }),
    };
    malformed
        .iter()
        .map(|one| RaisedFlag {
            payment_id: Some(one.payment_id.clone()),
            order_id: Some(one.order_id.clone()),
            flag: flag(one),
        })
        .collect()
}

/// The problems that only a better read settles: those that a flag tells of are a person's.
pub(super) const UNSETTLED: [SearchProblem; 2] =
    [SearchProblem::Disagreement, SearchProblem::NotShown];

/// The flags of a finding, with whom they are about.
pub(super) fn raised(finding: &RefundFinding) -> impl Iterator<Item = RaisedFlag> {
    finding.flags.iter().map(|flag| RaisedFlag {
        payment_id: Some(finding.refund.payment_id.clone()),
        order_id: Some(finding.refund.order_id.clone()),
        flag: flag.clone(),
    })
}

/// What landed while its record was void may be what the record is closed by now; what else did is flagged
/// anew.
/// And a record that made no sense can be read.
pub(super) fn gone(finding: &RefundFinding) -> impl Iterator<Item = GoneFlag> {
    let again = finding.paid.is_some().then_some(FlagKind::RefundedAgain);
    let malformed = finding.refund.was_malformed.then_some(FlagKind::MalformedRefund);
    again.into_iter().chain(malformed).map(|kind| GoneFlag {
        kind,
        payment_id: Some(finding.refund.payment_id.clone()),
        subject: None,
        note: kind.cause_gone().unwrap_or_default().to_owned(),
    })
}

/// Whether money went back that was not to: then the payment's transfer is to be accounted for anew.
pub(super) fn is_again(finding: &RefundFinding) -> bool {
    finding.flags.iter().any(|flag| flag.kind == FlagKind::RefundedAgain)
}

/// A record is closed once.
pub(super) fn paid_event_key(refund: &SearchedRefund) -> String {
    format!("{}:{}:{}", EventKind::RefundPaid, refund.order_id, refund.payment_id)
}
