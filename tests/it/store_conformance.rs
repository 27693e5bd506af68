//! One suite that every `Store` must pass, against the real database.
//!
//! Each case plays the gateway with `GatewayDb`, hands verdicts to the store as the worker would, and
//! reads back what the gateway and its consumers would see. Nothing here looks at a chain or a clock.

/// Instantiates cases for every backend. A case is `async fn name(db: &TestDb)`.
macro_rules! for_each_backend {
    ($($case:ident),+ $(,)?) => {
        mod sqlite {
            use crate::store_conformance::harness::TestDb;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let db = TestDb::sqlite().await;
                    super::$case(&db).await;
                    db.close().await;
                }
            )+
        }
        mod postgres {
            use crate::store_conformance::harness::TestDb;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let db = TestDb::postgres().await;
                    super::$case(&db).await;
                    db.close().await;
                }
            )+
        }
    };
}

mod careless_gateways;
mod discovery;
mod failing;
mod flags;
mod harness;
mod leases;
mod ledger;
mod postgres_only;
mod reading;
mod refunds;
mod refusals;
mod reorgs;
mod schedules;
mod schema;
mod settling;
mod sqlite_only;
