//! The loops: discovery finds payments to follow, the targeted checks read those that are due, the full
//! reconcile reads all that are open and compares the books with the chain, refunds are looked for on the chain,
//! sampling and tuning fit the repeat schedules, and maintenance prunes. One [`driver`] runs them all.
//!
//! A task is an idempotent function without input: a hint may wake it, never steer it, so that the path
//! after a restart is the only path. Nothing here decides about a payment (that is the domain's), and no
//! task retries inside itself: its next activation is the retry.

mod check;
mod discovery;
pub mod driver;
mod maintenance;
mod probes;
mod read;
mod reconcile;
mod refunds;
pub mod sampling;
pub mod schedules;
mod targeted;
pub mod tune;

pub use check::{Checker, CheckerSettings, Leased, Read, WatchedChain};
pub use discovery::Discovery;
pub use driver::{Activation, Driver, Stop, Stopper, Task, TaskState};
pub use maintenance::Maintenance;
pub use probes::Probes;
pub use reconcile::{
    AskForRuns, Counts, Progress, ReceiverReport, Reconcile, ReconcileSettings, Reconciler, Report,
    RunAudience, RunEnd, ScanStart, Stage, Unheard, WatchedReceiver,
};
pub use refunds::{RefundSettings, Refunds};
pub use sampling::{Sampling, Waits};
pub use schedules::Schedules;
pub use targeted::Targeted;
pub use tune::Tuning;
