//! Refunds: looks on the chain for those that are owed, and closes their records (DESIGN section 10).
//!
//! A record in somebody's hands is looked for often, one that nobody has claimed rarely, and so is one that
//! is closed, for a while: a second refund is flagged. A search covers a
//! page of records at once, in final blocks only, and goes on where the last one ended. Two replicas that
//! search for the same page write the same thing once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::check::WatchedChain;
use super::driver::{Activation, Stop, Task};
use crate::clock::Clock;
use crate::domain::{
    ChainId, Outcome, RefundFinding, RefundPolicy, RefundReading, SearchProblem, SearchedRefund,
    judge_refund,
};
use crate::store::{SearchDue, Store, StoreError};
use crate::telemetry::{Metrics, seconds};

/// Closes refund records that the chain shows paid.
pub struct Refunds {
    /// The database.
    pub store: Arc<dyn Store>,
    /// The chains, and whom to believe about their refunds.
    pub chains: BTreeMap<ChainId, (Arc<WatchedChain>, RefundPolicy)>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The metrics.
    pub metrics: Metrics,
    /// How often and how much.
    pub settings: RefundSettings,
}

/// How often refunds are looked for, and how many at once.
#[derive(Debug, Clone, Copy)]
pub struct RefundSettings {
    /// Between two searches for a record that is claimed or sent.
    pub every: Duration,
    /// Between two searches for one that is owed or blocked, or closed.
    pub owed_every: Duration,
    /// How long one that is closed is still searched for.
    pub closed_for: Duration,
    /// The most records searched for at once.
    pub batch_max: u32,
}

/// The most searches per chain in one activation; what is left is for the next.
const SEARCHES_MAX: u32 = 200;

/// How long one search may take.
const SEARCH_MAX: Duration = Duration::from_secs(60);

impl Refunds {
    /// Searches until nothing is due. Returns how many records were closed. A chain that cannot be read
    /// keeps no other from being searched (I11).
    pub async fn search_all(&self, stop: &Stop) -> Result<usize, StoreError> {
        let mut closed = 0;
        for chain_id in self.chains.keys() {
            for _ in 0..SEARCHES_MAX {
                if stop.is_requested() {
                    return Ok(closed);
                }
                match self.search_page(*chain_id, stop).await? {
                    Searched::Some { closed: more } => closed += more,
                    Searched::UpToDate => {
                        let unsettled = self.store.refunds_unsettled(*chain_id).await?;
                        if unsettled > 0 {
                            tracing::warn!(
                                %chain_id,
                                refunds = unsettled,
                                "refunds could not be looked for: no endpoint shows all of it, or \
                                 endpoints disagree; their records stay as they are"
                            );
                            break;
                        }
                        let chain = chain_id.to_string();
                        let now = seconds(self.clock.now());
                        self.metrics.refunds_searched.with_label_values(&[chain.as_str()]).set(now);
                        break;
                    }
                    Searched::GivenUp => break,
                }
            }
        }
        Ok(closed)
    }

    async fn search_page(&self, chain_id: ChainId, stop: &Stop) -> Result<Searched, StoreError> {
        let Some((watched, policy)) = self.chains.get(&chain_id) else {
            return Ok(Searched::GivenUp);
        };
        let now = self.clock.now();
        let due = SearchDue {
            in_hand_before: now.saturating_sub(self.settings.every),
            owed_before: now.saturating_sub(self.settings.owed_every),
            closed_after: now.saturating_sub(self.settings.closed_for),
        };
        // No more nonces than one log filter takes.
        let filter_max = u32::try_from(watched.chain.settings().batch_max).unwrap_or(u32::MAX);
        let limit = self.settings.batch_max.min(filter_max);
        let page = self.store.refunds_to_search(chain_id, due, limit).await?;
        if page.is_empty() {
            return Ok(Searched::UpToDate);
        }
        if !page.malformed.is_empty() {
            self.store.refunds_malformed(&page.malformed, now).await?;
        }
        let refunds = page.refunds;
        if refunds.is_empty() {
            return Ok(Searched::Some { closed: 0 });
        }
        let judge = |refund: &SearchedRefund, readings: &[RefundReading]| {
            judge_refund(refund, readings, policy, now)
        };
        // Whatever one endpoint leaves open, the next one may settle.
        let is_enough = |readings: &[RefundReading]| {
            refunds.iter().all(|refund| {
                let finding = judge(refund, readings);
                let is_flagged = finding.problem == Some(SearchProblem::TooManyUses);
                finding.searched_to.is_some() || finding.paid.is_some() || is_flagged
            })
        };
        let search = watched.chain.search_refunds(&refunds, policy, now, SEARCH_MAX, is_enough);
        let readings = tokio::select! {
            readings = search => readings,
            () = stop.patience_over() => return Ok(Searched::GivenUp),
        };
        let findings: Vec<RefundFinding> =
            refunds.iter().map(|refund| judge(refund, &readings)).collect();
        if findings.iter().all(is_void) {
            let failure = readings.iter().find_map(|reading| reading.outcome.as_ref().err());
            tracing::warn!(
                %chain_id,
                refunds = refunds.len(),
                failure = failure.map(ToString::to_string),
                "refunds could not be looked for; their records stay as they are"
            );
            return Ok(Searched::GivenUp);
        }
        let closed = self.store.refunds_searched(&findings, self.clock.now()).await?;
        for payment in &closed {
            self.metrics.resolutions.with_label_values(&[Outcome::RefundPaid.code()]).inc();
            tracing::info!(%payment, "a refund was paid: its record is closed");
        }
        for finding in &findings {
            for flag in &finding.flags {
                tracing::debug!(payment = %finding.refund.payment_id, kind = %flag.kind, "a refund is flagged");
            }
        }
        Ok(match progress(&refunds, &findings) {
            true => Searched::Some { closed: closed.len() },
            false => Searched::GivenUp,
        })
    }
}

/// Too few endpoints answered to say anything.
fn is_void(finding: &RefundFinding) -> bool {
    finding.searched_to.is_none() && finding.paid.is_none() && finding.problem.is_none()
}

/// Whether the next page can be another one: else the same is asked for again and again.
fn progress(refunds: &[SearchedRefund], findings: &[RefundFinding]) -> bool {
    findings.iter().zip(refunds).any(|(finding, refund)| {
        let moved = finding.searched_to.is_some() && finding.searched_to != refund.searched_to;
        finding.is_complete || finding.paid.is_some() || finding.problem.is_some() || moved
    })
}

/// What one page came to.
enum Searched {
    /// There may be more.
    Some { closed: usize },
    /// Nothing is due.
    UpToDate,
    /// Not now.
    GivenUp,
}

#[async_trait]
impl Task for Refunds {
    fn name(&self) -> &'static str {
        "refunds"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        self.search_all(stop).await?;
        Ok(Activation::default())
    }
}
