//! Refund records as the search on chain works through them: which are due, and what was found.

use async_trait::async_trait;

use super::StoreError;
use super::row::{coded, unsigned};
use crate::domain::{
    ChainId, EventKind, OpenRefund, OrderId, PaymentId, RaisedFlag, RefundFinding, RefundStatus,
    Timestamp,
};

/// Which refund records are to be searched for: those last searched for at or before these times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SearchDue {
    /// Records in somebody's hands: claimed or sent.
    pub in_hand_before: Timestamp,
    /// The others that are not closed: owed or blocked.
    pub owed_before: Timestamp,
}

/// Refund records, for the search on chain.
#[async_trait]
pub trait RefundStore {
    /// At most `limit` records of this chain and of the rail x402 that are not closed and are due for a
    /// search, those longest without one first.
    async fn refunds_to_search(
        &self,
        chain_id: ChainId,
        due: SearchDue,
        limit: u32,
    ) -> Result<Vec<OpenRefund>, StoreError>;

    /// Writes down what a search came to, in one transaction: how far it went, and of a refund that was
    /// paid the record's end, the event `refund.paid` and the evidence (I12); and raises its flags. A
    /// record that is not what it was when it was asked about is left alone (I9, I10). Returns the
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
    pub(super) detected_at: i64,
    pub(super) searched_to: Option<i64>,
}

impl RawRefund {
    pub(super) fn parse(self) -> Result<OpenRefund, StoreError> {
        const TABLE: &str = "refunds_owed";
        Ok(OpenRefund {
            id: self.id,
            payment_id: PaymentId::new(self.payment_id),
            order_id: OrderId::new(self.order_id),
            chain_id: ChainId::new(unsigned(TABLE, "chain_id", self.chain_id)?),
            token: coded(TABLE, "token", &self.token, |text| text.parse().ok())?,
            payer: coded(TABLE, "payer", &self.payer, |text| text.parse().ok())?,
            amount: coded(TABLE, "amount", &self.amount, |text| text.parse().ok())?,
            refund_nonce: coded(TABLE, "refund_nonce", &self.refund_nonce, |t| t.parse().ok())?,
            status: coded(TABLE, "status", &self.status, RefundStatus::from_code)?,
            detected_at: Timestamp::from_millis(self.detected_at),
            searched_to: self
                .searched_to
                .map(|number| unsigned(TABLE, "searched_to", number))
                .transpose()?,
        })
    }
}

/// One that makes no sense is told of and left out, so that it holds up no other (I11).
pub(super) fn sound_refunds(rows: Vec<RawRefund>) -> Vec<OpenRefund> {
    rows.into_iter()
        .filter_map(|row| {
            let id = row.id;
            row.parse()
                .inspect_err(|error| {
                    let error = crate::errors::error_chain(error);
                    tracing::error!(refund = id, error, "a refund record makes no sense");
                })
                .ok()
        })
        .collect()
}

/// The flags of a finding, with whom they are about.
pub(super) fn raised(finding: &RefundFinding) -> impl Iterator<Item = RaisedFlag> {
    finding.flags.iter().map(|flag| RaisedFlag {
        payment_id: Some(finding.refund.payment_id.clone()),
        order_id: Some(finding.refund.order_id.clone()),
        flag: flag.clone(),
    })
}

/// A record is closed once.
pub(super) fn paid_event_key(refund: &OpenRefund) -> String {
    format!("{}:{}:{}", EventKind::RefundPaid, refund.order_id, refund.payment_id)
}
