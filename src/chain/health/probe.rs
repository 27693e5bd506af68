//! Probes: asking an endpoint what the answer to is known.

use std::collections::BTreeMap;
use std::sync::Arc;

use alloy_primitives::{Address, keccak256};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::condition::Told;
use super::learnt::{Confirmed, LEARNT_AGE_MAX};
use super::quiz::{Answers, Question, Quiz, sick_of};
use super::{Diagnosis, KnownUsed, Sickness};
use crate::chain::asked::Asked;
use crate::chain::endpoint::Endpoint;
use crate::chain::heads::Heads;
use crate::chain::read::Finding;
use crate::chain::wide::common_block;
use crate::chain::{Chain, ChainSettings};
use crate::domain::{BlockRef, ReadFailure, ReadFailureKind, Timestamp};

/// What an endpoint has shown that says where it stands.
struct Look {
    heads: Heads,
    told: BTreeMap<Address, Told>,
    /// Whether what is right may end what was wrong.
    may_end: bool,
    /// What is not as it should be, and no wrong answer.
    unwell: Diagnosis,
}

impl Endpoint {
    /// Why this endpoint gives no evidence about anything, if it is sick.
    pub(in crate::chain) fn sickness(&self) -> Option<ReadFailure> {
        let wrong = self.memory().condition.of_all();
        wrong.or_else(|| self.erring()).map(unhealthy)
    }

    /// Why it gives no evidence about each of these, if it gives none about any of them.
    pub(in crate::chain) fn silence<'a>(
        &self,
        tokens: impl Iterator<Item = &'a Address>,
    ) -> Option<Vec<ReadFailure>> {
        self.silenced(tokens).into_iter().collect()
    }

    /// Why it gives no evidence about each of these, where it gives none.
    pub(in crate::chain) fn silenced<'a>(
        &self,
        tokens: impl Iterator<Item = &'a Address>,
    ) -> Vec<Option<ReadFailure>> {
        let erring = self.erring();
        let memory = self.memory();
        let about = |token| memory.condition.about(token).or_else(|| erring.clone());
        tokens.map(|token| about(token).map(unhealthy)).collect()
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
        {
            let mut memory = self.memory();
            memory.is_right_chain = false;
            memory.condition.to_ask_again().for_each(|(token, question)| quiz.add(token, question));
        }
        let heads = self.heads(settings).await.map_err(|failure| sick_of(&failure))?;
        let mut answers = Answers { told: BTreeMap::new(), trouble: None };
        // What it cannot know yet is left out.
        let (questions, too_new): (Vec<Question>, Vec<Question>) =
            quiz.questions.iter().partition(|question| question.known.block <= heads.head.number);
        too_new.iter().for_each(|question| answers.note(question.known.token, Told::Nothing));
        let used = self.ask_states(settings, &quiz.tokens, &questions, &heads, &mut answers).await;
        if let Some(trouble) = &answers.trouble
            && (trouble.0 == Sickness::WrongChain || answers.is_all_nothing())
        {
            return Err(trouble.clone());
        }
        // One token's trouble with its own state is no trouble of the endpoint's.
        answers.trouble = None;
        let mut unwell = self.ask_logs(settings, used, &mut answers).await;
        let fresh = self.see_head(settings, &heads.head, now);
        let may_end = fresh.is_ok();
        let stale = fresh.err().map(|failure| (Sickness::StaleHead, failure.detail));
        unwell = answers.trouble.or(stale).or(unwell);
        Ok(Look { heads, told: answers.told, may_end, unwell })
    }

    /// Asks about these authorizations, and about one that nobody ever signed at each token, all in one
    /// read. Returns those that read used, as they should.
    async fn ask_states(
        &self,
        settings: &ChainSettings,
        tokens: &BTreeMap<Address, bool>,
        questions: &[Question],
        heads: &Heads,
        answers: &mut Answers,
    ) -> Vec<Question> {
        let random = || keccak256(Uuid::new_v4().as_bytes());
        let nobodys = |token: Address| Asked::known(token, Address::from_word(random()), random());
        let mut asked: Vec<Asked> = tokens.keys().map(|token| nobodys(*token)).collect();
        asked.extend(questions.iter().map(|question| question.known.asked()));
        if asked.is_empty() {
            return Vec::new();
        }
        let states = self.states(settings, &asked, &heads.head).await;
        let (unused, used) = states.split_at(tokens.len());
        for ((token, is_configured), state) in tokens.iter().zip(unused) {
            match state {
                Ok(false) => answers.note(*token, Told::Right),
                Ok(true) => {
                    let detail = format!("a random nonce at {token} reads used");
                    answers.wrong(*token, Sickness::RandomNonceUsed, detail, None);
                }
                Err(failure) if failure.kind == ReadFailureKind::NoCode => match is_configured {
                    true => {
                        answers.wrong(*token, Sickness::NoCode, failure.to_string(), None);
                    }
                    // One endpoint may have made that token up: that makes no other one sick.
                    false => answers.note(*token, Told::Nothing),
                },
                Err(failure) => answers.none(*token, failure),
            }
        }
        let mut right = Vec::with_capacity(questions.len());
        for (question, state) in questions.iter().zip(used) {
            let KnownUsed { token, payer, nonce, block } = question.known;
            match state {
                Ok(true) => right.push(*question),
                Ok(false) => {
                    let at = heads.head.number;
                    let detail = format!(
                        "{nonce} of {payer} at {token}, used in block {block}, reads unused at {at}"
                    );
                    answers.wrong(token, Sickness::KnownNonceUnused, detail, Some(*question));
                }
                Err(failure) => answers.none(token, failure),
            }
        }
        right
    }

    /// Asks for the logs of those that read used. Returns what is not there, and makes nobody sick.
    async fn ask_logs(
        &self,
        settings: &ChainSettings,
        used: Vec<Question>,
        answers: &mut Answers,
    ) -> Diagnosis {
        let mut unwell = None;
        for question in used {
            let token = question.known.token;
            if answers.is_wrong(&token) {
                continue;
            }
            match self.shows_log(settings, &question.known).await {
                Ok(()) => {}
                Err((Sickness::KnownLogMissing, detail)) if question.is_configured => {
                    answers.wrong(token, Sickness::KnownLogMissing, detail, Some(question));
                }
                Err((Sickness::KnownLogMissing, detail)) => {
                    unwell = Some((Sickness::LearntLogMissing, detail));
                }
                Err(trouble) => {
                    answers.note(token, Told::Nothing);
                    answers.trouble.get_or_insert(trouble);
                }
            }
        }
        unwell
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

    /// Takes note of a probe, and says so once when something has changed. Answers with the worst that holds now.
    fn diagnose(
        &self,
        settings: &ChainSettings,
        told: BTreeMap<Address, Told>,
        may_end: bool,
        unwell: Diagnosis,
    ) -> Diagnosis {
        let (chain, endpoint) = (settings.chain_id, &self.name);
        let (before, condition) = {
            let mut memory = self.memory();
            let before = memory.condition.in_short();
            memory.condition.note(told, may_end, unwell);
            (before, memory.condition.clone())
        };
        let worst = condition.worst();
        let is_wrong = worst.as_ref().is_some_and(|(sickness, _)| sickness.is_wrong_answer());
        // That too many requests fail was said when it began.
        let shown = self.erring().filter(|_| !is_wrong).or_else(|| worst.clone());
        self.observer.probed(chain, endpoint, shown.as_ref().map(|(sickness, _)| *sickness));
        if condition.in_short() == before {
            return shown;
        }
        match worst {
            Some((sickness, detail)) if condition.of_all().is_some() => tracing::error!(
                %chain, %endpoint, %sickness, detail,
                "the endpoint is sick: it gives no evidence until it answers a probe rightly"
            ),
            Some((sickness, detail)) if is_wrong => tracing::error!(
                %chain, %endpoint, %sickness, detail,
                "the endpoint is sick: it gives no evidence about payments in this token until it answers a \
                 probe rightly"
            ),
            Some((sickness, detail)) => {
                tracing::warn!(%chain, %endpoint, %sickness, detail, "the endpoint is unwell");
            }
            None => tracing::info!(%chain, %endpoint, "the endpoint is well"),
        }
        shown
    }
}

fn unhealthy((sickness, detail): (Sickness, String)) -> ReadFailure {
    ReadFailure::new(ReadFailureKind::Unhealthy, format!("{sickness}: {detail}"))
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
        let common = common_block(&heads, self.near());
        let mut diagnoses = Vec::with_capacity(looks.len());
        let mut standing = Vec::with_capacity(looks.len());
        for (place, look) in looks {
            let (told, may_end, unwell) = match look {
                Ok(Look { heads, told, may_end, unwell }) => {
                    let lags = common.is_some_and(|common| heads.head.number < common);
                    if !lags {
                        standing.push((place, heads));
                    }
                    let lagging = || (Sickness::Lagging, self.lagging(&heads.head).detail);
                    (told, may_end, lags.then(lagging).or(unwell))
                }
                Err(sick) => (BTreeMap::new(), false, Some(sick)),
            };
            let endpoint = &self.endpoints[place];
            diagnoses.push(endpoint.diagnose(&self.settings, told, may_end, unwell));
        }
        self.confirm_candidate(&standing, now).await;
        diagnoses
    }

    /// What the endpoint at this place is asked.
    fn quiz(&self, place: usize, now: Timestamp) -> Quiz {
        let mut quiz = Quiz::default();
        for known in &self.settings.known_used {
            quiz.add(known.token, Some(Question { known: *known, is_configured: true }));
        }
        let learnt = self.learnt();
        learnt.tokens.iter().for_each(|token| quiz.add(*token, None));
        let confirmed = learnt.confirmed.as_ref().filter(|confirmed| {
            confirmed.is_younger_than(LEARNT_AGE_MAX, now) && confirmed.askable.contains(&place)
        });
        if let Some(Confirmed { known, .. }) = confirmed {
            quiz.add(known.token, Some(Question { known: *known, is_configured: false }));
        }
        quiz
    }
}
