//! The gateway's rows: those a story starts with, and those it writes on the way.

use std::time::Duration;

use super::{DISCOVERY_EVERY, Runner, STORY_CHAIN, STORY_PAY_TO, STORY_TOKEN};
use crate::domain::{BlockTime, OrderStatus, RawPayment};
use crate::sim::gateway::{NewOrder, OrderUpdate};
use crate::sim::scenario::{GatewaySet, StoryPayment};

impl Runner {
    pub(super) async fn write_first_rows(&mut self) -> anyhow::Result<()> {
        for (sku, available) in &self.scenario.stock {
            self.gateway.put_stock(sku, *available).await?;
        }
        for (name, order) in &self.scenario.orders {
            let row = NewOrder {
                id: name.clone(),
                kind: order.kind.code().to_owned(),
                status: order.status.code().to_owned(),
                paid_by: order.paid_by.clone(),
                quote_expires_at: Some(self.at(order.quote_expires_at)),
                delivered_at: order.delivered.then(|| self.at(Duration::ZERO)),
                created_at: self.at(Duration::ZERO),
                held: order.stock.iter().map(|(sku, n)| (sku.clone(), *n)).collect(),
            };
            self.gateway.insert_order(&row).await?;
        }
        for payment in self.scenario.payments_at_start() {
            self.write_payment(&payment).await?;
        }
        for (name, identifier) in &self.scenario.identifiers {
            self.gateway
                .insert_identifier(name, &identifier.payment, identifier.status.code(), None)
                .await?;
        }
        Ok(())
    }

    /// A time of the story in the chain's seconds.
    pub(super) fn block_time(&self, at: Duration) -> BlockTime {
        BlockTime::from_secs(u64::try_from(self.at(at).as_millis() / 1_000).unwrap_or(0))
    }

    pub(super) async fn write_payment(&mut self, payment: &StoryPayment) -> anyhow::Result<()> {
        let millis = |at: Duration| Some(self.at(at).as_millis().to_string());
        let valid_before = self.block_time(payment.valid_before).as_secs();
        let row = RawPayment {
            id: payment.name.clone(),
            order_id: Some(payment.order.clone()),
            rail: Some(self.scenario.chain.rail.code().to_owned()),
            method: Some(payment.method.code().to_owned()),
            chain_id: Some(STORY_CHAIN.to_string()),
            token: Some(STORY_TOKEN.to_string()),
            payer: Some(payment.payer.to_string()),
            pay_to: Some(STORY_PAY_TO.to_string()),
            amount: Some(payment.amount.to_string()),
            nonce: Some(payment.nonce.to_string()),
            valid_after: Some("0".to_owned()),
            valid_before: Some(valid_before.to_string()),
            tx_hash: None,
            status: Some(payment.status.code().to_owned()),
            created_at: millis(payment.created_at),
            broadcast_at: millis(payment.broadcast_at),
        };
        self.gateway.insert_payment(&row).await?;
        // A `settling` row is found once it is stale.
        let stale_at = payment.broadcast_at + self.scenario.policy.stale_after + DISCOVERY_EVERY;
        self.discoveries.insert(stale_at);
        Ok(())
    }

    pub(super) async fn gateway_set(&self, now: Duration, set: &GatewaySet) -> anyhow::Result<()> {
        match set {
            GatewaySet::Payment { payment, status } => {
                self.gateway.set_payment_status(payment, status.code()).await?;
            }
            GatewaySet::Order { order, status, paid_by, delivered, release_stock } => {
                let update = OrderUpdate {
                    status: status.map(|s: OrderStatus| s.code().to_owned()),
                    paid_by: paid_by.clone(),
                    delivered_at: delivered.unwrap_or(false).then(|| self.at(now)),
                    release_stock: *release_stock,
                };
                self.gateway.update_order(order, &update).await?;
            }
            GatewaySet::Identifier { identifier, status } => {
                self.gateway.set_identifier_status(identifier, status.code()).await?;
            }
            GatewaySet::Stock { sku, available } => self.gateway.put_stock(sku, *available).await?,
        }
        Ok(())
    }
}
