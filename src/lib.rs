//! `reconciled` finds out what happened to payments whose settlement outcome nobody knows.
//!
//! It runs beside a payment gateway, shares its database, reads the chain, and writes down the truth:
//! the order is paid, or failed, or somebody is owed a refund. It never settles, signs or sends anything.
//!
//! One direction, no back and forth:
//!
//! ```text
//! lease due watches -> read the chain in batches -> judge -> resolve -> apply in one transaction
//!    store               chain                     domain   domain     store
//! ```

// Commands write through `commands::output`: the macros of the standard library panic when `head` has left.
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod chain;
pub mod cli;
pub mod clock;
pub mod commands;
pub mod config;
pub mod domain;
pub mod errors;
pub mod http;
pub mod schedule;
pub mod sim;
pub mod store;
pub mod telemetry;
pub mod worker;
