//! The simulated node as a chain under test: what it shows is what a real chain shows.

use std::time::Duration;

use alloy_primitives::{Address, U256, address};
use reconciled::domain::{Amount, BlockRef, ChainId, Timestamp};
use reconciled::sim::{Authorized, ChainState, Included, SimChain, SimServer, SimSettings};
use url::Url;

use super::backend::{Authorization, HISTORY, Mined, TestChain};

const CHAIN_ID: u64 = 84_532;
const TOKEN: Address = address!("0x036CbD53842c5426634e7929541eC2318f3dCF7e");
const BLOCK_TIME: Duration = Duration::from_secs(1);
const FINALIZED_LAG: Duration = Duration::from_secs(4);

pub(crate) struct OnSim(SimServer);

fn head(chain: &ChainState) -> BlockRef {
    let view = chain.view();
    chain.block(view, chain.head(view)).unwrap()
}

/// The time of the next block.
fn next(chain: &ChainState) -> Timestamp {
    Timestamp::from(head(chain).time).saturating_add(BLOCK_TIME)
}

/// Mines a block that holds what `include` adds to it, and finds that there.
fn mined(
    chain: &mut ChainState,
    include: impl FnOnce(&mut ChainState, Timestamp) -> Included,
) -> Mined {
    let at = next(chain);
    let included = include(chain, at);
    chain.set_time(at);
    let block = head(chain);
    assert_eq!((included.number, included.time), (block.number, block.time));
    Mined { block, tx_hash: included.tx_hash, logs: Vec::new() }
}

fn authorized(authorization: &Authorization) -> Authorized {
    Authorized {
        payer: authorization.payer,
        to: authorization.to,
        value: Amount::new(U256::from(authorization.value)),
        nonce: authorization.nonce,
    }
}

impl TestChain for OnSim {
    async fn start() -> Self {
        // For the HTTP clients of the proxies; taken by whichever test comes first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let genesis = Timestamp::from_millis(1_700_000_000_000);
        let id = ChainId::new(CHAIN_ID);
        let settings = SimSettings::new(id, genesis, BLOCK_TIME, FINALIZED_LAG, TOKEN);
        let chain = Self(SimServer::start(SimChain::new(settings), 1).await.unwrap());
        chain.mine(HISTORY).await;
        chain
    }

    fn url(&self) -> Url {
        self.0.urls()[0].clone()
    }

    fn chain_id(&self) -> ChainId {
        ChainId::new(CHAIN_ID)
    }

    fn token(&self) -> Address {
        TOKEN
    }

    fn payer(&self, n: u64) -> Address {
        Address::from_word(U256::from(n + 1_000_000).into())
    }

    async fn head(&self) -> BlockRef {
        head(&self.0.chain().lock())
    }

    async fn transfer(&self, authorizations: &[Authorization]) -> Mined {
        let transfers: Vec<Authorized> = authorizations.iter().map(authorized).collect();
        let mut done = mined(&mut self.0.chain().lock(), |chain, at| match transfers.as_slice() {
            [one] => chain.transfer(at, *one).unwrap(),
            many => chain.batch(at, many).unwrap(),
        });
        // Each is followed by its Transfer.
        done.logs = (0..).step_by(2).take(transfers.len()).collect();
        done
    }

    async fn cancel(&self, authorization: &Authorization) -> Mined {
        let Authorization { payer, nonce, .. } = *authorization;
        let mut done =
            mined(&mut self.0.chain().lock(), |chain, at| chain.cancel(at, payer, nonce).unwrap());
        done.logs = vec![0];
        done
    }

    async fn fail(&self, _: &Authorization) {
        mined(&mut self.0.chain().lock(), |chain, at| chain.revert(at).unwrap());
    }

    async fn mine(&self, count: u64) {
        let mut chain = self.0.chain().lock();
        let to = Timestamp::from(head(&chain).time).saturating_add(BLOCK_TIME * count as u32);
        chain.set_time(to);
    }

    async fn advance(&self, secs: u64) {
        let mut chain = self.0.chain().lock();
        let to = Timestamp::from(head(&chain).time).saturating_add(Duration::from_secs(secs));
        chain.pause(Duration::from_secs(secs) - BLOCK_TIME);
        chain.set_time(to);
    }

    async fn reorg(&self, depth: u64) {
        self.0.chain().lock().reorg(depth).unwrap();
    }

    async fn remove_multicall(&self) {
        self.0.chain().lock().remove_multicall();
        self.mine(1).await;
    }
}
