//! Probes: asking an endpoint what the answer to is known.

use std::sync::Arc;

use alloy_primitives::{Address, keccak256};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::learnt::LEARNT_AGE_MAX;
use super::{Diagnosis, KnownUsed, Sickness};
use crate::chain::asked::Asked;
use crate::chain::endpoint::Endpoint;
use crate::chain::heads::Heads;
use crate::chain::read::Finding;
use crate::chain::wide::common_block;
use crate::chain::{Chain, ChainSettings};
use crate::domain::{BlockRef, ReadFailure, ReadFailureKind, Timestamp};

/// An authorization to ask about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::chain) struct Question {
    known: KnownUsed,
    is_configured: bool,
}

/// What one endpoint is asked by a probe.
#[derive(Debug, Clone)]
struct Quiz {
    questions: Vec<Question>,
    /// Where a random nonce is asked about; the flag says whether the token is configured.
    tokens: Vec<(Address, bool)>,
}

/// What an endpoint that answered nothing wrongly has shown.
struct Look {
    heads: Heads,
    /// Whether nothing had to be left out.
    is_complete: bool,
    /// What is not as it should be, and no wrong answer.
    unwell: Diagnosis,
}

impl Endpoint {
    /// Why this endpoint gives no evidence, if it is sick.
    pub(in crate::chain) fn sickness(&self) -> Option<ReadFailure> {
        let wrong =
            self.memory().diagnosis.clone().filter(|(sickness, _)| sickness.is_wrong_answer());
        let (sickness, detail) = wrong.or_else(|| self.erring())?;
        Some(ReadFailure::new(ReadFailureKind::Unhealthy, format!("{sickness}: {detail}")))
    }

    /// Whether too many of its requests fail.
    fn erring(&self) -> Diagnosis {
        self.transport.error_rate().map(|detail| (Sickness::ErrorRate, detail))
    }

    /// Asks where it stands, and whether it knows what is known.
    async fn look_at(
        &self,
        settings: &ChainSettings,
        mut quiz: Quiz,
        now: Timestamp,
    ) -> Result<Look, (Sickness, String)> {
        self.memory().is_right_chain = false;
        let failed = self.memory().failed;
        if let Some(failed) = failed.filter(|failed| !quiz.questions.contains(failed)) {
            quiz.questions.push(failed);
        }
        let heads = self.heads(settings).await.map_err(|failure| sick_of(&failure))?;
        let before = quiz.questions.len();
        quiz.questions.retain(|question| question.known.block <= heads.head.number);
        let is_complete = quiz.questions.len() == before;
        self.states_are_right(settings, &quiz, &heads.head).await?;
        let mut unwell = None;
        for question in &quiz.questions {
            let Err((sickness, detail)) = self.shows_log(settings, &question.known).await else {
                continue;
            };
            let is_missing = sickness == Sickness::KnownLogMissing;
            if is_missing && !question.is_configured {
                unwell = Some((Sickness::LearntLogMissing, detail));
                continue;
            }
            if is_missing {
                self.memory().failed = Some(*question);
            }
            return Err((sickness, detail));
        }
        let fresh = self.see_head(settings, &heads.head, now);
        fresh.map_err(|failure| (Sickness::StaleHead, failure.detail))?;
        Ok(Look { heads, is_complete, unwell })
    }

    /// Whether it says of these authorizations, and of one that nobody ever signed at each token, what is
    /// the case: all in one read.
    async fn states_are_right(
        &self,
        settings: &ChainSettings,
        quiz: &Quiz,
        head: &BlockRef,
    ) -> Result<(), (Sickness, String)> {
        let Quiz { questions, tokens } = quiz;
        let random = || keccak256(Uuid::new_v4().as_bytes());
        let nobodys = |token: Address| Asked::known(token, Address::from_word(random()), random());
        let mut asked: Vec<Asked> = tokens.iter().map(|(token, _)| nobodys(*token)).collect();
        asked.extend(questions.iter().map(|question| question.known.asked()));
        if asked.is_empty() {
            return Ok(());
        }
        let states = self.states(settings, &asked, head).await;
        let (unused, used) = states.split_at(tokens.len());
        for ((token, is_configured), state) in tokens.iter().zip(unused) {
            match state {
                Ok(false) => {}
                Ok(true) => {
                    let detail = format!("a random nonce at {token} reads used");
                    return Err((Sickness::RandomNonceUsed, detail));
                }
                // One endpoint may have made that token up: that makes no other one sick.
                Err(failure) if failure.kind == ReadFailureKind::NoCode && !is_configured => {}
                Err(failure) => return Err(sick_of(failure)),
            }
        }
        for (question, state) in questions.iter().zip(used) {
            if !*state.as_ref().map_err(sick_of)? {
                self.memory().failed = Some(*question);
                let KnownUsed { token, payer, nonce, block } = question.known;
                let at = head.number;
                let detail = format!(
                    "{nonce} of {payer} at {token}, used in block {block}, reads unused at {at}"
                );
                return Err((Sickness::KnownNonceUnused, detail));
            }
        }
        Ok(())
    }

    /// Whether it has the log of an authorization's use.
    pub(super) async fn shows_log(
        &self,
        settings: &ChainSettings,
        known: &KnownUsed,
    ) -> Result<(), (Sickness, String)> {
        let KnownUsed { token, payer, nonce, block } = known;
        let range = (*block, *block);
        match self.find_eip3009(settings, &[known.asked()], &[0], range).await.remove(&0) {
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

    /// Takes note of a diagnosis, and says so once when it has changed. What forbids evidence stays until
    /// a probe that left nothing out finds nothing wrong. Answers with what holds now.
    fn diagnose(&self, settings: &ChainSettings, found: Diagnosis, is_complete: bool) -> Diagnosis {
        let (chain, endpoint) = (settings.chain_id, &self.name);
        let sickness = |diagnosis: &Diagnosis| diagnosis.as_ref().map(|(sickness, _)| *sickness);
        let forbids = |diagnosis: &Diagnosis| {
            sickness(diagnosis).is_some_and(|sickness| sickness.is_wrong_answer())
        };
        let (before, diagnosis) = {
            let mut memory = self.memory();
            let before = memory.diagnosis.clone();
            if is_complete && !forbids(&found) {
                memory.failed = None;
            }
            if !forbids(&before) || forbids(&found) || is_complete {
                memory.diagnosis = found;
            }
            (before, memory.diagnosis.clone())
        };
        // It says so itself when it begins and ends.
        let shown = self.erring().filter(|_| !forbids(&diagnosis));
        let shown = shown.or_else(|| diagnosis.clone());
        self.observer.probed(chain, endpoint, sickness(&shown));
        if sickness(&before) == sickness(&diagnosis) {
            return shown;
        }
        match &diagnosis {
            Some((sickness, detail)) if sickness.is_wrong_answer() => tracing::error!(
                %chain, %endpoint, %sickness, detail,
                "the endpoint is sick: it gives no evidence until it answers a probe rightly"
            ),
            Some((sickness, detail)) => {
                tracing::warn!(%chain, %endpoint, %sickness, detail, "the endpoint is unwell");
            }
            None => tracing::info!(%chain, %endpoint, "the endpoint is well"),
        }
        shown
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
        let mut looks = JoinSet::new();
        for (place, endpoint) in self.endpoints.iter().enumerate() {
            let (endpoint, settings) = (Arc::clone(endpoint), self.settings.clone());
            let quiz = self.quiz(place, now);
            looks.spawn(async move { (place, endpoint.look_at(&settings, quiz, now).await) });
        }
        let mut looks = looks.join_all().await;
        looks.sort_by_key(|(place, _)| *place);
        let heads: Vec<BlockRef> =
            looks.iter().filter_map(|(_, look)| Some(look.as_ref().ok()?.heads.head)).collect();
        let common = common_block(&heads, self.settings.head_lag_max);
        let mut diagnoses = Vec::with_capacity(looks.len());
        let mut standing = Vec::with_capacity(looks.len());
        for (place, look) in looks {
            let (found, is_complete) = match look {
                Ok(Look { heads, is_complete, unwell }) => {
                    let lags = common.is_some_and(|common| heads.head.number < common);
                    if !lags {
                        standing.push((place, heads));
                    }
                    let lagging = || (Sickness::Lagging, self.lagging(&heads.head).detail);
                    (lags.then(lagging).or(unwell), is_complete)
                }
                Err(sick) => (Some(sick), false),
            };
            diagnoses.push(self.endpoints[place].diagnose(&self.settings, found, is_complete));
        }
        self.confirm_candidate(&standing, now).await;
        diagnoses
    }

    /// What the endpoint at this place is asked.
    fn quiz(&self, place: usize, now: Timestamp) -> Quiz {
        let configured = self.settings.known_used.iter();
        let mut questions: Vec<Question> =
            configured.map(|known| Question { known: *known, is_configured: true }).collect();
        let mut tokens: Vec<(Address, bool)> = Vec::new();
        for known in &self.settings.known_used {
            if !tokens.iter().any(|(token, _)| *token == known.token) {
                tokens.push((known.token, true));
            }
        }
        let learnt = self.learnt();
        if tokens.is_empty() {
            tokens.extend(learnt.token.map(|token| (token, false)));
        }
        let confirmed = learnt.confirmed.as_ref().filter(|confirmed| {
            confirmed.is_younger_than(LEARNT_AGE_MAX, now) && confirmed.askable.contains(&place)
        });
        questions.extend(
            confirmed.map(|confirmed| Question { known: confirmed.known, is_configured: false }),
        );
        Quiz { questions, tokens }
    }
}
