//! What the database says at one moment of a story, beside what the chain holds.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Runner, STORY_PAY_TO};
use crate::domain::{Amount, Drift, FlagKind, RefundReason, RefundStatus};
use crate::sim::expectation::{Observed, Refund};
use crate::worker::Report;

impl Runner {
    pub(super) async fn observe(&self) -> anyhow::Result<Observed> {
        let orders = self.gateway.orders().await?;
        let payments = self.gateway.payments().await?;
        let refunds = self.refunds().await?;
        let stock = self.gateway.stock().await?;
        let flags = self.gateway.open_flags().await?;
        Ok(Observed {
            drift: Some(self.both_drifts(&orders, &payments, &refunds).await?),
            paid_by: orders
                .iter()
                .filter_map(|(order, (_, paid_by))| Some((order.clone(), paid_by.clone()?)))
                .collect(),
            orders: orders.into_iter().map(|(order, (status, _))| (order, status)).collect(),
            payments,
            stock: stock
                .into_iter()
                .map(|(sku, available)| Ok((sku, available.parse()?)))
                .collect::<anyhow::Result<_>>()?,
            reservations: self.gateway.reservations_by_order().await?,
            identifiers: self.gateway.identifiers().await?,
            refunds,
            refunded: self.refunded(),
            flags: flags.iter().map(|flag| flag.trim_end_matches(':').to_owned()).collect(),
            events: self.gateway.events().await?,
            reads: self.server.requests(),
        })
    }

    /// What each buyer received, by his payments. The chain's own record, not what the daemon saw of it.
    fn refunded(&self) -> BTreeMap<String, Amount> {
        let chain = self.server.chain().lock();
        let rows = self.scenario.all_payments();
        rows.into_iter().map(|row| (row.name, chain.received(row.payer))).collect()
    }

    async fn refunds(&self) -> anyhow::Result<Vec<Refund>> {
        let seen = self.gateway.refunds().await?;
        seen.into_iter()
            .map(|refund| {
                let odd = |what: &str| anyhow::anyhow!("refunds_owed holds the {what} {refund:?}");
                Ok(Refund {
                    reason: RefundReason::from_code(&refund.reason).ok_or_else(|| odd("reason"))?,
                    status: RefundStatus::from_code(&refund.status).ok_or_else(|| odd("status"))?,
                    amount: refund.amount.parse().map_err(|_| odd("amount"))?,
                    payment: refund.payment_id.clone(),
                })
            })
            .collect()
    }

    /// The drift that the last full reconcile found, unless it is not what the chain's own record says.
    async fn both_drifts(
        &self,
        orders: &BTreeMap<String, (String, Option<String>)>,
        payments: &BTreeMap<String, String>,
        refunds: &[Refund],
    ) -> anyhow::Result<String> {
        let flagged = self.flagged().await?;
        let record = self.drift(orders, payments, refunds, flagged).await?;
        let Some(run) = self.store.runs().await?.finished else { return Ok(record) };
        let report = Report::deserialize(&run.report)?;
        let drifts: Vec<String> = report.receivers.iter().map(|r| r.drift.to_string()).collect();
        let reported = drifts.join("+");
        if drifts.is_empty() || reported == record {
            return Ok(record);
        }
        let problems = report.problems.join("; ");
        Ok(format!("{reported} as reported ({problems}), {record} by the chain's own record"))
    }

    /// What a person was asked about, instead of paying an order or being owed back.
    async fn flagged(&self) -> anyhow::Result<Amount> {
        let sql = "SELECT CAST(detail AS TEXT) FROM {flags} \
                   WHERE kind IN (?, ?) AND cause_gone_at IS NULL";
        let kinds = [FlagKind::UnmatchedTransfer, FlagKind::SettledOrderOver];
        let mut sum = Amount::ZERO;
        for row in self.gateway.rows(sql, &kinds.map(|kind| Some(kind.code())), 1).await? {
            let detail: serde_json::Value =
                serde_json::from_str(row[0].as_deref().unwrap_or_default())?;
            let amount = detail["amount"].as_str().or(detail["transfer"]["value"].as_str());
            let amount = amount.unwrap_or_default().parse::<Amount>();
            sum = sum.saturating_add(amount.map_err(|e| anyhow::anyhow!("{detail}: {e}"))?);
        }
        Ok(sum)
    }

    /// What reached `pay_to` on the simulated chain less what the database accounts for: paid, owed back
    /// or flagged (I4). The chain's side is the chain's own record, not what the daemon saw of it.
    async fn drift(
        &self,
        orders: &BTreeMap<String, (String, Option<String>)>,
        payments: &BTreeMap<String, String>,
        refunds: &[Refund],
        flagged: Amount,
    ) -> anyhow::Result<String> {
        let on_chain = self.server.chain().lock().received(STORY_PAY_TO);
        let mut moved: BTreeMap<String, Amount> = BTreeMap::new();
        for row in self.gateway.transfers().await?.into_iter().filter(|row| !row.orphaned) {
            let amount = row.amount.parse().map_err(|_| anyhow::anyhow!("no amount: {row:?}"))?;
            moved.extend(row.payment_id.map(|payment| (payment, amount)));
        }
        let mut accounted = flagged;
        for (status, paid_by) in orders.values() {
            let pays = matches!(status.as_str(), "paid" | "undelivered");
            let Some(payer) = paid_by.as_ref().filter(|_| pays) else { continue };
            if payments.get(payer).is_some_and(|status| status == "settled") {
                // What moved, which can be less than was asked for; else what the gateway settled itself.
                let amount = match moved.get(payer) {
                    Some(amount) => *amount,
                    None => self.payment(payer)?.amount,
                };
                accounted = accounted.saturating_add(amount);
            }
        }
        let again =
            "{flags} WHERE kind = 'refunded_again' AND closed_at IS NULL AND payment_id = ?";
        for refund in refunds {
            let rows = format!("SELECT CAST(count(*) AS TEXT) FROM {again}");
            let rows = self.gateway.rows(&rows, &[Some(&refund.payment)], 1).await?;
            let again: u64 = rows[0][0].as_deref().unwrap_or_default().parse()?;
            let stands = u64::from(refund.status != RefundStatus::Void);
            for _ in 0..again + stands {
                accounted = accounted.saturating_add(refund.amount);
            }
        }
        Ok(Drift::between(on_chain, accounted).to_string())
    }
}
