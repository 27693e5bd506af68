//! Runs tasks: each on its own period, woken early by a signal, never overlapping itself.
//!
//! A panic in a task is caught and counted, and the task goes on with its next activation. Stopping is a
//! request: a task finishes what it holds and returns; nothing is aborted, because a database future must
//! not be dropped half way.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::clock::Clock;
use crate::domain::Timestamp;
use crate::errors::error_chain;
use crate::telemetry::{Metrics, seconds};

/// A request to stop, seen by everybody who holds a clone.
#[derive(Clone, Debug)]
pub struct Stop {
    requested: watch::Receiver<bool>,
    patience: Duration,
}

/// The other end of [`Stop`].
#[derive(Debug)]
pub struct Stopper(watch::Sender<bool>);

impl Stop {
    /// A pair of ends. After a request, work that can be broken off may go on for `patience`.
    pub fn new(patience: Duration) -> (Stopper, Self) {
        let (sender, requested) = watch::channel(false);
        (Stopper(sender), Self { requested, patience })
    }

    /// Whether somebody asked to stop.
    pub fn is_requested(&self) -> bool {
        *self.requested.borrow()
    }

    /// Waits for the request; a [`Stopper`] that is gone counts as one.
    pub async fn requested(&self) {
        // An error means that the sender is gone: nobody can ask any more, so nobody wants us.
        let _ = self.requested.clone().wait_for(|stop| *stop).await;
    }

    /// Waits for the request, and then for the end of patience.
    pub async fn patience_over(&self) {
        self.requested().await;
        tokio::time::sleep(self.patience).await;
    }
}

impl Stopper {
    /// Asks everybody to stop.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

/// What a task wants after a good activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activation {
    /// Look again in this time, if that is before the period is over.
    pub again_in: Option<Duration>,
}

/// An idempotent piece of work without input.
#[async_trait]
pub trait Task: Send + Sync + 'static {
    /// For logs and metrics.
    fn name(&self) -> &'static str;

    /// Does what there is to do, and returns soon after a stop was requested.
    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation>;
}

/// What became of a task's activations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TaskState {
    /// The task.
    pub name: &'static str,
    /// When it last ended well.
    pub last_success: Option<Timestamp>,
    /// What went wrong last, unless it ended well since.
    pub last_error: Option<String>,
    /// Failures in a row.
    pub failures_in_a_row: u32,
}

/// Runs tasks until it is told to stop.
pub struct Driver {
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    stop: Stop,
    states: Vec<Arc<Mutex<TaskState>>>,
    running: Vec<JoinHandle<()>>,
}

/// The wait after a first failure, doubled with each one after it.
const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_DOUBLINGS_MAX: u32 = 6;
/// The longest wait between two failing activations, whatever the task's own period.
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// The shortest wait between two activations.
const PAUSE_MIN: Duration = Duration::from_millis(5);

impl Driver {
    /// A driver without tasks.
    pub fn new(clock: Arc<dyn Clock>, metrics: Metrics, stop: Stop) -> Self {
        Self { clock, metrics, stop, states: Vec::new(), running: Vec::new() }
    }

    /// Starts a task: activated at once, then every `period`, and whenever `wake` is signalled.
    pub fn start(&mut self, task: Arc<dyn Task>, period: Duration, wake: Arc<Notify>) {
        let name = task.name();
        self.metrics.expect_task(name);
        let state = Arc::new(Mutex::new(TaskState { name, ..TaskState::default() }));
        self.states.push(Arc::clone(&state));
        let runner = Runner {
            task,
            period,
            wake,
            stop: self.stop.clone(),
            clock: Arc::clone(&self.clock),
            metrics: self.metrics.clone(),
            state,
        };
        self.running.push(tokio::spawn(runner.run()));
    }

    /// Lets others see what became of the tasks.
    pub fn states(&self) -> Vec<Arc<Mutex<TaskState>>> {
        self.states.clone()
    }

    /// Waits until every task has returned. Call after the stop was requested.
    pub async fn finished(self) {
        for running in self.running {
            if let Err(error) = running.await {
                tracing::error!(%error, "a task's loop ended badly");
            }
        }
    }
}

struct Runner {
    task: Arc<dyn Task>,
    period: Duration,
    wake: Arc<Notify>,
    stop: Stop,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    state: Arc<Mutex<TaskState>>,
}

impl Runner {
    async fn run(mut self) {
        while !self.stop.is_requested() {
            let pause = self.activate().await;
            tokio::select! {
                () = self.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
                () = self.stop.requested() => {}
            }
        }
    }

    /// One activation, in a task of its own so that a panic ends only that. Returns how long to wait.
    async fn activate(&mut self) -> Duration {
        let name = self.task.name();
        let task = Arc::clone(&self.task);
        let stop = self.stop.clone();
        let outcome = tokio::spawn(async move { task.activate(&stop).await }).await;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let error = match outcome {
            Ok(Ok(activation)) => {
                let now = self.clock.now();
                state.last_success = Some(now);
                state.last_error = None;
                state.failures_in_a_row = 0;
                self.metrics.task_last_success.with_label_values(&[name]).set(seconds(now));
                let again_in = activation.again_in.unwrap_or(self.period);
                return again_in.clamp(PAUSE_MIN, self.period.max(PAUSE_MIN));
            }
            Ok(Err(error)) => error_chain(error.as_ref()),
            Err(join) => {
                self.metrics.task_panics.with_label_values(&[name]).inc();
                format!("panicked: {join}")
            }
        };
        self.metrics.task_failures.with_label_values(&[name]).inc();
        state.failures_in_a_row = state.failures_in_a_row.saturating_add(1);
        let doublings = state.failures_in_a_row.min(BACKOFF_DOUBLINGS_MAX);
        let pause = BACKOFF_MIN.saturating_mul(1 << doublings).min(BACKOFF_MAX);
        tracing::error!(task = name, error, retry_in_secs = pause.as_secs_f64(), "a task failed");
        state.last_error = Some(error);
        pause
    }
}

#[cfg(test)]
mod tests;
