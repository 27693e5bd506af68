//! Whether a story that reads well makes sense: everything it names exists, and every number is possible.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Act, ChainAct, Event, GatewaySet, OrderTable, PaymentTable, Scenario, Scheme};
use crate::domain::{Method, Rail};
use crate::sim::expectation::Expect;

/// What makes no sense, and where.
pub(super) struct Nonsense {
    pub(super) table: String,
    pub(super) key: &'static str,
    pub(super) problem: String,
}

fn ensure(
    holds: bool,
    table: impl Into<String>,
    key: &'static str,
    problem: impl Into<String>,
) -> Result<(), Nonsense> {
    if holds { Ok(()) } else { Err(Nonsense { table: table.into(), key, problem: problem.into() }) }
}

impl Scenario {
    /// Checks everything; the first thing that makes no sense is the error.
    pub(super) fn check_sense(&self) -> Result<(), Nonsense> {
        let chain = &self.chain;
        ensure(chain.endpoints >= 1, "chain", "endpoints", "there must be one")?;
        ensure(chain.block_time.as_millis() >= 1, "chain", "block_time", "at least 1ms")?;
        let quorum = self.policy.quorum;
        let enough = (1..=chain.endpoints).contains(&quorum);
        ensure(enough, "policy", "quorum", "at least 1, at most the number of endpoints")?;
        ensure(!self.expects.is_empty(), "expect", "at", "a story needs an ending")?;
        for (sku, available) in &self.stock {
            ensure(*available >= 0, "stock", "available", format!("{sku} is negative"))?;
        }
        for (name, order) in &self.orders {
            self.check_order(&format!("order.{name}"), order)?;
        }
        for (name, row) in &self.payments {
            self.check_payment(&format!("payment.{name}"), name, row)?;
        }
        for (name, identifier) in &self.identifiers {
            self.payment_exists(&format!("identifier.{name}"), "payment", &identifier.payment)?;
        }
        let mut names: BTreeSet<&str> = self.payments.keys().map(String::as_str).collect();
        for (at, payment, _) in self.later_rows() {
            let problem = format!("there is a payment {payment} already");
            ensure(names.insert(payment), event_table(at), "payment", problem)?;
        }
        self.events.iter().try_for_each(|event| self.check_event(event))?;
        self.expects.iter().try_for_each(|expect| self.check_expect(expect))
    }

    fn check_order(&self, table: &str, order: &OrderTable) -> Result<(), Nonsense> {
        for (sku, quantity) in &order.stock {
            self.sku_exists(table, "stock", sku)?;
            ensure(*quantity >= 0, table, "stock", format!("{sku} is negative"))?;
        }
        order.paid_by.iter().try_for_each(|payment| self.payment_exists(table, "paid_by", payment))
    }

    fn check_payment(&self, table: &str, name: &str, row: &PaymentTable) -> Result<(), Nonsense> {
        match &row.order {
            Some(order) => self.order_exists(table, "order", order)?,
            None => ensure(
                self.only_order().is_some(),
                table,
                "order",
                "must be named unless there is exactly one order",
            )?,
        }
        let fits = match row.method {
            None => true,
            Some(Method::Tempo) => self.chain.rail == Rail::Mpp,
            Some(Method::Eip3009 | Method::Permit2) => self.chain.rail == Rail::X402,
        };
        ensure(fits, table, "method", "not a method of the chain's rail")?;
        let fits = row.scheme == Scheme::Exact || row.method == Some(Method::Permit2);
        ensure(fits, table, "scheme", "only permit2 settles for less than was signed for")?;
        if let Some(signed) = &row.same_authorization_as {
            const KEY: &str = "same_authorization_as";
            self.payment_exists(table, KEY, signed)?;
            let first = self.row(signed).is_some_and(|r| r.same_authorization_as.is_none());
            ensure(signed != name && first, table, KEY, "must be the payment it was signed for")?;
            ensure(row.payer.is_none(), table, "payer", format!("is that of {signed}"))?;
        }
        Ok(())
    }

    fn check_event(&self, event: &Event) -> Result<(), Nonsense> {
        let table = event_table(event.at);
        let payment = |name: &String| self.payment_exists(&table, "payment", name);
        match &event.act {
            Act::Chain(act) => match act {
                ChainAct::Transfer { payment: name, unseen, by_payer, .. } => {
                    payment(name)?;
                    for (key, is_set) in [("unseen", *unseen), ("by_payer", *by_payer)] {
                        let fits = !is_set || self.by_permit2(name);
                        ensure(fits, &table, key, "only of a permit2 payment")?;
                    }
                    Ok(())
                }
                ChainAct::Cancel { payment: name }
                | ChainAct::Revert { payment: name }
                | ChainAct::Park { payment: name } => payment(name),
                ChainAct::Batch { payments } => {
                    ensure(!payments.is_empty(), &table, "payments", "at least one")?;
                    payments.iter().try_for_each(payment)?;
                    let permits = payments.iter().filter(|name| self.by_permit2(name)).count();
                    let alike = permits == 0 || permits == payments.len();
                    ensure(alike, &table, "payments", "permit2 is not batched with others")
                }
                ChainAct::Reorg { depth } => ensure(*depth >= 1, &table, "depth", "at least 1"),
                ChainAct::BareTransfer { .. } => Ok(()),
            },
            Act::Rpc { endpoint, until, .. } => {
                let exists = *endpoint < self.chain.endpoints;
                ensure(exists, &table, "endpoint", "there is no such endpoint")?;
                let ends = until.is_none_or(|until| until > event.at);
                ensure(ends, &table, "until", "must be after `at`")
            }
            Act::GatewayPayment { payment, row } => self.check_payment(&table, payment, row),
            Act::GatewaySet(set) => match set {
                GatewaySet::Payment { payment: name, .. } => payment(name),
                GatewaySet::Order { order, paid_by, .. } => {
                    self.order_exists(&table, "order", order)?;
                    paid_by.iter().try_for_each(|p| self.payment_exists(&table, "paid_by", p))
                }
                GatewaySet::Identifier { identifier, .. } => {
                    self.identifier_exists(&table, "identifier", identifier)
                }
                GatewaySet::Stock { sku, available } => {
                    self.sku_exists(&table, "stock", sku)?;
                    ensure(*available >= 0, &table, "available", "must not be negative")
                }
            },
            Act::Refund(refund) => payment(&refund.payment),
            Act::Kill { .. } | Act::ClockJump { .. } => Ok(()),
        }
    }

    fn check_expect(&self, expect: &Expect) -> Result<(), Nonsense> {
        let table = format!("expect at {}", humantime::format_duration(expect.at));
        for order in expect.orders.keys() {
            self.order_exists(&table, "orders", order)?;
        }
        for (order, payment) in &expect.paid_by {
            self.order_exists(&table, "paid_by", order)?;
            self.payment_exists(&table, "paid_by", payment)?;
        }
        for payment in expect.payments.keys() {
            self.payment_exists(&table, "payments", payment)?;
        }
        for sku in expect.stock.keys() {
            self.sku_exists(&table, "stock", sku)?;
        }
        for order in expect.reservations.keys() {
            let holds = self.orders.get(order).is_some_and(|order| !order.stock.is_empty());
            ensure(holds, &table, "reservations", format!("no order {order} that holds stock"))?;
        }
        for identifier in expect.identifiers.keys() {
            self.identifier_exists(&table, "identifiers", identifier)?;
        }
        for refund in expect.refunds.iter().flatten() {
            self.payment_exists(&table, "refunds", &refund.payment)?;
        }
        for payment in expect.refunded.keys() {
            self.payment_exists(&table, "refunded", payment)?;
        }
        for flag in expect.flags.iter().flatten() {
            let known = flag.split_once(':').is_none_or(|(_, name)| self.is_subject(name));
            let problem = format!("{flag:?} is not kind:NAME of an order or a payment");
            ensure(known, &table, "flags", problem)?;
        }
        for event in &expect.events {
            let known = event.split_once(':').is_some_and(|(_, name)| self.is_subject(name));
            let problem = format!("{event:?} is not kind:NAME of an order or a payment");
            ensure(known, &table, "events", problem)?;
        }
        Ok(())
    }

    fn by_permit2(&self, name: &str) -> bool {
        self.row(name).is_some_and(|row| row.method == Some(Method::Permit2))
    }

    /// Whether an event or a flag can be about this.
    fn is_subject(&self, name: &str) -> bool {
        self.orders.contains_key(name) || self.row(name).is_some()
    }

    fn payment_exists(&self, table: &str, key: &'static str, name: &str) -> Result<(), Nonsense> {
        ensure(self.row(name).is_some(), table, key, format!("there is no payment {name}"))
    }

    fn order_exists(&self, table: &str, key: &'static str, name: &str) -> Result<(), Nonsense> {
        ensure(self.orders.contains_key(name), table, key, format!("there is no order {name}"))
    }

    fn identifier_exists(
        &self,
        table: &str,
        key: &'static str,
        name: &str,
    ) -> Result<(), Nonsense> {
        let exists = self.identifiers.contains_key(name);
        ensure(exists, table, key, format!("there is no identifier {name}"))
    }

    fn sku_exists(&self, table: &str, key: &'static str, name: &str) -> Result<(), Nonsense> {
        ensure(self.stock.contains_key(name), table, key, format!("there is no {name} in [stock]"))
    }
}

fn event_table(at: Duration) -> String {
    format!("event at {}", humantime::format_duration(at))
}
