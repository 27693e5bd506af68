//! Chain to ledger with Permit2, on anvil and on the simulated node: a transfer that no event identifies is told
//! whose it is by the calldata of its transaction, and accounted for once (I4).

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::BTreeMap;

use alloy_primitives::B256;
use reconciled::domain::{Account, RawPayment, Timestamp};
use reconciled::sim::gateway::NewOrder;
use reconciled::worker::Report;
use serde_json::Value;

use crate::chain_reader::backend::{
    FINALIZED_AFTER, PAY_TO, Permit, TestChain, Through, authorization, permit,
};
use crate::chain_reader::on_anvil::OnAnvil;
use crate::chain_reader::on_sim::OnSim;
use crate::support::worker::{Home, Worker};

struct Scene<C> {
    chain: C,
    worker: Worker,
}

impl<C: TestChain> Scene<C> {
    async fn start(home: Home) -> Self {
        let chain = C::start().await;
        let configuration = format!(
            "[[chains]]\nchain_id = {}\nblock_time = \"1s\"\nfinality_margin = \"10s\"\n\
             head_age_max = \"1h\"\nupto_facilitators = [\"{}\"]\n\
             [[chains.endpoints]]\nname = \"only\"\nurl = \"{}\"\n\
             [[chains.receivers]]\ntoken = \"{}\"\npay_to = \"{PAY_TO}\"\nfirst_block = 1\n",
            chain.chain_id(),
            chain.facilitator(),
            chain.url(),
            chain.token(),
        );
        let now = Timestamp::from(chain.head().await.time);
        let worker = Worker::start(home, &configuration, now).await;
        Self { chain, worker }
    }

    /// An order `order-ID` and its payment, whose settle call gave no answer.
    async fn unknown(&self, id: &str, permit: &Permit) {
        let now = self.worker.now();
        let order = format!("order-{id}");
        self.worker.gateway.insert_order(&NewOrder::paying(&order, now)).await.unwrap();
        let text = |value: &dyn ToString| Some(value.to_string());
        let row = RawPayment {
            id: id.to_owned(),
            order_id: text(&order),
            rail: text(&"x402"),
            method: text(&"permit2"),
            chain_id: text(&self.chain.chain_id()),
            token: text(&self.chain.token()),
            payer: text(&permit.owner),
            pay_to: text(&permit.to),
            amount: text(&permit.amount),
            nonce: text(&permit.nonce),
            valid_after: text(&0),
            valid_before: text(&permit.deadline),
            tx_hash: None,
            status: text(&"unknown"),
            created_at: text(&now.as_millis()),
            broadcast_at: text(&now.as_millis()),
        };
        self.worker.gateway.insert_payment(&row).await.unwrap();
    }

    /// A full reconcile once all is final, of payments that nothing has looked at.
    async fn reconcile(&self) -> Report {
        self.chain.mine(FINALIZED_AFTER).await;
        self.worker.clock.set(Timestamp::from(self.chain.head().await.time));
        let report = self.worker.reconcile_undiscovered().await;
        assert!(report.problems.is_empty(), "{report:?}");
        report
    }

    async fn paid_by(&self, order: &str) -> Option<String> {
        let (status, by) = self.worker.gateway.orders().await.unwrap()[order].clone();
        by.filter(|_| status == "paid")
    }

    /// The details of open flags, by kind.
    async fn flags(&self) -> Vec<(String, Value)> {
        let sql =
            "SELECT kind, CAST(detail AS TEXT) FROM {flags} WHERE closed_at IS NULL ORDER BY id";
        let rows = self.worker.gateway.rows(sql, &[], 2).await.unwrap();
        let text = |column: Option<String>| column.unwrap();
        rows.into_iter()
            .map(|row| {
                let [kind, detail] = <[_; 2]>::try_from(row).unwrap().map(text);
                (kind, serde_json::from_str(&detail).unwrap())
            })
            .collect()
    }
}

/// The accounts that hold something.
fn held(report: &Report) -> BTreeMap<Account, u64> {
    let [receiver] = report.receivers.as_slice() else { panic!("{report:?}") };
    assert!(receiver.drift.is_zero(), "{receiver:?}");
    let all = Account::ALL.iter().map(|one| (*one, receiver.totals.of(*one).get().to::<u64>()));
    all.filter(|(_, amount)| *amount > 0).collect()
}

async fn each_transfer_is_its_payments_by_the_calldata<C: TestChain>(home: Home) {
    let scene = Scene::<C>::start(home).await;
    let mut permits = Vec::new();
    for n in 1..=4 {
        permits.push(permit(&scene.chain, n).await);
    }
    let [exact, mut upto, one, other] = permits.try_into().unwrap();
    upto.upto = Some(400_000);
    for (id, permit) in [("exact", &exact), ("upto", &upto), ("one", &one), ("other", &other)] {
        scene.unknown(id, permit).await;
    }
    scene.chain.settle_permits(&[exact], Through::Nobody).await;
    scene.chain.settle_permits(&[upto], Through::Nobody).await;
    scene.chain.settle_permits(&[one, other], Through::Multicall3).await;

    let report = scene.reconcile().await;
    assert_eq!((report.counts.transfers_found, report.counts.taken_up), (4, 4), "{report:?}");
    assert_eq!(report.counts.flags_raised, 0);
    for id in ["exact", "upto", "one", "other"] {
        assert_eq!(scene.paid_by(&format!("order-{id}")).await.as_deref(), Some(id));
    }
    // What moved counts, and not what it was for.
    assert_eq!(held(&report), BTreeMap::from([(Account::Paid, 3_400_000)]));
    let again = scene.reconcile().await;
    assert_eq!((again.counts.taken_up, held(&again)), (0, held(&report)));
    assert_eq!(scene.flags().await, []);
}

/// Beside an ordinary authorization, whose event stands before its transfer.
async fn money_of_permits_that_nobody_claims_is_flagged_with_what_is_known<C: TestChain>(
    home: Home,
) {
    let scene = Scene::<C>::start(home).await;
    let nobodys = permit(&scene.chain, 1).await;
    let hidden = permit(&scene.chain, 2).await;
    let authorized = authorization(&scene.chain, 3).await;
    // The transaction of this one does not show which permit it used.
    scene.unknown("hidden", &hidden).await;
    let seen = scene.chain.settle_permits(&[nobodys], Through::Nobody).await;
    scene.chain.settle_permits(&[hidden], Through::Obscurity).await;
    scene.chain.transfer(&[authorized]).await;

    let report = scene.reconcile().await;
    assert_eq!((report.counts.transfers_found, report.counts.taken_up), (3, 0), "{report:?}");
    assert_eq!(held(&report), BTreeMap::from([(Account::Flagged, 3_000_000)]));
    assert_eq!(scene.paid_by("order-hidden").await, None, "nothing proves that it is its money");
    let flags = scene.flags().await;
    let of = |owner: alloy_primitives::Address| {
        let found =
            flags.iter().find(|(_, detail)| detail["from"].as_str().unwrap().parse() == Ok(owner));
        let (kind, detail) = found.unwrap_or_else(|| panic!("{owner}: {flags:?}"));
        assert_eq!(
            (kind.as_str(), detail["amount"].as_str()),
            ("unmatched_transfer", Some("1000000"))
        );
        assert_eq!(detail["pay_to"].as_str().unwrap().parse(), Ok(PAY_TO));
        detail.clone()
    };
    let nonce =
        |detail: &Value| detail["nonce"].as_str().map(|nonce| nonce.parse::<B256>().unwrap());
    let detail = of(nobodys.owner);
    assert_eq!(nonce(&detail), Some(nobodys.nonce), "by its calldata");
    assert_eq!(detail["tx_hash"].as_str().unwrap().parse(), Ok(seen.tx_hash));
    assert_eq!(nonce(&of(authorized.payer)), Some(authorized.nonce), "by the log before it");
    let detail = of(hidden.owner);
    assert_eq!(nonce(&detail), None);
    let candidates = detail["candidates"].to_string();
    assert!(candidates.contains("\"hidden\""), "it may be meant for that: {candidates}");

    // The row that was missing is written, long after.
    scene.unknown("late", &nobodys).await;
    let report = scene.reconcile().await;
    assert_eq!((report.counts.taken_up, report.counts.flags_closed), (1, 1), "{report:?}");
    assert_eq!(scene.paid_by("order-late").await.as_deref(), Some("late"));
}

macro_rules! on_every_chain {
    ($($case:ident: $anvil:ident, $sim:ident;)+) => {
        $(
            #[tokio::test]
            async fn $anvil() {
                $case::<OnAnvil>(Home::postgres().await).await;
            }
            #[tokio::test]
            async fn $sim() {
                $case::<OnSim>(Home::sqlite()).await;
            }
        )+
    };
}

on_every_chain! {
    each_transfer_is_its_payments_by_the_calldata:
        on_anvil_each_transfer_is_its_payments_by_the_calldata,
        on_sim_each_transfer_is_its_payments_by_the_calldata;
    money_of_permits_that_nobody_claims_is_flagged_with_what_is_known:
        on_anvil_money_of_permits_that_nobody_claims_is_flagged_with_what_is_known,
        on_sim_money_of_permits_that_nobody_claims_is_flagged_with_what_is_known;
}
