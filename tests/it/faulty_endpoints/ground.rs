//! The chains that a story can be played on: anvil, a real EVM, and the simulated node.

use std::time::Duration;

use alloy_primitives::{Address, U256, address};
use reconciled::domain::{Amount, ChainId, Timestamp};
use reconciled::sim::{Authorized, ChainState, Included, SimChain, SimServer, SimSettings};
use serde_json::json;

use super::fates::TICK_SECS;
use crate::support::anvil::{ANVIL_CHAIN_ID, Authorization, TokenOnAnvil};
use crate::support::fault_proxy::number;
use crate::support::node::Node;

/// Blocks of one tick, beside those that hold transactions.
pub(super) const TICK_BLOCKS: u64 = 8;

/// So many blocks behind the head is the finalized one.
pub(super) const FINALIZED_BEHIND: u64 = 16;

/// The time between two blocks of a tick, in seconds.
const PAUSE_SECS: u64 = TICK_SECS / TICK_BLOCKS;

/// The chain's time near tick 0, well after anything that real time may do to it.
const START_SECS: u64 = 1_900_000_000;

/// Blocks that are there before tick 0.
const HISTORY: u64 = FINALIZED_BEHIND + TICK_BLOCKS;

/// A chain with one EIP-3009 token. What is done on it is mined at once or at the latest when the acts of a
/// tick are over.
pub(super) trait Ground: Sized {
    /// A fresh one.
    async fn start() -> Self;
    /// As a node that can be asked.
    fn node(&self) -> &Node;
    /// Its id.
    fn chain_id(&self) -> u64;
    /// The token.
    fn token(&self) -> Address;
    /// Mines the blocks of a tick, the last of them at about this time.
    async fn move_to(&self, secs: u64);
    /// Uses these authorizations in one transaction: all or none. Returns its block if it succeeded.
    async fn use_together(&self, authorizations: &[Authorization]) -> Option<u64>;
    /// Cancels an authorization. Returns the block.
    async fn cancel(&self, authorization: &Authorization) -> u64;
    /// A transaction with it fails.
    async fn fail(&self, authorization: &Authorization);
    /// Moves money that no authorization stands behind. Returns the block.
    async fn give(&self, from: Address, to: Address, value: u64) -> u64;
    /// The acts of a tick are over.
    async fn end_acts(&self);
    /// Replaces the last `depth` blocks by empty ones.
    async fn reorg(&self, depth: u64);
}

// ---- anvil

pub(super) struct OnAnvil(TokenOnAnvil);

impl Ground for OnAnvil {
    async fn start() -> Self {
        let chain = TokenOnAnvil::start(FINALIZED_BEHIND / 2).await;
        chain.anvil.rpc("evm_setNextBlockTimestamp", json!([START_SECS])).await;
        chain.anvil.mine(HISTORY).await;
        Self(chain)
    }

    fn node(&self) -> &Node {
        self.0.anvil.node()
    }

    fn chain_id(&self) -> u64 {
        ANVIL_CHAIN_ID
    }

    fn token(&self) -> Address {
        self.0.token
    }

    async fn move_to(&self, secs: u64) {
        let anvil = &self.0.anvil;
        let head = anvil.block("latest").await.time.as_secs();
        let first = (secs - PAUSE_SECS * (TICK_BLOCKS - 1)).max(head + 1);
        anvil.rpc("evm_setNextBlockTimestamp", json!([first])).await;
        anvil.rpc("anvil_mine", json!(["0x1"])).await;
        let rest = format!("{:#x}", TICK_BLOCKS - 1);
        anvil.rpc("anvil_mine", json!([rest, format!("{PAUSE_SECS:#x}")])).await;
    }

    async fn use_together(&self, authorizations: &[Authorization]) -> Option<u64> {
        let receipt = match authorizations {
            [one] => self.0.transfer(one).await,
            many => {
                let calls = many.iter().map(|signed| self.0.transfer_call(signed));
                self.0.try_batch(calls.collect()).await
            }
        };
        (receipt["status"] == "0x1").then(|| number(&receipt["blockNumber"]))
    }

    async fn cancel(&self, authorization: &Authorization) -> u64 {
        number(&self.0.cancel(authorization).await["blockNumber"])
    }

    /// Its signature is for other values.
    async fn fail(&self, authorization: &Authorization) {
        let mut call = self.0.transfer_call(authorization).to_vec();
        call[4 + 64 + 31] ^= 1;
        let receipt = self.0.anvil.send(Some(self.0.token), call.into()).await;
        assert_eq!(receipt["status"], "0x0", "{receipt}");
    }

    async fn give(&self, from: Address, to: Address, value: u64) -> u64 {
        number(&self.0.give(from, to, value).await["blockNumber"])
    }

    async fn end_acts(&self) {}

    async fn reorg(&self, depth: u64) {
        let before = self.0.anvil.block("latest").await.time.as_secs();
        self.0.anvil.reorg(depth).await;
        // The clock went on, the chain did not.
        let time = self.0.anvil.block("latest").await.time.as_secs();
        if time < before {
            self.0.anvil.advance(before - time).await;
        }
    }
}

// ---- the simulated node

pub(super) struct OnSim {
    server: SimServer,
    node: Node,
}

const SIM_CHAIN_ID: u64 = 84_532;
const SIM_TOKEN: Address = address!("0x036CbD53842c5426634e7929541eC2318f3dCF7e");

/// The time of the next block: what is done now goes there.
fn next(chain: &ChainState) -> Timestamp {
    let head = chain.block(chain.view(), chain.head(chain.view())).unwrap();
    Timestamp::from(head.time).saturating_add(Duration::from_secs(PAUSE_SECS))
}

impl OnSim {
    /// Has a transaction in the next block, which fails if the chain refuses what it does.
    fn include(
        &self,
        act: impl FnOnce(&mut ChainState, Timestamp) -> Option<Included>,
    ) -> Option<u64> {
        let mut chain = self.server.chain().lock();
        let at = next(&chain);
        let included = act(&mut chain, at);
        if included.is_none() {
            chain.revert(at).unwrap();
        }
        included.map(|included| included.number)
    }
}

impl Ground for OnSim {
    async fn start() -> Self {
        let at = |secs: u64| Timestamp::from_millis(secs as i64 * 1_000);
        let genesis = at(START_SECS - HISTORY * PAUSE_SECS);
        let (id, block_time) = (ChainId::new(SIM_CHAIN_ID), Duration::from_secs(PAUSE_SECS));
        let lag = block_time * FINALIZED_BEHIND as u32;
        let settings = SimSettings::new(id, genesis, block_time, lag, SIM_TOKEN);
        let server = SimServer::start(SimChain::new(settings), 1).await.unwrap();
        server.chain().lock().set_time(at(START_SECS));
        let node = Node::at(server.urls()[0].clone());
        Self { server, node }
    }

    fn node(&self) -> &Node {
        &self.node
    }

    fn chain_id(&self) -> u64 {
        SIM_CHAIN_ID
    }

    fn token(&self) -> Address {
        SIM_TOKEN
    }

    async fn move_to(&self, secs: u64) {
        let mut chain = self.server.chain().lock();
        chain.set_time(Timestamp::from_millis(secs as i64 * 1_000));
    }

    async fn use_together(&self, authorizations: &[Authorization]) -> Option<u64> {
        self.include(|chain, at| {
            let secs = at.as_millis() as u64 / 1_000;
            let is_valid = |a: &Authorization| a.valid_after < secs && secs < a.valid_before;
            if !authorizations.iter().all(is_valid) {
                return None;
            }
            let authorized = |a: &Authorization| Authorized {
                payer: a.payer,
                to: a.to,
                value: Amount::new(U256::from(a.value)),
                nonce: a.nonce,
            };
            let all: Vec<Authorized> = authorizations.iter().map(authorized).collect();
            match all.as_slice() {
                [one] => chain.transfer(at, *one).ok(),
                many => chain.batch(at, many).ok(),
            }
        })
    }

    async fn cancel(&self, a: &Authorization) -> u64 {
        self.include(|chain, at| chain.cancel(at, a.payer, a.nonce).ok()).unwrap()
    }

    async fn fail(&self, _: &Authorization) {
        self.include(|_, _| None);
    }

    async fn give(&self, from: Address, to: Address, value: u64) -> u64 {
        let value = Amount::new(U256::from(value));
        self.include(|chain, at| chain.bare_transfer(at, from, to, value).ok()).unwrap()
    }

    async fn end_acts(&self) {
        let mut chain = self.server.chain().lock();
        let at = next(&chain);
        chain.set_time(at);
    }

    async fn reorg(&self, depth: u64) {
        self.server.chain().lock().reorg(depth).unwrap();
    }
}
