//! Which version a watch follows, whatever is adopted meanwhile, and when a version cannot be read.

#![allow(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};

use super::*;
use crate::domain::{ChainId, PaymentId, Phase, Rail, Timestamp};
use crate::store::schedules::NewVersion;
use crate::store::{DatabaseUrl, connect};

const BASE: Series = Series { rail: Rail::X402, chain_id: ChainId::new(8453) };
const T0: Timestamp = Timestamp::from_millis(1_780_000_000_000);

/// A database with these policies, each adopted after the one before it, and their ids.
async fn adopted(policies: &[Value]) -> (tempfile::TempDir, Arc<dyn Store>, Vec<i64>) {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("gateway.db").display());
    let store = connect(&DatabaseUrl::parse(&url).unwrap(), 2).await.unwrap();
    store.migrate().await.unwrap();
    store.verify_schema().await.unwrap();
    let mut ids: Vec<i64> = Vec::new();
    for policy in policies {
        let version = NewVersion {
            series: BASE,
            previous_id: ids.last().copied(),
            policy: policy.clone(),
            sample_size: 100,
            window_ms: 1,
            expected_reads: 1.0,
            expected_delay_ms: 1.0,
            never_share: 0.0,
            adopted: true,
            reason: String::new(),
        };
        ids.push(store.add_version(&version, T0).await.unwrap().unwrap());
    }
    (folder, store, ids)
}

fn offsets(ms: u64) -> Value {
    json!({ "kind": "offsets", "offsets_ms": [0, ms] })
}

fn watch(checks_done: u32, schedule_id: Option<i64>) -> Watch {
    Watch {
        payment_id: PaymentId::from("p"),
        phase: Phase::Targeted,
        opened_at: T0,
        next_check_at: Some(T0),
        checks_done,
        consecutive_inconclusive: 0,
        schedule_id,
        last_verdict: None,
    }
}

/// The id of the version that such a watch follows.
fn followed(schedules: &Schedules, watch: &Watch) -> Option<i64> {
    schedules.of(watch, BASE).map(|schedule| schedule.id.unwrap())
}

#[tokio::test]
async fn a_new_watch_takes_the_newest_version_and_a_started_one_keeps_its_own() {
    let (_folder, store, ids) = adopted(&[offsets(1), offsets(2)]).await;
    let schedules = Schedules::new(Following::Adopted);
    let started = watch(3, Some(ids[0]));
    assert_eq!(followed(&schedules, &watch(0, None)), None, "nothing is known yet");
    schedules.refresh(store.as_ref()).await.unwrap();
    schedules.load(store.as_ref(), [&started]).await;
    assert_eq!(followed(&schedules, &watch(0, None)), Some(ids[1]));
    assert_eq!(followed(&schedules, &watch(0, Some(ids[0]))), Some(ids[1]), "it starts anew");
    assert_eq!(followed(&schedules, &started), Some(ids[0]));
    assert_eq!(followed(&schedules, &watch(3, None)), None, "it started on the built-in repeats");
    let elsewhere = Series { chain_id: ChainId::new(1), ..BASE };
    assert_eq!(schedules.of(&watch(0, None), elsewhere), None);
}

#[tokio::test]
async fn configured_repeats_override_every_version_and_without_fitting_only_started_watches_go_on()
{
    let (_folder, store, ids) = adopted(&[offsets(1)]).await;
    let started = watch(3, Some(ids[0]));
    for (following, of_started) in
        [(Following::Configured, None), (Following::Started, Some(ids[0]))]
    {
        let schedules = Schedules::new(following);
        schedules.refresh(store.as_ref()).await.unwrap();
        schedules.load(store.as_ref(), [&started]).await;
        assert_eq!(followed(&schedules, &watch(0, None)), None, "{following:?}");
        assert_eq!(followed(&schedules, &started), of_started, "{following:?}");
    }
}

#[tokio::test]
async fn a_version_that_is_gone_or_makes_no_sense_leaves_the_built_in_repeats() {
    let (_folder, store, ids) = adopted(&[json!({ "kind": "hourglass" })]).await;
    let schedules = Schedules::new(Following::Adopted);
    schedules.refresh(store.as_ref()).await.unwrap();
    let watches = [watch(3, Some(ids[0])), watch(3, Some(999)), watch(0, None)];
    schedules.load(store.as_ref(), &watches).await;
    for one in &watches {
        assert_eq!(schedules.of(one, BASE), None);
    }
}

#[tokio::test]
async fn what_is_kept_in_memory_is_bounded() {
    let (_folder, store, ids) = adopted(&[offsets(1)]).await;
    let schedules = Schedules::new(Following::Adopted);
    for id in 1..=2 * i64::try_from(KNOWN_MAX).unwrap() {
        schedules.load(store.as_ref(), [&watch(1, Some(1_000 + id))]).await;
    }
    assert!(schedules.inner().known.len() <= KNOWN_MAX);
    // One batch follows a version that is known and more others than there is room for.
    schedules.load(store.as_ref(), [&watch(1, Some(ids[0]))]).await;
    let others: Vec<Watch> =
        (1..=KNOWN_MAX).map(|id| watch(1, Some(9_000 + i64::try_from(id).unwrap()))).collect();
    let batch: Vec<Watch> = others.into_iter().chain([watch(1, Some(ids[0]))]).collect();
    schedules.load(store.as_ref(), &batch).await;
    assert_eq!(followed(&schedules, &watch(1, Some(ids[0]))), Some(ids[0]), "of this very batch");
    schedules.load(store.as_ref(), [&watch(1, Some(ids[0]))]).await;
    assert_eq!(followed(&schedules, &watch(1, Some(ids[0]))), Some(ids[0]));
}
