//! Everything that needs a real database, a real EVM or the real binary. `./test.sh` brings them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on should panic"
)]

mod chain_reader;
mod costs;
mod faulty_endpoints;
mod ledger_cost;
mod ledger_permits;
mod process;
mod reconciling;
mod sampling;
mod sim_node;
mod store_conformance;
mod support;
