//! anvil as a chain under test, and the cases that only a real EVM can stage.

use alloy_primitives::{Address, B256, Bytes, U256};
use reconciled::chain::MULTICALL3;
use reconciled::domain::{BlockRef, ChainId, ConsumptionKind, NonceState};
use serde_json::{Value, json};
use url::Url;

use super::backend::{
    Authorization, HISTORY, Mined, PAYERS, Permit, Reader, TestChain, Through, authorization,
    observed, payment, permit, permit_payment,
};
use crate::support::anvil::{ANVIL_CHAIN_ID, ANVIL_SENDER, RICH_PAYERS, TokenOnAnvil, payer_key};

pub(crate) struct OnAnvil(pub(super) TokenOnAnvil);

impl OnAnvil {
    async fn mined(&self, receipt: &Value) -> Mined {
        let hex = |value: &Value| -> u64 {
            let text = value.as_str().unwrap().trim_start_matches("0x");
            u64::from_str_radix(text, 16).unwrap()
        };
        let starts = |log: &Value, with: &[&str]| {
            let topic = log["topics"][0].as_str().unwrap();
            with.iter().any(|start| topic.starts_with(start))
        };
        // Uses and cancellations; where there are none, transfers and invalidations.
        let of_token = ["0x98de5035", "0x1cdd46ff"].as_slice();
        let by_permit2 = ["0xddf252ad", "0x3704902f"].as_slice();
        let all = receipt["logs"].as_array().unwrap();
        let wanted =
            if all.iter().any(|log| starts(log, of_token)) { of_token } else { by_permit2 };
        let is_consumption = |log: &&Value| starts(log, wanted);
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

    fn facilitator(&self) -> Address {
        ANVIL_SENDER
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

    async fn settle_permits(&self, permits: &[Permit], through: Through) -> Mined {
        let receipt = self.0.settle_permits(permits, through).await;
        assert_eq!(receipt["status"], "0x1", "{receipt}");
        let mined = self.mined(&receipt).await;
        assert_eq!(mined.logs.len(), permits.len(), "every permit came through: {receipt}");
        mined
    }

    async fn invalidate(&self, owner: Address, word: U256, mask: U256) -> Mined {
        let receipt = self.0.invalidate(owner, word, mask).await;
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

#[tokio::test]
async fn a_permits_deadline_is_inclusive_and_upto_never_settles_nothing() {
    let chain = OnAnvil::start().await;
    let at = chain.head().await.time.as_secs() + 100;
    for (deadline, upto, accepted) in [
        (at - 1, None, false),
        (at, None, true),
        (at, Some(1), true),
        (at, Some(0), false),
        (at, Some(1_000_001), false),
    ] {
        let permit = Permit { deadline, upto, ..permit(&chain, 1).await };
        let snapshot = chain.0.anvil.snapshot().await;
        chain.0.anvil.rpc("evm_setNextBlockTimestamp", json!([at])).await;
        let receipt = chain.0.settle_permits(&[permit], Through::Nobody).await;
        assert_eq!(receipt["status"] == "0x1", accepted, "{deadline} {upto:?}");
        chain.0.anvil.revert(snapshot).await;
    }
}

#[tokio::test]
async fn a_call_that_failed_inside_multicall3_is_no_proof_and_takes_none_from_its_neighbour() {
    let chain = OnAnvil::start().await;
    let good = permit(&chain, 1).await;
    let mut late = Permit { nonce: B256::repeat_byte(0x33), ..good };
    late.deadline = 1;
    let payments = [permit_payment(&chain, &good).await, permit_payment(&chain, &late).await];
    // One transfer, and two calls that could have made it.
    let receipt = chain.0.settle_permits(&[late, good], Through::Multicall3).await;
    assert_eq!(receipt["status"], "0x1", "{receipt}");
    let evidence = Reader::of(&chain).read(&payments).await;
    let consumed = |evidence| match &observed(evidence).nonce {
        NonceState::Used(consumption) => consumption.kind,
        other => panic!("{other:?}"),
    };
    assert!(matches!(consumed(&evidence[0]), ConsumptionKind::Transferred(_)));
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
    // Its owner burns the other one in a later block.
    let word = U256::from_be_bytes(late.nonce.0) >> 8;
    chain.invalidate(late.owner, word, U256::MAX).await;
    let evidence = Reader::of(&chain).read(&payments).await;
    assert!(matches!(consumed(&evidence[0]), ConsumptionKind::Transferred(_)));
    assert_eq!(consumed(&evidence[1]), ConsumptionKind::Canceled);
}

#[tokio::test]
async fn a_nonce_burned_in_the_block_of_anothers_transfer_proves_nothing() {
    let chain = OnAnvil::start().await;
    let (used, burned) = (permit(&chain, 1).await, permit(&chain, 1).await);
    let burned = Permit { nonce: B256::repeat_byte(0x33), ..burned };
    let payments = [permit_payment(&chain, &used).await, permit_payment(&chain, &burned).await];
    let anvil = &chain.0.anvil;
    // One block holds a transfer whose call nobody can see, and the burning of another nonce.
    anvil.rpc("evm_setAutomine", json!([false])).await;
    let permits = [used];
    let (mined, _, _) = tokio::join!(
        chain.0.settle_permits(&permits, Through::Obscurity),
        chain.0.invalidate(burned.owner, U256::from_be_bytes(burned.nonce.0) >> 8, U256::MAX),
        async {
            while anvil.rpc("txpool_status", json!([])).await["pending"] != "0x2" {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            chain.mine(1).await;
        }
    );
    assert_eq!(mined["status"], "0x1", "{mined}");
    anvil.rpc("evm_setAutomine", json!([true])).await;
    for evidence in Reader::of(&chain).read(&payments).await {
        let nonce = &observed(&evidence).nonce;
        assert!(matches!(nonce, NonceState::UsedWithoutLog { .. }), "{nonce:?}");
    }
}
