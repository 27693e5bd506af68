//! The daemon of a story: the real worker, built as `run` builds it, and called when its tasks would be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::refunds::SEARCH_EVERY;
use super::{Audience, Runner, STORY_CHAIN, STORY_PAY_TO, STORY_TOKEN, Told};
use crate::chain::{Chain, ChainSettings, EndpointSettings, Permit2Settings};
use crate::clock::{Clock, ManualClock};
use crate::domain::{Outcome, PaidAfter, Policy, Receiver, RefundPolicy};
use crate::schedule::{Pacing, Schedule, Timing};
use crate::sim::scenario::{KillPoint, Scenario};
use crate::sim::{FACILITATOR, SimServer};
use crate::store::{Applied, Store};
use crate::telemetry::{Metrics, rpc_observer};
use crate::worker::{
    Checker, CheckerSettings, Discovery, Leased, ReconcileSettings, Reconciler, RefundSettings,
    Refunds, RunAudience, ScanStart, WatchedChain, WatchedReceiver,
};

/// As in the daemon's configuration.
const LEASE_TTL: Duration = Duration::from_secs(60);
const HEAD_AGE_MAX: Duration = Duration::from_secs(60);
const HEAD_LAG_MAX: Duration = Duration::from_secs(20);
const LOG_LOOKBACK: Duration = Duration::from_secs(3_600);
const BATCH_MAX: u32 = 500;
const PAGE_SIZE: u32 = 2_000;
const OWED_SEARCH_EVERY: Duration = Duration::from_secs(3_600);
/// As far back as the daemon looks.
const LOOKBACK: Duration = Duration::from_secs(7 * 24 * 3_600);
const FINALITY_RETRY: Duration = Duration::from_secs(60);
/// Beyond the story's own `finalized_lag`.
const FINALITY_SLACK: Duration = Duration::from_secs(60);
/// The simulated chain answers at once or not at all.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// What a killed daemon loses and a started one has anew.
pub(super) struct Daemon {
    pub(super) checker: Arc<Checker>,
    pub(super) discovery: Discovery,
    pub(super) refunds: Refunds,
    pub(super) reconciler: Reconciler,
}

/// What a full reconcile resolved.
#[derive(Default)]
struct Heard(Mutex<Vec<Applied>>);

impl RunAudience for Heard {
    fn resolved(&self, applied: &[Applied]) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(applied);
    }
}

impl Runner {
    pub(super) async fn check_due(
        &mut self,
        now: Duration,
        audience: &mut dyn Audience,
    ) -> anyhow::Result<()> {
        loop {
            let leased = self.daemon.checker.lease_due(BATCH_MAX).await?;
            let count = leased.followed().len();
            if count == 0 {
                return Ok(());
            }
            if let Some(point) = self.kill_at_next.take() {
                self.die(point, leased).await?;
                audience.hear(now, Told::Killed).await;
                return Ok(());
            }
            let applied = self.daemon.checker.finish(leased, &self.stop).await?;
            self.tell(now, applied, audience).await;
        }
    }

    pub(super) async fn reconcile(
        &mut self,
        now: Duration,
        audience: &mut dyn Audience,
    ) -> anyhow::Result<()> {
        self.store.request_run(self.clock.now()).await?;
        let heard = Heard::default();
        self.daemon.reconciler.run_pending(&heard, &self.stop).await?;
        let applied = heard.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.tell(now, applied, audience).await;
        Ok(())
    }

    /// Whatever the process held in memory is gone; what it leased stays leased.
    async fn die(&mut self, point: KillPoint, leased: Leased) -> anyhow::Result<()> {
        match point {
            KillPoint::LeaseAndRead => drop(leased),
            KillPoint::ReadAndApply => drop(self.daemon.checker.read(leased).await),
        }
        self.daemon = start_daemon(&self.scenario, &self.server, &self.store, &self.clock)?;
        Ok(())
    }

    async fn tell(&mut self, now: Duration, applied: Vec<Applied>, audience: &mut dyn Audience) {
        for one in applied {
            let Ok(resolved) = one.result else { continue };
            if !resolved.recorded && resolved.outcome != Outcome::Flagged {
                continue;
            }
            let paid = matches!(
                resolved.outcome,
                Outcome::Paid
                    | Outcome::Reinstated
                    | Outcome::RefundOwed
                    | Outcome::AuthorizationReused
            );
            let delay = self.landed.get(&one.payment_id).filter(|_| paid);
            let delay = delay.map(|landed| self.at(now).since(*landed));
            if let Some(delay) = delay {
                self.delays.entry(one.payment_id.to_string()).or_insert(delay);
            }
            let told = Told::Resolved { payment: one.payment_id, outcome: resolved.outcome, delay };
            audience.hear(now, told).await;
        }
    }
}

pub(super) fn start_daemon(
    scenario: &Scenario,
    server: &SimServer,
    store: &Arc<dyn Store>,
    clock: &Arc<ManualClock>,
) -> anyhow::Result<Daemon> {
    let metrics = Metrics::new()?;
    let policy = Policy {
        deadline_after: scenario.policy.deadline,
        early_failure: scenario.policy.early_failure,
        late: scenario.policy.late,
        paid_after: scenario.policy.paid_after,
        quorum: scenario.policy.quorum,
        positive_quorum: 1,
    };
    let endpoints = server
        .urls()
        .iter()
        .enumerate()
        .map(|(i, url)| EndpointSettings::new(&format!("endpoint-{i}"), url.clone()));
    let settings = ChainSettings {
        block_time: scenario.chain.block_time,
        head_age_max: HEAD_AGE_MAX,
        head_lag_max: HEAD_LAG_MAX,
        log_lookback: LOG_LOOKBACK,
        batch_max: 400,
        read_safe: policy.paid_after == PaidAfter::Safe,
        permit2: Permit2Settings {
            upto_facilitators: vec![FACILITATOR],
            ..Permit2Settings::default()
        },
        request_timeout: REQUEST_TIMEOUT,
        ..ChainSettings::new(STORY_CHAIN, endpoints.collect())
    };
    let refund_policy = RefundPolicy { wallets: Vec::new(), quorum: policy.positive_quorum };
    let watched = WatchedChain {
        chain: Chain::new(settings, rpc_observer(&metrics), clock.clone())?,
        schedule: Schedule::default(),
        timing: Timing {
            finality_margin: scenario.chain.finalized_lag + FINALITY_SLACK,
            deadline_margin: scenario.chain.block_time * 10,
            finality_retry: FINALITY_RETRY,
            pacing: Pacing::default(),
        },
        policy: policy.clone(),
    };
    let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(clock);
    let watched = Arc::new(watched);
    let refunds = Refunds {
        store: Arc::clone(store),
        chains: BTreeMap::from([(STORY_CHAIN, (Arc::clone(&watched), refund_policy))]),
        clock: Arc::clone(&clock),
        metrics: metrics.clone(),
        settings: RefundSettings {
            every: SEARCH_EVERY,
            owed_every: OWED_SEARCH_EVERY,
            closed_for: LOOKBACK,
            batch_max: BATCH_MAX,
        },
    };
    let checker = Checker::new(
        Arc::clone(store),
        BTreeMap::from([(STORY_CHAIN, watched)]),
        policy,
        Arc::clone(&clock),
        metrics.clone(),
        CheckerSettings { lease_ttl: LEASE_TTL },
    );
    let checker = Arc::new(checker);
    let receiver = WatchedReceiver {
        receiver: Receiver { token: STORY_TOKEN, pay_to: STORY_PAY_TO },
        start: ScanStart::Lookback(LOOKBACK),
    };
    let reconciler = Reconciler::new(
        Arc::clone(&checker),
        BTreeMap::from([(STORY_CHAIN, vec![receiver])]),
        metrics,
        ReconcileSettings { page_size: PAGE_SIZE, window: LOOKBACK, lease_ttl: 2 * LEASE_TTL },
    );
    let discovery = Discovery {
        store: Arc::clone(store),
        clock,
        stale_after: scenario.policy.stale_after,
        batch_max: 1_000,
        wakes: Arc::new(Notify::new()),
    };
    Ok(Daemon { checker, discovery, refunds, reconciler })
}
