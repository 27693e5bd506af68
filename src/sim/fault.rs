//! What an endpoint can do wrong, as public reports describe it. Several faults can be on at once.

use super::chain::View;
use crate::domain::ChainId;

/// One thing an endpoint does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Answers HTTP 503 and nothing useful.
    Down,
    /// The head, and everything beyond it, stays as it was when the fault was set; no error says so.
    FrozenHead,
    /// `eth_getLogs` finds nothing.
    EmptyLogs,
    /// `authorizationState` is always false.
    SaysUnused,
    /// Serves another chain's id.
    WrongChain,
    /// Answers HTTP 429.
    RateLimited,
    /// There is no code at the token's address.
    NoCode,
    /// Refuses log ranges of more than this many blocks.
    LogRangeLimit(u64),
}

/// A [`Fault`] without its particulars, to clear it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is the fault of the same name")]
pub enum FaultKind {
    Down,
    FrozenHead,
    EmptyLogs,
    SaysUnused,
    WrongChain,
    RateLimited,
    NoCode,
    LogRangeLimit,
}

impl Fault {
    /// Which fault this is.
    pub const fn kind(self) -> FaultKind {
        match self {
            Self::Down => FaultKind::Down,
            Self::FrozenHead => FaultKind::FrozenHead,
            Self::EmptyLogs => FaultKind::EmptyLogs,
            Self::SaysUnused => FaultKind::SaysUnused,
            Self::WrongChain => FaultKind::WrongChain,
            Self::RateLimited => FaultKind::RateLimited,
            Self::NoCode => FaultKind::NoCode,
            Self::LogRangeLimit(_) => FaultKind::LogRangeLimit,
        }
    }
}

/// Everything one endpoint does wrong at the moment.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    on: Vec<Fault>,
    frozen: Option<View>,
}

impl Faults {
    /// Turns a fault on; `view` is the chain as it is now. A head that is frozen already stays where it is.
    pub fn set(&mut self, fault: Fault, view: &View) {
        self.on.retain(|other| other.kind() != fault.kind());
        self.on.push(fault);
        if fault == Fault::FrozenHead && self.frozen.is_none() {
            self.frozen = Some(view.clone());
        }
    }

    /// Turns a fault off, if it was on.
    pub fn clear(&mut self, kind: FaultKind) {
        self.on.retain(|fault| fault.kind() != kind);
        if kind == FaultKind::FrozenHead {
            self.frozen = None;
        }
    }

    /// Whether this fault is on.
    pub fn has(&self, fault: Fault) -> bool {
        self.on.contains(&fault)
    }

    /// The view the endpoint is stuck at, if it is.
    pub fn frozen(&self) -> Option<&View> {
        self.frozen.as_ref()
    }

    /// The widest log range the endpoint takes, if it is limited.
    pub fn log_range_max(&self) -> Option<u64> {
        self.on.iter().find_map(|fault| match fault {
            Fault::LogRangeLimit(blocks) => Some(*blocks),
            _ => None,
        })
    }

    /// The chain id the endpoint gives for a chain that has `true_id`.
    pub fn chain_id(&self, true_id: ChainId) -> ChainId {
        match self.has(Fault::WrongChain) {
            true => ChainId::new(true_id.get() ^ 1),
            false => true_id,
        }
    }
}
