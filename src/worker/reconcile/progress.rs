//! Where a run stands, and what it found: both are kept as JSON in the run's row.

use std::collections::BTreeMap;
use std::fmt;

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};

use crate::domain::{
    BlockRef, BlockTime, ChainId, Drift, LedgerKey, PaymentId, Receiver, Totals, Unaccounted,
};
use crate::errors::error_chain;
use crate::store::{Run, SettledKey, StoreError};

/// The most problems and unaccounted transfers a report tells of.
const TOLD_MAX: usize = 20;

/// What a run is doing, and where it reads on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Open payments to chain.
    Watches {
        /// The last payment read.
        after: Option<PaymentId>,
    },
    /// Chain to ledger: reading the chain.
    Scan {
        /// The chain being read; `None` before the first.
        chain: Option<ChainId>,
        /// Pages read of it.
        pages: u32,
    },
    /// Ledger to chain.
    Unproven {
        /// The last payment looked at.
        after: Option<SettledKey>,
    },
    /// Looking through open flags for those whose cause is gone.
    Flags {
        /// The row of the last one looked at.
        after: i64,
    },
    /// Accounting for what arrived.
    Accounts(AccountsPlace),
    /// Checking the payments whose money was found.
    Settle {
        /// Batches checked.
        batches: u32,
    },
    /// Done.
    Over,
}

/// Where the accounting stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountsPlace {
    /// 0, or 1 after what was found in round 0 was settled.
    pub round: u8,
    /// The chain; `None` before the first.
    pub chain: Option<ChainId>,
    /// Since when its transfers are accounted for.
    pub since: BlockTime,
    /// The last transfer that was.
    pub after: LedgerKey,
}

impl Stage {
    /// For people and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Watches { .. } => "open payments to chain",
            Self::Scan { .. } => "chain to ledger",
            Self::Unproven { .. } => "ledger to chain",
            Self::Flags { .. } => "open flags",
            Self::Accounts(_) => "accounts",
            Self::Settle { .. } => "checking what was found",
            Self::Over => "done",
        }
    }
}

/// Where a run stands, for people: something of it moves with every step.
impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match self {
            Self::Scan { chain: Some(chain), pages } => {
                write!(f, "{name}, chain {chain}, page {}", u64::from(*pages) + 1)
            }
            Self::Settle { batches } => write!(f, "{name}, batch {}", u64::from(*batches) + 1),
            _ => f.write_str(name),
        }
    }
}

/// How much was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Open payments read.
    pub payments_read: u64,
    /// Transfers the scan had not seen before.
    pub transfers_found: u64,
    /// Settled payments that no transfer was known for, and whose chain was read for it.
    pub settled_read: u64,
    /// Transfers accounted for.
    pub transfers_accounted: u64,
    /// Payments found to be settled that nobody had resolved.
    pub taken_up: u64,
    /// Flags about money raised.
    pub flags_raised: u64,
    /// Flags closed because their cause is gone.
    #[serde(default)]
    pub flags_closed: u64,
}

/// What is kept of one receiver while the accounting goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ReceiverTotals {
    /// The chain.
    pub chain_id: ChainId,
    /// Who is paid.
    pub receiver: Receiver,
    /// Since when.
    pub since: BlockTime,
    /// Up to which block.
    pub up_to: BlockRef,
    /// How much.
    pub totals: Totals,
}

/// Where a run stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What it is doing.
    pub stage: Stage,
    /// What it has done.
    pub counts: Counts,
    /// What went wrong.
    pub problems: Vec<String>,
    /// Totals so far.
    pub(super) totals: Vec<ReceiverTotals>,
    /// What is not accounted for exactly once.
    pub(super) unaccounted: Vec<Unaccounted>,
}

impl Progress {
    /// Where this run stands. A version that cannot read what another wrote starts it anew: everything a
    /// run does can be done again.
    pub(super) fn of(run: &Run) -> Self {
        let stands = run.progress.clone().and_then(|value| serde_json::from_value(value).ok());
        stands.unwrap_or_else(|| Self {
            stage: Stage::Watches { after: None },
            counts: Counts::default(),
            problems: Vec::new(),
            totals: Vec::new(),
            unaccounted: Vec::new(),
        })
    }

    /// Reads progress for display.
    pub fn read(run: &Run) -> Self {
        Self::of(run)
    }

    pub(super) fn problem(&mut self, problem: String) {
        tracing::warn!(problem, "full reconcile: something could not be done");
        if self.problems.len() < TOLD_MAX {
            self.problems.push(problem);
        }
    }

    /// What came of a part of a step. What the database refuses is told of and costs that part alone (I11);
    /// one that cannot be reached costs the attempt at the run.
    pub(super) fn or_told<T>(
        &mut self,
        part: &str,
        result: Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error @ StoreError::Unreachable(_)) => Err(error),
            Err(error) => {
                self.problem(format!("{part}: {}", error_chain(&error)));
                Ok(None)
            }
        }
    }

    /// A chain whose accounting is not complete has no totals: what was added up so far would look as if
    /// nothing were missing.
    pub(super) fn leave_out(&mut self, chain_id: ChainId) {
        self.totals.retain(|kept| kept.chain_id != chain_id);
    }

    /// Forgets what was accounted for: all of it is accounted for anew.
    pub(super) fn forget_accounts(&mut self) {
        self.totals.clear();
        self.unaccounted.clear();
    }

    pub(super) fn unaccounted(&mut self, found: Vec<Unaccounted>) {
        let room = TOLD_MAX.saturating_sub(self.unaccounted.len());
        self.unaccounted.extend(found.into_iter().take(room));
    }

    pub(super) fn add_totals(&mut self, chain_id: ChainId, totals: &BTreeMap<Receiver, Totals>) {
        for kept in self.totals.iter_mut().filter(|kept| kept.chain_id == chain_id) {
            if let Some(more) = totals.get(&kept.receiver) {
                kept.totals.merge(more);
            }
        }
    }

    pub(super) fn into_report(self) -> Report {
        let receivers = self.totals.into_iter().map(|kept| ReceiverReport {
            chain_id: kept.chain_id,
            token: kept.receiver.token,
            pay_to: kept.receiver.pay_to,
            since: kept.since,
            up_to: kept.up_to,
            drift: kept.totals.drift(),
            totals: kept.totals,
        });
        Report {
            counts: self.counts,
            receivers: receivers.collect(),
            unaccounted: self.unaccounted,
            problems: self.problems,
        }
    }
}

/// What a run found about one receiver (I4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiverReport {
    /// The chain.
    pub chain_id: ChainId,
    /// The token.
    pub token: Address,
    /// The address.
    pub pay_to: Address,
    /// Block times from here on are accounted for.
    pub since: BlockTime,
    /// Up to this block.
    pub up_to: BlockRef,
    /// Totals in base units.
    #[serde(flatten)]
    pub totals: Totals,
    /// What arrived less what is accounted for; zero when all is well.
    pub drift: Drift,
}

/// What a run found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// How much was done.
    #[serde(flatten)]
    pub counts: Counts,
    /// Receiver by receiver; one whose accounting did not come to its end is not among them.
    pub receivers: Vec<ReceiverReport>,
    /// Some of what is not accounted for exactly once.
    pub unaccounted: Vec<Unaccounted>,
    /// What could not be done.
    pub problems: Vec<String>,
}

impl Report {
    /// Whether everything was done, everything is accounted for, and nobody needs to look.
    pub fn is_well(&self) -> bool {
        let balanced = self.receivers.iter().all(|receiver| receiver.drift.is_zero());
        balanced && self.counts.flags_raised == 0 && self.problems.is_empty()
    }

    pub(super) fn log(&self, run: i64) {
        let Counts {
            payments_read,
            transfers_found,
            settled_read,
            taken_up,
            flags_raised,
            flags_closed,
            ..
        } = self.counts;
        tracing::info!(
            run,
            payments_read,
            transfers_found,
            settled_read,
            taken_up,
            flags_raised,
            flags_closed,
            "full reconcile done"
        );
        for receiver in self.receivers.iter().filter(|receiver| !receiver.drift.is_zero()) {
            tracing::error!(
                chain = %receiver.chain_id, token = %receiver.token, pay_to = %receiver.pay_to,
                drift = %receiver.drift,
                "money is not accounted for exactly once; `reconciled reconcile --once` says which"
            );
        }
    }
}
