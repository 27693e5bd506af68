//! An endpoint that says "unused" of everything, at a fresh head: alone, nothing but a known answer tells.

use alloy_primitives::keccak256;
use reconciled::domain::{RawPayment, Timestamp};
use reconciled::sim::gateway::NewOrder;

use super::fates::{AMOUNT, PAY_TO};
use crate::support::anvil::{ANVIL_CHAIN_ID, Authorization, TokenOnAnvil, payer_key};
use crate::support::fault_proxy::lies::Lie;
use crate::support::fault_proxy::{FaultProxy, Manners, number};
use crate::support::worker::{Home, Worker};

/// Blocks from the head to the finalized one.
const FINALIZED_BEHIND: u64 = 2;

/// Seconds in a day, and a little: past the deadline of all that was broadcast before.
const A_DAY_LATER: u64 = 24 * 3_600 + 600;

struct Scene {
    chain: TokenOnAnvil,
    proxy: FaultProxy,
    worker: Worker,
}

impl Scene {
    /// An endpoint that lies from the start, and a worker that knows one right answer.
    async fn start() -> Self {
        let chain = TokenOnAnvil::start(FINALIZED_BEHIND / 2).await;
        chain.anvil.mine(20).await;
        let known = sign(&chain, 1).await;
        let receipt = chain.transfer(&known).await;
        assert_eq!(receipt["status"], "0x1", "{receipt}");
        chain.anvil.mine(20).await;
        let url = chain.anvil.url();
        let proxy = FaultProxy::start(url, ANVIL_CHAIN_ID, FINALIZED_BEHIND, 1).await;
        let configuration = format!(
            "[[chains]]\nchain_id = {ANVIL_CHAIN_ID}\nblock_time = \"1s\"\n\
             finality_margin = \"10s\"\nhead_age_max = \"1h\"\n\
             [[chains.known_used]]\ntoken = \"{}\"\npayer = \"{}\"\nnonce = \"{}\"\nblock = {}\n\
             [[chains.endpoints]]\nname = \"only\"\nurl = \"{}\"\n",
            chain.token,
            known.payer,
            known.nonce,
            number(&receipt["blockNumber"]),
            proxy.url()
        );
        let now = Timestamp::from(chain.anvil.block("latest").await.time);
        let worker = Worker::start(Home::sqlite(), &configuration, now).await;
        Self { chain, proxy, worker }
    }

    fn lie(&self, lie: Option<Lie>) {
        self.proxy.behave(Manners { lie, ..Manners::default() });
    }

    /// An order `order-ID` and its payment, whose settle call gave no answer.
    async fn unknown(&self, id: &str, a: &Authorization) {
        let now = self.worker.now();
        let order = format!("order-{id}");
        self.worker.gateway.insert_order(&NewOrder::paying(&order, now)).await.unwrap();
        let text = |value: &dyn ToString| Some(value.to_string());
        let row = RawPayment {
            id: id.to_owned(),
            order_id: text(&order),
            rail: text(&"x402"),
            method: text(&"eip3009"),
            chain_id: text(&ANVIL_CHAIN_ID),
            token: text(&self.chain.token),
            payer: text(&a.payer),
            pay_to: text(&PAY_TO),
            amount: text(&AMOUNT),
            nonce: text(&a.nonce),
            valid_after: text(&a.valid_after),
            valid_before: text(&a.valid_before),
            tx_hash: None,
            status: text(&"unknown"),
            created_at: text(&now.as_millis()),
            broadcast_at: text(&now.as_millis()),
        };
        self.worker.gateway.insert_payment(&row).await.unwrap();
    }

    /// Chain and clock go on.
    async fn later(&self, secs: u64) {
        self.chain.anvil.advance(secs).await;
        self.chain.anvil.mine(FINALIZED_BEHIND + 1).await;
        self.worker.clock.set(Timestamp::from(self.chain.anvil.block("latest").await.time));
    }

    async fn look(&self) {
        self.worker.probe().await;
        self.worker.look().await;
        self.worker.reconcile().await;
    }

    async fn statuses(&self, id: &str) -> (String, String) {
        let order = self.worker.gateway.orders().await.unwrap()[&format!("order-{id}")].0.clone();
        (self.worker.gateway.payments().await.unwrap()[id].clone(), order)
    }
}

async fn sign(chain: &TokenOnAnvil, n: u64) -> Authorization {
    let now = chain.anvil.block("latest").await.time.as_secs();
    Authorization {
        payer: payer_key(n).address(),
        to: PAY_TO,
        value: AMOUNT,
        valid_after: 0,
        valid_before: now + 600,
        nonce: keccak256(format!("known answers {n}")),
    }
}

fn texts(payment: &str, order: &str) -> (String, String) {
    (payment.to_owned(), order.to_owned())
}

#[tokio::test]
async fn i2_an_endpoint_that_fails_its_known_answer_is_no_evidence_until_it_is_well_again() {
    let scene = Scene::start().await;
    let (landed, never) = (sign(&scene.chain, 2).await, sign(&scene.chain, 3).await);
    scene.unknown("landed", &landed).await;
    scene.unknown("never", &never).await;
    let receipt = scene.chain.transfer(&landed).await;
    assert_eq!(receipt["status"], "0x1", "{receipt}");
    scene.later(60).await;
    scene.lie(Some(Lie::Unused));
    scene.look().await;
    // Past the window, which a finalized block would prove, and past the deadline.
    for secs in [700, A_DAY_LATER, 600] {
        scene.later(secs).await;
        scene.look().await;
        assert_eq!(scene.statuses("landed").await, texts("unknown", "paying"));
        assert_eq!(scene.statuses("never").await, texts("unknown", "paying"));
    }
    let flags = scene.worker.gateway.open_flags().await.unwrap();
    assert!(flags.contains(&"inconclusive_at_deadline:landed".to_owned()), "{flags:?}");

    scene.lie(None);
    scene.later(60).await;
    scene.look().await;
    scene.later(60).await;
    scene.look().await;
    assert_eq!(scene.statuses("landed").await, texts("settled", "paid"));
    assert_eq!(scene.statuses("never").await, texts("failed", "failed"));
}

#[tokio::test]
async fn i2_an_endpoint_that_calls_everything_used_fails_the_probe_of_a_random_nonce() {
    let scene = Scene::start().await;
    let open = sign(&scene.chain, 2).await;
    scene.unknown("open", &open).await;
    scene.later(60).await;
    // Not even its invented transfer is believed, though one endpoint is enough for a positive.
    scene.lie(Some(Lie::Paid(PAY_TO, AMOUNT)));
    for secs in [60, A_DAY_LATER] {
        scene.look().await;
        assert_eq!(scene.statuses("open").await, texts("unknown", "paying"));
        scene.later(secs).await;
    }
    scene.lie(None);
    scene.look().await;
    scene.later(60).await;
    scene.look().await;
    assert_eq!(scene.statuses("open").await, texts("failed", "failed"));
}
