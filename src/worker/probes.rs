//! Asks every endpoint now and then what the answer to is known, so that a sick one is found out before it
//! is believed, and a well one is used again.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use super::check::WatchedChain;
use super::driver::{Activation, Stop, Task};
use crate::clock::Clock;
use crate::domain::ChainId;

/// Probes the endpoints of all chains. A sick endpoint is no failure of this task: it has its own metric.
pub struct Probes {
    /// The chains.
    pub chains: BTreeMap<ChainId, Arc<WatchedChain>>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
}

#[async_trait]
impl Task for Probes {
    fn name(&self) -> &'static str {
        "probes"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        for watched in self.chains.values() {
            // It touches no database, so it may be broken off.
            tokio::select! {
                _ = watched.chain.probe(self.clock.now()) => {}
                () = stop.requested() => break,
            }
        }
        Ok(Activation::default())
    }
}
