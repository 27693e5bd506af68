//! What happens in a story, made to happen: on the chain, at its endpoints, by the gateway's hand.

use std::time::Duration;

use super::{Audience, DISCOVERY_EVERY, Runner, STORY_PAY_TO, Told};
use alloy_primitives::U256;

use crate::domain::{Amount, Method, PaymentId};
use crate::sim::chain::Authorized;
use crate::sim::scenario::{Act, ChainAct, Scheme, StoryPayment};
use crate::sim::{FACILITATOR, Fault, Permitted};

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
            ChainAct::Transfer { payment, to, amount, unseen, by_payer }
                if self.by_permit2(payment)? =>
            {
                let story = self.payment(payment)?;
                let mut permit = self.permitted(&story, *amount);
                permit.to = to.unwrap_or(permit.to);
                if *by_payer {
                    permit.settler = permit.owner;
                }
                let included = match unseen {
                    false => chain.lock().settle_permit(at, &permit)?,
                    true => chain.lock().settle_permit_unseen(at, &permit)?,
                };
                self.landed.insert(PaymentId::from(payment.as_str()), included.time.into());
            }
            ChainAct::Transfer { payment, to, amount, .. } => {
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
                let by_permit2 = |story: &StoryPayment| story.method == Method::Permit2;
                let included = if stories.iter().all(by_permit2) {
                    let permits = stories.iter().map(|story| self.permitted(story, None));
                    let permits: Vec<Permitted> = permits.collect();
                    chain.lock().batch_permits(at, &permits)?
                } else {
                    let all: Vec<Authorized> = stories.iter().map(authorized).collect();
                    chain.lock().batch(at, &all)?
                };
                for name in payments {
                    self.landed.insert(PaymentId::from(name.as_str()), included.time.into());
                }
            }
            ChainAct::Cancel { payment } => {
                let StoryPayment { method, payer, nonce, .. } = self.payment(payment)?;
                if method == Method::Permit2 {
                    let word = U256::from_be_bytes(nonce.0) >> 8;
                    let mask = U256::ONE << usize::from(nonce[31]);
                    chain.lock().invalidate(at, payer, word, mask)?;
                } else {
                    chain.lock().cancel(at, payer, nonce)?;
                }
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

    fn by_permit2(&self, payment: &str) -> anyhow::Result<bool> {
        Ok(self.payment(payment)?.method == Method::Permit2)
    }

    /// The payment's permit. Of an exact one, another amount is another permit with the same nonce.
    fn permitted(&self, payment: &StoryPayment, amount: Option<Amount>) -> Permitted {
        let upto = payment.scheme == Scheme::Upto;
        Permitted {
            owner: payment.payer,
            to: STORY_PAY_TO,
            amount: amount.filter(|_| !upto).unwrap_or(payment.amount),
            upto: upto.then_some(amount.unwrap_or(payment.amount)),
            settler: FACILITATOR,
            nonce: payment.nonce,
            deadline: self.block_time(payment.valid_before),
        }
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
