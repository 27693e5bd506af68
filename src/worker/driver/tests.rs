//! What a task can rely on: it never overlaps itself, a panic ends one activation and no more, a signal
//! wakes it, and a stop waits for it.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::bail;

use super::*;
use crate::clock::SystemClock;

#[derive(Default)]
struct Probe {
    activations: AtomicU32,
    running: AtomicU32,
    most_at_once: AtomicU32,
    finished: AtomicU32,
}

/// Takes `takes`, and on its first activation does `first`.
struct Probed {
    probe: Arc<Probe>,
    takes: Duration,
    first: fn() -> anyhow::Result<()>,
}

#[async_trait]
impl Task for Probed {
    fn name(&self) -> &'static str {
        "probed"
    }

    async fn activate(&self, _stop: &Stop) -> anyhow::Result<Activation> {
        let running = self.probe.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.probe.most_at_once.fetch_max(running, Ordering::SeqCst);
        let nth = self.probe.activations.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(self.takes).await;
        self.probe.running.fetch_sub(1, Ordering::SeqCst);
        if nth == 0 {
            (self.first)()?;
        }
        self.probe.finished.fetch_add(1, Ordering::SeqCst);
        Ok(Activation::default())
    }
}

struct Running {
    probe: Arc<Probe>,
    wake: Arc<Notify>,
    stopper: Stopper,
    driver: Driver,
    metrics: Metrics,
}

fn start(takes: Duration, period: Duration, first: fn() -> anyhow::Result<()>) -> Running {
    let (stopper, stop) = Stop::new(Duration::from_secs(1));
    let metrics = Metrics::new().expect("metrics");
    let mut driver = Driver::new(Arc::new(SystemClock), metrics.clone(), stop);
    let probe = Arc::new(Probe::default());
    let wake = Arc::new(Notify::new());
    let task = Probed { probe: Arc::clone(&probe), takes, first };
    driver.start(Arc::new(task), period, Arc::clone(&wake));
    Running { probe, wake, stopper, driver, metrics }
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..500 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited too long until {what}");
}

const NEVER: Duration = Duration::from_secs(3_600);

#[tokio::test]
async fn a_signal_wakes_a_task_and_it_never_overlaps_itself() {
    let running = start(Duration::from_millis(20), NEVER, || Ok(()));
    let probe = Arc::clone(&running.probe);
    until("the first activation ran", || probe.finished.load(Ordering::SeqCst) == 1).await;
    for _ in 0..50 {
        running.wake.notify_one();
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    until("the signals were heard", || probe.finished.load(Ordering::SeqCst) >= 3).await;
    assert_eq!(probe.most_at_once.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_panic_is_caught_and_counted_and_the_next_activation_runs() {
    let running = start(Duration::ZERO, Duration::from_millis(10), || panic!("on purpose"));
    let probe = Arc::clone(&running.probe);
    until("it ran again", || probe.finished.load(Ordering::SeqCst) >= 1).await;
    assert_eq!(running.metrics.task_panics.with_label_values(&["probed"]).get(), 1);
    let state = running.driver.states()[0].lock().expect("state").clone();
    assert_eq!((state.last_error, state.failures_in_a_row), (None, 0));
}

#[tokio::test]
async fn a_failure_is_kept_in_the_status_until_the_task_ends_well() {
    let running = start(Duration::ZERO, Duration::from_millis(10), || bail!("no database"));
    let states = running.driver.states();
    let error = || states[0].lock().expect("state").last_error.clone();
    until("the failure shows", || error().is_some()).await;
    assert_eq!(error().as_deref(), Some("no database"));
    until("it ended well", || error().is_none()).await;
    assert_eq!(running.metrics.task_failures.with_label_values(&["probed"]).get(), 1);
}

#[tokio::test]
async fn a_stop_waits_for_what_is_running() {
    let running = start(Duration::from_millis(100), NEVER, || Ok(()));
    let probe = Arc::clone(&running.probe);
    until("it runs", || probe.running.load(Ordering::SeqCst) == 1).await;
    running.stopper.stop();
    running.driver.finished().await;
    assert_eq!(probe.finished.load(Ordering::SeqCst), 1);
    assert_eq!(probe.activations.load(Ordering::SeqCst), 1);
}
