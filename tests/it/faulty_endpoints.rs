//! Hundreds of payments of every fate over days, read by the real worker through endpoints that go wrong in
//! every way there is: every order ends right, nothing fails from silence (I2), and every unit that reached
//! the merchant is accounted for once (I4).
//!
//! One seed is played every time, so that a failure is about the change at hand. `RECONCILED_TEST_SEED` plays
//! another, `RECONCILED_TEST_SOAK` so many more, rolled anew.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod books;
mod fates;
mod ground;
mod known_answers;
mod story;
mod truth;

use self::ground::{Ground, OnAnvil, OnSim};
use self::story::{Endpoints, Story};
use crate::support::dice::{Dice, from_environment, seed};
use crate::support::worker::Home;

/// Payments in one story.
const PAYMENTS: usize = 500;

/// The seed played unless another is asked for. It once found endpoints silenced for good by another's lie.
const SEED: u64 = 4_240_147_534;

/// Plays one seed, and those that a soak adds.
async fn play<G: Ground>(what: &str, endpoints: Endpoints, home: impl AsyncFn() -> Home) {
    let first = from_environment("RECONCILED_TEST_SEED").unwrap_or(SEED);
    let mut more = Dice::new(seed());
    let soak = from_environment("RECONCILED_TEST_SOAK").unwrap_or(0);
    let seeds = std::iter::once(first).chain((0..soak).map(|_| more.roll(0..1 << 32)));
    for seed in seeds {
        eprintln!("{what}: RECONCILED_TEST_SEED={seed}");
        let mut story = Story::<G>::start(home().await, endpoints, PAYMENTS, seed).await;
        story.play().await;
        eprintln!("{what}: seed {seed}: {}", story.figures());
        story.check_ending().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i2_faulty_endpoints_fail_nothing_that_landed_with_a_quorum_of_one() {
    let endpoints = Endpoints::Honest { count: 2 };
    play::<OnAnvil>("anvil, quorum 1 of 2", endpoints, async || Home::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i2_one_lying_endpoint_of_three_fails_and_pays_nothing_with_a_quorum_of_two() {
    let home = async || Home::postgres().await;
    play::<OnAnvil>("anvil, quorum 2 of 3", Endpoints::OneLies, home).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i2_faulty_endpoints_of_the_simulated_node_fail_nothing_that_landed() {
    let (endpoints, home) = (Endpoints::Honest { count: 2 }, async || Home::postgres().await);
    play::<OnSim>("simulated, quorum 1 of 2", endpoints, home).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i2_one_lying_endpoint_of_three_of_the_simulated_node_fails_and_pays_nothing() {
    play::<OnSim>("simulated, quorum 2 of 3", Endpoints::OneLies, async || Home::sqlite()).await;
}
