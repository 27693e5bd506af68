//! A simulated chain that speaks real JSON-RPC over HTTP, and the scenario runner.
//!
//! Used by `demo`, `drill` and tests only: the daemon never depends on it.

pub mod gateway;
