//! Bad input: each gets a message that names what to mend, the documented exit code, and stops nothing
//! else.

use reconciled::domain::RawPayment;
use url::Url;

use super::scene::Scene;
use crate::support::anvil::ANVIL_CHAIN_ID;
use crate::support::daemon::{Ended, Settings};
use crate::support::postgres::TestDatabase;

fn assert_said(ended: &Ended, code: i32, parts: &[&str]) {
    assert_eq!(ended.code, code, "{ended:?}");
    for part in parts {
        assert!(ended.stderr.contains(part), "{part:?} is not in {}", ended.stderr);
    }
}

// ---- Configuration: exit code 2

#[tokio::test]
async fn a_configuration_that_cannot_work_is_refused_with_the_name_of_the_key() {
    let good =
        || Settings::fast("postgres://127.0.0.1:1/x").chain(1, &[("a", "http://127.0.0.1:1/")]);
    let bad: Vec<(&str, Settings, &[&str])> = vec![
        ("an unknown key", good().text("checks", "lease_tll", "5s"), &["lease_tll", "lease_ttl"]),
        ("a wrong unit", good().text("checks", "lease_ttl", "5 apples"), &["5 apples", "90s"]),
        (
            "too short a lease",
            good().text("checks", "lease_ttl", "1s"),
            &["checks.lease_ttl", "5s"],
        ),
        ("no chain", Settings::fast("postgres://127.0.0.1:1/x"), &["chains", "[[chains]]"]),
        ("a chain twice", good().chain(1, &[("b", "http://127.0.0.1:1/")]), &["chains[1]"]),
        ("no endpoint", Settings::fast("postgres://127.0.0.1:1/x").chain(1, &[]), &["endpoints"]),
        (
            "another database",
            good().text("database", "url", "mysql://x"),
            &["database.url", "postgres://"],
        ),
        ("no database", good().text("database", "url", ""), &["RECONCILED_DATABASE_URL"]),
        ("a bad port", good().text("database", "url", "postgres://h:no/x"), &["database.url"]),
        ("no schedule", good().text("reconcile", "cron", "often"), &["reconcile.cron", "often"]),
        ("no filter", good().text("log", "filter", "rec=conciled=loud"), &["log.filter"]),
        (
            "repeats that fall",
            good().set("checks", "repeats", r#"["2s", "1s"]"#),
            &["checks.repeats"],
        ),
        ("no quorum", good().set("policy", "quorum", "2"), &["endpoints", "policy.quorum"]),
        (
            "a bad depth",
            good().text("policy", "paid_after", "soon"),
            &["policy.paid_after", "soon"],
        ),
        ("a bad override", good().env("RECONCILED_POLICY_QUORUM", "many"), &["quorum"]),
    ];
    for (what, settings, parts) in bad {
        let ended = settings.write().run(&["run"]).await;
        eprintln!("{what}: {}", ended.stderr);
        assert_said(&ended, 2, parts);
    }
}

#[tokio::test]
async fn a_configuration_file_that_is_not_there_is_named() {
    let config = Settings::fast("sqlite:x").write().moved_to("elsewhere.toml");
    for command in [&["run"][..], &["migrate"], &["explain", "p"]] {
        assert_said(&config.run(command).await, 2, &["elsewhere.toml", "--config"]);
    }
    let ended = config.run(&["explain"]).await;
    assert_said(&ended, 2, &["Usage"]);
}

// ---- Tables

#[tokio::test]
async fn without_its_tables_every_command_says_to_migrate_and_ends() {
    let database = TestDatabase::empty().await;
    let settings = Settings::fast(&database.url()).chain(1, &[("a", "http://127.0.0.1:1/")]);
    let config = settings.write();
    for command in [&["run"][..], &["explain", "p"], &["recheck", "p"]] {
        let ended = config.run(command).await;
        assert_said(&ended, 1, &["lacks table", "reconciled migrate"]);
    }
    let ended = config.run(&["migrate"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let ended = config.run(&["explain", "p"]).await;
    assert_said(&ended, 1, &["there is no payment and no order p"]);
}

#[tokio::test]
async fn a_missing_column_is_named() {
    let scene = Scene::start().await;
    scene.gateway.execute("ALTER TABLE payments DROP COLUMN nonce", &[]).await.unwrap();
    let ended = scene.settings().write().run(&["run"]).await;
    assert_said(&ended, 1, &["lacks column payments.nonce"]);
}

#[tokio::test]
async fn without_the_optional_tables_orders_are_paid_and_failed_all_the_same() {
    let scene = Scene::start().await;
    for table in ["stock_reservations", "stock", "payment_identifiers"] {
        scene.gateway.execute(&format!("DROP TABLE {table}"), &[]).await.unwrap();
    }
    let (lands, canceled) = (scene.sign().await, scene.sign().await);
    for (id, authorization) in [("lands", &lands), ("canceled", &canceled)] {
        let order = reconciled::sim::gateway::NewOrder::paying(id, super::scene::now());
        scene.gateway.insert_order(&order).await.unwrap();
        scene.gateway.insert_payment(&scene.row(id, id, authorization)).await.unwrap();
    }
    let config = scene.settings().set("policy", "early_failure", "true").write();
    let daemon = config.start_ready().await;
    scene.land(&lands).await;
    scene.chain.cancel(&canceled).await;
    scene.finalize().await;
    scene.order_is("lands", "paid").await;
    scene.order_is("canceled", "failed").await;
    assert_eq!(daemon.logs_with("stock is left alone").len(), 1);
    assert_eq!(daemon.logs_with("retries are not answered").len(), 1);
    assert_eq!(config.explain("lands").await["payment"]["status"], "settled");
}

// ---- Rows

/// I11: what cannot be read is flagged with its column; the rest goes on; mended, it is found out.
async fn malformed_rows_among_good_ones(scene: &Scene, amount: &str) {
    scene.gateway.put_stock("thing", 0).await.unwrap();
    let good = scene.unknown("good").await;
    let nonce = scene.sign().await;
    let short = nonce.nonce.to_string()[..64].to_owned();
    let bad = |column: &str| {
        let row = scene.row(&format!("bad-{column}"), "order-bad", &nonce);
        let text = |text: &str| Some(text.to_owned());
        match column {
            "nonce" => RawPayment { nonce: text(&short), ..row },
            "amount" => RawPayment { amount: text(amount), ..row },
            "payer" => RawPayment { payer: text("vitalik.eth"), ..row },
            "valid_before" => RawPayment { valid_before: None, ..row },
            "method" => RawPayment { method: text("cash"), ..row },
            other => panic!("{other}"),
        }
    };
    let columns = ["nonce", "amount", "payer", "valid_before", "method"];
    scene.order("order-bad").await;
    for column in columns {
        scene.gateway.insert_payment(&bad(column)).await.unwrap();
    }
    let config = scene.settings().write();
    let daemon = config.start_ready().await;
    scene.land(&good).await;
    scene.order_is("order-good", "paid").await;
    for column in columns {
        let id = format!("bad-{column}");
        scene.flagged("malformed_payment", &id).await;
        let story = config.explain(&id).await;
        let detail = story["flags"][0]["detail"].to_string();
        assert!(detail.contains(&format!("column {column} is ")), "{story}");
        assert_eq!(scene.payment_status(&id).await, "unknown");
    }
    assert_eq!(daemon.metrics().await.get("open_flags{kind=\"malformed_payment\"}"), 5.0);
    assert_eq!(daemon.metrics().await.sum("task_failures_total"), 0.0);
    assert_eq!(daemon.metrics().await.sum("apply_failures_total"), 0.0);

    // Somebody mends the row.
    scene.land(&nonce).await;
    let mended = "UPDATE payments SET nonce = ? WHERE id = 'bad-nonce'";
    scene.gateway.execute(mended, &[Some(&nonce.nonce.to_string())]).await.unwrap();
    scene.order_is("order-bad", "paid").await;
    assert_eq!(scene.paid_by("order-bad").await.as_deref(), Some("bad-nonce"));
    let flags = scene.gateway.open_flags().await.unwrap();
    assert!(!flags.contains(&"malformed_payment:bad-nonce".to_owned()), "{flags:?}");
    assert_eq!(flags.len(), 4, "{flags:?}");
    let story = config.explain("bad-nonce").await;
    assert_eq!(story["flags"][0]["closed_by"], "reconciled", "{story}");
    scene.assert_conserved().await;
}

#[tokio::test]
async fn malformed_rows_are_flagged_by_column_and_stop_nothing_on_postgres() {
    malformed_rows_among_good_ones(&Scene::start().await, "NaN").await;
}

#[tokio::test]
async fn malformed_rows_are_flagged_by_column_and_stop_nothing_on_sqlite() {
    malformed_rows_among_good_ones(&Scene::on_sqlite().await, "a million").await;
}

/// A status nobody knows: the row is followed from before, and then says nonsense.
#[tokio::test]
async fn a_status_that_turns_to_nonsense_is_flagged_and_mended() {
    let scene = Scene::start().await;
    let authorization = scene.unknown("p").await;
    let config = scene.settings().write();
    let _daemon = config.start_ready().await;
    scene.checked_again("p", "pending").await;
    scene.gateway.set_payment_status("p", "perhaps").await.unwrap();
    scene.land(&authorization).await;
    scene.flagged("malformed_payment", "p").await;
    let story = config.explain("p").await;
    let detail = story["flags"][0]["detail"].to_string();
    assert!(detail.contains("column status is") && detail.contains("perhaps"), "{story}");
    scene.gateway.set_payment_status("p", "unknown").await.unwrap();
    scene.order_is("order-p", "paid").await;
    assert_eq!(scene.gateway.open_flags().await.unwrap(), [""; 0]);
}

/// I11, and after the configuration was mended: a restart is all it takes.
#[tokio::test]
async fn a_payment_on_a_chain_that_is_not_configured_is_flagged_and_found_out_later() {
    let scene = Scene::start().await;
    let (here, there) = (scene.unknown("here").await, scene.unknown("there").await);
    let other = "UPDATE payments SET chain_id = ?i WHERE id = ?";
    scene.gateway.execute(other, &[Some("10"), Some("there")]).await.unwrap();
    let config = scene.settings().write();
    {
        let _daemon = config.start_ready().await;
        scene.land(&here).await;
        scene.order_is("order-here", "paid").await;
        scene.flagged("chain_not_configured", "there").await;
        let text = config.explain_text("there").await;
        assert!(text.contains("chain 10 is not configured; add it under [[chains]]"), "{text}");
        assert_eq!(scene.payment_status("there").await, "unknown");
    }
    scene.land(&there).await;
    let chain_id = ANVIL_CHAIN_ID.to_string();
    scene.gateway.execute(other, &[Some(&chain_id), Some("there")]).await.unwrap();
    let _daemon = config.start_ready().await;
    scene.order_is("order-there", "paid").await;
    assert_eq!(scene.gateway.open_flags().await.unwrap(), [""; 0]);
}

// ---- Secrets

#[tokio::test]
async fn secrets_in_urls_never_appear_in_logs_metrics_or_stories() {
    let scene = Scene::start().await;
    let authorization = scene.unknown("p").await;
    // One endpoint that refuses, one that answers something else, one that works: each with a secret.
    let refusing = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing_url =
        format!("http://u:hush-user@{}/hush-path?key=hush-query", refusing.local_addr().unwrap());
    drop(refusing);
    let anvil = scene.chain.anvil.url();
    let mut odd = anvil.clone();
    odd.set_path("/hush-path/v2");
    odd.set_password(Some("hush-user")).unwrap();
    let mut good = anvil.clone();
    good.set_username("hush-user").unwrap();
    good.set_query(Some("key=hush-query"));
    let mut database = Url::parse(&scene.database_url()).unwrap();
    database.set_password(Some("hush-password")).unwrap();
    let endpoints =
        [("refusing", refusing_url.as_str()), ("odd", odd.as_str()), ("good", good.as_str())];
    let config = scene
        .settings_without_chain()
        .text("database", "url", "")
        .env("RECONCILED_DATABASE_URL", database.as_str())
        // Not even to somebody who wants to see everything.
        .text("log", "filter", "trace")
        .chain(ANVIL_CHAIN_ID, &endpoints)
        .write();
    let mut daemon = config.start_ready().await;
    scene.checked_again("p", "pending").await;
    scene.land(&authorization).await;
    scene.order_is("order-p", "paid").await;
    let shown = [
        config.explain_text("p").await,
        config.explain("p").await.to_string(),
        daemon.metrics_text().await,
        daemon.page("/readyz").await.1,
    ];
    assert!(
        shown[1].contains("refusing"),
        "the failure is told by the endpoint's name: {}",
        shown[1]
    );
    assert_eq!(daemon.sigterm().await.0, 0);
    let logs = daemon.logs().join("\n");
    for text in shown.iter().chain([&logs]) {
        let leak = text.lines().find(|line| line.contains("hush"));
        assert_eq!(leak, None);
    }
}

/// The database refuses the password: an error to mend, and no place to repeat it.
#[tokio::test]
async fn a_database_that_refuses_is_reported_without_its_url() {
    let database = TestDatabase::empty().await;
    let mut url = Url::parse(&database.url()).unwrap();
    url.set_username("nobody").unwrap();
    url.set_password(Some("hush-password")).unwrap();
    let config = Settings::fast(url.as_str()).chain(1, &[("a", "http://127.0.0.1:1/")]).write();
    for command in [&["migrate"][..], &["run"], &["explain", "p"]] {
        let ended = config.run(command).await;
        assert_said(&ended, 1, &["nobody"]);
        assert!(!ended.stderr.contains("hush"), "{}", ended.stderr);
    }
}

/// Two daemons for one port: the second says which key to change.
#[tokio::test]
async fn a_port_that_is_taken_is_named() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let settings = Settings::fast("postgres://127.0.0.1:1/x").text("http", "listen", &address);
    let ended = settings.chain(1, &[("a", "http://127.0.0.1:1/")]).write().run(&["run"]).await;
    assert_said(&ended, 1, &["http.listen", &address]);
}
