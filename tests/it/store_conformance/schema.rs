//! What has to be there, and what may be missing.

use reconciled::domain::{Outcome, Policy};
use reconciled::store::{OptionalTables, StoreError};

use super::harness::{TestDb, at, expired, hours, judged, outcome, settled};

for_each_backend!(
    a_migrated_database_has_everything,
    migrating_again_changes_nothing,
    a_gateway_without_stock_or_identifiers_is_served,
    half_of_the_stock_tables_count_as_none,
    a_missing_table_is_named,
    a_missing_column_is_named,
);

async fn a_migrated_database_has_everything(db: &TestDb) {
    let tables = db.store.verify_schema().await.unwrap();
    assert_eq!(tables, OptionalTables { stock: true, identifiers: true });
    db.store.ping().await.unwrap();
}

async fn migrating_again_changes_nothing(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.discover().await;
    db.store.migrate().await.unwrap();
    assert_eq!(db.payment_status("p").await, "unknown");
    assert_eq!(db.count("{watches}").await, 1);
}

async fn a_gateway_without_stock_or_identifiers_is_served(db: &TestDb) {
    for table in ["stock_reservations", "stock", "payment_identifiers"] {
        db.gateway.execute(&format!("DROP TABLE {table}"), &[]).await.unwrap();
    }
    let tables = db.store.verify_schema().await.unwrap();
    assert_eq!(tables, OptionalTables { stock: false, identifiers: false });
    db.paying_order("o", "p").await;
    db.paying_order("q", "r").await;
    let batch = vec![judged("p", settled("p")), judged("r", expired(hours(24)))];
    let applied = db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(outcome(&applied, "p"), Outcome::Paid);
    assert_eq!(outcome(&applied, "r"), Outcome::Failed);
    let story = db.store.story(&"p".into()).await.unwrap().unwrap();
    assert!(story.reservations.is_empty() && story.identifiers.is_empty());
}

async fn half_of_the_stock_tables_count_as_none(db: &TestDb) {
    db.gateway.execute("DROP TABLE stock", &[]).await.unwrap();
    let tables = db.store.verify_schema().await.unwrap();
    assert_eq!(tables, OptionalTables { stock: false, identifiers: true });
}

async fn missing(db: &TestDb) -> String {
    match db.store.verify_schema().await {
        Err(StoreError::Schema { missing }) => missing,
        other => panic!("{other:?}"),
    }
}

async fn a_missing_table_is_named(db: &TestDb) {
    for table in ["{retry_outcomes}", "payments"] {
        db.gateway.execute(&format!("DROP TABLE {table}"), &[]).await.unwrap();
        let missing = missing(db).await;
        assert!(missing.contains(table.trim_matches(['{', '}'])), "{missing}");
    }
}

async fn a_missing_column_is_named(db: &TestDb) {
    db.gateway.execute("ALTER TABLE payments DROP COLUMN valid_before", &[]).await.unwrap();
    let missing = missing(db).await;
    assert!(missing.contains("payments") && missing.contains("valid_before"), "{missing}");
}
