//! What only SQLite can do to us: any value in any column, views that count no changes, one writer.

use reconciled::domain::{Outcome, Policy, RawPayment, Verdict};
use reconciled::sim::gateway::GatewayDb;
use reconciled::store::{DatabaseUrl, StoreError, connect};

use super::harness::{
    T0, TestDb, at, expired, hours, ids, judged, outcome, payment, resolved, settled,
};

/// I11: SQLite keeps what it is given, whatever the column was declared as.
#[tokio::test]
async fn a_value_of_the_wrong_type_is_a_malformed_payment_that_names_its_column() {
    let db = TestDb::sqlite().await;
    let some = |text: &str| Some(text.to_owned());
    let bad = [
        RawPayment { created_at: some("yesterday"), ..payment("created_at", "o") },
        RawPayment { broadcast_at: some("12.5"), ..payment("broadcast_at", "o") },
        RawPayment { chain_id: some("base"), ..payment("chain_id", "o") },
        RawPayment { amount: some("1e6"), ..payment("amount", "o") },
        RawPayment { valid_before: some("soon"), ..payment("valid_before", "o") },
        RawPayment {
            status: some("settling"),
            created_at: some("a settling row"),
            ..payment("stale", "o")
        },
    ];
    db.order("o").await;
    for row in &bad {
        db.gateway.insert_payment(row).await.unwrap();
    }
    db.payment("nonce", "o").await;
    let blob = "UPDATE payments SET nonce = x'ff00ff' WHERE id = 'nonce'";
    db.gateway.execute(blob, &[]).await.unwrap();
    assert_eq!(db.discover().await, (7, 0));
    let (_, followed) = db.lease_all().await;
    for one in &followed {
        let column = one.payment.as_ref().unwrap_err().column;
        match one.watch.payment_id.as_str() {
            "stale" => assert_eq!(column, "created_at"),
            id => assert_eq!(column, id),
        }
    }
    db.store.release(&db.lease_all().await.0).await.unwrap();
    let malformed = Verdict::Inconclusive(reconciled::domain::Inconclusive::MalformedPayment);
    let batch = ids(&followed).into_iter().map(|id| judged(id, malformed.clone())).collect();
    db.gateway.execute("UPDATE {watches} SET lease_token = NULL", &[]).await.unwrap();
    let applied = db.apply_at(at(30), &Policy::default(), batch).await;
    for id in ids(&followed) {
        assert_eq!(outcome(&applied, id), Outcome::Flagged);
    }
    db.store.story(&"nonce".into()).await.unwrap().unwrap();
}

/// I11: other rows of an order make no sense either, now and then.
#[tokio::test]
async fn an_order_with_a_senseless_reservation_or_shelf_is_left_for_a_person() {
    let db = TestDb::sqlite().await;
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    let sql = "UPDATE stock_reservations SET quantity = 'two'";
    db.gateway.execute(sql, &[]).await.unwrap();
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Flagged);
    assert_eq!(db.flags().await, ["order_unreadable:p"]);
    assert_eq!(db.order_status("o").await.0, "paying");

    db.order_with_stock("q", "shelf").await;
    db.payment("r", "q").await;
    let sql = "UPDATE stock SET available = 'plenty' WHERE sku = 'shelf'";
    db.gateway.execute(sql, &[]).await.unwrap();
    let batch = vec![judged("r", expired(hours(24)))];
    db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(db.flags().await, ["order_unreadable:p", "stock_missing:r"]);
    assert_eq!(db.stock("shelf").await, "plenty");
}

/// DESIGN section 5: a gateway may keep its own schema and expose updatable views.
#[tokio::test]
async fn updatable_views_serve_as_well_as_tables() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gateway.db");
    std::fs::File::create(&path).unwrap();
    let url = DatabaseUrl::parse(&format!("sqlite:{}", path.display())).unwrap();
    let gateway = GatewayDb::connect(&url).await.unwrap();
    let schema = std::fs::read_to_string("migrations/sqlite/0001_gateway_contract.sql").unwrap();
    for table in ["orders", "payments", "stock_reservations", "stock", "payment_identifiers"] {
        let start = schema.find(&format!("CREATE TABLE IF NOT EXISTS {table} (")).unwrap();
        let end = start + schema[start..].find(");").unwrap() + 1;
        let inner = schema[start..end].replacen(table, &format!("inner_{table}"), 1);
        gateway.execute(&inner, &[]).await.unwrap();
        let view = format!("CREATE VIEW {table} AS SELECT * FROM inner_{table}");
        gateway.execute(&view, &[]).await.unwrap();
    }
    for (table, key, columns) in [
        ("orders", "id", "status = new.status, paid_by = new.paid_by, updated_at = new.updated_at"),
        (
            "payments",
            "id",
            "status = new.status, settled_at = new.settled_at, updated_at = new.updated_at",
        ),
        ("stock_reservations", "id", "status = new.status"),
        ("stock", "sku", "available = new.available"),
        ("payment_identifiers", "id", "status = new.status, updated_at = new.updated_at"),
    ] {
        let trigger = format!(
            "CREATE TRIGGER update_{table} INSTEAD OF UPDATE ON {table} BEGIN \
             UPDATE inner_{table} SET {columns} WHERE {key} = old.{key}; END"
        );
        gateway.execute(&trigger, &[]).await.unwrap();
    }
    for statement in [
        "INSERT INTO inner_orders (id, kind, status) VALUES ('o', 'order', 'paying')",
        "INSERT INTO inner_orders (id, kind, status) VALUES ('q', 'order', 'paying')",
        "INSERT INTO inner_stock VALUES ('sku', 3)",
        "INSERT INTO inner_stock_reservations VALUES ('o/sku', 'o', 'sku', 2, 'held')",
        "INSERT INTO inner_stock_reservations VALUES ('q/sku', 'q', 'sku', 1, 'held')",
        "INSERT INTO inner_payment_identifiers (id, payment_id, status) \
         VALUES ('key', 'p', 'in_flight')",
    ] {
        gateway.execute(statement, &[]).await.unwrap();
    }
    for (id, order) in [("p", "o"), ("r", "q")] {
        let p = payment(id, order);
        gateway
            .execute(
                "INSERT INTO inner_payments (id, order_id, rail, method, chain_id, token, payer, \
                 pay_to, amount, nonce, valid_before, status, created_at) \
                 VALUES (?, ?, 'x402', 'eip3009', ?i, ?, ?, ?, ?, ?, ?, 'unknown', ?)",
                &[
                    Some(id),
                    Some(order),
                    p.chain_id.as_deref(),
                    p.token.as_deref(),
                    p.payer.as_deref(),
                    p.pay_to.as_deref(),
                    p.amount.as_deref(),
                    p.nonce.as_deref(),
                    p.valid_before.as_deref(),
                    p.created_at.as_deref(),
                ],
            )
            .await
            .unwrap();
    }

    let store = connect(&url, 2).await.unwrap();
    store.migrate().await.unwrap();
    let tables = store.verify_schema().await.unwrap();
    assert!(tables.stock && tables.identifiers);
    assert_eq!(store.discover(T0, T0, 10).await.unwrap().opened, 2);
    let lease = super::harness::lease(T0, at(60));
    assert_eq!(ids(&store.lease_due(&lease, 10).await.unwrap()), ["p", "r"]);
    let batch = vec![judged("p", settled("p")), judged("r", expired(hours(24)))];
    let applied = store.apply(&lease, batch, &Policy::default(), at(hours(24))).await.unwrap();
    assert_eq!(resolved(&applied, "p").outcome, Outcome::Paid);
    assert_eq!(resolved(&applied, "r").outcome, Outcome::Failed);
    let orders = gateway.orders().await.unwrap();
    assert_eq!(orders["o"], ("paid".to_owned(), Some("p".to_owned())));
    assert_eq!(orders["q"], ("failed".to_owned(), None));
    assert_eq!(gateway.stock().await.unwrap()["sku"], "4");
    assert_eq!(gateway.reservations().await.unwrap()["o/sku"], "committed");
    assert_eq!(gateway.identifiers().await.unwrap()["key"], "settled");
}

#[tokio::test]
async fn a_database_in_memory_is_refused() {
    for url in ["sqlite::memory:", "sqlite:file:shared?mode=memory&cache=shared"] {
        let url = DatabaseUrl::parse(url).unwrap();
        let error = connect(&url, 2).await.err().unwrap();
        assert!(matches!(error, StoreError::Url(_)), "{error:?}");
    }
}

/// The gateway may use the same library in the same file.
#[tokio::test]
async fn our_migrations_are_noted_in_a_table_of_our_own() {
    let db = TestDb::sqlite().await;
    let files = std::fs::read_dir("migrations/sqlite").unwrap().count();
    assert_eq!(db.count("reconciled_migrations").await, files as u64);
    assert_eq!(db.count("(SELECT 1 FROM sqlite_schema WHERE name = '_sqlx_migrations')").await, 0);
}

/// A writer that does not let go is out of reach, not a refusal: nothing is marked as refused.
#[tokio::test]
async fn a_locked_file_is_waited_for() {
    let db = TestDb::sqlite().await;
    db.paying_order("o", "p").await;
    db.discover().await;
    let (lease, _) = db.lease_all().await;
    let GatewayDb::Sqlite(pool) = &db.gateway else { panic!("this is SQLite") };
    let mut held = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    sqlx::query("UPDATE orders SET status = 'canceled'").execute(&mut *held).await.unwrap();
    let store = std::sync::Arc::clone(&db.store);
    let applying = tokio::spawn(async move {
        let batch = vec![judged("p", settled("p"))];
        store.apply(&lease, batch, &Policy::default(), at(30)).await.unwrap()
    });
    // Reading goes on meanwhile, and sees what was there before.
    let story = db.store.story(&"p".into()).await.unwrap().unwrap();
    assert_eq!(story.order.unwrap()["status"], "paying");
    assert!(!applying.is_finished());
    held.commit().await.unwrap();
    let applied = applying.await.unwrap();
    let refund = resolved(&applied, "p").refund;
    assert_eq!(refund, Some(reconciled::domain::RefundReason::Late), "it saw the gateway's write");
}
