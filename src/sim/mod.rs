//! A simulated chain that speaks real JSON-RPC over HTTP, and the format of case files.
//!
//! Used by `demo`, `drill`, benches and tests only: the daemon never depends on it. The chain lives in
//! virtual time and holds one EIP-3009 token, Permit2 and x402's proxies; it has no EVM, no accounts, no gas market and no mempool.
//! What a reader of the chain cannot see is left out, and what it can see is as a real node shows it.
//!
//! - [`chain`]: blocks, transactions, nonce states and reorgs, as plain state.
//! - [`node`]: JSON-RPC requests answered from that state.
//! - [`fault`]: what an endpoint can do wrong.
//! - [`server`]: endpoints on loopback.
//! - [`scenario`] and [`expectation`]: stories with a known right ending.
//! - [`gateway`]: the gateway's side of the database.
//! - [`runner`] and [`stage`]: a story played on a fresh database with the daemon's own worker.

mod abi;
pub mod chain;
pub mod expectation;
pub mod fault;
pub mod gateway;
pub mod node;
mod permit2;
pub mod replay;
pub mod runner;
pub mod scenario;
pub mod server;
pub mod stage;
mod values;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use chain::{Authorized, ChainState, FACILITATOR, Included, SimError, SimSettings};
pub use fault::{Fault, FaultKind};
pub use permit2::Permitted;
pub use server::{SimServer, SimServerError};

/// A simulated chain, shared between whoever makes things happen on it and the servers that show it.
#[derive(Debug, Clone)]
pub struct SimChain(Arc<Mutex<ChainState>>);

impl SimChain {
    /// A chain with nothing but its genesis block.
    pub fn new(settings: SimSettings) -> Self {
        Self(Arc::new(Mutex::new(ChainState::new(settings))))
    }

    /// The chain's state, for as long as the guard lives. Never hold it across an `await`.
    pub fn lock(&self) -> MutexGuard<'_, ChainState> {
        // Every change to the state is complete before anything in it can panic, so a poisoned lock
        // holds a whole state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
