//! What is asked about one payment, and which payments are searched for together.

use std::time::Duration;

use alloy_primitives::{Address, B256, U256};

use super::logs::LogsOf;
use super::multicall::StateCall;
use super::{ChainSettings, eip3009, permit2};
use crate::domain::{Amount, Method, Payment, ReadFailure, Timestamp};

/// What is asked about one payment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    /// Who keeps the authorization's state.
    pub(super) keeper: Keeper,
    /// The token contract.
    pub(super) token: Address,
    /// Who pays.
    pub(super) payer: Address,
    /// Who is to be paid.
    pub(super) pay_to: Address,
    /// How much was asked for.
    pub(super) amount: Amount,
    /// The authorization's nonce.
    pub(super) nonce: B256,
    /// Not used before this, by the gateway's clock.
    pub(super) started_at: Timestamp,
}

impl Asked {
    /// About an EIP-3009 authorization of which nothing is claimed.
    pub(super) fn known(token: Address, payer: Address, nonce: B256) -> Self {
        Self {
            keeper: Keeper::Token,
            token,
            payer,
            pay_to: Address::ZERO,
            amount: Amount::ZERO,
            nonce,
            started_at: Timestamp::from_millis(0),
        }
    }
}

/// Who keeps the state of an authorization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Keeper {
    /// The token itself (EIP-3009).
    Token,
    /// Permit2, for all tokens of an owner.
    Permit2,
}

impl Keeper {
    /// The logs in which it shows how an authorization was used.
    pub(super) const fn logs(self) -> LogsOf {
        match self {
            Self::Token => LogsOf::Uses,
            Self::Permit2 => LogsOf::Permits,
        }
    }
}

impl From<&Payment> for Asked {
    fn from(payment: &Payment) -> Self {
        Self {
            keeper: match payment.method {
                Method::Permit2 => Keeper::Permit2,
                // A Tempo payment is never asked about this way; if it were, no token would answer.
                Method::Eip3009 | Method::Tempo => Keeper::Token,
            },
            token: payment.token,
            payer: payment.payer,
            pay_to: payment.pay_to,
            amount: payment.amount,
            nonce: payment.nonce,
            started_at: payment.started_at().min(payment.created_at),
        }
    }
}

impl Asked {
    /// The call for its authorization's state.
    pub(super) fn state_call(&self, settings: &ChainSettings) -> StateCall {
        match self.keeper {
            Keeper::Token => eip3009::state_call(self),
            Keeper::Permit2 => permit2::state_call(settings, self),
        }
    }

    /// Whether the authorization is used, by the word its keeper answered with.
    pub(super) fn is_used(&self, word: U256) -> Result<bool, ReadFailure> {
        match self.keeper {
            Keeper::Token => eip3009::is_used(self, word),
            Keeper::Permit2 => Ok(permit2::is_used(self, word)),
        }
    }
}

/// Payments whose logs are searched together: of one keeper, at most `count_max`, and none that started
/// more than `gap_max` after the one before it, so that an old payment does not widen everybody's range.
/// None is empty.
pub(super) fn groups(
    asked: &[Asked],
    mut used: Vec<usize>,
    gap_max: impl Fn(Keeper) -> Duration,
    count_max: usize,
) -> Vec<Vec<usize>> {
    used.sort_by_key(|index| (asked[*index].keeper, asked[*index].started_at));
    used.chunk_by(|one, next| {
        let (one, next) = (&asked[*one], &asked[*next]);
        one.keeper == next.keeper && next.started_at.since(one.started_at) <= gap_max(one.keeper)
    })
    .flat_map(|near| near.chunks(count_max).map(<[usize]>::to_vec))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_payment_is_searched_apart() {
        let at = |keeper: Keeper, secs: i64| Asked {
            keeper,
            token: Address::ZERO,
            payer: Address::ZERO,
            pay_to: Address::ZERO,
            amount: Amount::ZERO,
            nonce: B256::ZERO,
            started_at: Timestamp::from_millis(secs * 1_000),
        };
        let times = [1_000, 5, 1_030, 1_060, 1_061];
        let mut asked = times.map(|secs| at(Keeper::Token, secs)).to_vec();
        let gap = |_| Duration::from_secs(30);
        let grouped = groups(&asked, vec![0, 1, 2, 3, 4], gap, 3);
        assert_eq!(grouped, [vec![1], vec![0, 2, 3], vec![4]]);
        assert_eq!(groups(&asked, vec![4, 2], gap, 3), [vec![2], vec![4]]);
        // Another keeper's uses are other logs.
        asked.push(at(Keeper::Permit2, 1_031));
        let grouped = groups(&asked, vec![0, 2, 5], gap, 3);
        assert_eq!(grouped, [vec![0, 2], vec![5]]);
    }
}
