//! Who works on which watch, and checks that change nothing but their watch.

use std::collections::BTreeSet;
use std::sync::Arc;

use reconciled::domain::{NextCheck, PaymentId, Phase, Policy};
use reconciled::store::ApplyFailure;

use super::harness::{T0, TestDb, at, failure, ids, inconclusive, judged, lease, pending, settled};

for_each_backend!(
    what_is_due_first_is_leased_first,
    a_lease_keeps_others_away_until_it_expires,
    a_released_watch_is_free_at_once,
    the_next_due_time_is_that_of_the_oldest_free_watch,
    pages_cover_every_open_watch_once_and_skip_what_others_hold,
    replicas_never_hold_the_same_watch,
    a_watch_whose_payment_is_gone_says_so,
    a_check_writes_its_watch_and_its_row_and_gives_the_lease_back,
    inconclusive_checks_are_counted_until_one_is_conclusive,
    a_check_under_a_lost_lease_writes_nothing,
    a_recheck_ends_the_lease_of_whoever_is_checking,
    a_watch_that_makes_no_sense_holds_up_no_other,
);

async fn due_at(db: &TestDb, id: &str, secs: u64) {
    db.payment(id, "o").await;
    db.store.discover(at(secs), T0, 1).await.unwrap();
}

async fn what_is_due_first_is_leased_first(db: &TestDb) {
    for (id, secs) in [("c", 1), ("a", 3), ("b", 2), ("d", 4)] {
        due_at(db, id, secs).await;
    }
    let first = lease(at(3), at(60));
    let due = db.store.lease_due(&first, 2).await.unwrap();
    assert_eq!(ids(&due), ["c", "b"]);
    let second = lease(at(3), at(60));
    let due = db.store.lease_due(&second, 2).await.unwrap();
    assert_eq!(ids(&due), ["a"], "what is not due yet is not leased");
}

async fn a_lease_keeps_others_away_until_it_expires(db: &TestDb) {
    due_at(db, "p", 0).await;
    let first = lease(T0, at(60));
    assert_eq!(db.store.lease_due(&first, 10).await.unwrap().len(), 1);
    let early = lease(at(59), at(120));
    assert!(db.store.lease_due(&early, 10).await.unwrap().is_empty());
    assert!(db.store.lease_page(&early, None, 10).await.unwrap().is_empty());
    let late = lease(at(60), at(120));
    assert_eq!(db.store.lease_due(&late, 10).await.unwrap().len(), 1);
    assert_eq!(db.store.release(&first).await.unwrap(), 0, "it lost the watch");
}

async fn a_released_watch_is_free_at_once(db: &TestDb) {
    due_at(db, "p", 0).await;
    let first = lease(T0, at(60));
    db.store.lease_due(&first, 10).await.unwrap();
    assert_eq!(db.store.release(&first).await.unwrap(), 1);
    assert_eq!(db.store.release(&first).await.unwrap(), 0);
    assert_eq!(db.store.lease_due(&lease(T0, at(60)), 10).await.unwrap().len(), 1);
}

async fn the_next_due_time_is_that_of_the_oldest_free_watch(db: &TestDb) {
    assert_eq!(db.store.next_due_at(T0).await.unwrap(), None);
    due_at(db, "p", 5).await;
    due_at(db, "q", 9).await;
    assert_eq!(db.store.next_due_at(T0).await.unwrap(), Some(at(5)));
    let first = lease(at(5), at(60));
    db.store.lease_due(&first, 10).await.unwrap();
    assert_eq!(db.store.next_due_at(at(6)).await.unwrap(), Some(at(9)));
    assert_eq!(db.store.next_due_at(at(60)).await.unwrap(), Some(at(5)), "the lease is over");
    db.store.release(&first).await.unwrap();
    db.apply("p", settled("p")).await;
    db.apply("q", settled("q")).await;
    assert_eq!(db.store.next_due_at(at(999)).await.unwrap(), None, "closed watches are never due");
}

async fn pages_cover_every_open_watch_once_and_skip_what_others_hold(db: &TestDb) {
    for (id, secs) in [("b", 99), ("A", 98), ("d", 100), ("c", 100), ("e", 100)] {
        due_at(db, id, secs).await;
    }
    db.order("o").await;
    db.apply("e", settled("e")).await;
    let other = lease(at(100), at(200));
    let theirs = db.store.lease_due(&other, 2).await.unwrap();
    assert_eq!(ids(&theirs), ["A", "b"]);

    let ours = lease(at(50), at(300));
    let page = db.store.lease_page(&ours, None, 1).await.unwrap();
    assert_eq!(ids(&page), ["c"], "not due yet, and read all the same");
    let after = page[0].watch.payment_id.clone();
    let page = db.store.lease_page(&ours, Some(&after), 10).await.unwrap();
    assert_eq!(ids(&page), ["d"]);
    let after = page[0].watch.payment_id.clone();
    assert!(db.store.lease_page(&ours, Some(&after), 10).await.unwrap().is_empty());
    db.store.release(&other).await.unwrap();
    db.store.release(&ours).await.unwrap();
    let all = db.store.lease_page(&ours, None, 10).await.unwrap();
    assert_eq!(ids(&all), ["A", "b", "c", "d"], "ids are compared byte for byte");
}

/// I10.
async fn replicas_never_hold_the_same_watch(db: &TestDb) {
    for n in 0..40 {
        db.payment(&format!("p{n:02}"), "o").await;
    }
    assert_eq!(db.discover().await, (40, 0));
    let mut replicas = Vec::new();
    for _ in 0..4 {
        replicas.push(db.replica().await);
    }
    let tasks: Vec<_> = replicas
        .iter()
        .map(|store| {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                let mut held = Vec::new();
                loop {
                    let due = store.lease_due(&lease(T0, at(60)), 3).await.unwrap();
                    if due.is_empty() {
                        return held;
                    }
                    held.extend(due.into_iter().map(|f| f.watch.payment_id));
                }
            })
        })
        .collect();
    let mut all: Vec<PaymentId> = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    assert_eq!(all.len(), 40);
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 40);
}

async fn a_watch_whose_payment_is_gone_says_so(db: &TestDb) {
    due_at(db, "p", 0).await;
    db.gateway.execute("DELETE FROM payments", &[]).await.unwrap();
    let (_, followed) = db.lease_all().await;
    let malformed = followed[0].payment.clone().unwrap_err();
    assert_eq!((malformed.column, malformed.found.as_str()), ("id", "missing"));
}

async fn a_check_writes_its_watch_and_its_row_and_gives_the_lease_back(db: &TestDb) {
    due_at(db, "p", 0).await;
    let (held, _) = db.lease_all().await;
    let mut check = judged("p", pending(10));
    check.due.open = NextCheck { phase: Phase::Reconcile, at: None };
    assert_eq!(db.store.reschedule(&held, &[check]).await.unwrap(), 1);
    assert_eq!(db.store.release(&held).await.unwrap(), 0, "it was given back");
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    let watch = story.watch.unwrap();
    assert_eq!((watch.phase, watch.next_check_at), (Phase::Reconcile, None));
    assert_eq!((watch.checks_done, watch.last_verdict.as_deref()), (1, Some("pending")));
    assert_eq!(watch.opened_at, T0);
    let [check] = story.checks.as_slice() else { panic!("one check: {:?}", story.checks) };
    assert_eq!((check.at, check.verdict.as_str(), check.block), (at(20), "pending", Some(1_000)));
    let detail = check.detail.as_deref().unwrap();
    assert!(detail.contains("first") && detail.contains("second"), "{detail}");
    assert!(detail.contains("no answer") && !detail.contains('\n'), "{detail}");
    assert!(story.resolutions.is_empty());
}

async fn inconclusive_checks_are_counted_until_one_is_conclusive(db: &TestDb) {
    due_at(db, "p", 0).await;
    for (verdict, checks, inconclusive) in
        [(inconclusive(), 1, 1), (inconclusive(), 2, 2), (pending(10), 3, 0)]
    {
        let (held, _) = db.lease_all().await;
        db.store.reschedule(&held, &[judged("p", verdict)]).await.unwrap();
        let watch = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap().watch.unwrap();
        assert_eq!((watch.checks_done, watch.consecutive_inconclusive), (checks, inconclusive));
    }
}

async fn a_check_under_a_lost_lease_writes_nothing(db: &TestDb) {
    due_at(db, "lost", 0).await;
    due_at(db, "kept", 0).await;
    let old = lease(T0, at(10));
    db.store.lease_due(&old, 10).await.unwrap();
    let other = lease(at(10), at(60));
    assert_eq!(ids(&db.store.lease_due(&other, 1).await.unwrap()), ["kept"]);
    let checks = [judged("lost", pending(10)), judged("kept", pending(10))];
    assert_eq!(db.store.reschedule(&old, &checks).await.unwrap(), 1);
    let story = db.store.story(&PaymentId::from("kept")).await.unwrap().unwrap();
    assert_eq!(story.watch.unwrap().checks_done, 0);
    assert!(story.checks.is_empty());
    assert_eq!(db.store.release(&other).await.unwrap(), 1, "the other lease still holds");
}

async fn a_recheck_ends_the_lease_of_whoever_is_checking(db: &TestDb) {
    due_at(db, "p", 0).await;
    let (held, _) = db.lease_all().await;
    let asked = [PaymentId::from("p")];
    assert_eq!(db.store.recheck(&asked, at(5)).await.unwrap(), asked);
    let check = judged("p", pending(10));
    assert_eq!(db.store.reschedule(&held, std::slice::from_ref(&check)).await.unwrap(), 0);
    let applied = db.store.apply(&held, vec![check], &Policy::default(), at(6)).await.unwrap();
    assert_eq!(failure(&applied, "p"), ApplyFailure::LeaseLost);
    assert_eq!(db.count("{checks}").await, 0);
    assert_eq!(db.store.next_due_at(at(5)).await.unwrap(), Some(at(5)));
    assert_eq!(ids(&db.store.lease_due(&lease(at(5), at(60)), 10).await.unwrap()), ["p"]);
}

/// Somebody edited our own row by hand.
async fn a_watch_that_makes_no_sense_holds_up_no_other(db: &TestDb) {
    for id in ["a", "b", "c"] {
        due_at(db, id, 0).await;
    }
    let edit = "UPDATE {watches} SET consecutive_inconclusive = -1 WHERE payment_id = 'b'";
    db.gateway.execute(edit, &[]).await.unwrap();
    let first = lease(T0, at(60));
    assert_eq!(ids(&db.store.lease_due(&first, 10).await.unwrap()), ["a", "c"]);
    assert_eq!(db.store.release(&first).await.unwrap(), 3);
    assert_eq!(ids(&db.lease_all().await.1), ["a", "c"]);
}
