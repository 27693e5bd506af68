//! A database, a chain and a gateway: what a daemon under test stands in.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use alloy_primitives::{Address, address, keccak256};
use reconciled::clock::{Clock, SystemClock};
use reconciled::domain::{RawPayment, Timestamp};
use reconciled::sim::gateway::{GatewayDb, NewOrder};
use reconciled::store::DatabaseUrl;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::anvil::{ANVIL_CHAIN_ID, Authorization, RICH_PAYERS, TokenOnAnvil, payer_key};
use crate::support::daemon::{Settings, eventually};
use crate::support::postgres::TestDatabase;

/// The merchant.
pub(super) const PAY_TO: Address = address!("0x00000000000000000000000000000000000000a1");

/// Somebody else.
pub(super) const ELSEWHERE: Address = address!("0x00000000000000000000000000000000000000e1");

/// What every payment is for.
pub(super) const AMOUNT: u64 = 1_000_000;

/// How long an authorization is valid, in seconds.
pub(super) const VALID_FOR: u64 = 600;

/// From the broadcast to the deadline, and a little.
pub(super) const PAST_THE_DEADLINE: u64 = 24 * 3_600 + 60;

/// Finalized is this many epochs of slots behind the head.
const EPOCHS_TO_FINALITY: u64 = 2;

enum Home {
    Postgres(TestDatabase),
    Sqlite(tempfile::TempDir),
}

/// A database, a chain and a gateway.
pub(super) struct Scene {
    pub(super) chain: TokenOnAnvil,
    pub(super) gateway: GatewayDb,
    home: Home,
    slots_in_an_epoch: u64,
    payers: AtomicU64,
}

impl Scene {
    /// On PostgreSQL, migrated; blocks are final when two are above them.
    pub(super) async fn start() -> Self {
        Self::with_epochs_of(1).await
    }

    /// The same with a longer way to finality: twice `slots_in_an_epoch`.
    pub(super) async fn with_epochs_of(slots_in_an_epoch: u64) -> Self {
        let database = TestDatabase::migrated().await;
        Self::at(Home::Postgres(database), slots_in_an_epoch).await
    }

    /// On a SQLite file that `migrate` made.
    pub(super) async fn on_sqlite() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::Sqlite(folder);
        let migrated = Settings::fast(&url_of(&home)).write().run(&["migrate"]).await;
        assert_eq!(migrated.code, 0, "{migrated:?}");
        Self::at(home, 1).await
    }

    async fn at(home: Home, slots_in_an_epoch: u64) -> Self {
        let chain = TokenOnAnvil::start(slots_in_an_epoch).await;
        let url = DatabaseUrl::parse(&url_of(&home)).unwrap();
        let gateway = GatewayDb::connect(&url).await.unwrap();
        Self { chain, gateway, home, slots_in_an_epoch, payers: AtomicU64::new(0) }
    }

    /// Where the database is.
    pub(super) fn database_url(&self) -> String {
        url_of(&self.home)
    }

    /// Fast settings without a chain.
    pub(super) fn settings_without_chain(&self) -> Settings {
        Settings::fast(&self.database_url())
    }

    /// Fast settings for a daemon on this database and chain.
    pub(super) fn settings(&self) -> Settings {
        let url = self.chain.anvil.url();
        self.settings_without_chain().chain(ANVIL_CHAIN_ID, &[("anvil", url.as_str())])
    }

    // ---- The gateway and the buyers

    /// What some payer signs to pay the merchant, with a nonce of its own.
    pub(super) async fn sign(&self) -> Authorization {
        self.sign_many(1).await[0]
    }

    /// The same, of as many payers as there are.
    pub(super) async fn sign_many(&self, count: usize) -> Vec<Authorization> {
        let now = self.chain.anvil.block("latest").await.time.as_secs();
        let payer = || payer_key(self.payers.fetch_add(1, Ordering::Relaxed) % RICH_PAYERS);
        let sign = |_| Authorization {
            payer: payer().address(),
            to: PAY_TO,
            value: AMOUNT,
            valid_after: 0,
            valid_before: now + VALID_FOR,
            nonce: keccak256(Uuid::new_v4().as_bytes()),
        };
        (0..count).map(sign).collect()
    }

    /// A payment row for an authorization, `unknown` and broadcast now.
    pub(super) fn row(&self, id: &str, order: &str, a: &Authorization) -> RawPayment {
        let text = |value: &dyn ToString| Some(value.to_string());
        RawPayment {
            id: id.to_owned(),
            order_id: text(&order),
            rail: text(&"x402"),
            method: text(&"eip3009"),
            chain_id: text(&ANVIL_CHAIN_ID),
            token: text(&self.chain.token),
            payer: text(&a.payer),
            pay_to: text(&a.to),
            amount: text(&a.value),
            nonce: text(&a.nonce),
            valid_after: text(&a.valid_after),
            valid_before: text(&a.valid_before),
            tx_hash: None,
            status: text(&"unknown"),
            created_at: text(&now().as_millis()),
            broadcast_at: text(&now().as_millis()),
        }
    }

    /// Writes an order that is being paid and holds one `thing`.
    pub(super) async fn order(&self, id: &str) {
        let order = NewOrder { held: vec![("thing".to_owned(), 1)], ..NewOrder::paying(id, now()) };
        self.gateway.insert_order(&order).await.unwrap();
    }

    /// Writes a payment of an order in this status, and its buyer's identifier `retry-ID`.
    pub(super) async fn pay(
        &self,
        id: &str,
        order: &str,
        status: &str,
        authorization: &Authorization,
    ) {
        let row =
            RawPayment { status: Some(status.to_owned()), ..self.row(id, order, authorization) };
        self.gateway.insert_payment(&row).await.unwrap();
        self.gateway
            .insert_identifier(&format!("retry-{id}"), id, "in_flight", Some("{}"))
            .await
            .unwrap();
    }

    /// An order `order-ID` with a payment `ID` whose settle call gave no answer.
    pub(super) async fn unknown(&self, id: &str) -> Authorization {
        let authorization = self.sign().await;
        let order = format!("order-{id}");
        self.order(&order).await;
        self.pay(id, &order, "unknown", &authorization).await;
        authorization
    }

    /// Sends an authorization, which must succeed.
    pub(super) async fn land(&self, authorization: &Authorization) -> Value {
        let receipt = self.chain.transfer(authorization).await;
        assert_eq!(receipt["status"], "0x1", "{receipt}");
        receipt
    }

    /// Mines until the head of now is final.
    pub(super) async fn finalize(&self) {
        self.chain.anvil.mine(EPOCHS_TO_FINALITY * self.slots_in_an_epoch + 1).await;
    }

    /// Moves chain time on, and makes a block that late final.
    pub(super) async fn later(&self, secs: u64) {
        self.chain.anvil.advance(secs).await;
        self.finalize().await;
    }

    // ---- What can be seen

    /// Waits for an order's status.
    pub(super) async fn order_is(&self, order: &str, status: &str) {
        eventually(&format!("order {order} is {status}"), async || {
            let seen = self.order_status(order).await;
            if seen == status { Ok(()) } else { Err(seen) }
        })
        .await;
    }

    /// Waits for a payment's status.
    pub(super) async fn payment_is(&self, payment: &str, status: &str) {
        eventually(&format!("payment {payment} is {status}"), async || {
            let seen = self.payment_status(payment).await;
            if seen == status { Ok(()) } else { Err(seen) }
        })
        .await;
    }

    /// An order's status.
    pub(super) async fn order_status(&self, order: &str) -> String {
        self.gateway.orders().await.unwrap()[order].0.clone()
    }

    /// A payment's status.
    pub(super) async fn payment_status(&self, payment: &str) -> String {
        self.gateway.payments().await.unwrap()[payment].clone()
    }

    /// Which payment pays an order.
    pub(super) async fn paid_by(&self, order: &str) -> Option<String> {
        self.gateway.orders().await.unwrap()[order].1.clone()
    }

    /// How much of the `thing` is on the shelf.
    pub(super) async fn shelf(&self) -> String {
        self.gateway.stock().await.unwrap()["thing"].clone()
    }

    /// The status of a buyer's identifier.
    pub(super) async fn identifier(&self, payment: &str) -> String {
        self.gateway.identifiers().await.unwrap()[&format!("retry-{payment}")].clone()
    }

    /// Waits for the phase of a payment's watch.
    pub(super) async fn phase_is(&self, payment: &str, phase: &str) {
        eventually(&format!("the watch of {payment} is {phase}"), async || {
            let sql = "SELECT phase FROM {watches} WHERE payment_id = ?";
            let rows = self.gateway.rows(sql, &[Some(payment)], 1).await.unwrap();
            let seen = format!("{rows:?}");
            if rows == [[Some(phase.to_owned())]] { Ok(()) } else { Err(seen) }
        })
        .await;
    }

    /// Waits for two more checks of a payment with this verdict: the second one began after the call.
    pub(super) async fn checked_again(&self, payment: &str, verdict: &str) {
        let count = async || {
            let sql =
                "SELECT CAST(count(*) AS TEXT) FROM {checks} WHERE payment_id = ? AND verdict = ?";
            let rows = self.gateway.rows(sql, &[Some(payment), Some(verdict)], 1).await.unwrap();
            rows[0][0].as_deref().unwrap().parse::<u64>().unwrap()
        };
        let before = count().await;
        eventually(&format!("{payment} is checked again as {verdict}"), async || {
            if count().await >= before + 2 {
                return Ok(());
            }
            let sql = "SELECT verdict, detail FROM {checks} WHERE payment_id = ? ORDER BY id DESC LIMIT 3";
            Err(format!("{:?}", self.gateway.rows(sql, &[Some(payment)], 2).await.unwrap()))
        })
        .await;
    }

    /// Waits for an open flag.
    pub(super) async fn flagged(&self, kind: &str, payment: &str) {
        let flag = format!("{kind}:{payment}");
        eventually(&format!("the flag {flag} is up"), async || {
            let flags = self.gateway.open_flags().await.unwrap();
            if flags.contains(&flag) { Ok(()) } else { Err(format!("{flags:?}")) }
        })
        .await;
    }

    /// Waits until no watch is open.
    pub(super) async fn all_closed(&self) {
        eventually("every watch is closed", async || {
            let sql = "SELECT payment_id, phase, last_verdict FROM {watches} \
                       WHERE phase <> 'closed' ORDER BY 1 LIMIT 10";
            let open = self.gateway.rows(sql, &[], 3).await.unwrap();
            if open.is_empty() { Ok(()) } else { Err(format!("{open:?}")) }
        })
        .await;
    }

    /// How often each outcome was written to `resolutions`.
    pub(super) async fn outcomes(&self) -> BTreeMap<String, u64> {
        self.counts("SELECT outcome, CAST(count(*) AS TEXT) FROM {resolutions} GROUP BY 1").await
    }

    /// Of a query that gives names and numbers.
    pub(super) async fn counts(&self, sql: &str) -> BTreeMap<String, u64> {
        let rows = self.gateway.rows(sql, &[], 2).await.unwrap();
        rows.into_iter()
            .map(|row| match &row[..] {
                [Some(name), Some(count)] => (name.clone(), count.parse().unwrap()),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    /// I4: what reached the merchant on chain pays orders or is owed back, to the last unit.
    pub(super) async fn assert_conserved(&self) {
        let filter = json!({
            "fromBlock": "0x0",
            "toBlock": "latest",
            "address": self.chain.token,
            "topics": [keccak256("Transfer(address,address,uint256)"), null, PAY_TO.into_word()],
        });
        let logs = self.chain.anvil.rpc("eth_getLogs", json!([filter])).await;
        let value = |log: &Value| {
            let hex = log["data"].as_str().unwrap().trim_start_matches("0x");
            u128::from_str_radix(hex, 16).unwrap()
        };
        let on_chain: u128 = logs.as_array().unwrap().iter().map(value).sum();
        let paid = "SELECT CAST(coalesce(sum(CAST(p.amount AS bigint)), 0) AS TEXT) FROM orders o \
                    JOIN payments p ON p.id = o.paid_by WHERE o.status = 'paid'";
        let owed = "SELECT CAST(coalesce(sum(CAST(amount AS bigint)), 0) AS TEXT) \
                    FROM {refunds_owed} WHERE status <> 'void'";
        let sum = async |sql: &str| {
            let rows = self.gateway.rows(sql, &[], 1).await.unwrap();
            rows[0][0].as_deref().unwrap().parse::<u128>().unwrap()
        };
        let (paid, owed) = (sum(paid).await, sum(owed).await);
        assert_eq!(on_chain, paid + owed, "on chain, and paid {paid} + owed {owed}");
    }
}

fn url_of(home: &Home) -> String {
    match home {
        Home::Postgres(database) => database.url(),
        Home::Sqlite(folder) => format!("sqlite:{}", folder.path().join("gateway.db").display()),
    }
}

/// Local time.
pub(super) fn now() -> Timestamp {
    SystemClock.now()
}

/// A hex quantity of a receipt.
pub(super) fn number(value: &Value) -> u64 {
    u64::from_str_radix(value.as_str().unwrap().trim_start_matches("0x"), 16).unwrap()
}

/// A time a while ago.
pub(super) fn ago(secs: u64) -> Timestamp {
    now().saturating_sub(Duration::from_secs(secs))
}
