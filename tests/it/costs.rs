//! What reading costs, counted at the node: the figures of docs/rpc-figures.md are asserted here. And what
//! nobody waits for.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use reconciled::clock::Clock;
use reconciled::domain::{Amount, RawPayment, Timestamp};
use reconciled::sim::gateway::NewOrder;
use reconciled::sim::runner::{STORY_CHAIN, STORY_PAY_TO, STORY_START, STORY_TOKEN};
use reconciled::sim::{Authorized, SimChain, SimServer, SimSettings};
use url::Url;

use crate::support::worker::{Home, Worker};

const VALID_FOR: Duration = Duration::from_secs(300);
const DAY: Duration = Duration::from_secs(24 * 3_600);
const AMOUNT: u64 = 1_000_000;

struct Shop {
    worker: Arc<Worker>,
    server: SimServer,
}

impl Shop {
    /// A shop as the sample configuration has it, but for its repeats, with `endpoints` endpoints, and one
    /// more where `silent` is.
    async fn open(endpoints: usize, silent: Option<Url>, quorum: usize) -> Self {
        let chain = SimChain::new(SimSettings::new(
            STORY_CHAIN,
            STORY_START.saturating_sub(Duration::from_secs(3_600)),
            Duration::from_secs(2),
            Duration::from_secs(20 * 60),
            STORY_TOKEN,
        ));
        chain.lock().set_time(STORY_START);
        let server = SimServer::start(chain, endpoints).await.unwrap();
        let mut configuration = format!(
            "[checks]\nrepeats = [\"0s\", \"3s\", \"6s\", \"9s\"]\n\
             [policy]\nquorum = {quorum}\n\
             [[chains]]\nchain_id = {STORY_CHAIN}\nrequest_timeout = \"4s\"\n"
        );
        if silent.is_some() {
            configuration.push_str("hedge_after = \"300ms\"\n");
        }
        for (n, url) in server.urls().iter().cloned().chain(silent).enumerate() {
            let endpoint = format!("[[chains.endpoints]]\nname = \"{n}\"\nurl = \"{url}\"\n");
            configuration.write_str(&endpoint).unwrap();
        }
        let worker = Worker::start(Home::sqlite(), &configuration, STORY_START).await;
        Self { worker: Arc::new(worker), server }
    }

    /// Lets time pass on the chain and here.
    fn pass(&self, by: Duration) {
        let now = self.worker.clock.now().saturating_add(by);
        self.server.chain().lock().set_time(now);
        self.worker.clock.set(now);
    }

    /// An order and its payment number `n`, whose settle call gave no answer.
    async fn unknown_payment(&self, n: u64) {
        let now = self.worker.clock.now();
        let id = format!("p{n}");
        self.worker.gateway.insert_order(&NewOrder::paying(&id, now)).await.unwrap();
        self.worker.gateway.insert_payment(&row(&id, now, n)).await.unwrap();
    }

    /// Puts the transfer of payment `n` into the next block.
    fn land(&self, n: u64) {
        let at = self.worker.clock.now().saturating_add(Duration::from_secs(2));
        let (payer, nonce) = identity(n);
        let value = Amount::new(U256::from(AMOUNT));
        let transfer = Authorized { payer, to: STORY_PAY_TO, value, nonce };
        self.server.chain().lock().transfer(at, transfer).unwrap();
    }

    /// Checks everything that is due, and says how many payments that were and how many calls it took.
    async fn check_due(&self) -> (usize, u64) {
        let before = self.server.requests();
        let checked = self.worker.look().await;
        (checked, self.server.requests() - before)
    }
}

fn identity(n: u64) -> (Address, B256) {
    (Address::from_word(U256::from(n + 1_000_000).into()), U256::from(n + 1).into())
}

fn row(id: &str, at: Timestamp, n: u64) -> RawPayment {
    let (payer, nonce) = identity(n);
    let millis = Some(at.as_millis().to_string());
    RawPayment {
        id: id.to_owned(),
        order_id: Some(id.to_owned()),
        rail: Some("x402".to_owned()),
        method: Some("eip3009".to_owned()),
        chain_id: Some(STORY_CHAIN.to_string()),
        token: Some(STORY_TOKEN.to_string()),
        payer: Some(payer.to_string()),
        pay_to: Some(STORY_PAY_TO.to_string()),
        amount: Some(AMOUNT.to_string()),
        nonce: Some(nonce.to_string()),
        valid_after: Some("0".to_owned()),
        valid_before: Some((at.saturating_add(VALID_FOR).as_millis() / 1_000).to_string()),
        tx_hash: None,
        status: Some("unknown".to_owned()),
        created_at: millis.clone(),
        broadcast_at: millis,
    }
}

#[tokio::test]
async fn a_thousand_open_payments_cost_at_most_six_calls_with_one_endpoint() {
    let shop = Shop::open(1, None, 1).await;
    for n in 0..1_000 {
        shop.unknown_payment(n).await;
    }
    // The first check of a process also asks for the chain id.
    assert_eq!(shop.check_due().await, (1_000, 5));
    shop.pass(Duration::from_secs(3));
    let (checked, calls) = shop.check_due().await;
    assert_eq!(checked, 1_000);
    assert!(calls <= 6, "{calls} calls");
    assert_eq!(calls, 4, "docs/rpc-figures.md says so: two heads, two batches of states");
}

#[tokio::test]
async fn a_thousand_payments_at_the_deadline_cost_at_most_fourteen_calls_with_two_of_three() {
    let shop = Shop::open(3, None, 2).await;
    for n in 0..1_000 {
        shop.unknown_payment(n).await;
    }
    // Each endpoint is asked for its chain id once.
    for _ in 0..3 {
        let (checked, calls) = shop.check_due().await;
        assert!(checked == 1_000 && calls <= 6, "open: {checked} checked with {calls} calls");
        shop.pass(Duration::from_secs(3));
    }
    shop.pass(DAY);
    let (checked, calls) = shop.check_due().await;
    assert_eq!(checked, 1_000);
    assert!(calls <= 14, "{calls} calls");
    assert_eq!(calls, 12, "docs/rpc-figures.md says so: twice two from each endpoint");
    let failed = shop.worker.gateway.payments().await.unwrap();
    assert_eq!(failed.values().filter(|status| *status == "failed").count(), 1_000);
}

#[tokio::test]
async fn nothing_open_costs_nothing() {
    let shop = Shop::open(1, None, 1).await;
    shop.pass(Duration::from_secs(3_600));
    assert_eq!(shop.check_due().await, (0, 0));
}

#[tokio::test]
async fn a_transfer_is_written_while_a_silent_endpoint_keeps_a_negative_waiting() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = Url::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    // Connections are taken by the system, and nobody ever answers.
    let shop = Shop::open(2, Some(silent), 2).await;
    shop.unknown_payment(1).await;
    shop.pass(DAY);
    shop.unknown_payment(2).await;
    shop.land(2);
    shop.pass(Duration::from_secs(4));
    let worker = Arc::clone(&shop.worker);
    let checking = tokio::spawn(async move { worker.look().await });
    let status =
        async |payment: &str| shop.worker.gateway.payments().await.unwrap()[payment].clone();
    while status("p2").await != "settled" {
        assert!(!checking.is_finished(), "it was written with the rest");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!checking.is_finished(), "the negative waits for the endpoint that says nothing");
    assert_eq!(status("p1").await, "unknown");
    assert_eq!(checking.await.unwrap(), 2);
    assert_eq!(status("p1").await, "failed", "two of three agree");
    drop(listener);
}

#[tokio::test]
async fn a_silent_endpoint_keeps_no_transfer_waiting_that_the_others_show_at_the_deadline() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = Url::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    let shop = Shop::open(2, Some(silent), 2).await;
    shop.unknown_payment(1).await;
    shop.unknown_payment(2).await;
    shop.land(2);
    // All are asked at once about both.
    shop.pass(DAY);
    let worker = Arc::clone(&shop.worker);
    let began = std::time::Instant::now();
    let checking = tokio::spawn(async move { worker.look().await });
    let status =
        async |payment: &str| shop.worker.gateway.payments().await.unwrap()[payment].clone();
    while status("p2").await != "settled" {
        assert!(!checking.is_finished(), "it was written with the rest");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let took = began.elapsed();
    assert!(took < Duration::from_millis(3_500), "{took:?}: the silent one is given up after 4 s");
    assert_eq!(status("p1").await, "unknown");
    assert_eq!(checking.await.unwrap(), 2);
    assert_eq!(status("p1").await, "failed", "two of three agree");
    drop(listener);
}

#[tokio::test]
async fn of_two_transfers_for_one_order_the_first_on_the_chain_pays_whichever_is_read_first() {
    let shop = Shop::open(3, None, 2).await;
    shop.unknown_payment(1).await;
    shop.land(1);
    shop.pass(DAY);
    // Past its deadline, the first is read from all endpoints, after this one was from the first of them.
    let late = RawPayment { order_id: Some("p1".to_owned()), ..row("p2", shop.worker.now(), 2) };
    shop.worker.gateway.insert_payment(&late).await.unwrap();
    shop.land(2);
    shop.pass(Duration::from_secs(4));
    assert_eq!(shop.worker.look().await, 2);
    let orders = shop.worker.gateway.orders().await.unwrap();
    assert_eq!(orders["p1"], ("paid".to_owned(), Some("p1".to_owned())));
}
