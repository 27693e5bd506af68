//! Tokens that break every rule of EIP-3009, on a real EVM: nothing about them ever reads as settled, and no
//! order of theirs is ever paid (I2, I3); and the honest token's payments in the same batch are read right (I11).

mod stage;

use std::collections::BTreeMap;
use std::time::Duration;

use reconciled::chain::{Breadth, ChainSettings, KnownUsed, Sickness};
use reconciled::domain::{
    EndpointName, Payment, PaymentId, Policy, RawPayment, ReadFailureKind, Receiver, Timestamp,
    Verdict, judge,
};
use reconciled::sim::gateway::NewOrder;
use serde_json::json;

use self::stage::Stage;
use super::backend::{FINALIZED_AFTER, Reader, TestChain, failures, payment, settings};
use super::cases::used;
use super::health::probe_at;
use crate::support::anvil::ANVIL_CHAIN_ID;
use crate::support::dice::Dice;
use crate::support::worker::{Home, Worker};

/// The verdict as watches and checks store it.
fn code(verdict: &Verdict) -> String {
    match verdict.reason() {
        Some(reason) => format!("{}:{reason}", verdict.kind()),
        None => verdict.kind().to_owned(),
    }
}

/// Honest payments: those that landed settle, the others do not.
struct Honest {
    landed: Vec<Payment>,
    canceled: Vec<Payment>,
    unused: Vec<Payment>,
}

impl Honest {
    async fn beside(stage: &mut Stage) -> Self {
        let mut honest = Self { landed: Vec::new(), canceled: Vec::new(), unused: Vec::new() };
        for n in 0..3 {
            let mut next = async |kind: &str| {
                let a = stage.authorization().await;
                let id = PaymentId::from(format!("honest {kind} {n}").as_str());
                (a, Payment { id, ..payment(&stage.chain, &a).await })
            };
            let (a, landed) = next("landed").await;
            let (b, canceled) = next("canceled").await;
            let (_, unused) = next("unused").await;
            stage.chain.transfer(&[a]).await;
            stage.chain.cancel(&b).await;
            honest.landed.push(landed);
            honest.canceled.push(canceled);
            honest.unused.push(unused);
        }
        stage.chain.mine(FINALIZED_AFTER).await;
        honest
    }

    fn with_verdicts(&self) -> impl Iterator<Item = (&Payment, &'static str)> {
        let all = |payments, verdict| std::iter::repeat(verdict).zip(payments);
        let landed = all(&self.landed, "settled:final");
        let canceled = all(&self.canceled, "unsettleable:canceled");
        let all = landed.chain(canceled).chain(all(&self.unused, "pending"));
        all.map(|(verdict, payment)| (payment, verdict))
    }
}

/// Reads everything in one batch, in an order that `dice` choose, and says what is not as it must be.
async fn wrong_verdicts(
    stage: &Stage,
    honest: &Honest,
    reader: &Reader,
    dice: &mut Dice,
) -> Vec<String> {
    let mut all: Vec<(&Payment, Vec<&str>)> =
        stage.hostile.iter().map(|h| (&h.payment, h.verdicts.to_vec())).collect();
    all.extend(honest.with_verdicts().map(|(payment, verdict)| (payment, vec![verdict])));
    for place in (1..all.len()).rev() {
        all.swap(place, dice.roll(0..place as u64 + 1) as usize);
    }
    let payments: Vec<Payment> = all.iter().map(|(payment, _)| (*payment).clone()).collect();
    let evidence = reader.read_at(&payments, Breadth::FirstAnswer, 0).await;
    let mut wrong = Vec::new();
    for ((payment, expected), evidence) in all.iter().zip(&evidence) {
        let verdict = code(&judge(payment, evidence, &Policy::default()));
        if !expected.contains(&verdict.as_str()) {
            wrong.push(format!("{}: {verdict}, not {expected:?}: {evidence:?}", payment.id));
        }
    }
    wrong
}

#[tokio::test]
async fn i2_no_token_however_hostile_reads_as_settled_and_honest_neighbours_are_read_right() {
    let mut stage = Stage::start().await;
    let honest = Honest::beside(&mut stage).await;
    let reader = Reader::of(&stage.chain);
    for seed in 0..6 {
        // Another block, another minute: for those that change their minds.
        stage.chain.advance(61).await;
        let wrong = wrong_verdicts(&stage, &honest, &reader, &mut Dice::new(seed)).await;
        assert!(wrong.is_empty(), "in order {seed}: {wrong:#?}");
    }
    // In small batches, and where every state is a call of its own.
    let small = ChainSettings { batch_max: 7, ..settings(&stage.chain, &[stage.chain.url()]) };
    let wrong = wrong_verdicts(&stage, &honest, &Reader::with(small), &mut Dice::new(7)).await;
    assert!(wrong.is_empty(), "in small batches: {wrong:#?}");
    stage.chain.remove_multicall().await;
    stage.hostile.retain(|hostile| hostile.name != "Multicall3 as the token");
    let reader = Reader::of(&stage.chain);
    let wrong = wrong_verdicts(&stage, &honest, &reader, &mut Dice::new(8)).await;
    assert!(wrong.is_empty(), "without Multicall3: {wrong:#?}");
}

fn receiver(payment: &Payment) -> Receiver {
    Receiver { token: payment.token, pay_to: payment.pay_to }
}

#[tokio::test]
async fn i11_a_token_that_calls_every_nonce_used_makes_no_endpoint_sick_about_another() {
    const UNHEALTHY: Option<ReadFailureKind> = Some(ReadFailureKind::Unhealthy);
    let mut stage = Stage::start().await;
    let honest = Honest::beside(&mut stage).await;
    // Its logs are whole, so it is learnt like any other, and a random nonce is asked about.
    let hostile = stage.hostile.iter().find(|hostile| hostile.name == "another amount").unwrap();
    let urls = [stage.chain.url(), stage.chain.url()];
    let block = {
        let reader = Reader::of(&stage.chain);
        used(&reader.read_one(&hostile.payment).await).log.block.number
    };
    let Payment { token, payer, nonce, .. } = hostile.payment;
    let known = KnownUsed { token, payer, nonce, block };
    for known_used in [vec![], vec![known]] {
        let reader = Reader::with(ChainSettings { known_used, ..settings(&stage.chain, &urls) });
        let mut payments = vec![hostile.payment.clone()];
        reader.read(&payments).await;
        payments.extend(honest.with_verdicts().map(|(payment, _)| payment.clone()));
        // First it is all that is known, then the honest token is known as well.
        for _ in 0..2 {
            assert_eq!(probe_at(&reader, 0).await, [Some(Sickness::RandomNonceUsed); 2]);
            // One answer of a scan is about all its tokens.
            let head = stage.chain.head().await.number;
            let first = honest.landed.iter().map(receiver).next().unwrap();
            for (receivers, failure) in
                [(vec![first], None), (vec![first, receiver(&hostile.payment)], UNHEALTHY)]
            {
                let (name, receivers) = (EndpointName::new("a"), receivers.into_iter().collect());
                let within = Duration::from_secs(20);
                let scan = reader.chain.scan(&name, &receivers, head - 1, head, within).await;
                assert_eq!(scan.err().map(|failure| failure.kind), failure);
            }
            for breadth in [Breadth::FirstAnswer, Breadth::All] {
                let evidence = reader.read_at(&payments, breadth, 0).await;
                assert_eq!(failures(&evidence[0]), [UNHEALTHY; 2], "{breadth:?}");
                for ((payment, expected), evidence) in honest.with_verdicts().zip(&evidence[1..]) {
                    let verdict = code(&judge(payment, evidence, &Policy::default()));
                    assert_eq!(verdict, expected, "{}: {evidence:?}", payment.id);
                }
            }
        }
    }
}

/// The row a gateway would write.
fn row(payment: &Payment) -> RawPayment {
    let text = |value: &dyn ToString| Some(value.to_string());
    RawPayment {
        id: payment.id.to_string(),
        order_id: text(&format!("order of {}", payment.id)),
        rail: text(&payment.rail.code()),
        method: text(&payment.method.code()),
        chain_id: text(&payment.chain_id),
        token: text(&payment.token),
        payer: text(&payment.payer),
        pay_to: text(&payment.pay_to),
        amount: text(&payment.amount),
        nonce: text(&payment.nonce),
        valid_after: text(&payment.valid_after.as_secs()),
        valid_before: text(&payment.valid_before.as_secs()),
        tx_hash: None,
        status: text(&"unknown"),
        created_at: text(&payment.created_at.as_millis()),
        broadcast_at: text(&payment.started_at().as_millis()),
    }
}

#[tokio::test]
async fn i3_no_order_of_a_hostile_token_is_ever_paid() {
    let mut stage = Stage::start().await;
    let honest = Honest::beside(&mut stage).await;
    let now = Timestamp::from(stage.chain.head().await.time);
    let configuration = format!(
        "[[chains]]\nchain_id = {ANVIL_CHAIN_ID}\nblock_time = \"1s\"\nfinality_margin = \"10s\"\n\
         [[chains.endpoints]]\nname = \"anvil\"\nurl = \"{}\"\n",
        stage.chain.url()
    );
    let worker = Worker::start(Home::sqlite(), &configuration, now).await;
    let all = stage.hostile.iter().map(|h| &h.payment);
    for payment in all.chain(honest.with_verdicts().map(|(payment, _)| payment)) {
        let order = NewOrder::paying(&format!("order of {}", payment.id), now);
        worker.gateway.insert_order(&order).await.unwrap();
        worker.gateway.insert_payment(&row(payment)).await.unwrap();
    }
    let count = stage.hostile.len() + 9;
    assert_eq!(worker.look().await, count);
    // Past every window and the deadline, and a while longer.
    for secs in [700, 25 * 3_600, 3_600, 61] {
        stage.chain.advance(secs).await;
        stage.chain.mine(FINALIZED_AFTER).await;
        worker.clock.set(Timestamp::from(stage.chain.head().await.time));
        worker.look().await;
        worker.reconcile().await;
    }

    let orders = worker.gateway.orders().await.unwrap();
    let statuses = worker.gateway.payments().await.unwrap();
    let flags = worker.gateway.open_flags().await.unwrap();
    let seen = |payment: &Payment| {
        let (order, paid_by) = &orders[&format!("order of {}", payment.id)];
        (order.as_str(), statuses[payment.id.as_str()].as_str(), paid_by.is_some())
    };
    for payment in &honest.landed {
        assert_eq!(seen(payment), ("paid", "settled", true), "{}", payment.id);
    }
    for payment in honest.unused.iter().chain(&honest.canceled) {
        assert_eq!(seen(payment), ("failed", "failed", false), "{}", payment.id);
    }
    let mut wrong = BTreeMap::new();
    for hostile in &stage.hostile {
        let (order, status, is_paid) = seen(&hostile.payment);
        let is_inconclusive = hostile.verdicts.iter().all(|v| v.starts_with("inconclusive"));
        let flagged = flags.contains(&format!("inconclusive_at_deadline:{}", hostile.name));
        // What cannot be read is never failed for it, and a person is told.
        let right = match is_inconclusive {
            true => (order, status, flagged) == ("paying", "unknown", true),
            false => matches!((order, status), ("failed", "failed") | ("paying", "unknown")),
        };
        if !right || is_paid {
            wrong.insert(hostile.name, (order, status, is_paid, flagged));
        }
    }
    assert_eq!(wrong, BTreeMap::new());
    assert_eq!(worker.gateway.refunds().await.unwrap(), [], "none of it is owed back");
    let paid = worker.gateway.rows("SELECT id FROM orders WHERE status = 'paid'", &[], 1).await;
    assert_eq!(paid.unwrap().len(), honest.landed.len(), "{}", json!(orders));
}
