//! Who watches a story, and what it is told.

use std::time::Duration;

use crate::domain::{Outcome, PaymentId};
use crate::sim::Fault;
use crate::sim::scenario::{ChainAct, GatewaySet, RefundAct, StoryPayment};

/// Something the runner's audience may want to hear of.
#[derive(Debug, Clone, PartialEq)]
pub enum Told {
    /// The gateway wrote a payment's row.
    PaymentWritten(StoryPayment),
    /// The gateway changed a row.
    GatewaySet(GatewaySet),
    /// Something happened on the chain.
    Chain(ChainAct),
    /// The refund process did something.
    Refund(RefundAct),
    /// An endpoint misbehaves, or is well again.
    Rpc {
        /// Which.
        endpoint: usize,
        /// How.
        fault: Fault,
        /// Whether it starts.
        starts: bool,
    },
    /// The daemon was killed and started again.
    Killed,
    /// A payment was resolved.
    Resolved {
        /// Which.
        payment: PaymentId,
        /// How.
        outcome: Outcome,
        /// From its transfer's block, if it has one.
        delay: Option<Duration>,
    },
}

/// Hears what happens, when it happens in the story, and may take its time.
#[async_trait::async_trait]
pub trait Audience: Send {
    /// Something happened at this time of the story.
    async fn hear(&mut self, at: Duration, told: Told);
    /// The story goes on from one moment to the next.
    async fn step(&mut self, from: Duration, to: Duration);
}

/// Nobody listens.
pub struct Nobody;

#[async_trait::async_trait]
impl Audience for Nobody {
    async fn hear(&mut self, _at: Duration, _told: Told) {}
    async fn step(&mut self, _from: Duration, _to: Duration) {}
}
