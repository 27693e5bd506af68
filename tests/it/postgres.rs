//! What is PostgreSQL's alone: leases between replicas, views instead of tables, values only it can
//! hold, and a server that is not there. What holds for every database is in `store_conformance`.

use reconciled::store::{DatabaseUrl, connect};

use crate::support::postgres::TestDatabase;

#[tokio::test]
async fn migrating_twice_is_as_good_as_once() {
    let database = TestDatabase::empty().await;
    let url = DatabaseUrl::parse(&database.url()).unwrap();
    let store = connect(&url, 2).await.unwrap();
    let error = store.verify_schema().await.unwrap_err();
    assert!(error.to_string().contains("lacks table orders"), "{error}");
    store.migrate().await.unwrap();
    store.migrate().await.unwrap();
    let optional = store.verify_schema().await.unwrap();
    assert!(optional.stock && optional.identifiers);
}
