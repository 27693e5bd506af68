//! The decisions, as pure functions over plain values.
//!
//! [`judge`] turns what the chain showed into a [`Verdict`]; [`resolve`] turns a verdict and freshly
//! locked rows into a [`Resolution`]. Nothing here performs I/O, reads a clock or is async: a decision
//! can be tested, replayed and argued about without a database or a chain.

mod agreement;
mod conservation;
mod decision;
mod evidence;
mod flag;
mod ids;
mod ledger;
mod order;
mod payment;
mod policy;
mod refund;
mod refund_search;
mod resolution;
mod scan;
mod standing;
#[cfg(test)]
mod tests;
mod time;
mod verdict;
mod watch;

pub use agreement::disagreements;
pub use conservation::{
    Account, Drift, FlagState, KnownTransfer, LedgerKey, LedgerPage, PageAccount, Receiver,
    RefundsAgain, Scanned, Totals, Unaccounted, Unbacked, log_subject, pays_another,
    settled_without_transfer,
};
pub use decision::resolve;
pub use evidence::{
    BlockRef, Consumption, ConsumptionKind, EndpointName, Evidence, LogRef, NonceState,
    Observation, ReadFailure, ReadFailureKind, Reading, SeenTransfer, failure_of,
};
pub use flag::{CLOSED_BY_ITSELF, Closing, Flag, FlagKind, GoneFlag, RaisedFlag, StoredFlag};
pub use ids::{Amount, ChainId, OrderId, PaymentId, Sku};
pub use ledger::{
    Decided, Identifier, IdentifierChange, Ledger, RecordedTransfer, ReservationChange,
};
pub(crate) use order::column_code;
pub use order::{IdentifierStatus, Order, OrderKind, OrderStatus, Reservation, ReservationStatus};
pub use payment::{
    MalformedPayment, Method, Payment, PaymentStatus, Rail, RawPayment, Sibling, Terms,
};
pub use policy::{LatePolicy, PaidAfter, Policy};
pub use refund::{RefundOwed, RefundReason, RefundStatus, refund_nonce};
pub use refund_search::{
    NonceUse, RefundFinding, RefundPaid, RefundPolicy, RefundReading, RefundSearch, SearchProblem,
    SearchedRefund, judge_refund,
};
pub use resolution::{
    Claim, Event, EventKind, OrderChange, Outcome, RefundChange, Resolution, Situation,
    StockChange, TransferChange, WatchChange,
};
pub use scan::{
    Agreement, Answers, Cursor, PageEnd, ScanAnswer, ScanHead, ScannedTransfer, agreement, enough,
    next_width,
};
pub use standing::FlaggedPage;
pub use time::{BlockTime, Timestamp};
pub use verdict::{Finality, Inconclusive, Settlement, Transfer, Unsettleable, Verdict, judge};
pub use watch::{DueTimes, Judged, NextCheck, Phase, Watch};
