//! anvil as a chain under test, and the cases that only a real EVM can stage.

use alloy_primitives::{Address, B256, Bytes};
use reconciled::chain::MULTICALL3;
use reconciled::domain::{BlockRef, ChainId, ConsumptionKind, NonceState};
use serde_json::{Value, json};
use url::Url;

use super::backend::{
    Authorization, HISTORY, Mined, PAYERS, Reader, TestChain, authorization, observed, payment,
};
use crate::support::anvil::{ANVIL_CHAIN_ID, RICH_PAYERS, TokenOnAnvil, payer_key};

pub(crate) struct OnAnvil(pub(super) TokenOnAnvil);

impl OnAnvil {
    async fn mined(&self, receipt: &Value) -> Mined {
        let hex = |value: &Value| -> u64 {
            let text = value.as_str().unwrap().trim_start_matches("0x");
            u64::from_str_radix(text, 16).unwrap()
        };
        let is_consumption = |log: &&Value| {
            let topic = log["topics"][0].as_str().unwrap();
            topic.starts_with("0x98de5035") || topic.starts_with("0x1cdd46ff")
        };
        let logs = receipt["logs"].as_array().unwrap();
        let block = self.0.anvil.block(receipt["blockNumber"].as_str().unwrap()).await;
        let tx_hash: B256 = receipt["transactionHash"].as_str().unwrap().parse().unwrap();
        let logs = logs.iter().filter(is_consumption).map(|log| hex(&log["logIndex"])).collect();
        Mined { block, tx_hash, logs }
    }
}

impl TestChain for OnAnvil {
    async fn start() -> Self {
        const { assert!(RICH_PAYERS >= PAYERS) };
        let chain = TokenOnAnvil::start(1).await;
        chain.anvil.mine(HISTORY).await;
        Self(chain)
    }

    fn url(&self) -> Url {
        self.0.anvil.url()
    }

    fn chain_id(&self) -> ChainId {
        ChainId::new(ANVIL_CHAIN_ID)
    }

    fn token(&self) -> Address {
        self.0.token
    }

    fn payer(&self, n: u64) -> Address {
        payer_key(n).address()
    }

    async fn head(&self) -> BlockRef {
        self.0.anvil.block("latest").await
    }

    async fn transfer(&self, authorizations: &[Authorization]) -> Mined {
        let receipt = match authorizations {
            [one] => self.0.transfer(one).await,
            many => self.0.batch(many.iter().map(|a| self.0.transfer_call(a)).collect()).await,
        };
        assert_eq!(receipt["status"], "0x1", "{receipt}");
        self.mined(&receipt).await
    }

    async fn cancel(&self, authorization: &Authorization) -> Mined {
        let receipt = self.0.cancel(authorization).await;
        self.mined(&receipt).await
    }

    async fn fail(&self, authorization: &Authorization) {
        // The signature is for other values than those sent.
        let mut call = self.0.transfer_call(authorization).to_vec();
        call[4 + 64 + 31] ^= 1;
        let receipt = self.0.anvil.send(Some(self.0.token), Bytes::from(call)).await;
        assert_eq!(receipt["status"], "0x0", "{receipt}");
    }

    async fn mine(&self, count: u64) {
        self.0.anvil.mine(count).await;
    }

    async fn advance(&self, secs: u64) {
        self.0.anvil.advance(secs).await;
    }

    async fn reorg(&self, depth: u64) {
        self.0.anvil.reorg(depth).await;
    }

    async fn remove_multicall(&self) {
        self.0.anvil.rpc("anvil_setCode", json!([MULTICALL3, "0x"])).await;
        self.mine(1).await;
    }
}

#[tokio::test]
async fn forged_logs_from_another_contract_are_never_evidence() {
    let chain = OnAnvil::start().await;
    let real = authorization(&chain, 1).await;
    let forged = authorization(&chain, 2).await;
    let payments = [payment(&chain, &real).await, payment(&chain, &forged).await];
    chain.0.forge(&forged).await;
    chain.0.forge(&real).await;
    let mined = chain.transfer(&[real]).await;
    let evidence = Reader::of(&chain).read(&payments).await;
    let NonceState::Used(consumption) = observed(&evidence[0]).nonce else {
        panic!("{evidence:?}")
    };
    assert_eq!(consumption.log.tx_hash, mined.tx_hash);
    assert!(matches!(consumption.kind, ConsumptionKind::Transferred(_)));
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
}

#[tokio::test]
async fn the_window_is_strict_on_both_ends() {
    let chain = OnAnvil::start().await;
    let now = chain.head().await.time.as_secs();
    let at = now + 100;
    for (after, before, accepted) in
        [(at, at + 10, false), (at - 10, at, false), (at - 1, at + 1, true)]
    {
        let mut a = authorization(&chain, 1).await;
        (a.valid_after, a.valid_before) = (after, before);
        let snapshot = chain.0.anvil.snapshot().await;
        chain.0.anvil.rpc("evm_setNextBlockTimestamp", json!([at])).await;
        let receipt = chain.0.transfer(&a).await;
        assert_eq!(receipt["status"] == "0x1", accepted, "{after} < {at} < {before}");
        chain.0.anvil.revert(snapshot).await;
    }
}
