//! The simulated node as a chain under test: what it shows is what a real chain shows.

use std::time::Duration;

use alloy_primitives::{Address, U256, address};
use reconciled::chain::Breadth;
use reconciled::domain::{
    Amount, BlockRef, BlockTime, ChainId, Evidence, NonceState, Payment, ReadFailureKind, Timestamp,
};
use reconciled::sim::{
    Authorized, ChainState, FACILITATOR, Fault, Included, Permitted, SimChain, SimServer,
    SimSettings,
};
use url::Url;

use super::backend::{
    Authorization, HISTORY, Mined, Permit, Reader, TestChain, Through, authorization, failures,
    observed, payment, permit, permit_payment, settings,
};

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

fn permitted(permit: &Permit) -> Permitted {
    let amount = |units: u64| Amount::new(U256::from(units));
    Permitted {
        owner: permit.owner,
        to: permit.to,
        amount: amount(permit.amount),
        upto: permit.upto.map(amount),
        settler: FACILITATOR,
        nonce: permit.nonce,
        deadline: BlockTime::from_secs(permit.deadline),
    }
}

impl OnSim {
    async fn with_endpoints(count: usize) -> Self {
        // For the HTTP clients of the proxies; taken by whichever test comes first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let genesis = Timestamp::from_millis(1_700_000_000_000);
        let id = ChainId::new(CHAIN_ID);
        let settings = SimSettings::new(id, genesis, BLOCK_TIME, FINALIZED_LAG, TOKEN);
        let chain = Self(SimServer::start(SimChain::new(settings), count).await.unwrap());
        chain.mine(HISTORY).await;
        chain
    }
}

impl TestChain for OnSim {
    async fn start() -> Self {
        Self::with_endpoints(1).await
    }

    fn url(&self) -> Url {
        self.0.urls()[0].clone()
    }

    fn chain_id(&self) -> ChainId {
        ChainId::new(CHAIN_ID)
    }

    fn facilitator(&self) -> Address {
        FACILITATOR
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

    async fn settle_permits(&self, permits: &[Permit], through: Through) -> Mined {
        let permits: Vec<Permitted> = permits.iter().map(permitted).collect();
        let mut done = mined(&mut self.0.chain().lock(), |chain, at| {
            match through {
                Through::Nobody => chain.settle_permit(at, &permits[0]),
                Through::Payer => {
                    let settler = permits[0].owner;
                    chain.settle_permit(at, &Permitted { settler, ..permits[0] })
                }
                Through::Multicall3 => chain.batch_permits(at, &permits),
                Through::Obscurity => chain.settle_permit_unseen(at, &permits[0]),
            }
            .unwrap()
        });
        // Each is followed by its proxy's event.
        done.logs = (0..).step_by(2).take(permits.len()).collect();
        done
    }

    async fn invalidate(&self, owner: Address, word: U256, mask: U256) -> Mined {
        let mut done = mined(&mut self.0.chain().lock(), |chain, at| {
            chain.invalidate(at, owner, word, mask).unwrap()
        });
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

/// Reads one landed and one open payment through an endpoint with `fault`, and gives what was found.
async fn with_fault(fault: Fault) -> (Evidence, Evidence) {
    let chain = OnSim::start().await;
    let landed = authorization(&chain, 1).await;
    let open = authorization(&chain, 2).await;
    let payments = [payment(&chain, &landed).await, payment(&chain, &open).await];
    chain.transfer(&[landed]).await;
    chain.mine(10).await;
    chain.0.set_fault(0, fault);
    let mut evidence = Reader::of(&chain).read(&payments).await;
    let open = evidence.remove(1);
    (evidence.remove(0), open)
}

#[tokio::test]
async fn every_fault_shows_as_what_it_is_and_never_as_a_negative() {
    for (fault, kind) in [
        (Fault::Down, ReadFailureKind::RpcError),
        (Fault::RateLimited, ReadFailureKind::RateLimited),
        (Fault::WrongChain, ReadFailureKind::WrongChain),
        (Fault::NoCode, ReadFailureKind::NoCode),
    ] {
        let (landed, open) = with_fault(fault).await;
        assert_eq!(failures(&landed), [Some(kind)], "{fault:?}");
        assert_eq!(failures(&open), [Some(kind)], "{fault:?}");
    }
}

#[tokio::test]
async fn a_used_nonce_without_its_log_is_said_to_be_just_that() {
    let (landed, open) = with_fault(Fault::EmptyLogs).await;
    let found = &observed(&landed).nonce;
    assert!(matches!(found, NonceState::UsedWithoutLog { .. }), "{found:?}");
    assert_eq!(observed(&open).nonce, NonceState::Unused);
}

#[tokio::test]
async fn a_limited_log_range_hides_nothing() {
    let (landed, _) = with_fault(Fault::LogRangeLimit(3)).await;
    assert!(matches!(observed(&landed).nonce, NonceState::Used(_)), "{landed:?}");
}

#[tokio::test]
async fn narrow_reads_are_spread_over_the_endpoints() {
    let chain = OnSim::with_endpoints(3).await;
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    let reader = Reader::with(settings(&chain, chain.0.urls()));
    for _ in 0..9 {
        let evidence = reader.read_one(&payment).await;
        assert_eq!(observed(&evidence).nonce, NonceState::Unused);
    }
    let asked: Vec<u64> = (0..3).map(|endpoint| chain.0.requests_to(endpoint)).collect();
    // The chain id once, and three reads of three calls each.
    assert_eq!(asked, [10, 10, 10]);
}

#[tokio::test]
async fn one_endpoint_that_lies_is_seen_beside_one_that_does_not() {
    let chain = OnSim::with_endpoints(2).await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    chain.transfer(&[authorization]).await;
    chain.0.set_fault(0, Fault::SaysUnused);
    let reader = Reader::with(settings(&chain, chain.0.urls()));
    let evidence = reader.read_at(std::slice::from_ref(&payment), Breadth::All, 0).await.remove(0);
    let states: Vec<&NonceState> =
        evidence.readings.iter().map(|r| &r.outcome.as_ref().unwrap().nonce).collect();
    assert!(matches!(states[..], [NonceState::Unused, NonceState::Used(_)]), "{states:?}");
}

#[tokio::test]
async fn a_frozen_head_goes_stale_and_its_unused_counts_for_nothing() {
    let chain = OnSim::with_endpoints(2).await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    chain.0.set_fault(0, Fault::FrozenHead);
    chain.transfer(&[authorization]).await;
    chain.mine(1_000).await;
    let reader = Reader::with(settings(&chain, chain.0.urls()));
    let start = chain.head().await.time.as_secs() as i64;
    let mut evidence = Evidence::default();
    // A head is known to stand still once it has been seen to.
    for now in [start, start + 120] {
        chain.mine(120).await;
        let payment = std::slice::from_ref(&payment);
        evidence = reader.read_at(payment, Breadth::All, now).await.remove(0);
    }
    assert_eq!(failures(&evidence), [Some(ReadFailureKind::StaleHead), None]);
}

/// I11: a search that makes progress, however little, ends all the same.
#[tokio::test]
async fn a_search_for_permits_makes_no_more_log_reads_than_one_search_may() {
    let chain = OnSim::start().await;
    let started = Timestamp::from(chain.head().await.time);
    chain.mine(1_200).await;
    let permits = [permit(&chain, 1).await, permit(&chain, 2).await];
    let mut payments = Vec::new();
    for permit in &permits {
        let payment = permit_payment(&chain, permit).await;
        payments.push(Payment { created_at: started, broadcast_at: Some(started), ..payment });
    }
    chain.settle_permits(&permits[..1], Through::Obscurity).await;
    chain.settle_permits(&permits[1..], Through::Obscurity).await;
    chain.0.set_fault(0, Fault::LogRangeLimit(1));
    let reader = Reader::of(&chain);
    for evidence in reader.read(&payments).await {
        assert_eq!(failures(&evidence), [Some(ReadFailureKind::RangeRefused)]);
    }
    assert_eq!(reader.calls.of("eth_getLogs"), 1_000);
}
