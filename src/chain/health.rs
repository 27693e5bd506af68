//! Whether an endpoint can be believed: asked now and then what the answer to is known beforehand.
//!
//! An endpoint that gives a wrong answer to such a question is sick, and gives no evidence until it answers
//! rightly again. One that merely fails, stands still or lags is shown as such here; what that means for a
//! read is seen to by the read. Nothing here proves anything about a payment.

use std::fmt;

use alloy_primitives::{Address, B256, keccak256};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::endpoint::Endpoint;
use super::heads::Heads;
use super::read::{Asked, Finding};
use super::wide::common_block;
use super::{Chain, ChainSettings};
use crate::domain::{
    BlockRef, Evidence, Method, NonceState, Payment, ReadFailure, ReadFailureKind, Timestamp,
};

/// An EIP-3009 authorization that is known to be used or canceled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownUsed {
    /// The token.
    pub token: Address,
    /// Who signed.
    pub payer: Address,
    /// The authorization's nonce.
    pub nonce: B256,
    /// The block with its `AuthorizationUsed` or `AuthorizationCanceled`.
    pub block: u64,
}

/// Why an endpoint is sick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sickness {
    /// It does not answer properly.
    Failing,
    /// It serves another chain.
    WrongChain,
    /// Its head does not move.
    StaleHead,
    /// Its head is far behind the others'.
    Lagging,
    /// There is no code at a token of which an authorization is known.
    NoCode,
    /// A nonce nobody ever used reads used.
    RandomNonceUsed,
    /// An authorization that is known to be used reads unused.
    KnownNonceUnused,
    /// The log of an authorization that is known to be used is not there.
    KnownLogMissing,
}

impl Sickness {
    /// Every one of them.
    pub const ALL: [Self; 8] = [
        Self::Failing,
        Self::WrongChain,
        Self::StaleHead,
        Self::Lagging,
        Self::NoCode,
        Self::RandomNonceUsed,
        Self::KnownNonceUnused,
        Self::KnownLogMissing,
    ];

    /// A flat code, for labels and people.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Failing => "failing",
            Self::WrongChain => "wrong_chain",
            Self::StaleHead => "stale_head",
            Self::Lagging => "lagging",
            Self::NoCode => "no_code",
            Self::RandomNonceUsed => "random_nonce_used",
            Self::KnownNonceUnused => "known_nonce_unused",
            Self::KnownLogMissing => "known_log_missing",
        }
    }

    /// Whether its answers cannot be believed. The others are seen to by every read itself.
    const fn forbids_evidence(self) -> bool {
        !matches!(self, Self::Failing | Self::StaleHead | Self::Lagging)
    }
}

impl fmt::Display for Sickness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

/// What a look at an endpoint came to; `None`: it is well.
pub type Diagnosis = Option<(Sickness, String)>;

/// What is known of the chain beforehand, beyond what is configured.
#[derive(Debug, Default)]
pub(super) struct Learnt {
    /// Seen used in a final block by one endpoint; the next probe asks all of them.
    candidate: Option<KnownUsed>,
    /// Confirmed by all of them, and when.
    confirmed: Option<(KnownUsed, Timestamp)>,
}

/// What was learnt is learnt anew after this long, so that no endpoint need keep its log for longer.
const LEARN_AGAIN: std::time::Duration = std::time::Duration::from_secs(6 * 3_600);

impl Endpoint {
    /// Why this endpoint gives no evidence, if it is sick.
    pub(super) fn sickness(&self) -> Option<ReadFailure> {
        let memory = self.memory();
        let (sickness, detail) = memory.diagnosis.as_ref()?;
        let failure =
            || ReadFailure::new(ReadFailureKind::Unhealthy, format!("{sickness}: {detail}"));
        sickness.forbids_evidence().then(failure)
    }

    /// Asks where it stands, and whether it knows what is known.
    async fn look_at(
        &self,
        settings: &ChainSettings,
        known: &[KnownUsed],
        now: Timestamp,
    ) -> Result<Heads, (Sickness, String)> {
        self.memory().is_right_chain = false;
        let heads = self.heads(settings).await.map_err(|failure| sick_of(&failure))?;
        for known in known {
            self.knows(settings, known, &heads).await?;
        }
        let fresh = self.see_head(settings, &heads.head, now);
        fresh.map_err(|failure| (Sickness::StaleHead, failure.detail))?;
        Ok(heads)
    }

    /// Whether it says of this authorization, and of one that nobody ever signed, what is the case.
    async fn knows(
        &self,
        settings: &ChainSettings,
        known: &KnownUsed,
        heads: &Heads,
    ) -> Result<(), (Sickness, String)> {
        if known.block > heads.head.number {
            return Ok(());
        }
        let KnownUsed { token, payer, nonce, block } = *known;
        let used = Asked::known(token, payer, nonce);
        let random = Asked::known(token, payer, keccak256(Uuid::new_v4().as_bytes()));
        let states = self.states(settings, &[random, used], &heads.head).await;
        let state = |place: usize| match &states[place] {
            Ok(state) => Ok(*state),
            Err(failure) => Err(sick_of(failure)),
        };
        if state(0)? {
            let detail = format!("a random nonce of {payer} at {token} reads used");
            return Err((Sickness::RandomNonceUsed, detail));
        }
        if !state(1)? {
            let at = heads.head.number;
            let detail = format!(
                "{nonce} of {payer} at {token}, used in block {block}, reads unused at {at}"
            );
            return Err((Sickness::KnownNonceUnused, detail));
        }
        match self.find_eip3009(settings, &[used], &[0], (block, block)).await.remove(&0) {
            Some(Ok(Finding::Consumed(..))) => Ok(()),
            // An empty list under a bloom filter that has the log, for one.
            Some(Err(failure)) if failure.kind == ReadFailureKind::BadAnswer => {
                Err((Sickness::KnownLogMissing, failure.detail))
            }
            Some(Err(failure)) => Err(sick_of(&failure)),
            Some(Ok(Finding::Nothing { .. })) | None => {
                let detail = format!("no log of {nonce} of {payer} at {token} in block {block}");
                Err((Sickness::KnownLogMissing, detail))
            }
        }
    }

    /// Takes note of a diagnosis, and says so once when it has changed.
    fn diagnose(&self, settings: &ChainSettings, diagnosis: Diagnosis) {
        let (chain, endpoint) = (settings.chain_id, &self.name);
        let sickness = |diagnosis: &Diagnosis| diagnosis.as_ref().map(|(sickness, _)| *sickness);
        self.observer.probed(chain, endpoint, sickness(&diagnosis));
        let before = std::mem::replace(&mut self.memory().diagnosis, diagnosis.clone());
        if sickness(&before) == sickness(&diagnosis) {
            return;
        }
        match diagnosis {
            Some((sickness, detail)) if sickness.forbids_evidence() => tracing::error!(
                %chain, %endpoint, %sickness, detail,
                "the endpoint is sick: it gives no evidence until it answers a probe rightly"
            ),
            Some((sickness, detail)) => {
                tracing::warn!(%chain, %endpoint, %sickness, detail, "the endpoint is unwell");
            }
            None => tracing::info!(%chain, %endpoint, "the endpoint is well"),
        }
    }
}

fn sick_of(failure: &ReadFailure) -> (Sickness, String) {
    let sickness = match failure.kind {
        ReadFailureKind::WrongChain => Sickness::WrongChain,
        ReadFailureKind::NoCode => Sickness::NoCode,
        _ => Sickness::Failing,
    };
    (sickness, failure.to_string())
}

impl Chain {
    /// Looks at every endpoint, side by side: its chain id, its head, and what it says of what is known.
    /// Answers in the order of the configuration. It also ends a sickness that is over.
    pub async fn probe(&self, now: Timestamp) -> Vec<Diagnosis> {
        let mut known = self.settings.known_used.clone();
        known.extend(self.learnt().confirmed.map(|(known, _)| known));
        let known: std::sync::Arc<[KnownUsed]> = known.into();
        let mut looks = JoinSet::new();
        for (place, endpoint) in self.endpoints.iter().enumerate() {
            let (endpoint, settings) = (endpoint.clone(), self.settings.clone());
            let known = known.clone();
            looks.spawn(async move { (place, endpoint.look_at(&settings, &known, now).await) });
        }
        let mut looks = looks.join_all().await;
        looks.sort_by_key(|(place, _)| *place);
        let heads: Vec<BlockRef> =
            looks.iter().filter_map(|(_, look)| Some(look.as_ref().ok()?.head)).collect();
        let common = common_block(&heads, self.settings.head_lag_max);
        let mut diagnoses = Vec::with_capacity(looks.len());
        let mut standing = Vec::with_capacity(looks.len());
        for (place, look) in looks {
            let diagnosis = match look {
                Ok(heads) if common.is_some_and(|common| heads.head.number < common) => {
                    Some((Sickness::Lagging, self.lagging(&heads.head).detail))
                }
                Ok(heads) => {
                    standing.push((place, heads));
                    None
                }
                Err(sick) => Some(sick),
            };
            self.endpoints[place].diagnose(&self.settings, diagnosis.clone());
            diagnoses.push(diagnosis);
        }
        if standing.len() == self.endpoints.len() {
            self.confirm_candidate(&standing, now).await;
        }
        diagnoses
    }

    /// Takes note of an authorization that is used for good, to ask all endpoints about it.
    pub(super) fn learn(&self, payments: &[Payment], evidence: &[Evidence], now: Timestamp) {
        if !self.settings.learn_known_used {
            return;
        }
        let mut learnt = self.learnt();
        let is_recent =
            |(_, at): &(KnownUsed, Timestamp)| *at <= now && now.since(*at) < LEARN_AGAIN;
        if learnt.candidate.is_some() || learnt.confirmed.as_ref().is_some_and(is_recent) {
            return;
        }
        learnt.candidate = payments.iter().zip(evidence).find_map(|(payment, evidence)| {
            let block = evidence.readings.iter().flat_map(|r| &r.outcome).find_map(|seen| {
                let NonceState::Used(consumption) = seen.nonce else { return None };
                let block = consumption.log.block.number;
                (seen.finalized.number >= block).then_some(block)
            })?;
            let Payment { token, payer, nonce, .. } = *payment;
            (payment.method == Method::Eip3009).then_some(KnownUsed { token, payer, nonce, block })
        });
    }

    /// Only what every endpoint confirms is known: what one of them made up must not make the others sick.
    async fn confirm_candidate(&self, standing: &[(usize, Heads)], now: Timestamp) {
        let Some(candidate) = self.learnt().candidate.take() else { return };
        for (place, heads) in standing {
            let knows = self.endpoints[*place].knows(&self.settings, &candidate, heads).await;
            if candidate.block > heads.finalized.number || knows.is_err() {
                return;
            }
        }
        self.learnt().confirmed = Some((candidate, now));
    }
}
