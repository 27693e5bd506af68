//! What is wrong with an endpoint, as far as probes have found out, and about which tokens.
//!
//! A wrong answer is about one token's contract, and may be that contract's doing: one that calls everything
//! used, or takes a use back. So it silences the endpoint about that token and no other (I11). Unless tokens
//! agree: whoever answers wrongly about several of them, and rightly about none, is sick itself.

use std::collections::BTreeMap;

use alloy_primitives::Address;

use super::quiz::Question;
use super::{Diagnosis, Sickness};

/// So many tokens, about which an endpoint answers wrongly and rightly about none, agree that it is sick.
const AGREEING_MIN: usize = 2;

/// Whoever answers wrongly about more tokens than this is sick itself: no shop has so many.
const WRONG_MAX: usize = 16;

/// A wrong answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::chain) struct Wrong {
    /// What it was.
    pub(super) sickness: Sickness,
    /// For people.
    pub(super) detail: String,
    /// To which question, to ask it again until it is answered rightly; `None`: to that for a random nonce.
    pub(super) question: Option<Question>,
}

/// What a probe was told about one token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Told {
    /// All that was asked, and rightly.
    Right,
    /// Not all of it, and nothing wrong.
    Nothing,
    /// Something wrong.
    Wrong(Wrong),
}

impl Told {
    /// Whatever is wrong stays so, and only what is right throughout is right.
    pub(super) fn and(&mut self, other: Self) {
        match (&self, &other) {
            (Self::Wrong(_), _) | (_, Self::Right) => {}
            (Self::Right | Self::Nothing, _) => *self = other,
        }
    }
}

/// What is wrong with an endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::chain) struct Condition {
    wrong: BTreeMap<Address, Wrong>,
    /// Whether the tokens agree that the endpoint is sick.
    is_of_all: bool,
    /// What is not as it should be, and no wrong answer; every read sees to that itself.
    unwell: Diagnosis,
}

impl Condition {
    /// Takes note of a probe. What was wrong stays so until it is right, in a probe that `may_end` it.
    pub(super) fn note(&mut self, told: BTreeMap<Address, Told>, may_end: bool, unwell: Diagnosis) {
        let is_any_right = told.values().any(|told| *told == Told::Right);
        let is_any_wrong = told.values().any(|told| matches!(told, Told::Wrong(_)));
        for (token, told) in told {
            match told {
                Told::Right if may_end => drop(self.wrong.remove(&token)),
                Told::Right | Told::Nothing => {}
                Told::Wrong(wrong)
                    if self.wrong.len() <= WRONG_MAX || self.wrong.contains_key(&token) =>
                {
                    self.wrong.insert(token, wrong);
                }
                Told::Wrong(_) => {}
            }
        }
        let agree = match (is_any_right, is_any_wrong) {
            (true, _) => self.is_of_all && !may_end,
            (false, true) => self.wrong.len() >= AGREEING_MIN,
            (false, false) => self.is_of_all,
        };
        self.is_of_all = self.wrong.len() > WRONG_MAX || agree;
        self.unwell = unwell;
    }

    /// The tokens it answered wrongly about, and what to ask it again.
    pub(super) fn to_ask_again(&self) -> impl Iterator<Item = (Address, Option<Question>)> {
        self.wrong.iter().map(|(token, wrong)| (*token, wrong.question))
    }

    /// What forbids it to give any evidence.
    pub(super) fn of_all(&self) -> Diagnosis {
        self.wrong.values().next().filter(|_| self.is_of_all).map(told)
    }

    /// What forbids it to give evidence about this token.
    pub(super) fn about(&self, token: &Address) -> Diagnosis {
        self.of_all().or_else(|| self.wrong.get(token).map(told))
    }

    /// What a person should see first.
    pub(super) fn worst(&self) -> Diagnosis {
        self.wrong.values().next().map(told).or_else(|| self.unwell.clone())
    }

    /// What is worth a line in the log when it changes.
    pub(super) fn in_short(&self) -> (bool, Vec<(Address, Sickness)>, Option<Sickness>) {
        let wrong = self.wrong.iter().map(|(token, wrong)| (*token, wrong.sickness)).collect();
        (self.is_of_all, wrong, self.unwell.as_ref().map(|(sickness, _)| *sickness))
    }
}

fn told(wrong: &Wrong) -> (Sickness, String) {
    (wrong.sickness, wrong.detail.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: Address = Address::repeat_byte(1);
    const HONEST: Address = Address::repeat_byte(2);
    const OTHER: Address = Address::repeat_byte(3);

    fn wrong() -> Told {
        let detail = "a random nonce reads used".to_owned();
        Told::Wrong(Wrong { sickness: Sickness::RandomNonceUsed, detail, question: None })
    }

    fn probed(condition: &mut Condition, told: &[(Address, Told)]) {
        condition.note(told.iter().cloned().collect(), true, None);
    }

    /// Which of the three tokens it is silenced about.
    fn silenced(condition: &Condition) -> [bool; 3] {
        [HOSTILE, HONEST, OTHER].map(|token| condition.about(&token).is_some())
    }

    #[test]
    fn i11_one_token_s_wrong_answers_silence_nobody_about_another() {
        let mut condition = Condition::default();
        probed(&mut condition, &[(HOSTILE, wrong())]);
        assert_eq!(
            silenced(&condition),
            [true, false, false],
            "alone, it proves nothing of others"
        );
        probed(&mut condition, &[(HOSTILE, wrong()), (HONEST, Told::Right)]);
        assert_eq!(silenced(&condition), [true, false, false]);
        probed(&mut condition, &[(HOSTILE, Told::Right), (HONEST, Told::Right)]);
        assert_eq!(silenced(&condition), [false; 3]);
        // At a head that stands still, what is right ends nothing; but it does not agree with what is wrong.
        let told = [(HOSTILE, wrong()), (OTHER, wrong()), (HONEST, Told::Right)];
        condition.note(BTreeMap::from(told), false, None);
        assert_eq!(silenced(&condition), [true, false, true]);
    }

    #[test]
    fn tokens_that_agree_make_the_endpoint_sick_until_one_is_right() {
        let mut condition = Condition::default();
        probed(&mut condition, &[(HOSTILE, wrong()), (HONEST, wrong())]);
        assert_eq!(silenced(&condition), [true; 3], "about a token that was never asked about too");
        probed(&mut condition, &[(HOSTILE, Told::Nothing), (HONEST, Told::Nothing)]);
        condition.note(BTreeMap::from([(HONEST, Told::Right)]), false, None);
        assert_eq!(
            silenced(&condition),
            [true; 3],
            "no answer, or one at an old head, ends nothing"
        );
        probed(&mut condition, &[(HOSTILE, wrong()), (HONEST, wrong()), (OTHER, Told::Right)]);
        assert_eq!(silenced(&condition), [true, true, false]);
        probed(&mut condition, &[(HONEST, Told::Right)]);
        assert_eq!(silenced(&condition), [true, false, false]);
    }

    #[test]
    fn whoever_is_wrong_about_very_many_tokens_is_sick_itself() {
        let mut condition = Condition::default();
        for n in 0..=u8::try_from(WRONG_MAX).unwrap() {
            // Each beside one that is right, so that no two agree.
            let token = Address::repeat_byte(100 + n);
            probed(&mut condition, &[(token, wrong()), (HONEST, Told::Right)]);
        }
        assert_eq!(silenced(&condition), [true; 3]);
    }
}
