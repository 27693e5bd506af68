//! What the fit of repeat schedules asks of a store: samples, counted once, and versions.

use std::time::Duration;

use reconciled::domain::{
    ChainId, Finality, Judged, PaymentId, Policy, Rail, RawPayment, Settlement, Timestamp, Verdict,
};
use reconciled::store::samples::{
    BinGrid, OpenAges, Part, SampleBin, SampleCount, SampleKey, Watermark, epoch_of,
};
use reconciled::store::schedules::{NewVersion, Series};
use serde_json::json;

use super::harness::{
    T0, TestDb, at, block, expired, hours, judged, lease, payment, pending, resolved, settled_in,
    tentative, transfer,
};

for_each_backend!(
    settled_payments_come_in_order_page_by_page,
    a_payment_that_we_settled_has_its_place_by_our_resolution_not_by_its_block,
    a_payment_confirmed_or_owed_back_after_the_gateway_settled_it_comes_once,
    a_payment_that_the_gateway_settled_at_its_blocks_own_time_is_not_taken_for_ours,
    a_payment_that_we_settled_keeps_its_one_place_whatever_is_written_to_it,
    a_settlement_that_a_reorg_undid_soon_comes_as_it_is_settled_again,
    a_stretch_of_payments_that_do_not_count_is_walked_past,
    a_settled_row_that_makes_no_sense_comes_with_its_problem_and_stops_nothing,
    samples_and_their_watermark_move_together_and_once,
    of_two_replicas_that_begin_one_counts,
    counts_add_up_and_grids_are_never_mixed,
    open_payments_are_counted_by_the_age_they_have_reached,
    failed_payments_are_counted_until_they_settle_after_all,
    of_two_fits_after_the_same_version_one_is_refused,
    the_newest_versions_are_found_and_read_back_whole,
    a_version_that_makes_no_sense_keeps_no_other_from_being_read,
    pruning_leaves_what_is_in_use,
    what_was_observed_is_told_per_version,
    the_largest_clock_skew_is_told_per_series_and_falls,
    a_watch_keeps_the_version_it_started_on,
);

const GRID: BinGrid = BinGrid { step_ms: 2_000, bins: 100 };

/// How long a settlement must have stood to be counted.
const LAG: Duration = Duration::from_secs(120);

const BASE: Series = Series { rail: Rail::X402, chain_id: ChainId::new(8453) };

/// A payment that the gateway settled, with these times.
async fn gateway_settled(db: &TestDb, id: &str, settled_at: Option<u64>, updated_at: u64) {
    let row = RawPayment { status: Some("settled".to_owned()), ..payment(id, "o") };
    db.gateway.insert_payment(&row).await.unwrap();
    let millis = |secs: u64| at(secs).as_millis().to_string();
    let sql = "UPDATE payments SET settled_at = ?t, updated_at = ?t WHERE id = ?";
    let (settled_at, updated_at) = (settled_at.map(millis), millis(updated_at));
    db.gateway.execute(sql, &[settled_at.as_deref(), Some(&updated_at), Some(id)]).await.unwrap();
}

async fn page(db: &TestDb, after: &Watermark, until: u64, limit: u32) -> Vec<String> {
    let page = db.store.settled_after(after, at(until), LAG, limit).await.unwrap().payments;
    page.into_iter().map(|one| one.at.payment_id.to_string()).collect()
}

async fn settled_payments_come_in_order_page_by_page(db: &TestDb) {
    db.order("o").await;
    gateway_settled(db, "c", Some(20), 500).await;
    gateway_settled(db, "b", Some(20), 500).await;
    gateway_settled(db, "a", Some(30), 30).await;
    gateway_settled(db, "no time of its own", None, 30).await;
    gateway_settled(db, "d", Some(10), 500).await;
    gateway_settled(db, "too late", Some(41), 5).await;
    gateway_settled(db, "too early", Some(4), 500).await;
    db.payment("open", "o").await;
    let start = Watermark::before(at(5));
    assert_eq!(page(db, &start, 40, 10).await, ["d", "b", "c", "a"]);

    let first = db.store.settled_after(&start, at(40), LAG, 2).await.unwrap().payments;
    assert_eq!(first.len(), 2);
    assert!(first.iter().all(|one| one.block_time.is_none()), "nobody has seen their blocks");
    let last = first[1].at.clone();
    assert_eq!(last.payment_id.as_str(), "b");
    assert_eq!(page(db, &last, 40, 10).await, ["c", "a"], "the page goes on inside one moment");
    let known = first[0].payment.as_ref().unwrap();
    assert_eq!((known.id.as_str(), known.started_at()), ("d", T0));
}

async fn a_payment_that_we_settled_has_its_place_by_our_resolution_not_by_its_block(db: &TestDb) {
    db.paying_order("o", "slow").await;
    // Its block is from second 4, and we find out an hour later: what was sampled up to then must not
    // have passed it over.
    let verdict = settled_in("slow", 100, 7, Finality::Tentative);
    db.apply_at(at(3_600), &Policy::default(), vec![judged("slow", verdict)]).await;
    let after = Watermark::before(at(1_000));
    let found = db.store.settled_after(&after, at(4_000), LAG, 10).await.unwrap().payments;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].at.at_micros, at(3_600).as_millis() * 1_000);
    assert_eq!(found[0].block_time.map(Timestamp::from), Some(at(4)), "we know its block");
    assert!(page(db, &Watermark::before(T0), 3_599, 10).await.is_empty(), "it has one place");

    // Once it is final there is a second resolution, and still one place.
    let verdict = settled_in("slow", 100, 7, Finality::Final);
    db.apply_at(at(7_200), &Policy::default(), vec![judged("slow", verdict)]).await;
    assert_eq!(page(db, &Watermark::before(T0), 9_000, 10).await, ["slow"]);
    assert!(page(db, &found[0].at, 9_000, 10).await.is_empty());
}

async fn a_payment_confirmed_or_owed_back_after_the_gateway_settled_it_comes_once(db: &TestDb) {
    db.order_with_status("o", "undelivered").await;
    gateway_settled(db, "p", Some(6), 6).await;
    let verdict = settled_in("p", 100, 7, Finality::Final);
    db.apply_at(at(500), &Policy::default(), vec![judged("p", verdict)]).await;
    assert_eq!(db.refunds().await, ["p undelivered 1000000 owed"]);
    let found =
        db.store.settled_after(&Watermark::before(T0), at(900), LAG, 10).await.unwrap().payments;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].at.at_micros, at(6).as_millis() * 1_000, "where the gateway put it");
    assert_eq!(found[0].block_time.map(Timestamp::from), Some(at(4)), "from the transfer");
}

/// The gateway's clock says just what the block's says, and we confirm that later: still the gateway's.
async fn a_payment_that_the_gateway_settled_at_its_blocks_own_time_is_not_taken_for_ours(
    db: &TestDb,
) {
    db.order("o").await;
    gateway_settled(db, "p", Some(4), 4).await;
    let before = Watermark::before(T0);
    assert_eq!(page(db, &before, 900, 10).await, ["p"]);
    for (now, finality) in [(500, Finality::Tentative), (600, Finality::Final)] {
        let verdict = settled_in("p", 100, 7, finality);
        db.apply_at(at(now), &Policy::default(), vec![judged("p", verdict)]).await;
    }
    let found = db.store.settled_after(&before, at(900), LAG, 10).await.unwrap().payments;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].at.at_micros, at(4).as_millis() * 1_000);
    assert!(
        page(db, &found[0].at, 900, 10).await.is_empty(),
        "our confirmation is no second place"
    );
}

async fn a_payment_that_we_settled_keeps_its_one_place_whatever_is_written_to_it(db: &TestDb) {
    db.paying_order("o", "p").await;
    let verdict = settled_in("p", 100, 7, Finality::Tentative);
    db.apply_at(at(300), &Policy::default(), vec![judged("p", verdict)]).await;
    let before = Watermark::before(T0);
    let found = db.store.settled_after(&before, at(900), LAG, 10).await.unwrap();
    let place = found.payments[0].at.clone();
    assert_eq!(place.at_micros, at(300).as_millis() * 1_000);
    // The gateway comes round and writes its own time over the block's, and later none at all.
    for time in [Some(at(700).as_millis().to_string()), None] {
        let sql = "UPDATE payments SET settled_at = ?t WHERE id = ?";
        db.gateway.execute(sql, &[time.as_deref(), Some("p")]).await.unwrap();
        assert_eq!(page(db, &before, 900, 10).await, ["p"]);
        assert!(page(db, &place, 900, 10).await.is_empty());
    }
    // A reorg takes it away, and it settles again: it has been counted.
    db.apply_at(at(800), &Policy::default(), vec![judged("p", pending(800))]).await;
    assert_eq!(db.payment_status("p").await, "unknown");
    let verdict = settled_in("p", 101, 7, Finality::Final);
    db.apply_at(at(850), &Policy::default(), vec![judged("p", verdict)]).await;
    assert!(page(db, &place, 900, 10).await.is_empty());
}

/// Whether it was settled again before anybody looked, or only after: once, by the block that stands.
async fn a_settlement_that_a_reorg_undid_soon_comes_as_it_is_settled_again(db: &TestDb) {
    db.paying_order("o", "p").await;
    let verdict = settled_in("p", 100, 7, Finality::Tentative);
    db.apply_at(at(300), &Policy::default(), vec![judged("p", verdict)]).await;
    db.apply_at(at(330), &Policy::default(), vec![judged("p", pending(330))]).await;
    assert_eq!(db.payment_status("p").await, "unknown");
    let start = Watermark::before(T0);
    let passed = db.store.settled_after(&start, at(300), LAG, 10).await.unwrap();
    assert!(passed.payments.is_empty(), "it is open when its place is passed");
    let mut transfer = transfer("p", 110, 7);
    transfer.block.time = block(110, 340).time;
    let again = Verdict::Settled(Settlement { transfer, finality: Finality::Final });
    db.apply_at(at(450), &Policy::default(), vec![judged("p", again)]).await;
    for after in [start, passed.up_to.unwrap()] {
        let found = db.store.settled_after(&after, at(900), LAG, 10).await.unwrap().payments;
        let seen: Vec<_> = found.iter().map(|one| (one.at.at_micros, one.block_time)).collect();
        assert_eq!(seen, [(at(450).as_millis() * 1_000, Some(transfer.block.time))]);
    }
}

/// Nothing of this stretch becomes a sample; what is behind it must be reached all the same.
async fn a_stretch_of_payments_that_do_not_count_is_walked_past(db: &TestDb) {
    for n in 0..4 {
        db.paying_order(&format!("o{n}"), &format!("p{n}")).await;
        let verdict = settled_in(&format!("p{n}"), 100, n, Finality::Final);
        let batch = vec![judged(&format!("p{n}"), verdict)];
        db.apply_at(at(300), &Policy::default(), batch).await;
    }
    db.order("o").await;
    gateway_settled(db, "last", Some(200), 200).await;
    // The first three places are where the gateway's times of ours are.
    let mut after = Watermark::before(T0);
    let mut found = Vec::new();
    for _ in 0..20 {
        let stretch = db.store.settled_after(&after, at(900), LAG, 2).await.unwrap();
        found.extend(stretch.payments.iter().map(|one| one.at.payment_id.to_string()));
        let Some(up_to) = stretch.up_to else { break };
        assert!(
            (up_to.at_micros, up_to.payment_id.as_str())
                > (after.at_micros, after.payment_id.as_str())
        );
        after = up_to;
    }
    assert_eq!(found, ["last", "p0", "p1", "p2", "p3"]);
}

async fn a_settled_row_that_makes_no_sense_comes_with_its_problem_and_stops_nothing(db: &TestDb) {
    db.order("o").await;
    gateway_settled(db, "bad", Some(10), 10).await;
    gateway_settled(db, "good", Some(11), 11).await;
    let sql = "UPDATE payments SET payer = 'nobody' WHERE id = ?";
    db.gateway.execute(sql, &[Some("bad")]).await.unwrap();
    let found =
        db.store.settled_after(&Watermark::before(T0), at(20), LAG, 10).await.unwrap().payments;
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].payment.as_ref().unwrap_err().column, "payer");
    assert!(found[1].payment.is_ok());
}

fn key(part: Part, bin: u64) -> SampleKey {
    SampleKey { series: BASE, grid: GRID, epoch: epoch_of(T0), part, bin }
}

fn bin(key: SampleKey, settled: u64) -> SampleBin {
    let count =
        SampleCount { settled, latency_sum_ms: 3_000 * settled, clamped: 1, skew_max_ms: settled };
    SampleBin { key, count }
}

fn mark(secs: u64, id: &str) -> Watermark {
    Watermark { payment_id: PaymentId::from(id), ..Watermark::before(at(secs)) }
}

async fn stored(db: &TestDb) -> Vec<SampleBin> {
    db.store.sample_bins(BASE, GRID, 0).await.unwrap()
}

async fn samples_and_their_watermark_move_together_and_once(db: &TestDb) {
    assert_eq!(db.store.sampled_up_to().await.unwrap(), None);
    let (one, two) = (mark(10, "a"), mark(10, "b"));
    let bins = [bin(key(Part::Fit, 1), 5)];
    assert!(db.store.record_samples(None, &one, &bins, T0).await.unwrap());
    assert_eq!(db.store.sampled_up_to().await.unwrap(), Some(one.clone()));

    // A replica that read the same page, or a process that was killed after it had committed.
    let replica = db.replica().await;
    assert!(!replica.record_samples(None, &one, &bins, T0).await.unwrap());
    assert!(db.store.record_samples(Some(&one), &two, &bins, T0).await.unwrap());
    assert!(!replica.record_samples(Some(&one), &two, &bins, T0).await.unwrap());
    assert_eq!(stored(db).await[0].count.settled, 10, "each page is counted once");
    assert_eq!(replica.sampled_up_to().await.unwrap(), Some(two.clone()));

    // Samples that are refused do not move the watermark.
    let impossible = [bin(SampleKey { bin: GRID.bins + 1, ..key(Part::Fit, 0) }, 1)];
    let refused = db.store.record_samples(Some(&two), &mark(11, "c"), &impossible, T0).await;
    assert!(refused.is_err());
    assert_eq!(db.store.sampled_up_to().await.unwrap(), Some(two));
}

async fn of_two_replicas_that_begin_one_counts(db: &TestDb) {
    let replica = db.replica().await;
    let (to, bins) = (mark(10, "a"), [bin(key(Part::HeldOut, 3), 2)]);
    let (one, other) = tokio::join!(
        db.store.record_samples(None, &to, &bins, T0),
        replica.record_samples(None, &to, &bins, T0),
    );
    assert_ne!(one.unwrap(), other.unwrap());
    assert_eq!(stored(db).await, bins);
}

async fn counts_add_up_and_grids_are_never_mixed(db: &TestDb) {
    let coarse = BinGrid { step_ms: 4_000, ..GRID };
    let later = SampleKey { epoch: epoch_of(T0) + 1, ..key(Part::Fit, 7) };
    let elsewhere = Series { chain_id: ChainId::new(1), ..BASE };
    let first = [
        bin(key(Part::Fit, 7), 2),
        bin(key(Part::HeldOut, 7), 1),
        bin(SampleKey { grid: coarse, ..key(Part::Fit, 7) }, 40),
        bin(SampleKey { series: elsewhere, ..key(Part::Fit, 7) }, 50),
        bin(later, 3),
    ];
    let second = [bin(key(Part::Fit, 7), 1), bin(key(Part::Fit, GRID.bins), 1)];
    assert!(db.store.record_samples(None, &mark(1, "a"), &first, T0).await.unwrap());
    let moved = db.store.record_samples(Some(&mark(1, "a")), &mark(2, "b"), &second, T0).await;
    assert!(moved.unwrap());
    let sum = SampleCount { settled: 3, latency_sum_ms: 9_000, clamped: 2, skew_max_ms: 2 };
    let expected = [
        SampleBin { key: key(Part::Fit, 7), count: sum },
        bin(key(Part::Fit, GRID.bins), 1),
        bin(key(Part::HeldOut, 7), 1),
        bin(later, 3),
    ];
    assert_eq!(stored(db).await, expected);
    let recent = db.store.sample_bins(BASE, GRID, later.epoch).await.unwrap();
    assert_eq!(recent, [bin(later, 3)]);
}

async fn open_payments_are_counted_by_the_age_they_have_reached(db: &TestDb) {
    db.order("o").await;
    let started = |secs: u64| Some(at(secs).as_millis().to_string());
    let open = |id: &str, created_at: u64, broadcast_at: Option<u64>| RawPayment {
        created_at: started(created_at),
        broadcast_at: broadcast_at.and_then(started),
        ..payment(id, "o")
    };
    for row in [
        open("broadcast", 0, Some(995)),
        open("never broadcast", 995, None),
        open("older", 0, Some(900)),
        open("oldest", 100, Some(100)),
        open("before the window", 50, None),
        open("from the future", 0, Some(1_100)),
        RawPayment { rail: Some("cash".to_owned()), ..open("no rail", 0, Some(990)) },
        RawPayment { chain_id: Some("1".to_owned()), ..open("elsewhere", 0, Some(990)) },
        RawPayment { rail: Some("mpp".to_owned()), ..open("mpp", 0, Some(990)) },
        RawPayment { status: Some("failed".to_owned()), ..open("not open", 0, Some(990)) },
    ] {
        db.gateway.insert_payment(&row).await.unwrap();
    }
    let grids = [(BASE.chain_id, GRID)];
    let ages = db.store.open_ages(&grids, at(60), at(1_000)).await.unwrap();
    let age = |rail, bin, payments| OpenAges { series: Series { rail, ..BASE }, bin, payments };
    let (mpp, x402) = (Rail::Mpp, Rail::X402);
    let expected =
        [age(mpp, 5, 1), age(x402, 0, 1), age(x402, 2, 2), age(x402, 50, 1), age(x402, 100, 1)];
    assert_eq!(ages, expected);
    assert!(db.store.open_ages(&[], T0, at(1_000)).await.unwrap().is_empty());
}

async fn failed_payments_are_counted_until_they_settle_after_all(db: &TestDb) {
    for (order, id) in [("o1", "expired"), ("o2", "late")] {
        db.paying_order(order, id).await;
    }
    let end = hours(24) + 1;
    let policy = Policy::default();
    let batch = vec![judged("expired", expired(end)), judged("late", pending(end))];
    db.apply_at(at(end), &policy, batch).await;
    assert_eq!(db.payment_status("late").await, "failed");
    let failed = async |since| {
        let never = db.store.never_settled(since).await.unwrap();
        never.iter().map(|n| (n.series, n.epoch, n.payments)).collect::<Vec<_>>()
    };
    let hour = epoch_of(at(end));
    assert_eq!(failed(T0).await, [(BASE, hour, 2)]);
    assert_eq!(failed(at(end + 1)).await, []);

    let verdict = settled_in("late", 5_000, 1, Finality::Final);
    db.apply_at(at(end + 60), &policy, vec![judged("late", verdict)]).await;
    assert_eq!(failed(T0).await, [(BASE, hour, 1)]);
}

fn fitted(previous_id: Option<i64>, adopted: bool) -> NewVersion {
    NewVersion {
        series: BASE,
        previous_id,
        policy: json!({ "kind": "offsets", "offsets_ms": [0, 2_500] }),
        sample_size: 1_234,
        window_ms: 86_400_000,
        expected_reads: 3.25,
        expected_delay_ms: 812.5,
        never_share: 0.015,
        adopted,
        reason: "it saves 12.0 %".to_owned(),
    }
}

async fn of_two_fits_after_the_same_version_one_is_refused(db: &TestDb) {
    let replica = db.replica().await;
    let (version, others) = (fitted(None, true), fitted(None, true));
    let (one, other) =
        tokio::join!(db.store.add_version(&version, T0), replica.add_version(&others, T0));
    let first = match (one.unwrap(), other.unwrap()) {
        (Some(id), None) | (None, Some(id)) => id,
        both => panic!("{both:?}"),
    };
    // A rejected version counts as well: what was compared with the version before it is out of date.
    let second = db.store.add_version(&fitted(Some(first), false), at(1)).await.unwrap().unwrap();
    assert_eq!(replica.add_version(&fitted(Some(first), true), at(1)).await.unwrap(), None);
    assert!(replica.add_version(&fitted(Some(second), true), at(2)).await.unwrap().is_some());
    assert_eq!(db.count("{schedules}").await, 3);
}

async fn the_newest_versions_are_found_and_read_back_whole(db: &TestDb) {
    let mut previous = None;
    for (secs, adopted) in [(0, true), (1, true), (2, false), (3, false)] {
        let version = fitted(previous, adopted);
        previous = db.store.add_version(&version, at(secs)).await.unwrap();
    }
    let elsewhere = Series { rail: Rail::Mpp, chain_id: ChainId::new(4217) };
    let other = NewVersion { series: elsewhere, ..fitted(None, false) };
    db.store.add_version(&other, at(9)).await.unwrap().unwrap();

    let newest = db.store.newest_versions().await.unwrap();
    let seen: Vec<_> =
        newest.iter().map(|v| (v.fitted.series, v.fitted.adopted, v.created_at)).collect();
    assert_eq!(seen, [(elsewhere, false, at(9)), (BASE, true, at(1)), (BASE, false, at(3))]);
    let (adopted, rejected) = (&newest[1], &newest[2]);
    assert_eq!(adopted.fitted, fitted(adopted.fitted.previous_id, true));
    assert_eq!(adopted.fitted.previous_id, Some(adopted.id - 1));

    let found = db.store.versions(&[rejected.id, adopted.id, 999]).await.unwrap();
    assert_eq!(found, [adopted.clone(), rejected.clone()]);
    assert!(db.store.versions(&[]).await.unwrap().is_empty());
}

/// I11. What cannot be said of a version counts as nothing, and the next fit follows it all the same.
async fn a_version_that_makes_no_sense_keeps_no_other_from_being_read(db: &TestDb) {
    let elsewhere = Series { rail: Rail::Mpp, chain_id: ChainId::new(4217) };
    let other = NewVersion { series: elsewhere, ..fitted(None, true) };
    db.store.add_version(&other, at(1)).await.unwrap().unwrap();
    let id = db.store.add_version(&fitted(None, true), at(1)).await.unwrap().unwrap();
    let seen = async || {
        let newest = db.store.newest_versions().await.unwrap();
        newest.iter().map(|v| (v.fitted.series, v.id, v.fitted.sample_size)).collect::<Vec<_>>()
    };
    let sizes = [seen().await, {
        let sql = format!("UPDATE {{schedules}} SET sample_size = -1 WHERE id = {id}");
        db.gateway.execute(&sql, &[]).await.unwrap();
        seen().await
    }];
    assert_eq!(sizes[0], [(elsewhere, id - 1, 1_234), (BASE, id, 1_234)]);
    assert_eq!(sizes[1], [(elsewhere, id - 1, 1_234), (BASE, id, 0)]);
    let sql = format!("UPDATE {{schedules}} SET rail = 'cash' WHERE id = {id}");
    db.gateway.execute(&sql, &[]).await.unwrap();
    assert_eq!(seen().await, [(elsewhere, id - 1, 1_234)]);
    assert_eq!(db.store.versions(&[id - 1, id]).await.unwrap().len(), 1);
}

async fn pruning_leaves_what_is_in_use(db: &TestDb) {
    let old = SampleKey { epoch: epoch_of(T0) - 1, ..key(Part::Fit, 1) };
    let bins = [bin(old, 1), bin(key(Part::Fit, 1), 1)];
    assert!(db.store.record_samples(None, &mark(1, "a"), &bins, T0).await.unwrap());
    let mut ids = Vec::new();
    // Only 0 may go: a watch follows 1, 2 was adopted last, and 4 is the newest. 3 was rejected.
    for (secs, adopted) in [(0, true), (1, true), (2, true), (3, false), (4, false)] {
        let version = fitted(ids.last().copied(), adopted);
        ids.push(db.store.add_version(&version, at(secs)).await.unwrap().unwrap());
    }
    db.paying_order("o", "p").await;
    db.discover().await;
    let follows = format!("UPDATE {{watches}} SET schedule_id = {}", ids[1]);
    db.gateway.execute(&follows, &[]).await.unwrap();

    assert_eq!(db.store.prune_samples(T0, 100).await.unwrap(), 1);
    assert_eq!(db.store.prune_schedules(T0, 100).await.unwrap(), 0);
    assert_eq!(stored(db).await, [bins[1]]);
    assert_eq!(db.count("{schedules}").await, 5, "none is older than that");
    assert_eq!(db.store.prune_schedules(at(1), 100).await.unwrap(), 0, "0 was in use up to then");
    assert_eq!(db.store.prune_schedules(at(100), 1).await.unwrap(), 1, "as many as were asked for");
    assert_eq!(db.store.prune_schedules(at(100), 100).await.unwrap(), 1);
    let left = db.store.versions(&ids).await.unwrap();
    let left: Vec<i64> = left.iter().map(|version| version.id).collect();
    assert_eq!(left, [ids[1], ids[2], ids[4]]);
    assert_eq!(db.store.prune_schedules(at(100), 100).await.unwrap(), 0);
}

async fn what_was_observed_is_told_per_version(db: &TestDb) {
    for (order, id) in [("o1", "fast"), ("o2", "slow"), ("o3", "failed")] {
        db.paying_order(order, id).await;
    }
    let policy = Policy::default();
    // Second 20: `slow` is looked at once in vain. Blocks are from second 4.
    db.apply_at(at(20), &policy, vec![judged("slow", pending(20))]).await;
    let block = |id| judged(id, settled_in(id, 100, u64::from(id == "slow"), Finality::Tentative));
    db.apply_at(at(24), &policy, vec![block("fast")]).await;
    db.apply_at(at(34), &policy, vec![block("slow")]).await;
    let end = hours(24) + 1;
    db.apply_at(at(end), &policy, vec![judged("failed", expired(end))]).await;
    // The work is given up two days later, and the money owed back: nothing was found then.
    let sql = "UPDATE orders SET status = 'undelivered' WHERE id = 'o1'";
    db.gateway.execute(sql, &[]).await.unwrap();
    let block = |id| judged(id, settled_in(id, 100, 0, Finality::Final));
    let late = Judged { checked_at: at(hours(72)), ..block("fast") };
    let applied = db.apply_at(at(hours(72)), &policy, vec![late]).await;
    assert!(!resolved(&applied, "fast").settles);
    assert_eq!(db.refunds().await, ["fast undelivered 1000000 owed"]);
    let seen = db.store.observed_checks(T0).await.unwrap();
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].series, seen[0].schedule_id, seen[0].payments), (BASE, None, 2));
    assert_eq!(seen[0].reads_mean, 1.5);
    assert_eq!((seen[0].delay_mean_ms, seen[0].delay_max_ms), (25_000.0, 30_000));
    assert!(db.store.observed_checks(at(60)).await.unwrap().is_empty());
    let grids = [(BASE.chain_id, GRID)];
    let found = async |since| {
        let found = db.store.found_ages(&grids, since).await.unwrap();
        found.iter().map(|f| (f.series, f.bin, f.payments, f.age_mean_ms)).collect::<Vec<_>>()
    };
    assert_eq!(found(T0).await, [(BASE, 0, 2, 0.0)]);
    assert_eq!(found(at(60)).await, []);
    // One was found a minute after its broadcast, and the other only after an outage of hours, which says
    // nothing about the repeats.
    for (id, age) in [("fast", 61_i64), ("slow", 7_200)] {
        let broadcast = (T0.as_millis() - age * 1_000).to_string();
        let sql = "UPDATE payments SET broadcast_at = ?t WHERE id = ?";
        db.gateway.execute(sql, &[Some(&broadcast), Some(id)]).await.unwrap();
    }
    assert_eq!(found(T0).await, [(BASE, 30, 1, 61_000.0)]);
}

async fn the_largest_clock_skew_is_told_per_series_and_falls(db: &TestDb) {
    let of = |epoch: i64, skew_max_ms: u64| {
        let count = SampleCount { settled: 1, skew_max_ms, ..Default::default() };
        SampleBin { key: SampleKey { epoch: epoch_of(T0) + epoch, ..key(Part::Fit, 1) }, count }
    };
    let coarse = BinGrid { step_ms: 4_000, ..GRID };
    let mut other = of(0, 99);
    other.key.grid = coarse;
    let bins = [of(0, 7), of(1, 3), other];
    assert!(db.store.record_samples(None, &mark(1, "a"), &bins, T0).await.unwrap());
    let grids = [(BASE.chain_id, GRID), (ChainId::new(1), GRID)];
    for (since, skew) in [(0, vec![(BASE, 7)]), (1, vec![(BASE, 3)]), (2, vec![])] {
        assert_eq!(db.store.clock_skews(&grids, epoch_of(T0) + since).await.unwrap(), skew);
    }
}

async fn a_watch_keeps_the_version_it_started_on(db: &TestDb) {
    for (order, id) in [("o1", "fitted"), ("o2", "built in"), ("o3", "settled at once")] {
        db.paying_order(order, id).await;
    }
    db.discover().await;
    let by = |id: &str, version: Option<i64>| {
        let mut judged: Judged = judged(id, pending(20));
        judged.due.schedule_id = version;
        judged
    };
    let check = async |batch: Vec<Judged>| {
        let lease = lease(T0, at(60));
        db.store.lease_page(&lease, None, 10).await.unwrap();
        assert_eq!(db.store.reschedule(&lease, &batch).await.unwrap(), batch.len());
        db.store.release(&lease).await.unwrap();
    };
    let version = async |id: &str| {
        let story = db.store.story(&PaymentId::from(id)).await.unwrap().unwrap();
        story.watch.unwrap().schedule_id
    };
    check(vec![by("fitted", Some(5)), by("built in", None)]).await;
    assert_eq!((version("fitted").await, version("built in").await), (Some(5), None));
    // A newer version is adopted meanwhile.
    check(vec![by("fitted", Some(9)), by("built in", Some(9))]).await;
    assert_eq!((version("fitted").await, version("built in").await), (Some(5), None));

    // A check that is resolved counts as the first one too.
    let first = Judged { verdict: tentative("settled at once"), ..by("settled at once", Some(9)) };
    let later = Judged { verdict: tentative("fitted"), ..by("fitted", Some(9)) };
    db.apply_at(at(30), &Policy::default(), vec![first, later]).await;
    assert_eq!(version("settled at once").await, Some(9));
    assert_eq!(version("fitted").await, Some(5));

    // A watch that starts anew starts on what is in use then.
    let gone = Judged { verdict: pending(40), ..by("fitted", Some(11)) };
    db.apply_at(at(40), &Policy::default(), vec![gone]).await;
    check(vec![by("fitted", Some(12))]).await;
    assert_eq!(version("fitted").await, Some(12));
}
