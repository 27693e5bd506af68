//! Every fault an honest endpoint can have, one after the other: what is read through it is so, or nothing
//! is read; and once the fault is over, the same reader reads on.

use std::time::Duration;

use reconciled::chain::{Breadth, ChainSettings};
use reconciled::domain::{BlockTime, Payment, Policy, Verdict, judge};

use super::backend::{FINALIZED_AFTER, Reader, TestChain, authorization, payment, settings};
use crate::support::dice::seed;
use crate::support::fault_proxy::faults::Fault;
use crate::support::fault_proxy::{FaultProxy, Manners};

/// Reads at each of two rates.
const READS: usize = 3;

/// An endpoint that is well is used again after at most so long.
const PATIENCE_SECS: i64 = 600;

/// A payment, what is true of it, and since which block.
struct Known {
    payment: Payment,
    verdict: &'static str,
    since: u64,
}

impl Known {
    /// Whether this can be said of it: the truth, nothing at all, or what was true when the endpoint's
    /// block was the newest.
    fn admits(&self, verdict: &Verdict) -> bool {
        match verdict {
            Verdict::Inconclusive(_) => true,
            Verdict::Pending { as_of, .. } => as_of.number < self.since,
            Verdict::Settled(_) | Verdict::Unsettleable { .. } => verdict.kind() == self.verdict,
        }
    }
}

pub(crate) async fn no_fault_makes_a_reader_say_what_is_not_so<C: TestChain>() {
    let chain = C::start().await;
    let mut known = Vec::new();
    for (n, verdict) in [(1, "settled"), (2, "unsettleable"), (3, "pending"), (4, "settled")] {
        let a = authorization(&chain, n).await;
        // Nothing expires while we look.
        let valid_before = BlockTime::from_secs(u64::MAX);
        let payment = Payment { valid_before, ..payment(&chain, &a).await };
        let since = match verdict {
            "settled" => chain.transfer(&[a]).await.block.number,
            "unsettleable" => chain.cancel(&a).await.block.number,
            _ => u64::MAX,
        };
        known.push(Known { payment, verdict, since });
    }
    chain.mine(FINALIZED_AFTER).await;
    let payments: Vec<Payment> = known.iter().map(|known| known.payment.clone()).collect();
    let seed = seed();
    eprintln!("RECONCILED_TEST_SEED={seed}");
    for fault in Fault::QUICK.into_iter().chain([Fault::Huge]) {
        let id = chain.chain_id().get();
        let proxy = FaultProxy::start(chain.url(), id, FINALIZED_AFTER, seed).await;
        let timed = ChainSettings {
            request_timeout: Duration::from_secs(5),
            ..settings(&chain, std::slice::from_ref(proxy.url()))
        };
        let reader = Reader::with(timed);
        // Ten megabytes take long; one read tells.
        let (rates, reads) = match fault {
            Fault::Huge => (&[1_000][..], 1),
            _ => (&[300, 1_000][..], READS),
        };
        for faulty_per_mille in rates.iter().copied() {
            let faults = vec![fault];
            proxy.behave(Manners { faulty_per_mille, faults, ..Manners::default() });
            for _ in 0..reads {
                for (known, evidence) in known.iter().zip(reader.read(&payments).await) {
                    let verdict = judge(&known.payment, &evidence, &Policy::default());
                    let told = || format!("seed {seed}, {fault:?}: {verdict:?}: {evidence:?}");
                    assert!(known.admits(&verdict), "{}, not {}", told(), known.verdict);
                }
            }
        }
        assert_eq!(proxy.played().len(), 1, "seed {seed}: {fault:?} was never played");
        proxy.behave(Manners::default());
        // An endpoint that refused is left alone for a while.
        let mut waited = 0;
        loop {
            let evidence = reader.read_at(&payments, Breadth::FirstAnswer, waited).await;
            let verdicts = known.iter().zip(&evidence);
            let mut kinds = verdicts
                .map(|(known, e)| (judge(&known.payment, e, &Policy::default()), known.verdict));
            if kinds.all(|(verdict, known)| verdict.kind() == known) {
                break;
            }
            assert!(waited < PATIENCE_SECS, "seed {seed}, after {fault:?}: {evidence:?}");
            waited += 30;
            chain.advance(30).await;
        }
    }
}
