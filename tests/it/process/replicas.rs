//! I10: three processes on one database give the same result as one.

use std::collections::BTreeMap;

use serde_json::json;

use super::scene::Scene;
use crate::support::anvil::Authorization;
use crate::support::daemon::eventually;

/// Payments, and how many of them are a second one of the same order.
const PAYMENTS: u64 = 2_000;
const DUPLICATES: u64 = 200;
const ORDERS: u64 = PAYMENTS - DUPLICATES;

/// Authorizations in one transaction.
const BATCH: usize = 100;

/// Writes payments with their orders, in few statements: order n is paid by payment n, and some by
/// payment n + ORDERS as well.
async fn write(scene: &Scene, numbers: &[u64], authorizations: &[Authorization]) {
    let (mut orders, mut held, mut payments) = (Vec::new(), Vec::new(), Vec::new());
    for (n, authorization) in numbers.iter().zip(authorizations) {
        let order = format!("o{:04}", n % ORDERS);
        if *n < ORDERS {
            orders.push(json!({"id": order, "kind": "order", "status": "paying"}));
            held.push(json!({"id": order, "order_id": order, "sku": "thing", "quantity": 1,
                             "status": "held"}));
        }
        let row = scene.row(&format!("p{n:04}"), &order, authorization);
        payments.push(json!({
            "id": row.id, "order_id": row.order_id, "rail": row.rail, "method": row.method,
            "chain_id": row.chain_id, "token": row.token, "payer": row.payer, "pay_to": row.pay_to,
            "amount": row.amount, "nonce": row.nonce, "valid_after": row.valid_after,
            "valid_before": row.valid_before, "status": row.status,
        }));
    }
    let tables = [("orders", orders), ("stock_reservations", held), ("payments", payments)];
    for (table, rows) in tables {
        let sql = format!(
            "INSERT INTO {table} SELECT * FROM json_populate_recordset(NULL::{table}, CAST(? AS json))"
        );
        let sql = match table {
            "payments" => sql.replace("SELECT *", PAYMENT_COLUMNS),
            _ => sql,
        };
        scene.gateway.execute(&sql, &[Some(&json!(rows).to_string())]).await.unwrap();
    }
}

/// The columns of `payments` in their order, broadcast now.
const PAYMENT_COLUMNS: &str = "SELECT id, order_id, rail, method, chain_id, token, payer, pay_to, \
    amount, nonce, valid_after, valid_before, credential, tx_hash, status, settle_error, now(), now()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_give_each_of_two_thousand_payments_its_effects_exactly_once() {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 0).await.unwrap();
    // Small batches, so that all three have work; pages of the reconcile that cut across them.
    let config = scene
        .settings()
        .set("checks", "batch_max", "40")
        .set("reconcile", "page_size", "70")
        .write();
    let mut replicas = Vec::new();
    for _ in 0..3 {
        replicas.push(config.start_ready().await);
    }

    let numbers: Vec<u64> = (0..PAYMENTS).collect();
    for numbers in numbers.chunks(BATCH) {
        let authorizations = scene.sign_many(numbers.len()).await;
        write(&scene, numbers, &authorizations).await;
        let calls = authorizations.iter().map(|a| scene.chain.transfer_call(a)).collect();
        scene.chain.batch(calls).await;
    }
    scene.finalize().await;
    eventually("every payment is closed", async || {
        let sql = "SELECT phase, CAST(count(*) AS TEXT) FROM {watches} GROUP BY 1";
        let phases = scene.counts(sql).await;
        let done = phases == BTreeMap::from([("closed".to_owned(), PAYMENTS)]);
        if done { Ok(()) } else { Err(format!("{phases:?}")) }
    })
    .await;

    let per_payment = "SELECT payment_id || ' ' || outcome, CAST(count(*) AS TEXT) \
                       FROM {resolutions} WHERE outcome <> 'confirmed' GROUP BY 1 HAVING count(*) > 1";
    assert_eq!(scene.counts(per_payment).await, BTreeMap::new(), "resolved twice");
    let outcomes = scene.outcomes().await;
    assert_eq!(outcomes["paid"], ORDERS);
    assert_eq!(outcomes["refund_owed"], DUPLICATES);
    let known = ["paid", "refund_owed", "confirmed"];
    assert!(outcomes.keys().all(|outcome| known.contains(&outcome.as_str())), "{outcomes:?}");
    assert_eq!(scene.gateway.count("{transfers}").await.unwrap(), PAYMENTS);

    let events = "SELECT kind, CAST(count(*) AS TEXT) FROM {events} GROUP BY 1";
    let expected = [("order.paid", ORDERS), ("refund.owed", DUPLICATES)];
    assert_eq!(scene.counts(events).await, expected.map(|(k, n)| (k.to_owned(), n)).into());
    let refunds = "SELECT reason, CAST(count(*) AS TEXT) FROM {refunds_owed} GROUP BY 1";
    assert_eq!(scene.counts(refunds).await, [("duplicate".to_owned(), DUPLICATES)].into());
    let orders = "SELECT status, CAST(count(*) AS TEXT) FROM orders GROUP BY 1";
    assert_eq!(scene.counts(orders).await, [("paid".to_owned(), ORDERS)].into());
    let stock = "SELECT status, CAST(sum(quantity) AS TEXT) FROM stock_reservations GROUP BY 1";
    assert_eq!(scene.counts(stock).await, [("committed".to_owned(), ORDERS)].into());
    assert_eq!(scene.shelf().await, "0");
    scene.assert_conserved().await;

    // Each counted what it did itself, and together they did everything once.
    let mut counted = BTreeMap::<&str, f64>::new();
    for replica in &mut replicas {
        let metrics = replica.metrics().await;
        for outcome in known {
            let series = format!("resolutions_total{{outcome=\"{outcome}\"}}");
            *counted.entry(outcome).or_default() += metrics.get(&series);
        }
        assert_eq!(metrics.get("apply_failures_total{cause=\"refused\"}"), 0.0);
    }
    for (outcome, count) in outcomes {
        assert_eq!(counted[outcome.as_str()], count as f64, "{outcome}");
    }
    for mut replica in replicas {
        assert_eq!(replica.sigterm().await.0, 0);
    }
}
