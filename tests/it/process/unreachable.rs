//! Servers that are not there: nothing is concluded, the reason is shown, and work goes on when they
//! are back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use url::Url;

use super::scene::{PAST_THE_DEADLINE, Scene};
use crate::support::anvil::ANVIL_CHAIN_ID;
use crate::support::daemon::{Daemon, Settings, eventually};

/// What a [`Gate`] does with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Leads to the server.
    Open,
    /// Takes connections and ends them.
    Shut,
    /// Keeps them, and lets nothing through.
    Silent,
}

/// A way to a server that can be broken.
struct Gate {
    address: std::net::SocketAddr,
    way: watch::Sender<Way>,
    /// Questions that were met with silence.
    unanswered: Arc<AtomicU64>,
}

impl Gate {
    /// Shut at first.
    async fn to(host: &str, port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (way, seen) = watch::channel(Way::Shut);
        let server = format!("{host}:{port}");
        let unanswered = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&unanswered);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let count = Arc::clone(&count);
                tokio::spawn(Self::lead(client, server.clone(), seen.clone(), count));
            }
        });
        Self { address, way, unanswered }
    }

    async fn lead(
        mut client: TcpStream,
        server: String,
        mut way: watch::Receiver<Way>,
        unanswered: Arc<AtomicU64>,
    ) {
        if *way.borrow_and_update() == Way::Open {
            let mut server = TcpStream::connect(server).await.unwrap();
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                _ = way.changed() => {}
            }
        }
        // Held until the way changes again, or dropped at once.
        if *way.borrow_and_update() == Way::Silent {
            client.readable().await.unwrap();
            unanswered.fetch_add(1, Ordering::Relaxed);
            let _ = way.changed().await;
        }
    }

    fn set(&self, way: Way) {
        self.way.send_replace(way);
    }
}

async fn not_ready(daemon: &Daemon, because: &str) {
    eventually(&format!("/readyz says {because:?}"), async || match daemon.page("/readyz").await {
        (503, text) if text.contains(because) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

#[tokio::test]
async fn migrate_without_a_database_says_what_to_look_at() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let url = format!("postgres://gateway:hush@{address}/gateway");
    let ended = Settings::fast(&url).write().run(&["migrate"]).await;
    assert_eq!(ended.code, 1, "{ended:?}");
    assert!(ended.stderr.contains("the database cannot be reached"), "{ended:?}");
    assert!(!ended.stderr.contains("hush"), "{ended:?}");
    assert_eq!(ended.stdout, "");
}

/// Section 12: the database is not there at the start, comes, goes, and comes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_waits_for_its_database_and_says_so() {
    let scene = Scene::start().await;
    let authorization = scene.unknown("p").await;
    let mut url = Url::parse(&scene.database_url()).unwrap();
    let gate = Gate::to("127.0.0.1", url.port().unwrap()).await;
    url.set_port(Some(gate.address.port())).unwrap();
    let mut daemon = scene.settings().text("database", "url", url.as_str()).write().start().await;

    not_ready(&daemon, "database: not reached yet").await;
    assert_eq!(daemon.page("/healthz").await.0, 200);
    assert_eq!(daemon.metrics().await.get("scrape_failed"), 1.0);
    eventually("the log says so", async || {
        let lines = daemon.logs_with("the database cannot be reached; check database.url");
        if lines.is_empty() { Err(format!("{:?}", daemon.logs())) } else { Ok(()) }
    })
    .await;

    gate.set(Way::Open);
    daemon.ready().await;
    scene.checked_again("p", "pending").await;

    gate.set(Way::Shut);
    not_ready(&daemon, "database: the database").await;
    assert_eq!(daemon.metrics().await.get("scrape_failed"), 1.0);
    scene.land(&authorization).await;

    gate.set(Way::Open);
    scene.order_is("order-p", "paid").await;
    daemon.ready().await;
    assert_eq!(daemon.metrics().await.get("scrape_failed"), 0.0);
    assert_eq!(daemon.sigterm().await.0, 0);
}

/// I9: the database keeps the connection and says nothing any more. The end still comes, and the log says
/// what was left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_while_the_database_is_silent_ends_when_the_grace_period_is_over() {
    let scene = Scene::start().await;
    scene.unknown("p").await;
    let mut url = Url::parse(&scene.database_url()).unwrap();
    let gate = Gate::to("127.0.0.1", url.port().unwrap()).await;
    url.set_port(Some(gate.address.port())).unwrap();
    gate.set(Way::Open);
    let settings = scene.settings().text("database", "url", url.as_str());
    let mut daemon = settings.text("shutdown", "grace", "2s").write().start_ready().await;
    scene.checked_again("p", "pending").await;
    gate.set(Way::Silent);
    eventually("a task waits for an answer", async || {
        match gate.unanswered.load(Ordering::Relaxed) {
            0 => Err("none".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    let (code, took) = daemon.sigterm().await;
    assert_eq!(code, 0);
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert_eq!(daemon.logs_with("the grace period is over").len(), 1, "{:?}", daemon.logs());
}

/// I2: no endpoint answers, past the deadline: nothing fails, a person is told; and when it answers
/// again, the truth is found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_endpoint_nothing_fails_even_past_the_deadline() {
    let scene = Scene::start().await;
    let mut authorization = scene.sign().await;
    authorization.valid_before += PAST_THE_DEADLINE;
    scene.order("o").await;
    // Broadcast more than a day ago, by the local clock.
    let row = reconciled::domain::RawPayment {
        broadcast_at: Some(super::scene::ago(PAST_THE_DEADLINE).as_millis().to_string()),
        ..scene.row("p", "o", &authorization)
    };
    scene.gateway.insert_payment(&row).await.unwrap();
    scene.land(&authorization).await;

    let gate = Gate::to("127.0.0.1", scene.chain.anvil.url().port().unwrap()).await;
    let url = format!("http://{}/", gate.address);
    let settings = scene.settings_without_chain().chain(ANVIL_CHAIN_ID, &[("gate", &url)]);
    let daemon = settings.write().start_ready().await;
    scene.flagged("inconclusive_at_deadline", "p").await;
    scene.checked_again("p", "inconclusive:unreachable").await;
    assert_eq!(scene.payment_status("p").await, "unknown");
    assert_eq!(scene.order_status("o").await, "paying");
    let metrics = daemon.metrics().await;
    assert!(metrics.get("checks_total{verdict=\"inconclusive\"}") >= 2.0);
    assert_eq!(metrics.get("open_flags{kind=\"inconclusive_at_deadline\"}"), 1.0);

    gate.set(Way::Open);
    scene.order_is("o", "paid").await;
    assert_eq!(scene.gateway.open_flags().await.unwrap(), [""; 0]);
    scene.assert_conserved().await;
}

/// An endpoint of another chain gives no evidence, and the log says once, loudly, what to mend.
#[tokio::test]
async fn an_endpoint_of_another_chain_gives_no_evidence_and_is_called_out() {
    let scene = Scene::start().await;
    let authorization = scene.sign().await;
    scene.order("o").await;
    let row = reconciled::domain::RawPayment {
        chain_id: Some("8453".to_owned()),
        ..scene.row("p", "o", &authorization)
    };
    scene.gateway.insert_payment(&row).await.unwrap();
    scene.land(&authorization).await;
    let url = scene.chain.anvil.url();
    let settings = scene.settings_without_chain().chain(8_453, &[("mistaken", url.as_str())]);
    let config = settings.write();
    let daemon = config.start_ready().await;

    scene.checked_again("p", "inconclusive:wrong_chain").await;
    assert_eq!(scene.payment_status("p").await, "unknown");
    assert_eq!(scene.order_status("o").await, "paying");
    let text = config.explain_text("p").await;
    assert!(text.contains("inconclusive:wrong_chain") && text.contains("mistaken"), "{text}");
    let metrics = daemon.metrics().await;
    assert!(metrics.get("checks_total{verdict=\"inconclusive\"}") >= 2.0);
    assert_eq!(metrics.sum("resolutions_total"), 0.0);
    let reads = "endpoint_reads_total{chain=\"8453\",endpoint=\"mistaken\"";
    assert!(metrics.get(&format!("{reads},outcome=\"wrong_chain\"}}")) >= 2.0);
    assert_eq!(metrics.sum(reads), metrics.sum(&format!("{reads},outcome=\"wrong_chain\"")));
    let loud = daemon.logs_with("the endpoint gives no evidence");
    assert_eq!(loud.len(), 1, "{:?}", daemon.logs());
    assert_eq!(loud[0]["level"], "ERROR");
    assert_eq!(loud[0]["endpoint"], "mistaken");
    assert_eq!(loud[0]["chain"], "8453");
    assert_eq!(loud[0]["kind"], "wrong_chain");
    let told = loud[0]["detail"].as_str().unwrap();
    assert!(told.contains("31337") && told.contains("8453"), "{told}");
}
