//! An endpoint whose requests fail too often: it is not believed, still probed, and used again by itself.

use std::time::Duration;

use reconciled::chain::{Breadth, ChainSettings, ErrorRateLimits, Sickness};
use reconciled::domain::{ReadFailureKind, Timestamp};

use super::backend::{
    FINALIZED_AFTER, Reader, TestChain, authorization, failures, payment, settings,
};
use super::health::probe_at;
use crate::support::fault_proxy::faults::Fault;
use crate::support::fault_proxy::{FaultProxy, Manners};

const LIMITS: ErrorRateLimits =
    ErrorRateLimits { window: Duration::from_secs(240), requests_min: 10, share_max: 0.5 };
/// From one read to the next, in seconds.
const STEP: i64 = 12;

async fn behind_a_proxy(chain: &impl TestChain) -> (FaultProxy, Reader) {
    let id = chain.chain_id().get();
    let proxy = FaultProxy::start(chain.url(), id, FINALIZED_AFTER, 1).await;
    let settings = ChainSettings {
        error_rate: LIMITS,
        ..settings(chain, &[proxy.url().clone(), chain.url()])
    };
    (proxy, Reader::with(settings))
}

fn always(fault: Fault) -> Manners {
    Manners { faulty_per_mille: 1_000, faults: vec![fault], ..Manners::default() }
}

pub(crate) async fn one_that_keeps_failing_gives_no_evidence_until_few_requests_fail<
    C: TestChain,
>() {
    const UNHEALTHY: Option<ReadFailureKind> = Some(ReadFailureKind::Unhealthy);
    for fault in [Fault::BadGateway, Fault::Reset, Fault::Html, Fault::WrongIds] {
        let chain = C::start().await;
        let one = payment(&chain, &authorization(&chain, 1).await).await;
        let one = std::slice::from_ref(&one);
        let (proxy, reader) = behind_a_proxy(&chain).await;
        proxy.behave(always(fault));
        let mut now = 0;
        let read = async |breadth, now| {
            chain.mine(1).await;
            failures(&reader.read_at(one, breadth, now).await[0])
        };
        // Each read is one request.
        for _ in 0..LIMITS.requests_min {
            let found = read(Breadth::All, now).await;
            assert!(found[0].is_some() && found[0] != UNHEALTHY, "{fault:?} at {now} s: {found:?}");
            assert_eq!(found[1], None);
            now += STEP;
        }
        let requests = proxy.requests();
        assert_eq!(read(Breadth::All, now).await, [UNHEALTHY, None], "{fault:?}");
        for _ in 0..2 {
            assert_eq!(read(Breadth::FirstAnswer, now).await, [None], "asked last");
        }
        let within = Duration::from_secs(5);
        let heads = reader.chain.scan_heads(None, 2, within).await;
        assert!(heads[0].1.is_ok(), "the well one first");
        assert_eq!(heads[1].1.as_ref().unwrap_err().kind, ReadFailureKind::Unhealthy);
        let name = &heads[1].0;
        let block = reader.chain.scan_block(name, 1, within).await.unwrap_err();
        assert_eq!(block.kind, ReadFailureKind::Unhealthy);
        assert!(block.detail.starts_with("error_rate: 10 of 10 requests failed"), "{block}");
        assert_eq!(proxy.requests(), requests, "it is not even asked");

        assert_eq!(probe_at(&reader, now).await, [Some(Sickness::ErrorRate), None], "but probed");
        proxy.behave(Manners::default());
        assert_eq!(probe_at(&reader, now).await, [Some(Sickness::ErrorRate), None], "too soon");
        assert_eq!(read(Breadth::All, now).await, [UNHEALTHY, None]);
        now += i64::try_from(LIMITS.window.as_secs()).unwrap();
        chain.mine(1).await;
        assert_eq!(probe_at(&reader, now).await, [None, None], "{fault:?}: the window is good");
        assert_eq!(read(Breadth::All, now).await, [None, None]);
    }
}

pub(crate) async fn what_paces_or_comes_at_once_makes_nobody_sick<C: TestChain>() {
    let chain = C::start().await;
    let one = payment(&chain, &authorization(&chain, 1).await).await;
    let one = std::slice::from_ref(&one);
    let (proxy, reader) = behind_a_proxy(&chain).await;
    for (fault, step) in [(Fault::SlowDown, 40), (Fault::Unavailable, 40), (Fault::BadGateway, 0)] {
        proxy.behave(always(fault));
        let mut now = 0;
        for _ in 0..20 {
            chain.mine(1).await;
            let found = failures(&reader.read_at(one, Breadth::All, now).await[0]);
            assert_ne!(found[0], Some(ReadFailureKind::Unhealthy), "{fault:?} at {now} s");
            now += step;
        }
        reader.set_clock(Timestamp::from_millis(0));
    }
    assert!(proxy.requests() >= 60 - 10, "{}", proxy.requests());
}
