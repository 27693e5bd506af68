//! Flags: what stands, what is history, and what a person does with them.

use reconciled::domain::{
    Flag, FlagKind, GoneFlag, Inconclusive, PaymentId, RaisedFlag, StoredFlag, Verdict,
};
use reconciled::sim::gateway::OrderUpdate;
use reconciled::store::{CloseOutcome, FlagFilter};
use serde_json::json;

use super::harness::*;

for_each_backend! {
    a_person_closes_a_flag_once_and_it_says_who_and_why,
    what_a_person_closed_does_not_ask_again_until_its_cause_was_gone,
    another_occasion_is_a_flag_of_its_own,
    flags_about_no_payment_are_told_apart_by_their_subject,
    raising_what_stands_keeps_its_age_and_takes_the_new_detail,
    the_list_is_bounded_and_oldest_first,
}

/// Everything that was ever raised, oldest first.
async fn all(db: &TestDb) -> Vec<StoredFlag> {
    let filter = FlagFilter { closed_too: true, ..FlagFilter::default() };
    db.store.flags(&filter, 1_000).await.unwrap()
}

fn unmatched(subject: &str) -> RaisedFlag {
    RaisedFlag {
        payment_id: None,
        order_id: None,
        flag: Flag {
            kind: FlagKind::UnmatchedTransfer,
            subject: subject.to_owned(),
            detail: json!({ "amount": "5" }),
        },
    }
}

async fn a_person_closes_a_flag_once_and_it_says_who_and_why(db: &TestDb) {
    db.store.account_flags(&[unmatched("8453:0x1:7")], &[], at(1)).await.unwrap();
    let id = all(db).await[0].id;
    let closed = db.store.close_flags(&[id, id + 1], "alice", "a gift", at(60)).await.unwrap();
    assert_eq!(closed, [CloseOutcome::Closed, CloseOutcome::Unknown]);
    let flags = all(db).await;
    let closing = flags[0].closed.clone().unwrap();
    assert_eq!(
        (closing.at, closing.by.as_str(), closing.note.as_str()),
        (at(60), "alice", "a gift")
    );

    let again = db.store.close_flags(&[id], "bob", "me too", at(90)).await.unwrap();
    assert_eq!(again, [CloseOutcome::ClosedBefore(closing)]);
    assert_eq!(all(db).await, flags, "the first word stands");
    assert!(db.store.flags(&FlagFilter::default(), 10).await.unwrap().is_empty());
    assert!(db.store.close_flags(&[], "bob", "nothing", at(90)).await.unwrap().is_empty());
}

async fn what_a_person_closed_does_not_ask_again_until_its_cause_was_gone(db: &TestDb) {
    db.paying_order("o", "p").await;
    let unconfigured = || Verdict::Inconclusive(Inconclusive::ChainNotConfigured);
    db.apply("p", unconfigured()).await;
    let id = all(db).await[0].id;
    db.store.close_flags(&[id], "alice", "not ours", at(60)).await.unwrap();
    for _ in 0..3 {
        db.apply("p", unconfigured()).await;
    }
    assert!(db.flags().await.is_empty(), "the same cause does not nag");

    db.apply("p", pending(10)).await;
    db.apply("p", unconfigured()).await;
    assert_eq!(db.flags().await, ["chain_not_configured:p"], "it came back");
    let flags = all(db).await;
    assert_eq!(flags.len(), 2);
    let closing = flags[0].closed.clone().unwrap();
    assert_eq!((closing.by.as_str(), closing.note.as_str()), ("alice", "not ours"), "is kept");

    // Nobody closed this one: it closes with its cause, and says so.
    db.apply("p", pending(10)).await;
    let closing = all(db).await[1].closed.clone().unwrap();
    assert_eq!(closing.by, "reconciled");
    assert!(closing.note.contains("configured"), "{}", closing.note);
}

/// A reorg after delivery that a person has dealt with, and then another one.
async fn another_occasion_is_a_flag_of_its_own(db: &TestDb) {
    db.paying_order("o", "p").await;
    let delivered = OrderUpdate { delivered_at: Some(at(10)), ..OrderUpdate::default() };
    db.gateway.update_order("o", &delivered).await.unwrap();
    for number in [100, 105] {
        db.apply("p", settled_in("p", number, 7, reconciled::domain::Finality::Tentative)).await;
        db.apply("p", pending(40)).await;
        assert_eq!(db.flags().await, ["reorged_after_delivery:p"], "block {number}");
        let open = db.store.flags(&FlagFilter::default(), 10).await.unwrap();
        db.store.close_flags(&[open[0].id], "alice", "called the buyer", at(60)).await.unwrap();
    }
    assert_eq!(all(db).await.len(), 2);
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    assert_eq!(story.flags[1]["closed_by"], "alice", "explain tells who");
    assert_eq!(story.flags[1]["note"], "called the buyer", "and why");
}

async fn flags_about_no_payment_are_told_apart_by_their_subject(db: &TestDb) {
    let both = [unmatched("8453:0x1:7"), unmatched("8453:0x2:3"), unmatched("8453:0x1:7")];
    db.store.account_flags(&both, &[], at(1)).await.unwrap();
    assert_eq!(all(db).await.len(), 2);
    let gone = GoneFlag {
        kind: FlagKind::UnmatchedTransfer,
        payment_id: None,
        subject: Some("8453:0x1:7".to_owned()),
        note: "payment p claims it".to_owned(),
    };
    db.store.account_flags(&[], std::slice::from_ref(&gone), at(5)).await.unwrap();
    let open = db.store.flags(&FlagFilter::default(), 10).await.unwrap();
    assert_eq!(open.iter().map(|f| f.subject.as_str()).collect::<Vec<_>>(), ["8453:0x2:3"]);
    // Gone and there again, in one breath.
    db.store.account_flags(&[unmatched("8453:0x2:3")], &[gone], at(9)).await.unwrap();
    assert_eq!(db.store.flags(&FlagFilter::default(), 10).await.unwrap(), open);
}

async fn raising_what_stands_keeps_its_age_and_takes_the_new_detail(db: &TestDb) {
    db.store.account_flags(&[unmatched("s")], &[], at(1)).await.unwrap();
    let mut more = unmatched("s");
    more.flag.detail = json!({ "amount": "5", "candidates": ["p"] });
    db.store.account_flags(&[more.clone()], &[], at(500)).await.unwrap();
    let flags = all(db).await;
    assert_eq!((flags.len(), flags[0].opened_at), (1, at(1)));
    assert_eq!(flags[0].detail, more.flag.detail);
}

async fn the_list_is_bounded_and_oldest_first(db: &TestDb) {
    for n in (0..5u64).rev() {
        db.store.account_flags(&[unmatched(&format!("s{n}"))], &[], at(n)).await.unwrap();
    }
    let subjects = |flags: Vec<StoredFlag>| -> Vec<String> {
        flags.into_iter().map(|flag| flag.subject).collect()
    };
    let page = db.store.flags(&FlagFilter::default(), 3).await.unwrap();
    assert_eq!(subjects(page), ["s0", "s1", "s2"]);
    let other = FlagFilter { kind: Some(FlagKind::StockMissing), ..FlagFilter::default() };
    assert!(db.store.flags(&other, 3).await.unwrap().is_empty());
    let of_p = FlagFilter { payment_id: Some("p".into()), ..FlagFilter::default() };
    assert!(db.store.flags(&of_p, 3).await.unwrap().is_empty());
}
