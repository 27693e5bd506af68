//! The real binary as a process, beside a gateway that is played, on a real PostgreSQL (or SQLite file)
//! and a real EVM. What a part does by itself is its own suite's; here it is what somebody who runs the
//! daemon would see: its tables, pages, logs, commands and exit codes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod bad_input;
mod demo;
mod fates;
mod key_free;
mod kills;
mod ledger;
mod pages;
mod permits;
mod pipes;
mod refunds;
mod reorgs;
mod replicas;
mod scene;
mod schedules;
mod stops;
mod unreachable;
