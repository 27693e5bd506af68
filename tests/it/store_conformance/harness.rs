//! A database to play with, and short words for rows, verdicts and checks.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, B256, keccak256};
use reconciled::domain::{
    Amount, BlockRef, BlockTime, ChainId, DueTimes, EndpointName, Evidence, Finality, Inconclusive,
    Judged, NextCheck, NonceState, Observation, Outcome, PaymentId, Phase, Policy, RawPayment,
    ReadFailure, ReadFailureKind, Reading, Settlement, Timestamp, Transfer, Unsettleable, Verdict,
};
use reconciled::sim::gateway::{GatewayDb, NewOrder, SeenRefund};
use reconciled::store::{
    Applied, ApplyFailure, DatabaseUrl, Followed, Lease, Resolved, Store, connect,
};
use sqlx::{Connection as _, PgConnection};
use uuid::Uuid;

use crate::support::postgres::TestDatabase;

/// The moment the stories start, on a whole second.
pub(super) const T0: Timestamp = Timestamp::from_millis(1_780_000_000_000);

/// What every payment asks for, unless a test says otherwise.
pub(super) const AMOUNT: &str = "1000000";

const CHAIN: u64 = 8453;
const TOKEN: &str = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913";
const PAY_TO: &str = "0x00000000000000000000000000000000000000Aa";

pub(super) fn at(secs: u64) -> Timestamp {
    T0.saturating_add(Duration::from_secs(secs))
}

pub(super) fn hours(n: u64) -> u64 {
    n * 3_600
}

/// A database with the schema, its store, and a gateway beside it.
pub(super) struct TestDb {
    pub(super) store: Arc<dyn Store>,
    pub(super) gateway: GatewayDb,
    url: DatabaseUrl,
    /// The file's folder, or the server's database: gone with the test.
    _place: Box<dyn Any + Send + Sync>,
}

impl TestDb {
    pub(super) async fn sqlite() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gateway.db");
        let url = DatabaseUrl::parse(&format!("sqlite:{}", path.display())).unwrap();
        Self::on(url, Box::new(folder)).await
    }

    pub(super) async fn postgres() -> Self {
        let database = TestDatabase::migrated().await;
        let url = DatabaseUrl::parse(&database.url()).unwrap();
        Self::on(url, Box::new(database)).await
    }

    /// On PostgreSQL, beside what `sql` has created before the daemon's migrations ran.
    pub(super) async fn postgres_with(sql: &'static str) -> Self {
        let database = TestDatabase::empty().await;
        sqlx::raw_sql(sql).execute(&mut database.connection().await).await.unwrap();
        let url = DatabaseUrl::parse(&database.url()).unwrap();
        Self::on(url, Box::new(database)).await
    }

    async fn on(url: DatabaseUrl, place: Box<dyn Any + Send + Sync>) -> Self {
        let store = connect(&url, 4).await.unwrap();
        store.migrate().await.unwrap();
        store.verify_schema().await.unwrap();
        let gateway = GatewayDb::connect(&url).await.unwrap();
        Self { store, gateway, url, _place: place }
    }

    /// A connection of the test's own, to stand in somebody's way with.
    pub(super) async fn postgres_connection(&self) -> PgConnection {
        let DatabaseUrl::Postgres(url) = &self.url else { panic!("not PostgreSQL") };
        PgConnection::connect(url).await.unwrap()
    }

    /// Another replica on the same database.
    pub(super) async fn replica(&self) -> Arc<dyn Store> {
        let store = connect(&self.url, 4).await.unwrap();
        store.verify_schema().await.unwrap();
        store
    }

    pub(super) async fn close(&self) {
        self.gateway.close().await;
    }

    // ---- The gateway's rows

    /// An order being paid, without stock.
    pub(super) async fn order(&self, id: &str) {
        self.gateway.insert_order(&NewOrder::paying(id, T0)).await.unwrap();
    }

    pub(super) async fn order_with_status(&self, id: &str, status: &str) {
        let order = NewOrder { status: status.to_owned(), ..NewOrder::paying(id, T0) };
        self.gateway.insert_order(&order).await.unwrap();
    }

    /// An order that holds two of `sku`, of which three more are on the shelf.
    pub(super) async fn order_with_stock(&self, id: &str, sku: &str) {
        self.gateway.put_stock(sku, 3).await.unwrap();
        let order = NewOrder { held: vec![(sku.to_owned(), 2)], ..NewOrder::paying(id, T0) };
        self.gateway.insert_order(&order).await.unwrap();
    }

    /// An `unknown` payment of `order`, with an authorization of its own.
    pub(super) async fn payment(&self, id: &str, order: &str) {
        self.gateway.insert_payment(&payment(id, order)).await.unwrap();
    }

    pub(super) async fn paying_order(&self, order: &str, id: &str) {
        self.order(order).await;
        self.payment(id, order).await;
    }

    /// An order that is already paid by a settled payment `ORDER/first`.
    pub(super) async fn paid_order(&self, id: &str) {
        let first = format!("{id}/first");
        let order = NewOrder {
            status: "paid".to_owned(),
            paid_by: Some(first.clone()),
            ..NewOrder::paying(id, T0)
        };
        self.gateway.insert_order(&order).await.unwrap();
        let row = RawPayment { status: Some("settled".to_owned()), ..payment(&first, id) };
        self.gateway.insert_payment(&row).await.unwrap();
    }

    // ---- The daemon's work

    /// Opens watches for whatever is there to be followed.
    pub(super) async fn discover(&self) -> (usize, usize) {
        let found = self.store.discover(T0, at(0), 1_000).await.unwrap();
        (found.opened, found.reopened)
    }

    /// Leases every open watch, due or not.
    pub(super) async fn lease_all(&self) -> (Lease, Vec<Followed>) {
        let lease = lease(T0, at(60));
        let followed = self.store.lease_page(&lease, None, 1_000).await.unwrap();
        (lease, followed)
    }

    /// Discovers, leases and applies as one round of the worker does, at `now`.
    pub(super) async fn apply_at(
        &self,
        now: Timestamp,
        policy: &Policy,
        batch: Vec<Judged>,
    ) -> Vec<Applied> {
        self.discover().await;
        let (lease, _) = self.lease_all().await;
        let applied = self.store.apply(&lease, batch, policy, now).await.unwrap();
        self.store.release(&lease).await.unwrap();
        applied
    }

    /// The same soon after the start, with the default policy, for one payment.
    pub(super) async fn apply(&self, id: &str, verdict: Verdict) -> Resolved {
        self.apply_with(&Policy::default(), id, verdict).await
    }

    pub(super) async fn apply_with(&self, policy: &Policy, id: &str, verdict: Verdict) -> Resolved {
        let applied = self.apply_at(at(30), policy, vec![judged(id, verdict)]).await;
        assert_eq!(applied.len(), 1);
        resolved(&applied, id)
    }

    // ---- What can be seen afterwards

    pub(super) async fn order_status(&self, id: &str) -> (String, Option<String>) {
        self.gateway.orders().await.unwrap()[id].clone()
    }

    pub(super) async fn payment_status(&self, id: &str) -> String {
        self.gateway.payments().await.unwrap()[id].clone()
    }

    pub(super) async fn stock(&self, sku: &str) -> String {
        self.gateway.stock().await.unwrap()[sku].clone()
    }

    pub(super) async fn reservation(&self, id: &str) -> String {
        self.gateway.reservations().await.unwrap()[id].clone()
    }

    pub(super) async fn identifier(&self, id: &str) -> String {
        self.gateway.identifiers().await.unwrap()[id].clone()
    }

    pub(super) async fn events(&self) -> Vec<String> {
        self.gateway.events().await.unwrap()
    }

    pub(super) async fn flags(&self) -> Vec<String> {
        self.gateway.open_flags().await.unwrap()
    }

    /// Refund records as `payment reason amount status`.
    pub(super) async fn refunds(&self) -> Vec<String> {
        let refunds = self.gateway.refunds().await.unwrap();
        refunds
            .into_iter()
            .map(|SeenRefund { payment_id, reason, amount, status }| {
                format!("{payment_id} {reason} {amount} {status}")
            })
            .collect()
    }

    pub(super) async fn count(&self, table: &str) -> u64 {
        self.gateway.count(table).await.unwrap()
    }

    /// The first column of the only row, as text.
    pub(super) async fn value(&self, sql: &str) -> Option<String> {
        let rows = self.gateway.rows(sql, &[], 1).await.unwrap();
        assert_eq!(rows.len(), 1, "{sql}");
        rows[0][0].clone()
    }

    pub(super) async fn phase(&self, id: &str) -> Phase {
        let story = self.store.story(&PaymentId::from(id)).await.unwrap().unwrap();
        story.watch.unwrap().phase
    }

    /// Makes the database refuse every row that is added to one of our tables for this payment.
    pub(super) async fn refuse_inserts(&self, table: &str, payment: &str) {
        match &self.gateway {
            GatewayDb::Sqlite(_) => {
                let sql = format!(
                    "CREATE TRIGGER refuse_{table} BEFORE INSERT ON {{{table}}} \
                     WHEN new.payment_id = '{payment}' \
                     BEGIN SELECT raise(ABORT, 'refused by the test'); END"
                );
                self.gateway.execute(&sql, &[]).await.unwrap();
            }
            GatewayDb::Postgres(_) => {
                let sql = format!(
                    "ALTER TABLE {{{table}}} ADD CONSTRAINT refuse_{table} \
                     CHECK (payment_id <> '{payment}') NOT VALID"
                );
                self.gateway.execute(&sql, &[]).await.unwrap();
            }
        }
    }

    /// Takes the refusal away again.
    pub(super) async fn allow_inserts(&self, table: &str) {
        let sql = match &self.gateway {
            GatewayDb::Sqlite(_) => format!("DROP TRIGGER refuse_{table}"),
            GatewayDb::Postgres(_) => {
                format!("ALTER TABLE {{{table}}} DROP CONSTRAINT refuse_{table}")
            }
        };
        self.gateway.execute(&sql, &[]).await.unwrap();
    }
}

pub(super) fn lease(now: Timestamp, expires_at: Timestamp) -> Lease {
    Lease { token: Uuid::new_v4(), now, expires_at }
}

pub(super) fn ids(followed: &[Followed]) -> Vec<&str> {
    followed.iter().map(|f| f.watch.payment_id.as_str()).collect()
}

/// An `unknown` payment that asks for [`AMOUNT`] and expires after a minute.
pub(super) fn payment(id: &str, order: &str) -> RawPayment {
    let some = |text: &str| Some(text.to_owned());
    RawPayment {
        id: id.to_owned(),
        order_id: some(order),
        rail: some("x402"),
        method: some("eip3009"),
        chain_id: Some(CHAIN.to_string()),
        token: some(TOKEN),
        payer: Some(payer(id).to_string()),
        pay_to: some(PAY_TO),
        amount: some(AMOUNT),
        nonce: Some(keccak256(format!("nonce of {id}")).to_string()),
        valid_after: some("0"),
        valid_before: Some((T0.as_millis() / 1_000 + 60).to_string()),
        tx_hash: None,
        status: some("unknown"),
        created_at: Some(T0.as_millis().to_string()),
        broadcast_at: Some(T0.as_millis().to_string()),
    }
}

fn payer(id: &str) -> Address {
    Address::from_slice(&keccak256(id)[..20])
}

/// The block of this number, mined this many seconds into the story.
pub(super) fn block(number: u64, secs: u64) -> BlockRef {
    BlockRef {
        number,
        hash: keccak256(format!("block {number} at {secs}")),
        time: BlockTime::from_secs(u64::try_from(T0.as_millis() / 1_000).unwrap() + secs),
    }
}

/// The transfer that pays `id`, in block `number`.
pub(super) fn transfer(id: &str, number: u64, log_index: u64) -> Transfer {
    Transfer {
        chain_id: ChainId::new(CHAIN),
        token: TOKEN.parse().unwrap(),
        from: payer(id),
        to: PAY_TO.parse().unwrap(),
        value: AMOUNT.parse::<Amount>().unwrap(),
        block: block(number, 4),
        tx_hash: tx_hash(id),
        log_index,
    }
}

pub(super) fn tx_hash(id: &str) -> B256 {
    keccak256(format!("transaction of {id}"))
}

pub(super) fn settled(id: &str) -> Verdict {
    settled_in(id, 100, 7, Finality::Final)
}

pub(super) fn tentative(id: &str) -> Verdict {
    settled_in(id, 100, 7, Finality::Tentative)
}

pub(super) fn settled_in(id: &str, number: u64, log_index: u64, finality: Finality) -> Verdict {
    Verdict::Settled(Settlement { transfer: transfer(id, number, log_index), finality })
}

pub(super) fn pending(secs: u64) -> Verdict {
    Verdict::Pending { as_of: block(1_000, secs), agreeing: 1 }
}

pub(super) fn unsettleable(reason: Unsettleable, secs: u64) -> Verdict {
    Verdict::Unsettleable { reason, as_of: block(1_000, secs), consumption: None }
}

pub(super) fn expired(secs: u64) -> Verdict {
    unsettleable(Unsettleable::Expired, secs)
}

pub(super) fn inconclusive() -> Verdict {
    Verdict::Inconclusive(Inconclusive::ReadFailed(ReadFailureKind::Unreachable))
}

/// One check of `id`, with evidence from two endpoints.
pub(super) fn judged(id: &str, verdict: Verdict) -> Judged {
    let head = block(1_000, 20);
    let observation =
        Observation { head, safe: None, finalized: block(900, 2), nonce: NonceState::Unused };
    Judged {
        payment_id: PaymentId::from(id),
        checked_at: at(20),
        terms: None,
        evidence: Evidence {
            readings: vec![
                Reading { endpoint: EndpointName::new("first"), outcome: Ok(observation) },
                Reading {
                    endpoint: EndpointName::new("second"),
                    outcome: Err(ReadFailure::new(ReadFailureKind::Unreachable, "no answer")),
                },
            ],
        },
        verdict,
        problem: None,
        due: DueTimes {
            open: NextCheck { phase: Phase::Targeted, at: Some(at(40)) },
            late: Some(at(hours(25))),
            finality: at(1_200),
            reopened: at(30),
            schedule_id: None,
        },
    }
}

pub(super) fn resolved(applied: &[Applied], id: &str) -> Resolved {
    let one = applied.iter().find(|a| a.payment_id.as_str() == id).unwrap();
    *one.result.as_ref().unwrap_or_else(|failure| panic!("{id}: {failure:?}"))
}

pub(super) fn outcome(applied: &[Applied], id: &str) -> Outcome {
    resolved(applied, id).outcome
}

pub(super) fn failure(applied: &[Applied], id: &str) -> ApplyFailure {
    let one = applied.iter().find(|a| a.payment_id.as_str() == id).unwrap();
    one.result.clone().expect_err("nothing should have been written")
}
