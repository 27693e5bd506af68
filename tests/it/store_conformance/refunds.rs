//! The search for refunds: which records are due, and what is written down of a search.

use reconciled::domain::{
    BlockTime, ChainId, Flag, FlagKind, LedgerKey, LogRef, PaymentId, RefundFinding, RefundPaid,
    RefundStatus, RefundsAgain, SearchProblem, SearchedRefund,
};
use reconciled::store::SearchDue;
use serde_json::json;

use super::harness::*;

for_each_backend! {
    records_that_are_not_closed_are_due_and_those_in_hand_more_often,
    a_refund_that_was_paid_closes_its_record_with_all_that_goes_with_it,
    a_second_refund_of_a_closed_record_is_flagged_and_its_money_in_view,
    a_record_that_is_owed_again_is_searched_for_from_where_it_was_void,
    a_record_that_changed_since_it_was_asked_about_is_left_alone,
    two_replicas_close_one_record_once,
    a_search_that_found_nothing_only_says_how_far_it_came,
    a_misused_nonce_is_flagged_and_changes_nothing,
    a_record_that_is_given_up_for_now_goes_to_the_back_and_is_not_held_to_be_searched_for,
    a_search_that_begins_again_forgets_how_far_it_came,
    records_that_make_no_sense_are_flagged_and_starve_no_other,
}

const CHAIN: ChainId = ChainId::new(8453);

/// Orders paid by somebody else, each with a payment that is owed back.
async fn owed(db: &TestDb, ids: &[&str]) {
    for id in ids {
        db.paid_order(&format!("o-{id}")).await;
        db.payment(id, &format!("o-{id}")).await;
        db.apply(id, settled(id)).await;
    }
}

async fn set(db: &TestDb, id: &str, status: &str) {
    let sql = "UPDATE {refunds_owed} SET status = ? WHERE payment_id = ?";
    assert_eq!(db.gateway.execute(sql, &[Some(status), Some(id)]).await.unwrap(), 1);
}

/// How long closed records are searched for.
const CLOSED_FOR_SECS: u64 = 100_000;

async fn due_at(db: &TestDb, secs: u64, limit: u32) -> Vec<SearchedRefund> {
    let due = SearchDue {
        in_hand_before: at(secs.saturating_sub(60)),
        owed_before: at(secs.saturating_sub(3_600)),
        closed_after: at(secs.saturating_sub(CLOSED_FOR_SECS)),
    };
    let page = db.store.refunds_to_search(CHAIN, due, limit).await.unwrap();
    assert!(page.malformed.is_empty());
    page.refunds
}

fn ids(refunds: &[SearchedRefund]) -> Vec<&str> {
    refunds.iter().map(|refund| refund.payment_id.as_str()).collect()
}

fn nothing_found(refund: &SearchedRefund, searched_to: u64) -> RefundFinding {
    RefundFinding {
        refund: refund.clone(),
        searched_to: Some(searched_to),
        is_complete: true,
        problem: None,
        restart: false,
        is_use_seen: false,
        paid: None,
        flags: Vec::new(),
    }
}

fn paid(refund: &SearchedRefund) -> RefundFinding {
    let log = LogRef { block: block(500, 900), tx_hash: tx_hash("refund"), log_index: 4 };
    let paid = RefundPaid { log, evidence: json!({ "shown_by": ["first"] }) };
    RefundFinding { paid: Some(paid), ..nothing_found(refund, 600) }
}

async fn column(db: &TestDb, name: &str) -> Option<String> {
    db.value(&format!("SELECT CAST({name} AS TEXT) FROM {{refunds_owed}}")).await
}

async fn records_that_are_not_closed_are_due_and_those_in_hand_more_often(db: &TestDb) {
    owed(db, &["a", "b", "c", "d", "e", "f"]).await;
    for (id, status) in
        [("b", "claimed"), ("c", "sent"), ("d", "blocked"), ("e", "paid"), ("f", "void")]
    {
        set(db, id, status).await;
    }
    let all = due_at(db, 100, 10).await;
    assert_eq!(ids(&all), ["a", "b", "c", "d"], "closed ones only when no others are");
    assert_eq!(all[1].status, RefundStatus::Claimed);
    assert_eq!(all[0].amount.to_string(), AMOUNT);
    assert_eq!((all[0].searched_to, all[0].detected_at), (None, at(30)));
    assert_eq!(ids(&due_at(db, 100, 2).await), ["a", "b"], "bounded");
    let elsewhere =
        SearchDue { in_hand_before: at(100), owed_before: at(100), closed_after: at(0) };
    let other = db.store.refunds_to_search(ChainId::new(1), elsewhere, 10).await.unwrap();
    assert!(other.is_empty());

    let findings: Vec<RefundFinding> = all.iter().map(|one| nothing_found(one, 600)).collect();
    db.store.refunds_searched(&findings, at(100)).await.unwrap();
    let closed = due_at(db, 159, 10).await;
    assert_eq!(ids(&closed), ["e", "f"]);
    let findings: Vec<RefundFinding> = closed.iter().map(|one| nothing_found(one, 600)).collect();
    db.store.refunds_searched(&findings, at(159)).await.unwrap();
    assert!(due_at(db, 159, 10).await.is_empty());
    assert_eq!(ids(&due_at(db, 160, 10).await), ["b", "c"], "in somebody's hands");
    assert_eq!(ids(&due_at(db, 3_700, 10).await), ["a", "b", "c", "d"]);
}

/// I7, I12.
async fn a_refund_that_was_paid_closes_its_record_with_all_that_goes_with_it(db: &TestDb) {
    owed(db, &["a"]).await;
    set(db, "a", "claimed").await;
    let refund = due_at(db, 100, 10).await.remove(0);
    let closed = db.store.refunds_searched(&[paid(&refund)], at(1_000)).await.unwrap();
    assert_eq!(closed, [PaymentId::from("a")]);
    assert_eq!(db.refunds().await, ["a duplicate 1000000 paid"]);
    assert_eq!(db.events().await, ["refund.owed:o-a", "refund.paid:o-a"]);
    let story = db.store.story(&PaymentId::from("a")).await.unwrap().unwrap();
    let record = story.refund.unwrap();
    assert_eq!(record["paid_tx"], tx_hash("refund").to_string());
    assert!(record["paid_at"].as_str().is_some_and(|time| !time.is_empty()));
    let last = story.resolutions.last().unwrap();
    assert_eq!(last["outcome"], "refund_paid");
    assert_eq!(last["evidence"]["shown_by"][0], "first");
    assert_eq!((&last["block_number"], &last["log_index"]), (&500.into(), &4.into()));
    let again = due_at(db, 5_000, 10).await.remove(0);
    assert_eq!(again.status, RefundStatus::Paid, "it is watched for a while");
    assert_eq!(again.paid_tx, Some(tx_hash("refund").to_string()));
    assert!(due_at(db, 1_000 + CLOSED_FOR_SECS, 10).await.is_empty(), "and then no more");
}

/// I6: what was found is flagged, its transfer is in view again, and the record stays what it is.
async fn a_second_refund_of_a_closed_record_is_flagged_and_its_money_in_view(db: &TestDb) {
    owed(db, &["a"]).await;
    set(db, "a", "void").await;
    let refund = due_at(db, 100, 10).await.remove(0);
    let kind = FlagKind::RefundedAgain;
    let flag = Flag { kind, subject: "1:0x01:2".to_owned(), detail: json!({}) };
    let found = RefundFinding { flags: vec![flag], ..nothing_found(&refund, 600) };
    assert!(db.store.refunds_searched(&[found], at(100)).await.unwrap().is_empty());
    assert_eq!(db.refunds().await, ["a duplicate 1000000 void"]);
    assert_eq!(db.flags().await, ["refunded_again:a"]);
    assert!(db.store.unaccounted_since(CHAIN).await.unwrap().is_some());
    let after = LedgerKey { time: BlockTime::from_secs(0), id: i64::MIN };
    let page = db.store.ledger_page(CHAIN, &after, 10_000, 10).await.unwrap();
    assert_eq!(page.again[&PaymentId::from("a")], RefundsAgain { open: 1, decided: 0 });
}

/// I6: the transfer is there again, and what landed meanwhile is found, and closes the record.
async fn a_record_that_is_owed_again_is_searched_for_from_where_it_was_void(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("p", "o").await;
    db.apply("p", tentative("p")).await;
    let refund = due_at(db, 50, 10).await.remove(0);
    db.store.refunds_searched(&[nothing_found(&refund, 500)], at(50)).await.unwrap();
    db.apply("p", pending(60)).await;
    assert_eq!(db.refunds().await, ["p duplicate 1000000 void"]);
    let refund = due_at(db, 4_000, 10).await.remove(0);
    let flag = Flag { kind: FlagKind::RefundedAgain, ..misuse() };
    let found = RefundFinding { flags: vec![flag], ..nothing_found(&refund, 600) };
    db.store.refunds_searched(&[found], at(4_000)).await.unwrap();
    assert_eq!(db.flags().await, ["refunded_again:p"]);

    db.apply("p", tentative("p")).await;
    assert_eq!(db.refunds().await, ["p duplicate 1000000 owed"]);
    let refund = due_at(db, 8_000, 10).await.remove(0);
    assert_eq!((refund.status, refund.searched_to), (RefundStatus::Owed, Some(500)));
    db.store.refunds_searched(&[paid(&refund)], at(8_000)).await.unwrap();
    assert!(db.flags().await.is_empty(), "it is the refund");
}

/// I9, I10.
async fn a_record_that_changed_since_it_was_asked_about_is_left_alone(db: &TestDb) {
    owed(db, &["a"]).await;
    let refund = due_at(db, 100, 10).await.remove(0);
    for status in ["claimed", "void", "paid"] {
        set(db, "a", status).await;
        let mut misused = paid(&refund);
        misused.flags.push(misuse());
        let closed = db.store.refunds_searched(&[misused], at(1_000)).await.unwrap();
        assert!(closed.is_empty());
        assert_eq!(db.refunds().await, [format!("a duplicate 1000000 {status}")]);
        assert_eq!(column(db, "searched_to").await, None, "it was not searched for as it is now");
    }
    set(db, "a", "owed").await;
    let other_nonce = "UPDATE {refunds_owed} SET refund_nonce = '0x01'";
    db.gateway.execute(other_nonce, &[]).await.unwrap();
    assert!(db.store.refunds_searched(&[paid(&refund)], at(1_000)).await.unwrap().is_empty());
    assert_eq!(db.events().await, ["refund.owed:o-a"]);
    assert!(db.flags().await.is_empty());
}

async fn two_replicas_close_one_record_once(db: &TestDb) {
    owed(db, &["a", "b"]).await;
    let found: Vec<RefundFinding> = due_at(db, 100, 10).await.iter().map(paid).collect();
    let turned: Vec<RefundFinding> = found.iter().rev().cloned().collect();
    let replica = db.replica().await;
    let (one, other) = tokio::join!(
        db.store.refunds_searched(&found, at(1_000)),
        replica.refunds_searched(&turned, at(1_000)),
    );
    assert_eq!(one.unwrap().len() + other.unwrap().len(), 2);
    assert_eq!(db.count("{events}").await, 4, "two owed, two paid");
    assert_eq!(db.count("{resolutions}").await, 4);
}

async fn a_search_that_found_nothing_only_says_how_far_it_came(db: &TestDb) {
    owed(db, &["a"]).await;
    let refund = due_at(db, 100, 10).await.remove(0);
    let part = RefundFinding { is_complete: false, ..nothing_found(&refund, 600) };
    db.store.refunds_searched(&[part], at(100)).await.unwrap();
    assert_eq!(due_at(db, 101, 10).await[0].searched_to, Some(600), "still due: there is more");
    let silent =
        RefundFinding { searched_to: None, is_complete: false, ..nothing_found(&refund, 0) };
    db.store.refunds_searched(&[silent], at(200)).await.unwrap();
    assert_eq!(column(db, "searched_to").await.as_deref(), Some("600"));
    assert_eq!(db.refunds().await, ["a duplicate 1000000 owed"]);
    assert_eq!(db.count("{resolutions}").await, 1);
    assert!(db.store.refunds_searched(&[], at(300)).await.unwrap().is_empty());
}

fn misuse() -> Flag {
    Flag {
        kind: FlagKind::RefundMismatch,
        subject: String::new(),
        detail: json!({ "used_for": "something else" }),
    }
}

async fn a_misused_nonce_is_flagged_and_changes_nothing(db: &TestDb) {
    owed(db, &["a"]).await;
    let refund = due_at(db, 100, 10).await.remove(0);
    let misused = RefundFinding { flags: vec![misuse()], ..nothing_found(&refund, 600) };
    db.store.refunds_searched(std::slice::from_ref(&misused), at(100)).await.unwrap();
    db.store.refunds_searched(&[misused], at(200)).await.unwrap();
    assert_eq!(db.flags().await, ["refund_mismatch:a"]);
    assert_eq!(db.count("{flags}").await, 1);
    assert_eq!(db.refunds().await, ["a duplicate 1000000 owed"]);
}

/// I11.
async fn a_record_that_is_given_up_for_now_goes_to_the_back_and_is_not_held_to_be_searched_for(
    db: &TestDb,
) {
    owed(db, &["a", "b"]).await;
    let refund = due_at(db, 100, 1).await.remove(0);
    let mut unsettled = RefundFinding {
        searched_to: None,
        is_complete: false,
        problem: Some(SearchProblem::Disagreement),
        ..nothing_found(&refund, 0)
    };
    db.store.refunds_searched(std::slice::from_ref(&unsettled), at(100)).await.unwrap();
    assert_eq!(ids(&due_at(db, 101, 1).await), ["b"]);
    assert_eq!(db.store.refunds_unsettled(CHAIN).await.unwrap(), 1);
    assert_eq!(db.store.refunds_unsettled(ChainId::new(1)).await.unwrap(), 0);
    unsettled.problem = Some(SearchProblem::TooManyUses);
    db.store.refunds_searched(&[unsettled], at(200)).await.unwrap();
    assert_eq!(db.store.refunds_unsettled(CHAIN).await.unwrap(), 0, "a flag tells of that");
    db.store.refunds_searched(&[nothing_found(&refund, 600)], at(300)).await.unwrap();
    let problem = "SELECT search_problem FROM {refunds_owed} WHERE payment_id = 'a'";
    assert_eq!(db.value(problem).await, None);
}

async fn a_search_that_begins_again_forgets_how_far_it_came(db: &TestDb) {
    owed(db, &["a"]).await;
    set(db, "a", "claimed").await;
    let refund = due_at(db, 100, 10).await.remove(0);
    let seen = RefundFinding { is_use_seen: true, ..nothing_found(&refund, 600) };
    db.store.refunds_searched(&[seen], at(100)).await.unwrap();
    let refund = due_at(db, 1_000, 10).await.remove(0);
    assert_eq!((refund.begun_at, refund.is_use_seen), (Some(at(100)), true));
    let again = RefundFinding { restart: true, ..nothing_found(&refund, 700) };
    db.store.refunds_searched(&[again], at(1_000)).await.unwrap();
    let refund = due_at(db, 2_000, 10).await.remove(0);
    assert_eq!((refund.searched_to, refund.is_use_seen), (None, false));
    db.store.refunds_searched(&[nothing_found(&refund, 10)], at(2_000)).await.unwrap();
    let refund = due_at(db, 3_000, 10).await.remove(0);
    assert_eq!((refund.searched_to, refund.begun_at), (Some(10), Some(at(2_000))));
}

/// I11.
async fn records_that_make_no_sense_are_flagged_and_starve_no_other(db: &TestDb) {
    owed(db, &["a", "b"]).await;
    let spoil = "UPDATE {refunds_owed} SET payer = 'nobody' WHERE payment_id = 'a'";
    db.gateway.execute(spoil, &[]).await.unwrap();
    let due = SearchDue { in_hand_before: at(100), owed_before: at(100), closed_after: at(0) };
    let page = db.store.refunds_to_search(CHAIN, due, 1).await.unwrap();
    assert!(page.refunds.is_empty() && page.malformed[0].problem.contains("payer"), "{page:?}");
    db.store.refunds_malformed(&page.malformed, at(200)).await.unwrap();
    assert_eq!(db.flags().await, ["malformed_refund:a"]);
    let page = db.store.refunds_to_search(CHAIN, due, 1).await.unwrap();
    assert_eq!((ids(&page.refunds), page.malformed.len()), (vec!["b"], 0));
}
