//! The full reconcile as somebody who runs it sees it: `reconcile --once`, kills, replicas, reorgs (I4, I9, I10).

use serde_json::{Value, json};

use super::scene::{AMOUNT, PAY_TO, Scene};
use crate::support::anvil::ANVIL_CHAIN_ID;
use crate::support::daemon::{ConfigFile, Ended, Settings, eventually};
use crate::support::fault_proxy::faults::Fault;
use crate::support::fault_proxy::{FaultProxy, Manners};

/// Never by itself: only when somebody asks.
const NEVER: &str = "0 0 0 1 1 *";

fn settings(scene: &Scene) -> Settings {
    let receiver = (scene.chain.token.to_string(), PAY_TO.to_string());
    scene.settings().receiver(&receiver.0, &receiver.1).text("reconcile", "cron", NEVER)
}

async fn once(config: &ConfigFile) -> (Ended, Value) {
    let ended = config.run(&["reconcile", "--once", "--json"]).await;
    let report = serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {ended:?}"));
    (ended, report)
}

/// The totals of the one receiver, and its drift.
fn totals(report: &Value) -> Value {
    let of = &report["receivers"][0];
    let keys = ["chain", "paid", "owed", "refunded", "called_off", "flagged", "open", "drift"];
    keys.iter().map(|key| (*key, of[key].clone())).filter(|(_, v)| *v != json!("0")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconcile_on_postgres_finds_money_resolves_it_and_says_whether_the_books_balance() {
    finds_money_resolves_it_and_says_whether_the_books_balance(&Scene::start().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconcile_on_sqlite_finds_money_resolves_it_and_says_whether_the_books_balance() {
    finds_money_resolves_it_and_says_whether_the_books_balance(&Scene::on_sqlite().await).await;
}

async fn finds_money_resolves_it_and_says_whether_the_books_balance(scene: &Scene) {
    scene.gateway.put_stock("thing", 0).await.unwrap();
    let config = settings(scene).write();
    // One that nobody has looked at yet, one that no row knows.
    let known = scene.unknown("p").await;
    scene.land(&known).await;
    scene.land(&scene.sign().await).await;
    scene.finalize().await;

    let (ended, report) = once(&config).await;
    assert_eq!(ended.code, 1, "a flag was raised: {ended:?}");
    assert_eq!(ended.stderr, "", "no progress in a pipe");
    let two = (2 * AMOUNT).to_string();
    let one = AMOUNT.to_string();
    assert_eq!(totals(&report), json!({"chain": two, "paid": one, "flagged": one}));
    assert_eq!((&report["transfers_found"], &report["taken_up"]), (&json!(2), &json!(1)));
    assert_eq!(report["flags_raised"], 1);
    assert_eq!(scene.order_status("order-p").await, "paid");
    assert_eq!(scene.paid_by("order-p").await.as_deref(), Some("p"));

    let (again, second) = once(&config).await;
    assert_eq!(again.code, 0, "nothing new, and the books balance: {again:?}");
    assert_eq!(totals(&second), totals(&report));
    assert_eq!((&second["transfers_found"], &second["taken_up"]), (&json!(0), &json!(0)));
    let text = config.run(&["reconcile", "--once"]).await;
    assert_eq!(text.code, 0);
    for word in ["drift", "arrived", "flagged", two.as_str(), &PAY_TO.to_string()] {
        assert!(text.stdout.contains(word), "{word} is in {}", text.stdout);
    }

    // A row of the gateway is lost: its money is in nobody's books any more.
    scene.gateway.execute("DELETE FROM payments WHERE id = 'p'", &[]).await.unwrap();
    let (lost, report) = once(&config).await;
    assert_eq!(lost.code, 1, "{lost:?}");
    assert_eq!(totals(&report), json!({"chain": two, "flagged": one, "drift": one}));
    assert_eq!(report["unaccounted"][0]["payment_id"], "p");
    let text = config.run(&["reconcile", "--once"]).await;
    assert!(text.stdout.contains("not accounted for once"), "{}", text.stdout);

    // A daemon shows the same.
    let daemon = config.start_ready().await;
    let labels =
        format!("{{chain=\"31337\",pay_to=\"{:#x}\",token=\"{:#x}\"}}", PAY_TO, scene.chain.token);
    eventually("the drift is a metric", async || {
        let metrics = daemon.metrics().await;
        let drift = metrics.get(&format!("ledger_drift_base_units{labels}"));
        if drift == AMOUNT as f64 { Ok(()) } else { Err(drift.to_string()) }
    })
    .await;
    assert!(daemon.metrics().await.get("reconcile_finished_timestamp_seconds") > 1.7e9);
}

/// I11: a row of ours that was spoiled by hand keeps no run from ending, and so none from starting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spoiled_row_is_told_of_and_ends_no_reconcile() {
    let scene = Scene::start().await;
    let config = settings(&scene).write();
    scene.land(&scene.sign().await).await;
    scene.finalize().await;
    once(&config).await;
    scene.gateway.execute("UPDATE {transfers} SET block_hash = '0xzz'", &[]).await.unwrap();
    for _ in 0..2 {
        let (ended, report) = once(&config).await;
        assert_eq!(ended.code, 1);
        let problem = report["problems"][0].as_str().unwrap();
        assert!(problem.contains("transfers, column block_hash holds 0xzz"), "{problem}");
    }
}

/// Without --once the running daemon is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconcile_that_is_asked_for_is_made_by_the_daemon() {
    let scene = Scene::start().await;
    let config = settings(&scene).write();
    let asked = config.run(&["reconcile", "--json"]).await;
    assert_eq!((asked.code, asked.stdout.trim()), (0, "{\"requested\":true}"));
    let twice = config.run(&["reconcile", "--json"]).await;
    assert_eq!((twice.code, twice.stdout.trim()), (0, "{\"requested\":false}"));
    let _daemon = config.start_ready().await;
    let finished = async || {
        let sql =
            "SELECT CAST(count(*) AS TEXT) FROM {reconcile_runs} WHERE finished_at IS NOT NULL";
        scene.gateway.rows(sql, &[], 1).await.unwrap()[0][0].clone().unwrap()
    };
    eventually("the daemon makes it", async || {
        let count = finished().await;
        if count == "0" { Err(count) } else { Ok(()) }
    })
    .await;
    let before: u64 = finished().await.parse().unwrap();
    config.run(&["reconcile"]).await;
    eventually("and another one", async || {
        let count = finished().await;
        if count.parse::<u64>().unwrap() > before { Ok(()) } else { Err(count) }
    })
    .await;
}

/// Transfers in the scene of kills: each is a page of the accounting, so that a kill finds a run in the middle.
const TRANSFERS: u64 = 240;

/// I9, I10: killed in the middle, a run is taken up where it stood, by one of two, and comes to the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_was_killed_is_taken_up_by_one_of_two_replicas_and_comes_to_the_same() {
    let scene = Scene::start().await;
    let config = settings(&scene).set("reconcile", "page_size", "1").write();
    for _ in 0..(TRANSFERS / 40) {
        let authorizations = scene.sign_many(40).await;
        let calls = authorizations.iter().map(|a| scene.chain.transfer_call(a)).collect();
        scene.chain.batch(calls).await;
    }
    scene.finalize().await;

    let mut first = config.start_ready().await;
    let unfinished = async || {
        let sql = "SELECT CAST(id AS TEXT), CAST(progress AS TEXT) FROM {reconcile_runs} \
                   WHERE finished_at IS NULL";
        scene.gateway.rows(sql, &[], 2).await.unwrap().into_iter().next()
    };
    let (id, stood) = eventually("a run is in the middle of its accounting", async || {
        match unfinished().await.as_deref() {
            Some([Some(id), Some(progress)]) if progress.contains("\"transfers_accounted\": 2") => {
                Ok((id.clone(), progress.clone()))
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    first.kill9();
    assert_eq!(unfinished().await.unwrap()[0].as_ref(), Some(&id), "it is there, unfinished");
    let flagged = scene.gateway.count("{flags}").await.unwrap();
    assert!(flagged < TRANSFERS, "{flagged} flags: it was killed too late to show anything");

    let replicas = [config.start_ready().await, config.start_ready().await];
    let report = eventually("the same run is ended", async || {
        let sql = "SELECT CAST(report AS TEXT) FROM {reconcile_runs} \
                   WHERE CAST(id AS TEXT) = ? AND finished_at IS NOT NULL";
        let rows = scene.gateway.rows(sql, &[Some(&id)], 1).await.unwrap();
        rows.into_iter().flatten().flatten().next().ok_or_else(|| format!("{id} after {stood}"))
    })
    .await;
    let report: Value = serde_json::from_str(&report).unwrap();
    let all = (TRANSFERS * AMOUNT).to_string();
    assert_eq!(
        totals(&report),
        json!({"chain": all, "flagged": all}),
        "nothing twice, nothing lost"
    );
    // A flag that was raised just before the kill was open already when its page was done again.
    assert!(report["flags_raised"].as_u64().unwrap() >= TRANSFERS - 1, "{report}");
    let taken_up: usize =
        replicas.iter().map(|replica| replica.logs_with("full reconcile taken up").len()).sum();
    assert_eq!(taken_up, 1, "by one of them, where it stood");

    // Whoever makes the next ones: one at a time, with the same figures.
    for _ in 0..3 {
        let (ended, report) = once(&config).await;
        assert_eq!((ended.code, totals(&report)), (0, json!({"chain": all, "flagged": all})));
    }
    let overlapping = "SELECT CAST(count(*) AS TEXT) FROM {reconcile_runs} a JOIN {reconcile_runs} b \
                       ON a.id < b.id AND b.started_at < a.finished_at";
    let rows = scene.gateway.rows(overlapping, &[], 1).await.unwrap();
    assert_eq!(rows[0][0].as_deref(), Some("0"), "no two runs at once");
    assert_eq!(scene.gateway.count("{transfers}").await.unwrap(), TRANSFERS);
    assert_eq!(scene.gateway.count("{flags}").await.unwrap(), TRANSFERS);
}

/// Blocks in the scene of a killed scan, and how many one log request covers.
const BLOCKS: u64 = 1_000;
const BLOCKS_PER_REQUEST: u64 = 5;

/// For a range without a transfer: its logs, and the headers of its ends.
const REQUESTS_PER_RANGE: u64 = 2;

/// The other requests of a scan: for heads, blocks and chain ids, a few per page.
const OTHER_REQUESTS: u64 = 60;

async fn a_killed_scan_goes_on_from_its_cursor(scene: Scene) {
    scene.chain.anvil.mine(BLOCKS).await;
    scene.land(&scene.sign().await).await;
    scene.finalize().await;
    let proxy = FaultProxy::start(scene.chain.anvil.url(), ANVIL_CHAIN_ID, 2, 1).await;
    let (token, pay_to) = (scene.chain.token.to_string(), PAY_TO.to_string());
    let config = scene
        .settings_without_chain()
        .chain(ANVIL_CHAIN_ID, &[("proxy", proxy.url().as_str())])
        .of_chain("log_range_max", &BLOCKS_PER_REQUEST.to_string())
        .receiver(&token, &pay_to)
        .text("reconcile", "cron", NEVER)
        .write();
    let slow = Manners { faulty_per_mille: 300, faults: vec![Fault::Slow], ..Manners::default() };
    proxy.behave(slow);
    let mut first = config.spawn(&["reconcile", "--once"]);
    let cursor = async || {
        let sql = "SELECT CAST(block_number AS TEXT) FROM {cursors}";
        let rows = scene.gateway.rows(sql, &[], 1).await.unwrap();
        rows.into_iter().flatten().flatten().next().map_or(0, |text| text.parse::<u64>().unwrap())
    };
    let reached = eventually("the scan is in the middle", async || match cursor().await {
        block if block >= BLOCKS / 3 => Ok(block),
        block => Err(block.to_string()),
    })
    .await;
    first.kill().unwrap();
    first.wait().unwrap();
    let stood = cursor().await;
    assert!(reached <= stood && stood < BLOCKS, "{stood}: it was killed too late to show anything");
    proxy.behave(Manners::default());
    let before = proxy.requests();

    let (_, report) = once(&config).await;
    let one = AMOUNT.to_string();
    assert_eq!(totals(&report), json!({"chain": one, "flagged": one}), "{report}");
    assert!(cursor().await > BLOCKS);
    let requests = proxy.requests() - before;
    let rest = REQUESTS_PER_RANGE * (BLOCKS - stood) / BLOCKS_PER_REQUEST + OTHER_REQUESTS;
    assert!(requests <= rest, "{requests} requests from block {stood} on: at most {rest}");
    let runs = scene.gateway.count("{reconcile_runs}").await.unwrap();
    assert_eq!(runs, 1, "it is the run that was killed");
}

/// I9: blocks that were scanned before a kill are not read again, and the same run comes to its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_killed_on_postgres_goes_on_from_its_cursor() {
    a_killed_scan_goes_on_from_its_cursor(Scene::start().await).await;
}

/// The same on SQLite.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_killed_on_sqlite_goes_on_from_its_cursor() {
    a_killed_scan_goes_on_from_its_cursor(Scene::on_sqlite().await).await;
}

/// Finalized blocks do not change; if one does all the same, nothing is counted that is not there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finalized_block_that_leaves_the_chain_is_told_of_and_read_again() {
    let scene = Scene::start().await;
    let config = settings(&scene).write();
    scene.chain.anvil.mine(5).await;
    let money = scene.sign().await;
    scene.land(&money).await;
    scene.finalize().await;
    let (_, report) = once(&config).await;
    let one = AMOUNT.to_string();
    assert_eq!(totals(&report), json!({"chain": one, "flagged": one}));

    scene.chain.anvil.reorg(4).await;
    scene.finalize().await;
    let (ended, report) = once(&config).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(totals(&report), json!({}), "it is not there any more");
    let flags = scene.gateway.open_flags().await.unwrap();
    assert_eq!(flags, ["finalized_reorg:"], "a person is told, and the other flag's cause is gone");

    scene.land(&money).await;
    scene.finalize().await;
    let (_, report) = once(&config).await;
    assert_eq!(totals(&report), json!({"chain": one, "flagged": one}), "it landed again");
    assert_eq!(scene.gateway.open_flags().await.unwrap().len(), 2);
}
