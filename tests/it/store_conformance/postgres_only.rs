//! What is PostgreSQL's alone: leases between replicas, appliers side by side, views instead of tables,
//! values only it can hold, and a server that is not there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reconciled::domain::{Outcome, PaymentId, Phase, Policy, RawPayment};
use reconciled::sim::gateway::GatewayDb;
use reconciled::store::samples::Watermark;
use reconciled::store::{DatabaseUrl, Lease, Store, StoreError, connect};
use sqlx::{AssertSqlSafe, Connection as _};

use super::harness::{
    T0, TestDb, at, ids, judged, lease, outcome, payment, pending, resolved, settled, settled_in,
    transfer,
};
use crate::support::postgres::TestDatabase;

async fn run(db: &TestDb, sql: &str) {
    let GatewayDb::Postgres(pool) = &db.gateway else { panic!("a PostgreSQL database") };
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.unwrap();
}

/// `count` unknown payments `p1`, `p2`, … of as many orders `o1`, `o2`, …
async fn payments(db: &TestDb, count: u32) {
    let template = payment("p", "o");
    let sql = format!(
        "INSERT INTO orders (id, kind, status, created_at)
         SELECT 'o' || i, 'order', 'paying', to_timestamp(0) FROM generate_series(1, {count}) i;
         INSERT INTO payments (id, order_id, rail, method, chain_id, token, payer, pay_to, amount,
                               nonce, valid_after, valid_before, status, created_at, broadcast_at)
         SELECT 'p' || i, 'o' || i, 'x402', 'eip3009', 8453, '{token}', '{payer}', '{pay_to}',
                1000000, '0x' || lpad(to_hex(i), 64, '0'), 0, {before}, 'unknown',
                to_timestamp({now}), to_timestamp({now})
           FROM generate_series(1, {count}) i",
        token = template.token.unwrap(),
        payer = template.payer.unwrap(),
        pay_to = template.pay_to.unwrap(),
        before = template.valid_before.unwrap(),
        now = T0.as_millis() / 1_000,
    );
    run(db, &sql).await;
}

/// Three replicas lease side by side until nothing is left: everything is leased, nothing twice, and
/// nobody waits for anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_share_the_work_without_overlap() {
    const PAYMENTS: u32 = 2_000;
    let db = TestDb::postgres().await;
    payments(&db, PAYMENTS).await;
    assert_eq!(db.store.discover(T0, T0, PAYMENTS).await.unwrap().opened, 2_000);

    let mut replicas = Vec::new();
    for _ in 0..3 {
        let store = db.replica().await;
        replicas.push(tokio::spawn(async move {
            let mut leased = Vec::new();
            loop {
                let due = store.lease_due(&lease(T0, at(60)), 37).await.unwrap();
                if due.is_empty() {
                    return leased;
                }
                leased.extend(due.into_iter().map(|f| f.watch.payment_id.as_str().to_owned()));
            }
        }));
    }
    let mut all = Vec::new();
    let mut busy = 0;
    for replica in replicas {
        let leased = replica.await.unwrap();
        busy += usize::from(!leased.is_empty());
        all.extend(leased);
    }
    assert_eq!(all.len(), 2_000, "nothing is leased twice, nothing is left");
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 2_000);
    assert!(busy > 1, "the work was shared");
}

/// A watch that somebody has locked is passed over, not waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_watch_is_passed_over() {
    let db = TestDb::postgres().await;
    payments(&db, 3).await;
    db.discover().await;
    let mut somebody = db.postgres_connection().await;
    let mut transaction = somebody.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM reconciled.watches WHERE payment_id = 'p1' FOR UPDATE")
        .execute(&mut *transaction)
        .await
        .unwrap();
    let due = db.store.lease_due(&lease(T0, at(60)), 1).await.unwrap();
    assert_eq!(ids(&due), ["p2"]);
    let page = db.store.lease_page(&lease(T0, at(60)), None, 10).await.unwrap();
    assert_eq!(ids(&page), ["p3"]);
    transaction.rollback().await.unwrap();
}

/// Replicas and a gateway that cancels orders work side by side on orders with two payments each, every
/// third pair with one and the same authorization. Whoever comes first: every transfer pays one order or
/// is owed back once (I3, I4, I6, I10), and no check is turned away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_and_a_gateway_side_by_side_lose_no_money() {
    const ORDERS: usize = 45;
    let db = TestDb::postgres().await;
    for n in 0..ORDERS {
        let first = payment(&format!("{n}/a"), &format!("o{n}"));
        let mut second = payment(&format!("{n}/b"), &format!("o{n}"));
        if n % 3 == 0 {
            // Of another order, and a transfer of the first one's is all there is.
            let order = format!("reuse{n}");
            db.order(&order).await;
            second = RawPayment { id: second.id, order_id: Some(order), ..first.clone() };
        }
        db.order(&format!("o{n}")).await;
        db.gateway.insert_payment(&first).await.unwrap();
        db.gateway.insert_payment(&second).await.unwrap();
    }
    db.discover().await;

    let mut replicas = Vec::new();
    for size in [5, 7, 11] {
        let store = db.replica().await;
        replicas.push(tokio::spawn(async move {
            let mut answered = 0;
            loop {
                let lease = lease(T0, at(60));
                let due = store.lease_due(&lease, size).await.unwrap();
                if due.is_empty() {
                    return answered;
                }
                let batch = ids(&due)
                    .into_iter()
                    .rev()
                    .map(|id| {
                        let number: usize = id.split('/').next().unwrap().parse().unwrap();
                        let moved = if number.is_multiple_of(3) {
                            format!("{number}/a")
                        } else {
                            id.into()
                        };
                        judged(id, settled(&moved))
                    })
                    .collect();
                let applied = store.apply(&lease, batch, &Policy::default(), at(30)).await.unwrap();
                for one in &applied {
                    assert!(one.result.is_ok(), "{one:?}");
                }
                answered += applied.len();
            }
        }));
    }
    let gateway = db.gateway.clone();
    let canceling = tokio::spawn(async move {
        let GatewayDb::Postgres(pool) = &gateway else { panic!("a PostgreSQL database") };
        for n in (0..ORDERS).filter(|n| n % 5 == 1) {
            sqlx::query(
                "UPDATE orders SET status = 'canceled' WHERE id = $1 AND status = 'paying'",
            )
            .bind(format!("o{n}"))
            .execute(pool)
            .await
            .unwrap();
        }
    });
    let mut answered = 0;
    for replica in replicas {
        answered += replica.await.unwrap();
    }
    canceling.await.unwrap();
    assert_eq!(answered, 2 * ORDERS);
    // What was checked before the payment that comes first is left to it, and is checked again.
    for n in (0..ORDERS).filter(|n| n % 3 == 0) {
        let id = format!("{n}/b");
        if db.payment_status(&id).await == "unknown" {
            db.apply(&id, settled(&format!("{n}/a"))).await;
        }
    }

    let orders = db.gateway.orders().await.unwrap();
    let payments = db.gateway.payments().await.unwrap();
    let owed: Vec<String> =
        db.gateway.refunds().await.unwrap().into_iter().map(|r| r.payment_id).collect();
    let transfers = db.gateway.transfers().await.unwrap();
    assert_eq!(transfers.len(), ORDERS + ORDERS - ORDERS.div_ceil(3));
    for transfer in transfers {
        let id = transfer.payment_id.unwrap();
        let pays = orders.values().filter(|(_, by)| by.as_deref() == Some(id.as_str())).count();
        let back = owed.iter().filter(|owed| **owed == id).count();
        assert_eq!(pays + back, 1, "{id} pays {pays} orders and is owed back {back} times");
        assert_eq!(payments[&id], "settled");
    }
    for n in (0..ORDERS).filter(|n| n % 3 == 0) {
        assert_eq!(payments[&format!("{n}/b")], "failed", "its transfer is the other one's");
        assert_eq!(orders[&format!("reuse{n}")].1, None);
    }
}

/// The server ends the connection in the middle: the whole call says so, nothing is written, and the
/// watch is free again when its lease is over (I9).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_lost_while_applying_loses_nothing() {
    let db = TestDb::postgres().await;
    db.paying_order("o", "p").await;
    db.discover().await;
    let (lease, _) = db.lease_all().await;
    let mut somebody = db.postgres_connection().await;
    let mut transaction = somebody.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM orders FOR UPDATE").execute(&mut *transaction).await.unwrap();
    let store = db.store.clone();
    let applying = tokio::spawn(async move {
        let batch = vec![judged("p", settled("p"))];
        store.apply(&lease, batch, &Policy::default(), at(30)).await
    });
    wait_for_blocked(&db).await;
    run(
        &db,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
          WHERE datname = current_database() AND wait_event_type = 'Lock'",
    )
    .await;
    let error = applying.await.unwrap().unwrap_err();
    assert!(matches!(error, StoreError::Unreachable(_)), "{error:?}");
    transaction.rollback().await.unwrap();
    assert_eq!(db.payment_status("p").await, "unknown");
    assert_eq!(db.count("{checks}").await, 0);
    let next = super::harness::lease(at(60), at(120));
    assert_eq!(ids(&db.store.lease_due(&next, 10).await.unwrap()), ["p"]);
    let batch = vec![judged("p", settled("p"))];
    let applied = db.store.apply(&next, batch, &Policy::default(), at(61)).await.unwrap();
    assert_eq!(outcome(&applied, "p"), Outcome::Paid);
}

/// A full reconcile reads page after page; its checks go back in one go per page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_thousands_come_and_go_back_whole() {
    let db = TestDb::postgres().await;
    payments(&db, 5_000).await;
    assert_eq!(db.store.discover(T0, T0, 10_000).await.unwrap().opened, 5_000);
    let lease = lease(T0, at(60));
    let mut after: Option<PaymentId> = None;
    let mut sizes = Vec::new();
    loop {
        let page = db.store.lease_page(&lease, after.as_ref(), 2_000).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some(last.watch.payment_id.clone());
        let checks: Vec<_> = ids(&page).into_iter().map(|id| judged(id, pending(20))).collect();
        assert_eq!(db.store.reschedule(&lease, &checks).await.unwrap(), checks.len());
        sizes.push(page.len());
    }
    assert_eq!(sizes, [2_000, 2_000, 1_000]);
    assert_eq!(db.count("{checks}").await, 5_000);
    assert_eq!(db.store.next_due_at(T0).await.unwrap(), Some(at(40)));
}

async fn lease_one(store: &Arc<dyn Store>, id: &str) -> Lease {
    let lease = lease(T0, at(60));
    // Ids are leased in their order: this one and nothing before it.
    let before = format!("{}\u{20}", &id[..id.len() - 1]);
    let page = store.lease_page(&lease, Some(&PaymentId::from(before.as_str())), 1).await.unwrap();
    assert_eq!(ids(&page), [id]);
    lease
}

/// Two replicas apply the two payments of one order at the same moment: one pays, the other is owed
/// back (I3, I4), whoever comes first, and none is turned away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_payments_of_one_order_applied_at_once_pay_it_once() {
    let db = TestDb::postgres().await;
    let other = db.replica().await;
    for round in 0..20 {
        let (order, a, b) = (format!("o{round}"), format!("{round}/a"), format!("{round}/b"));
        db.paying_order(&order, &a).await;
        db.payment(&b, &order).await;
        db.discover().await;
        let lease_a = lease_one(&db.store, &a).await;
        let lease_b = lease_one(&other, &b).await;
        let policy = Policy::default();
        let (first, second) = tokio::join!(
            db.store.apply(&lease_a, vec![judged(&a, settled(&a))], &policy, at(30)),
            other.apply(&lease_b, vec![judged(&b, settled(&b))], &policy, at(30)),
        );
        let outcomes: BTreeSet<&str> =
            [outcome(&first.unwrap(), &a).code(), outcome(&second.unwrap(), &b).code()].into();
        assert_eq!(outcomes, BTreeSet::from(["paid", "refund_owed"]), "round {round}");
    }
    assert_eq!(db.refunds().await.len(), 20);
    assert_eq!(db.count("{transfers}").await, 40);
}

/// Two replicas apply two payments of different orders that claim one and the same log. Only the
/// index on transfers sees both: the slower one is resolved again, and loses (I4).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_claims_of_one_transfer_applied_at_once_are_one_payment() {
    let db = TestDb::postgres().await;
    let other = db.replica().await;
    for round in 0..20 {
        let (a, b) = (format!("{round}/a"), format!("{round}/b"));
        db.order(&format!("oa{round}")).await;
        db.order(&format!("ob{round}")).await;
        let reused = RawPayment { id: b.clone(), ..payment(&a, &format!("ob{round}")) };
        let first = RawPayment {
            order_id: Some(format!("oa{round}")),
            // The gateway wrote it in another case.
            nonce: reused.nonce.as_ref().map(|n| n.to_uppercase().replacen("0X", "0x", 1)),
            ..payment(&a, "")
        };
        db.gateway.insert_payment(&first).await.unwrap();
        db.gateway.insert_payment(&reused).await.unwrap();
        db.discover().await;
        let lease_a = lease_one(&db.store, &a).await;
        let lease_b = lease_one(&other, &b).await;
        let policy = Policy::default();
        let (first, second) = tokio::join!(
            db.store.apply(&lease_a, vec![judged(&a, settled(&a))], &policy, at(30)),
            other.apply(&lease_b, vec![judged(&b, settled(&a))], &policy, at(30)),
        );
        assert_eq!(outcome(&first.unwrap(), &a), Outcome::Paid, "the older row has it");
        // It came second, or came first and left it to the older row.
        if outcome(&second.unwrap(), &b) == Outcome::Waiting {
            assert_eq!(db.apply(&b, settled(&a)).await.outcome, Outcome::AuthorizationReused);
        } else {
            assert_eq!(db.order_status(&format!("ob{round}")).await.0, "failed");
        }
    }
    assert_eq!(db.count("{transfers}").await, 20);
}

/// One log recorded by a concurrent transaction that no lock of ours sees: the check is not lost, it is
/// resolved again on what is there then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_taken_while_it_is_applied_is_resolved_again() {
    let db = TestDb::postgres().await;
    db.paying_order("o", "p").await;
    db.discover().await;
    let (lease, _) = db.lease_all().await;
    let t = transfer("p", 100, 7);
    let mut rival = db.postgres_connection().await;
    let mut transaction = rival.begin().await.unwrap();
    sqlx::query(
        "INSERT INTO reconciled.transfers (chain_id, tx_hash, log_index, payment_id, token, payer,
             pay_to, amount, block_number, block_hash, block_time, finality, seen_at)
         VALUES (8453, $1, 7, 'rival', $2, $3, $4, 1000000, 100, $5, to_timestamp($6), 'final', now())",
    )
    .bind(format!("{:#x}", t.tx_hash))
    .bind(format!("{:#x}", t.token))
    .bind(format!("{:#x}", t.from))
    .bind(format!("{:#x}", t.to))
    .bind(format!("{:#x}", t.block.hash))
    .bind(i64::try_from(t.block.time.as_secs()).unwrap())
    .execute(&mut *transaction)
    .await
    .unwrap();
    let store = db.store.clone();
    let applying = tokio::spawn(async move {
        let batch = vec![judged("p", settled("p"))];
        store.apply(&lease, batch, &Policy::default(), at(30)).await
    });
    wait_for_blocked(&db).await;
    transaction.commit().await.unwrap();
    let applied = applying.await.unwrap().unwrap();
    assert_eq!(outcome(&applied, "p"), Outcome::AuthorizationReused);
    assert_eq!(db.flags().await, ["authorization_reused:p"]);
}

/// Waits until some statement of this database waits for a lock.
async fn wait_for_blocked(db: &TestDb) {
    let started = Instant::now();
    loop {
        let waiting = db
            .value(
                "SELECT count(*)::text FROM pg_stat_activity
                  WHERE datname = current_database() AND wait_event_type = 'Lock'",
            )
            .await;
        if waiting.as_deref() != Some("0") {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(10), "nobody waits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The gateway changes the order while the verdict is on its way: what counts is what stands there
/// once its transaction is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_holds_the_order_is_waited_for() {
    let db = TestDb::postgres().await;
    db.paying_order("o", "p").await;
    db.discover().await;
    let (lease, _) = db.lease_all().await;
    let mut gateway = db.postgres_connection().await;
    let mut transaction = gateway.begin().await.unwrap();
    sqlx::query("UPDATE orders SET status = 'canceled' WHERE id = 'o'")
        .execute(&mut *transaction)
        .await
        .unwrap();
    let store = db.store.clone();
    let applying = tokio::spawn(async move {
        let batch = vec![judged("p", settled("p"))];
        store.apply(&lease, batch, &Policy::default(), at(30)).await
    });
    wait_for_blocked(&db).await;
    transaction.commit().await.unwrap();
    let applied = applying.await.unwrap().unwrap();
    assert_eq!(outcome(&applied, "p"), Outcome::RefundOwed);
    assert_eq!(db.order_status("o").await.0, "canceled");
    assert_eq!(db.refunds().await, ["p late 1000000 owed"]);
}

/// Values that only PostgreSQL's types can hold fail their own row's parse, and no statement (I11).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn amounts_and_times_beyond_numbers_are_flagged_and_stop_nothing() {
    let db = TestDb::postgres().await;
    db.paying_order("o1", "nan").await;
    db.paying_order("o2", "never").await;
    db.paying_order("o3", "good").await;
    run(&db, "UPDATE payments SET amount = 'NaN' WHERE id = 'nan'").await;
    run(&db, "UPDATE payments SET created_at = '-infinity' WHERE id = 'never'").await;
    db.discover().await;
    let (lease, followed) = db.lease_all().await;
    let problems: Vec<(&str, &str, &str)> = followed
        .iter()
        .filter_map(|f| f.payment.as_ref().err())
        .map(|m| (m.payment_id.as_str(), m.column, m.found.as_str()))
        .collect();
    assert_eq!(problems, [("nan", "amount", "\"NaN\""), ("never", "created_at", "\"-Infinity\"")]);
    let batch = ["nan", "never", "good"].map(|id| judged(id, settled(id))).to_vec();
    let applied = db.store.apply(&lease, batch, &Policy::default(), at(30)).await.unwrap();
    assert_eq!(outcome(&applied, "nan"), Outcome::Flagged);
    assert_eq!(outcome(&applied, "never"), Outcome::Flagged);
    assert_eq!(outcome(&applied, "good"), Outcome::Paid);
    assert_eq!(db.flags().await, ["malformed_payment:nan", "malformed_payment:never"]);
    let story = db.store.story(&PaymentId::from("nan")).await.unwrap().unwrap();
    assert_eq!(story.payment["amount"], "NaN");
}

/// An endpoint's words may hold what `text` and `jsonb` cannot: they are stored without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nul_in_what_an_endpoint_said_stops_nothing() {
    let db = TestDb::postgres().await;
    db.paying_order("o", "p").await;
    db.discover().await;
    let (lease, _) = db.lease_all().await;
    let mut check = judged("p", settled("p"));
    check.evidence.readings[1].outcome.as_mut().unwrap_err().detail = "bad\0answer".to_owned();
    let applied = db.store.apply(&lease, vec![check], &Policy::default(), at(30)).await.unwrap();
    assert_eq!(outcome(&applied, "p"), Outcome::Paid);
    assert_eq!(db.count("{resolutions}").await, 1);
}

/// A gateway with a schema of its own exposes updatable views: migrating leaves them alone, and
/// payments are found, paid and failed through them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updatable_views_serve_as_well_as_tables() {
    let db = TestDb::postgres_with(
        "CREATE SCHEMA shop;
         CREATE TABLE shop.purchases (
             number text PRIMARY KEY, sort text, state text, paying text, quote_until timestamptz,
             handed_over timestamptz, made timestamptz, touched timestamptz, secret text);
         CREATE VIEW orders AS SELECT number AS id, sort AS kind, state AS status,
             paying AS paid_by, quote_until AS quote_expires_at, handed_over AS delivered_at,
             made AS created_at, touched AS updated_at FROM shop.purchases;
         CREATE TABLE shop.attempts (
             id text PRIMARY KEY, order_id text, rail text, method text, chain_id bigint,
             token text, payer text, pay_to text, units numeric(78, 0), nonce text,
             valid_after numeric(78, 0), valid_before numeric(78, 0), credential text,
             tx_hash text, status text, settle_error text, created_at timestamptz,
             broadcast_at timestamptz, settled_at timestamptz, updated_at timestamptz);
         CREATE VIEW payments AS SELECT id, order_id, rail, method, chain_id, token, payer, pay_to,
             units AS amount, nonce, valid_after, valid_before, credential, tx_hash, status,
             settle_error, created_at, broadcast_at, settled_at, updated_at FROM shop.attempts;
         CREATE TABLE shop.holds (
             id text PRIMARY KEY, order_id text, sku text, quantity bigint, status text);
         CREATE VIEW stock_reservations AS SELECT * FROM shop.holds;
         CREATE TABLE shop.shelf (sku text PRIMARY KEY, available bigint);
         CREATE VIEW stock AS SELECT sku, available FROM shop.shelf",
    )
    .await;
    assert_eq!(
        db.value("SELECT count(*)::text FROM pg_class WHERE relname = 'orders' AND relkind = 'r'")
            .await
            .as_deref(),
        Some("0"),
        "migrating made no table beside the view"
    );
    db.order_with_stock("o1", "cup").await;
    db.payment("paid", "o1").await;
    db.order_with_stock("o2", "hat").await;
    db.payment("failed", "o2").await;
    assert_eq!(db.discover().await, (2, 0));
    let (lease, _) = db.lease_all().await;
    let batch = vec![
        judged("paid", settled("paid")),
        judged("failed", super::harness::expired(super::harness::hours(25))),
    ];
    let applied = db.store.apply(&lease, batch, &Policy::default(), at(30)).await.unwrap();
    assert_eq!(outcome(&applied, "paid"), Outcome::Paid);
    assert_eq!(outcome(&applied, "failed"), Outcome::Failed);
    assert_eq!(
        db.value("SELECT state || ' by ' || paying FROM shop.purchases WHERE number = 'o1'").await,
        Some("paid by paid".to_owned())
    );
    assert_eq!(db.order_status("o2").await.0, "failed");
    assert_eq!(db.reservation("o1/cup").await, "committed");
    assert_eq!(db.reservation("o2/hat").await, "released");
    assert_eq!(db.stock("hat").await, "5");
    assert_eq!(db.phase("failed").await, Phase::Closed);
}

/// A view that swallows updates would let a payment count as paid that its gateway never hears of:
/// nothing is written then, and the check says why (I7).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_view_that_swallows_updates_is_noticed() {
    let db = TestDb::postgres().await;
    db.paying_order("o", "p").await;
    db.paying_order("o2", "p2").await;
    db.discover().await;
    let (lease, _) = db.lease_all().await;
    run(&db, "CREATE RULE deaf AS ON UPDATE TO orders WHERE old.id = 'o' DO INSTEAD NOTHING").await;
    let batch = vec![judged("p", settled("p")), judged("p2", settled("p2"))];
    let applied = db.store.apply(&lease, batch, &Policy::default(), at(30)).await.unwrap();
    let refused = format!("{:?}", super::harness::failure(&applied, "p"));
    assert!(refused.contains("0 of 1 rows of orders took their update"), "{refused}");
    assert_eq!(outcome(&applied, "p2"), Outcome::Paid);
    assert_eq!(db.payment_status("p").await, "unknown");
    assert_eq!(db.count("{resolutions}").await, 1);
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    assert_eq!(story.watch.unwrap().next_check_at, Some(at(40)), "it is tried again when due");
    let said = story.checks.last().unwrap().detail.clone().unwrap();
    assert!(said.starts_with("not applied: 0 of 1 rows of orders"), "{said}");
}

/// A payment settled though another pays its order is found however many payments there are: each
/// discovery reads on where the last one ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_settled_by_the_gateway_is_found_in_a_large_table() {
    let db = TestDb::postgres().await;
    payments(&db, 5_000).await;
    run(&db, "UPDATE payments SET status = 'failed'").await;
    db.paid_order("z").await;
    let duplicate = RawPayment { status: Some("settled".to_owned()), ..payment("z/second", "z") };
    db.gateway.insert_payment(&duplicate).await.unwrap();
    let mut opened = 0;
    for _ in 0..3 {
        opened += db.store.discover(T0, T0, 100).await.unwrap().opened;
    }
    assert_eq!(opened, 1);
    let (_, followed) = db.lease_all().await;
    assert_eq!(ids(&followed), ["z/second"]);
}

/// A refused connection is told at once and for what it is; a server that never answers, soon.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_server_is_told_quickly() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = free.local_addr().unwrap();
    drop(free);

    let (error, took) = connect_to(refusing).await;
    assert!(matches!(error, StoreError::Unreachable(_)), "{error}");
    assert_eq!(error.to_string(), "the database cannot be reached");
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("refused"), "{cause}");
    assert!(took < Duration::from_secs(2), "{took:?}");

    let (error, took) = connect_to(silent.local_addr().unwrap()).await;
    assert!(matches!(error, StoreError::Unreachable(_)), "{error}");
    assert!(took < Duration::from_secs(8), "{took:?}");
}

async fn connect_to(address: std::net::SocketAddr) -> (StoreError, Duration) {
    let started = Instant::now();
    let url = DatabaseUrl::parse(&format!("postgres://nobody:secret@{address}/none")).unwrap();
    match connect(&url, 2).await {
        Ok(_) => panic!("nobody is there"),
        Err(error) => {
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
            (error, started.elapsed())
        }
    }
}

/// Nothing is there, and then everything; once more changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrating_twice_is_as_good_as_once() {
    let database = TestDatabase::empty().await;
    let store = connect(&DatabaseUrl::parse(&database.url()).unwrap(), 2).await.unwrap();
    let error = store.verify_schema().await.unwrap_err();
    assert!(error.to_string().contains("lacks table orders"), "{error}");
    store.migrate().await.unwrap();
    store.migrate().await.unwrap();
    let optional = store.verify_schema().await.unwrap();
    assert!(optional.stock && optional.identifiers);
    let mut connection = database.connection().await;
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT schemaname || '.' || tablename FROM pg_tables WHERE tablename LIKE '%migrations'",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();
    assert_eq!(tables, ["reconciled.migrations"]);
}

/// The gateway's tables are those on the search path, and the URL may say what that is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_search_path_says_where_the_gateways_tables_are() {
    let database = TestDatabase::empty().await;
    let mut connection = database.connection().await;
    sqlx::raw_sql("CREATE SCHEMA shop; CREATE TABLE orders (nothing int)")
        .execute(&mut connection)
        .await
        .unwrap();
    let url = format!("{}?options[search_path]=shop", database.url());
    let store = connect(&DatabaseUrl::parse(&url).unwrap(), 2).await.unwrap();
    store.migrate().await.unwrap();
    store.verify_schema().await.unwrap();
    let schemas: Vec<String> =
        sqlx::query_scalar("SELECT schemaname FROM pg_tables WHERE tablename = 'payments'")
            .fetch_all(&mut connection)
            .await
            .unwrap();
    assert_eq!(schemas, ["shop"]);
}

/// Every connection carries the server's own limits: no statement or lock waits for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_never_lets_go_of_a_row_costs_one_payment_and_not_the_rest() {
    let db = TestDb::postgres().await;
    db.paying_order("held", "p1").await;
    db.paying_order("free", "p2").await;
    db.discover().await;
    let (lease, _) = db.lease_all().await;
    let mut gateway = db.postgres_connection().await;
    let mut transaction = gateway.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM orders WHERE id = 'held' FOR UPDATE")
        .execute(&mut *transaction)
        .await
        .unwrap();
    let batch = vec![
        judged("p1", settled("p1")),
        judged("p2", settled_in("p2", 101, 3, reconciled::domain::Finality::Final)),
    ];
    let applied = db.store.apply(&lease, batch, &Policy::default(), at(30)).await.unwrap();
    let refused = format!("{:?}", super::harness::failure(&applied, "p1"));
    assert!(refused.contains("lock timeout"), "{refused}");
    assert!(resolved(&applied, "p2").recorded);
    transaction.rollback().await.unwrap();
}

/// A page of settled payments is found by its index, however many there are: some rows per place are looked
/// at, and no table is read from one end to the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_search_for_settled_payments_seeks_to_its_watermark() {
    const PAYMENTS: u32 = 100_000;
    const PAGE: u32 = 100;
    let db = TestDb::postgres().await;
    payments(&db, PAYMENTS).await;
    // Every other one was settled by us.
    for sql in [
        "UPDATE payments SET status = 'settled',
                settled_at = created_at + substr(id, 2)::int * interval '1 ms';
         SELECT pg_stat_force_next_flush()",
        "INSERT INTO reconciled.resolutions (payment_id, outcome, verdict, evidence, settles, resolved_at)
         SELECT id, 'paid', 'settled', '{}', true, settled_at FROM payments
          WHERE substr(id, 2)::int % 2 = 0;
         SELECT pg_stat_force_next_flush()",
        "VACUUM ANALYZE payments",
        "VACUUM ANALYZE reconciled.resolutions",
    ] {
        run(&db, sql).await;
    }
    let touched = async || {
        let sql = "SELECT sum(seq_tup_read)::text, sum(idx_tup_fetch)::text
                     FROM pg_stat_user_tables WHERE relname IN ('payments', 'resolutions')";
        let rows = db.gateway.rows(sql, &[], 2).await.unwrap();
        [0, 1].map(|n| rows[0][n].as_deref().unwrap().parse::<u64>().unwrap())
    };
    // Connections tell their figures when they are told to, or some seconds late: until they stand still.
    let mut before = [0, 0];
    while before != touched().await {
        before = touched().await;
        tokio::time::sleep(Duration::from_millis(1_500)).await;
    }
    let store = db.replica().await;
    let lag = Duration::from_secs(120);
    let stretch =
        store.settled_after(&Watermark::before(at(50)), at(3_600), lag, PAGE).await.unwrap();
    assert!(stretch.is_full);
    let found = stretch.payments.len();
    assert_eq!(found, 67, "two places for each of ours, of which one counts");
    let mut after = before;
    while after[1] == before[1] {
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        store.settled_after(&Watermark::before(at(3_600)), at(3_600), lag, 1).await.unwrap();
        after = touched().await;
    }
    assert_eq!(after[0], before[0], "no table is read from end to end");
    let fetched = after[1] - before[1];
    assert!(fetched <= 10 * u64::from(PAGE), "{fetched} rows for a page of {PAGE}");
}
