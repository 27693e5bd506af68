//! Read-only access to a chain: from payments to evidence.
//!
//! Nothing here decides: a read that fails is a reading that says so, and what it all proves is
//! [`crate::domain::judge`]'s business. Nothing here can send, either: the transport refuses every
//! JSON-RPC method that is not on its allow-list (I1).

mod asked;
mod blocks;
mod eip3009;
mod endpoint;
mod error;
mod error_rate;
mod gate;
mod heads;
mod health;
mod logs;
mod monotone;
mod multicall;
mod narrow;
mod permit2;
mod read;
mod refunds;
mod settings;
mod transfers;
mod transport;
mod wide;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use alloy_primitives::{Address, address};
use tokio::time::Instant;

use crate::clock::Clock;
use crate::domain::{
    ChainId, ConsumptionKind, EndpointName, Evidence, Method, NonceState, Observation, Payment,
    ReadFailure, ReadFailureKind, Reading, Timestamp,
};
use asked::Asked;
use endpoint::Endpoint;
pub use error_rate::ErrorRateLimits;
pub use gate::EndpointLimits;
pub use health::{Diagnosis, KnownUsed, Sickness};
pub use permit2::{PERMIT2, Permit2Settings, X402_EXACT_PROXY, X402_UPTO_PROXY};
pub use settings::{ChainSettings, EndpointSettings};
use transport::ALLOWED_METHODS;

/// Multicall3's canonical address, the same on every chain that has it.
pub const MULTICALL3: Address = address!("0xcA11bde05977b3631167028862bE2a173976CA11");

/// Told of every JSON-RPC call, for metrics.
pub trait RpcObserver: Send + Sync + 'static {
    /// An endpoint is configured, and these are the only methods it will ever be called with.
    fn configured(&self, _chain: ChainId, _endpoint: &EndpointName, _methods: &[&'static str]) {}

    /// An endpoint was probed, and is well or sick.
    fn probed(&self, _chain: ChainId, _endpoint: &EndpointName, _sickness: Option<Sickness>) {}

    /// So many of an endpoint's requests fail that it became sick of it, or so few that it is well again; a
    /// probe that follows says the same.
    fn error_rate(&self, _chain: ChainId, _endpoint: &EndpointName, _is_sick: bool) {}

    /// Two endpoints of one chain are configured, in order of name: what they say will be compared.
    fn compared(&self, _chain: ChainId, _one: &EndpointName, _other: &EndpointName) {}

    /// One call was answered or failed. `outcome` is `ok` or a [`crate::domain::ReadFailureKind`] code;
    /// a batch of n calls is told n times, each with the batch's duration.
    fn called(
        &self,
        chain: ChainId,
        endpoint: &EndpointName,
        method: &'static str,
        outcome: &'static str,
        took: Duration,
    );

    /// An endpoint was read about a batch of payments. `outcome` is `ok`, or the
    /// [`crate::domain::ReadFailureKind`] code for which it gave no evidence about any of them: calls that
    /// are all answered prove nothing when the answers come from another chain or an old head.
    fn read(&self, _chain: ChainId, _endpoint: &EndpointName, _outcome: &'static str) {}
}

/// Whom to ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breadth {
    /// The first endpoint that gives evidence.
    FirstAnswer,
    /// Every endpoint, at one and the same block: before a negative may end a payment.
    All,
}

/// One chain, read through its endpoints.
pub struct Chain {
    settings: Arc<ChainSettings>,
    endpoints: Vec<Arc<Endpoint>>,
    learnt: Mutex<health::Learnt>,
    /// Counts narrow reads, so that each begins at the next endpoint.
    turn: AtomicUsize,
}

/// The chain cannot be set up as configured.
#[derive(Debug, thiserror::Error)]
#[error("chain {chain_id}: {problem}")]
pub struct ChainSetupError {
    /// The chain.
    pub chain_id: ChainId,
    /// What to mend.
    pub problem: String,
}

impl Chain {
    /// Sets up the chain; talks to nobody yet. The clock says for how long an endpoint is left alone.
    pub fn new(
        settings: ChainSettings,
        observer: Arc<dyn RpcObserver>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, ChainSetupError> {
        let chain_id = settings.chain_id;
        let refuse = |problem: String| ChainSetupError { chain_id, problem };
        if settings.endpoints.is_empty() {
            return Err(refuse("name at least one endpoint".to_owned()));
        }
        if settings.batch_max == 0 || settings.log_range_max == 0 {
            return Err(refuse("the largest batch and log range must be at least 1".to_owned()));
        }
        let seen_used: Arc<Mutex<monotone::SeenUsed>> = Arc::default();
        let mut endpoints: Vec<Arc<Endpoint>> = Vec::with_capacity(settings.endpoints.len());
        for endpoint in &settings.endpoints {
            if endpoints.iter().any(|other| other.name == endpoint.name) {
                return Err(refuse(format!("two endpoints are named {}", endpoint.name)));
            }
            let endpoint = Endpoint::new(
                &settings,
                endpoint,
                observer.clone(),
                clock.clone(),
                seen_used.clone(),
            )
            .map_err(refuse)?;
            observer.configured(chain_id, &endpoint.name, &ALLOWED_METHODS);
            endpoints.push(Arc::new(endpoint));
        }
        let mut names: Vec<&EndpointName> = endpoints.iter().map(|e| &e.name).collect();
        names.sort();
        for (place, one) in names.iter().enumerate() {
            for other in &names[place + 1..] {
                observer.compared(chain_id, one, other);
            }
        }
        Ok(Self {
            settings: Arc::new(settings),
            endpoints,
            turn: AtomicUsize::new(0),
            learnt: Mutex::default(),
        })
    }

    /// How the chain is read.
    pub fn settings(&self) -> &ChainSettings {
        &self.settings
    }

    /// Whether payments of this method can be read.
    pub const fn can_read(method: Method) -> bool {
        matches!(method, Method::Eip3009 | Method::Permit2)
    }

    /// Reads about exactly these payments (all of this chain and of a method that [`Self::can_read`]), in
    /// batches. Answers in the same order. Never fails: what could not be read is a reading that says why.
    ///
    /// It takes at most `within`. An endpoint that hangs neither keeps the next from being asked nor takes
    /// away what others have answered. `now` is the local time, used for
    /// nothing but the age of an endpoint's head.
    pub async fn read(
        &self,
        payments: &[Payment],
        breadth: Breadth,
        now: Timestamp,
        within: Duration,
    ) -> Vec<Evidence> {
        self.read_and_hear(payments, breadth, now, within, |_| {}).await
    }

    /// The same, and `hear` is told what is known so far each time an endpoint has answered: a proof need
    /// not wait for the endpoints that have not.
    pub async fn read_and_hear(
        &self,
        payments: &[Payment],
        breadth: Breadth,
        now: Timestamp,
        within: Duration,
        mut hear: impl FnMut(&[Evidence]),
    ) -> Vec<Evidence> {
        debug_assert!(payments.iter().all(|payment| {
            payment.chain_id == self.settings.chain_id && Self::can_read(payment.method)
        }));
        let mut evidence = vec![Evidence::default(); payments.len()];
        if payments.is_empty() {
            return evidence;
        }
        let asked: Vec<Asked> = payments.iter().map(Asked::from).collect();
        match breadth {
            Breadth::FirstAnswer => {
                self.read_until_answered(&asked, now, within, &mut evidence, &mut hear).await;
            }
            Breadth::All => {
                let mut answers = Vec::new();
                let name = |place: usize| self.endpoints[place].name.clone();
                self.read_all(asked.into(), now, within, |place, outcomes| {
                    for (evidence, outcome) in evidence.iter_mut().zip(&outcomes) {
                        let outcome = outcome.clone();
                        evidence.readings.push(Reading { endpoint: name(place), outcome });
                    }
                    answers.push(place);
                    hear(&evidence);
                })
                .await;
                // As configured, not as they came: a record of evidence reads the same every time.
                for evidence in &mut evidence {
                    let mut placed: Vec<_> =
                        answers.iter().zip(std::mem::take(&mut evidence.readings)).collect();
                    placed.sort_by_key(|(place, _)| **place);
                    evidence.readings = placed.into_iter().map(|(_, reading)| reading).collect();
                }
            }
        }
        self.learn(payments, &evidence, now);
        evidence
    }

    fn learnt(&self) -> MutexGuard<'_, health::Learnt> {
        // Every change is one assignment, so a panic elsewhere spoils nothing.
        self.learnt.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What came of asking one endpoint, per payment.
type Outcomes = Vec<Result<Observation, ReadFailure>>;

/// One failure of the endpoint's, for everything it was asked about.
fn same_for_all(count: usize, failure: &ReadFailure) -> Outcomes {
    vec![Err(failure.clone()); count]
}

/// Nobody waits for an answer any longer.
fn given_up(waited: Duration) -> ReadFailure {
    let detail = format!("the read was given up after {:.1} s", waited.as_secs_f64());
    ReadFailure::new(ReadFailureKind::Unreachable, detail)
}

/// What comes of `read`, if it takes no longer than `within`.
async fn bounded<T>(
    within: Duration,
    read: impl Future<Output = Result<T, ReadFailure>>,
) -> Result<T, ReadFailure> {
    tokio::time::timeout(within, read).await.unwrap_or_else(|_| Err(given_up(within)))
}

/// What comes of `work`, if it is done by `ends_at`.
async fn by<T>(
    ends_at: Instant,
    work: impl Future<Output = Result<T, ReadFailure>>,
) -> Result<T, ReadFailure> {
    let given_up = "not answered by the time the read had to be over";
    let too_late = |_| Err(ReadFailure::new(ReadFailureKind::Unreachable, given_up));
    tokio::time::timeout_at(ends_at, work).await.unwrap_or_else(too_late)
}

/// Asks one endpoint, and says so when its health has changed.
async fn ask(
    endpoint: &Endpoint,
    settings: &ChainSettings,
    asked: &[Asked],
    now: Timestamp,
    ends_at: Instant,
) -> Outcomes {
    if let Some(failures) = endpoint.silence(asked.iter().map(|asked| &asked.token)) {
        return failures.into_iter().map(Err).collect();
    }
    let outcomes = endpoint.read(settings, asked, now, ends_at).await;
    endpoint.report_health(settings.chain_id, &outcomes);
    outcomes
}

/// Whether an endpoint's answer is worth stopping at. Used, with no log to say how, is a lagging or
/// limited node; so may be a use whose transfer is not there. Ask another.
fn is_evidence(outcome: &Result<Observation, ReadFailure>) -> bool {
    match outcome {
        Err(_) => false,
        Ok(seen) => match &seen.nonce {
            NonceState::UsedWithoutLog { .. } | NonceState::UsedUnread(_) => false,
            NonceState::Used(consumption) => consumption.kind != ConsumptionKind::WithoutTransfer,
            NonceState::Unused => true,
        },
    }
}
