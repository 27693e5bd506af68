//! How SQLite answers the queries here: the rows it looks at must not grow with the history.

use sqlx::Row;

use super::SETTLED_AFTER;
use crate::store::Store;
use crate::store::sqlite::SqliteStore;

#[tokio::test]
async fn the_search_for_settled_payments_seeks_to_its_watermark() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("gateway.db").display());
    let store = SqliteStore::connect(&url, 2).await.unwrap();
    store.migrate().await.unwrap();
    let explain = format!("EXPLAIN QUERY PLAN {SETTLED_AFTER}");
    let query = sqlx::query(sqlx::AssertSqlSafe(explain)).bind(0).bind("").bind(1).bind(10);
    let rows = query.fetch_all(&store.reader).await.unwrap();
    let plan: Vec<String> = rows.iter().map(|row| row.get("detail")).collect();
    for (index, column) in [
        ("reconciled_payments_settled", "settled_at"),
        ("reconciled_resolutions_settling", "resolved_at"),
    ] {
        let step = plan.iter().find(|step| step.contains(index));
        let step = step.unwrap_or_else(|| panic!("{index} is not used: {plan:#?}"));
        assert!(step.starts_with("SEARCH"), "{step}");
        let bounds = [format!("{column}>?"), format!("{column}<?")];
        assert!(bounds.iter().all(|bound| step.contains(bound)), "{step}");
    }
    assert!(!plan.iter().any(|step| step.starts_with("SCAN p") || step.starts_with("SCAN r")));
}
