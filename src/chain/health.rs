//! Whether an endpoint can be believed: asked now and then what the answer to is known beforehand.
//!
//! An endpoint that gives a wrong answer to such a question is sick, and gives no evidence until it answers
//! it rightly: a probe that fails, or that cannot ask, ends nothing. One that merely fails, stands still or
//! lags is shown as such here; what that means for a read is seen to by the read. Nothing here proves
//! anything about a payment, and an endpoint that lies only now and then may never be found out.

mod condition;
mod learnt;
mod probe;
mod quiz;

use std::fmt;

use alloy_primitives::{Address, B256};

use super::asked::Asked;
pub(super) use condition::Condition;
pub(super) use learnt::Learnt;

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

impl KnownUsed {
    /// The question whether it is used.
    fn asked(&self) -> Asked {
        Asked::known(self.token, self.payer, self.nonce)
    }
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
    /// The log of an authorization that is configured as used is not there.
    KnownLogMissing,
    /// The log of a learnt one is not there: it may only have been kept for too short a time.
    LearntLogMissing,
    /// Too many of the requests to it fail.
    ErrorRate,
}

impl Sickness {
    /// Every one of them.
    pub const ALL: [Self; 10] = [
        Self::Failing,
        Self::WrongChain,
        Self::StaleHead,
        Self::Lagging,
        Self::NoCode,
        Self::RandomNonceUsed,
        Self::KnownNonceUnused,
        Self::KnownLogMissing,
        Self::LearntLogMissing,
        Self::ErrorRate,
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
            Self::LearntLogMissing => "learnt_log_missing",
            Self::ErrorRate => "error_rate",
        }
    }

    /// Whether it is a wrong answer, which stays so until the right one is given. The others are seen to by
    /// every read itself, or by whoever counts errors.
    const fn is_wrong_answer(self) -> bool {
        !matches!(
            self,
            Self::Failing
                | Self::WrongChain
                | Self::StaleHead
                | Self::Lagging
                | Self::LearntLogMissing
                | Self::ErrorRate
        )
    }
}

impl fmt::Display for Sickness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

/// What a look at an endpoint came to; `None`: it is well.
pub type Diagnosis = Option<(Sickness, String)>;
