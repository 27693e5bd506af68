//! What happens in a story, made to happen: on the chain, at its endpoints, by the gateway's hand.

use std::time::Duration;

use super::{Audience, DISCOVERY_EVERY, Runner, STORY_PAY_TO, Told};
use crate::domain::PaymentId;
use crate::sim::Fault;
use crate::sim::chain::Authorized;
use crate::sim::scenario::{Act, ChainAct, StoryPayment};

/// One thing to do in a story.
pub(super) enum Step {
    Act(Act),
    FaultEnds(usize, Fault),
}

impl Runner {
    /// Every act in order of time, the ends of faults among them.
    pub(super) fn acts(&self) -> Vec<(Duration, Step)> {
        let mut acts: Vec<(Duration, Step)> = Vec::new();
        for event in &self.scenario.events {
            acts.push((event.at, Step::Act(event.act.clone())));
            if let Act::Rpc { endpoint, fault, until: Some(until) } = &event.act {
                acts.push((*until, Step::FaultEnds(*endpoint, *fault)));
            }
        }
        acts.sort_by_key(|(at, _)| *at);
        acts
    }

    pub(super) async fn act(
        &mut self,
        now: Duration,
        step: Step,
        audience: &mut dyn Audience,
    ) -> anyhow::Result<()> {
        let told = match step {
            Step::FaultEnds(endpoint, fault) => {
                self.server.clear_fault(endpoint, fault.kind());
                Told::Rpc { endpoint, fault, starts: false }
            }
            Step::Act(Act::Rpc { endpoint, fault, .. }) => {
                self.server.set_fault(endpoint, fault);
                Told::Rpc { endpoint, fault, starts: true }
            }
            Step::Act(Act::Chain(act)) => {
                if let ChainAct::Reorg { depth } = &act {
                    self.server.chain().lock().reorg(*depth)?;
                }
                Told::Chain(act)
            }
            Step::Act(Act::GatewayPayment { payment, .. }) => {
                let payment = self.payment(&payment)?;
                self.write_payment(&payment).await?;
                self.discoveries.insert(now + DISCOVERY_EVERY);
                Told::PaymentWritten(payment)
            }
            Step::Act(Act::GatewaySet(set)) => {
                self.gateway_set(now, &set).await?;
                self.discoveries.insert(now + DISCOVERY_EVERY);
                Told::GatewaySet(set)
            }
            Step::Act(Act::Kill { between }) => {
                self.kill_at_next = Some(between);
                return Ok(());
            }
            Step::Act(Act::ClockJump { by }) => {
                self.clock_ahead += by;
                self.set_time(now);
                return Ok(());
            }
            Step::Act(Act::Refund(act)) => {
                self.write_refund(now, &act).await?;
                Told::Refund(act)
            }
        };
        audience.hear(now, told).await;
        Ok(())
    }

    pub(super) fn payment(&self, name: &str) -> anyhow::Result<StoryPayment> {
        self.scenario
            .payment(name)
            .ok_or_else(|| anyhow::anyhow!("the story has no payment {name}"))
    }

    /// Puts a transaction into the block at `now`, which must not exist yet.
    pub(super) async fn mine(&mut self, now: Duration, step: &Step) -> anyhow::Result<()> {
        let act = match step {
            Step::Act(Act::Chain(act)) => act,
            Step::Act(Act::Refund(act)) => return self.mine_refund(now, act).await,
            _ => return Ok(()),
        };
        let at = self.at(now);
        let chain = self.server.chain().clone();
        match act {
            ChainAct::Transfer { payment, to, amount } => {
                let story = self.payment(payment)?;
                let mut authorized = authorized(&story);
                authorized.to = to.unwrap_or(authorized.to);
                authorized.value = amount.unwrap_or(authorized.value);
                let included = chain.lock().transfer(at, authorized)?;
                self.landed.insert(PaymentId::from(payment.as_str()), included.time.into());
            }
            ChainAct::Batch { payments } => {
                let stories: Vec<StoryPayment> =
                    payments.iter().map(|name| self.payment(name)).collect::<Result<_, _>>()?;
                let all: Vec<Authorized> = stories.iter().map(authorized).collect();
                let included = chain.lock().batch(at, &all)?;
                for name in payments {
                    self.landed.insert(PaymentId::from(name.as_str()), included.time.into());
                }
            }
            ChainAct::Cancel { payment } => {
                let story = self.payment(payment)?;
                chain.lock().cancel(at, story.payer, story.nonce)?;
            }
            ChainAct::Revert { .. } => {
                chain.lock().revert(at)?;
            }
            ChainAct::BareTransfer { amount, payer } => {
                chain.lock().bare_transfer(at, *payer, STORY_PAY_TO, *amount)?;
            }
            ChainAct::Reorg { .. } => {}
            ChainAct::Park { .. } => anyhow::bail!("receive policies are Tempo's"),
        }
        Ok(())
    }
}

fn authorized(payment: &StoryPayment) -> Authorized {
    Authorized {
        payer: payment.payer,
        to: STORY_PAY_TO,
        value: payment.amount,
        nonce: payment.nonce,
    }
}
