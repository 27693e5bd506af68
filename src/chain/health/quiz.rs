//! What an endpoint is asked by a probe, and its answers as they come in.

use std::collections::BTreeMap;

use alloy_primitives::Address;

use super::condition::{Told, Wrong};
use super::{Diagnosis, KnownUsed, Sickness};
use crate::domain::{ReadFailure, ReadFailureKind};

/// An authorization to ask about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::chain) struct Question {
    pub(super) known: KnownUsed,
    pub(super) is_configured: bool,
}

/// What one endpoint is asked by a probe.
#[derive(Debug, Clone, Default)]
pub(super) struct Quiz {
    pub(super) questions: Vec<Question>,
    /// Where a random nonce is asked about, and whether that token is configured.
    pub(super) tokens: BTreeMap<Address, bool>,
}

impl Quiz {
    /// Asks this as well, and about a random nonce at the same token.
    pub(super) fn add(&mut self, token: Address, question: Option<Question>) {
        let is_configured = question.is_some_and(|question| question.is_configured);
        *self.tokens.entry(token).or_default() |= is_configured;
        self.questions.extend(question.filter(|question| !self.questions.contains(question)));
    }
}

/// Answers as they come in, by token.
pub(super) struct Answers {
    pub(super) told: BTreeMap<Address, Told>,
    /// The first answer that was none.
    pub(super) trouble: Diagnosis,
}

impl Answers {
    pub(super) fn wrong(
        &mut self,
        token: Address,
        sickness: Sickness,
        detail: String,
        to: Option<Question>,
    ) {
        self.note(token, Told::Wrong(Wrong { sickness, detail, question: to }));
    }

    pub(super) fn none(&mut self, token: Address, failure: &ReadFailure) {
        self.trouble.get_or_insert_with(|| sick_of(failure));
        self.note(token, Told::Nothing);
    }

    pub(super) fn note(&mut self, token: Address, told: Told) {
        self.told.entry(token).or_insert(Told::Right).and(told);
    }

    /// Whether nothing was answered at all.
    pub(super) fn is_all_nothing(&self) -> bool {
        self.told.values().all(|told| *told == Told::Nothing)
    }

    pub(super) fn is_wrong(&self, token: &Address) -> bool {
        matches!(self.told.get(token), Some(Told::Wrong(_)))
    }
}

/// What a failure to answer says of the endpoint.
pub(super) fn sick_of(failure: &ReadFailure) -> (Sickness, String) {
    let sickness = match failure.kind {
        ReadFailureKind::WrongChain => Sickness::WrongChain,
        ReadFailureKind::NoCode => Sickness::NoCode,
        _ => Sickness::Failing,
    };
    (sickness, failure.to_string())
}
