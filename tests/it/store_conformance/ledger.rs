//! Runs, the scan's cursors and rows, and the pages that say what became of money.

use std::collections::BTreeSet;
use std::time::Duration;

use alloy_primitives::Address;
use reconciled::domain::{
    Account, BlockRef, BlockTime, ChainId, Cursor, Finality, Flag, FlagKind, FlagState, LedgerKey,
    LedgerPage, Payment, PaymentId, RaisedFlag, RawPayment, Receiver, RefundStatus,
    ScannedTransfer, Timestamp, Transfer, log_subject,
};
use reconciled::store::{FoundTransfers, ScanPage, SettledKey};
use serde_json::json;

use super::harness::{T0, TestDb, at, block, hours, lease, payment, settled, transfer, tx_hash};

for_each_backend!(
    a_run_is_asked_for_once_until_it_ends,
    a_run_is_one_holder_s_until_its_lease_runs_out,
    a_run_that_is_given_back_goes_on_where_it_stood,
    ten_replicas_take_up_a_run_once,
    cursors_move_with_what_was_seen_or_not_at_all,
    a_scan_and_a_check_see_one_log_as_one_row,
    what_left_the_chain_is_taken_back,
    a_page_tells_what_became_of_every_transfer,
    pages_walk_through_every_transfer_once,
    marks_of_unaccounted_transfers_are_kept,
    settled_payments_come_by_once_and_only_without_a_transfer,
    a_transfer_that_is_another_payment_s_proves_nothing,
    a_transfer_that_was_found_is_one_payment_s,
    what_was_found_for_a_row_that_is_another_now_is_left,
    records_whose_transfer_is_gone_are_found,
    open_payments_of_a_payer_are_found,
    what_people_spoil_holds_up_nothing_else,
    old_runs_are_pruned,
    open_flags_come_in_pages_with_the_rows_they_are_about,
    money_that_was_nobody_s_and_is_claimed_by_now_is_in_view_again,
);

const CHAIN: ChainId = ChainId::new(8453);

fn receiver() -> Receiver {
    let transfer = transfer("any", 1, 1);
    Receiver { token: transfer.token, pay_to: transfer.to }
}

fn other_receiver() -> Receiver {
    Receiver { pay_to: Address::repeat_byte(0xbb), ..receiver() }
}

/// The transfer of payment `id`, as a scan sees it.
fn seen(id: &str, number: u64, log_index: u64) -> ScannedTransfer {
    let nonce = payment(id, "").nonce.unwrap().parse().unwrap();
    ScannedTransfer { transfer: transfer(id, number, log_index), nonce: Some(nonce) }
}

async fn open_cursors(db: &TestDb, receivers: &[Receiver]) {
    let cursors: Vec<Cursor> = receivers
        .iter()
        .map(|receiver| Cursor { receiver: *receiver, first_block: 91, block: block(90, 0) })
        .collect();
    db.store.open_cursors(CHAIN, &cursors, T0).await.unwrap();
}

fn scan(from: BlockRef, to: BlockRef, transfers: &[ScannedTransfer]) -> ScanPage {
    let receivers = vec![receiver()];
    ScanPage { chain_id: CHAIN, receivers, from, to, transfers: transfers.to_vec() }
}

/// Scans blocks 91 to 110 and sees these.
async fn scanned(db: &TestDb, transfers: &[ScannedTransfer]) {
    open_cursors(db, &[receiver()]).await;
    let page = scan(block(90, 0), block(110, 5), transfers);
    let ingested = db.store.ingest(&page, at(10)).await.unwrap().unwrap();
    assert_eq!((ingested.new, ingested.vanished.len()), (transfers.len(), 0));
}

async fn whole_ledger(db: &TestDb) -> LedgerPage {
    let start = LedgerKey { time: BlockTime::from_secs(0), id: i64::MIN };
    db.store.ledger_page(CHAIN, &start, 1_000, 1_000).await.unwrap()
}

// ---- Runs

async fn a_run_is_asked_for_once_until_it_ends(db: &TestDb) {
    assert_eq!(db.store.runs().await.unwrap(), Default::default());
    let lease = lease(at(1), at(61));
    assert!(db.store.take_run(&lease).await.unwrap().is_none(), "none was asked for");
    assert!(db.store.request_run(at(0)).await.unwrap());
    assert!(!db.store.request_run(at(0)).await.unwrap());
    let run = db.store.take_run(&lease).await.unwrap().unwrap();
    assert_eq!((run.requested_at, run.started_at), (at(0), Some(at(1))));
    assert!(!db.store.request_run(at(2)).await.unwrap());
    assert!(db.store.finish_run(&lease, run.id, &json!({"n": 1}), at(3)).await.unwrap());
    assert!(!db.store.finish_run(&lease, run.id, &json!({"n": 2}), at(4)).await.unwrap());
    let runs = db.store.runs().await.unwrap();
    let finished = runs.finished.unwrap();
    assert!(runs.unfinished.is_none());
    assert_eq!((finished.id, finished.report), (run.id, json!({"n": 1})));
    assert_eq!((finished.started_at, finished.finished_at), (at(1), at(3)));
    assert!(db.store.request_run(at(5)).await.unwrap());
}

async fn a_run_is_one_holder_s_until_its_lease_runs_out(db: &TestDb) {
    db.store.request_run(at(0)).await.unwrap();
    let (first, second) = (lease(at(1), at(61)), lease(at(30), at(90)));
    let run = db.store.take_run(&first).await.unwrap().unwrap();
    assert!(db.store.take_run(&second).await.unwrap().is_none());
    assert!(db.store.keep_run(&first, run.id, &json!({"stands": 1})).await.unwrap());
    assert!(!db.store.keep_run(&second, run.id, &json!({"stands": 9})).await.unwrap());
    let late = lease(at(61), at(121));
    let taken = db.store.take_run(&late).await.unwrap().unwrap();
    assert_eq!((taken.id, taken.started_at), (run.id, Some(at(1))));
    assert_eq!(taken.progress, Some(json!({"stands": 1})));
    assert!(!db.store.keep_run(&first, run.id, &json!({"stands": 2})).await.unwrap());
    assert!(!db.store.finish_run(&first, run.id, &json!({}), at(62)).await.unwrap());
    assert!(!db.store.release_run(&first).await.unwrap());
    assert!(db.store.finish_run(&late, run.id, &json!({}), at(63)).await.unwrap());
}

async fn a_run_that_is_given_back_goes_on_where_it_stood(db: &TestDb) {
    db.store.request_run(at(0)).await.unwrap();
    let first = lease(at(1), at(61));
    let run = db.store.take_run(&first).await.unwrap().unwrap();
    db.store.keep_run(&first, run.id, &json!({"stands": 1})).await.unwrap();
    assert!(db.store.release_run(&first).await.unwrap());
    let held = db.store.runs().await.unwrap().unfinished.unwrap();
    assert_eq!((held.held_until, held.progress), (None, Some(json!({"stands": 1}))));
    let taken = db.store.take_run(&lease(at(2), at(62))).await.unwrap().unwrap();
    assert_eq!((taken.id, taken.progress), (run.id, Some(json!({"stands": 1}))));
}

/// I10: no two runs at once.
async fn ten_replicas_take_up_a_run_once(db: &TestDb) {
    let mut replicas = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let store = db.replica().await;
        replicas.spawn(async move {
            let asked = store.request_run(at(0)).await.unwrap();
            let taken = store.take_run(&lease(at(1), at(61))).await.unwrap();
            (usize::from(asked), usize::from(taken.is_some()))
        });
    }
    let ends = replicas.join_all().await;
    assert_eq!(ends.iter().map(|(asked, _)| asked).sum::<usize>(), 1);
    assert_eq!(ends.iter().map(|(_, taken)| taken).sum::<usize>(), 1);
}

async fn old_runs_are_pruned(db: &TestDb) {
    for n in 0..3 {
        db.store.request_run(at(n)).await.unwrap();
        let lease = lease(at(n), at(n + 60));
        let run = db.store.take_run(&lease).await.unwrap().unwrap();
        db.store.finish_run(&lease, run.id, &json!({}), at(n)).await.unwrap();
    }
    db.store.request_run(at(9)).await.unwrap();
    assert_eq!(db.store.prune(at(2), 1_000).await.unwrap(), 2);
    assert_eq!(db.count("{reconcile_runs}").await, 2, "the newest, and the unfinished one");
}

// ---- The scan

async fn cursors_move_with_what_was_seen_or_not_at_all(db: &TestDb) {
    open_cursors(db, &[receiver(), other_receiver()]).await;
    open_cursors(db, &[receiver()]).await;
    let cursors = db.store.cursors(CHAIN).await.unwrap();
    assert_eq!(cursors.len(), 2);
    assert!(cursors.iter().all(|c| (c.first_block, c.block) == (91, block(90, 0))));
    assert!(db.store.cursors(ChainId::new(1)).await.unwrap().is_empty());

    let mut page = scan(block(90, 0), block(100, 4), &[seen("p", 95, 3)]);
    page.receivers = vec![receiver(), other_receiver()];
    assert_eq!(db.store.ingest(&page, at(10)).await.unwrap().unwrap().new, 1);
    assert!(db.store.ingest(&page, at(11)).await.unwrap().is_none(), "they do not stand there");
    let elsewhere = scan(block(100, 99), block(110, 5), &[seen("q", 105, 3)]);
    assert!(db.store.ingest(&elsewhere, at(12)).await.unwrap().is_none(), "another block 100");
    assert_eq!(db.count("{transfers}").await, 1, "nothing was written");
    let one = scan(block(100, 4), block(110, 5), &[seen("q", 105, 3)]);
    assert_eq!(db.store.ingest(&one, at(13)).await.unwrap().unwrap().new, 1);
    let mut blocks: Vec<u64> =
        db.store.cursors(CHAIN).await.unwrap().iter().map(|c| c.block.number).collect();
    blocks.sort_unstable();
    assert_eq!(blocks, [100, 110], "only those of the page move");
    assert!(
        !db.store
            .rewind(CHAIN, &[receiver()], &block(100, 4), &block(95, 1), at(14))
            .await
            .unwrap()
    );
    assert!(
        db.store.rewind(CHAIN, &[receiver()], &block(110, 5), &block(95, 1), at(14)).await.unwrap()
    );
    assert_eq!(db.count("{transfers}").await, 2, "rows stay until their blocks are read again");
}

async fn a_scan_and_a_check_see_one_log_as_one_row(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.paying_order("o2", "q").await;
    db.apply("p", settled("p")).await;
    scanned(db, &[seen("p", 100, 7), seen("q", 101, 7)]).await;
    let page = whole_ledger(db).await;
    let rows: Vec<_> = page
        .transfers
        .iter()
        .map(|k| (k.payment_id.as_ref().map(|p| p.as_str()), k.scanned))
        .collect();
    assert_eq!(rows, [(Some("p"), true), (None, true)], "one row per log");
    let mut late = settled("q");
    if let reconciled::domain::Verdict::Settled(settlement) = &mut late {
        settlement.transfer = transfer("q", 101, 7);
    }
    db.apply("q", late).await;
    let page = whole_ledger(db).await;
    let rows: Vec<_> = page
        .transfers
        .iter()
        .map(|k| (k.payment_id.as_ref().map(|p| p.as_str()), k.scanned))
        .collect();
    assert_eq!(rows, [(Some("p"), true), (Some("q"), true)]);
}

async fn what_left_the_chain_is_taken_back(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.apply("p", settled("p")).await;
    let (stays, goes, paid) = (seen("s", 99, 1), seen("g", 98, 1), seen("p", 100, 7));
    scanned(db, &[stays, goes, paid]).await;
    let flag = RaisedFlag {
        payment_id: None,
        order_id: None,
        flag: Flag {
            kind: FlagKind::UnmatchedTransfer,
            subject: log_subject(&goes.transfer),
            detail: json!({}),
        },
    };
    db.store.account_flags(&[flag], &[], at(11)).await.unwrap();
    let (from, to) = (block(110, 5), block(90, 0));
    assert!(db.store.rewind(CHAIN, &[receiver()], &from, &to, at(12)).await.unwrap());
    let page = scan(to, block(110, 6), &[stays]);
    let ingested = db.store.ingest(&page, at(13)).await.unwrap().unwrap();
    assert_eq!(ingested.new, 0);
    assert_eq!(ingested.vanished, [PaymentId::from("p")], "its own check says what becomes of it");
    let ledger = whole_ledger(db).await;
    let mut rows: Vec<_> =
        ledger.transfers.iter().map(|k| (k.transfer.tx_hash, k.scanned)).collect();
    rows.sort();
    let mut expected = [(tx_hash("s"), true), (tx_hash("p"), false)];
    expected.sort();
    assert_eq!(rows, expected);
    assert!(db.flags().await.is_empty(), "the flag's cause is gone");
    // It comes back in the same block.
    assert!(db.store.rewind(CHAIN, &[receiver()], &block(110, 6), &to, at(14)).await.unwrap());
    let page = scan(to, block(110, 7), &[stays, goes, paid]);
    assert_eq!(db.store.ingest(&page, at(15)).await.unwrap().unwrap().new, 2);
    assert!(whole_ledger(db).await.transfers.iter().all(|known| known.scanned));
}

// ---- Accounts

async fn a_page_tells_what_became_of_every_transfer(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("dup", "o").await;
    db.apply("dup", settled("dup")).await;
    db.paying_order("o2", "open").await;
    db.discover().await;
    scanned(db, &[seen("o/first", 99, 1), seen("dup", 100, 7), seen("open", 101, 1)]).await;
    let nobody_s = seen("nobody", 102, 1);
    let page = scan(block(110, 5), block(120, 6), &[]);
    db.store.ingest(&page, at(11)).await.unwrap().unwrap();
    let mut bare = nobody_s;
    bare.nonce = None;
    bare.transfer.block = block(115, 5);
    let page = scan(block(120, 6), block(130, 7), &[bare]);
    db.store.ingest(&page, at(12)).await.unwrap().unwrap();
    let subject = log_subject(&bare.transfer);
    let flag = RaisedFlag {
        payment_id: None,
        order_id: None,
        flag: Flag {
            kind: FlagKind::UnmatchedTransfer,
            subject: subject.clone(),
            detail: json!({}),
        },
    };
    db.store.account_flags(&[flag], &[], at(13)).await.unwrap();

    let page = whole_ledger(db).await;
    assert_eq!(page.transfers.len(), 4);
    assert_eq!(page.transfers[3].nonce, None);
    let ids: BTreeSet<&str> = page.payments.keys().map(PaymentId::as_str).collect();
    assert_eq!(ids, BTreeSet::from(["dup", "o/first", "open"]));
    let order = page.orders.values().find(|o| o.id.as_str() == "o").unwrap();
    assert_eq!(order.paid_by, Some(PaymentId::from("o/first")));
    let (status, amount) = page.refunds[&PaymentId::from("dup")];
    assert_eq!((status.code(), amount.to_string().as_str()), ("owed", "1000000"));
    assert_eq!(page.flags[&(FlagKind::UnmatchedTransfer, subject)], FlagState::Open);
    assert_eq!(page.watched, BTreeSet::from([PaymentId::from("open")]));
    let up_to = db
        .store
        .ledger_page(CHAIN, &LedgerKey { time: BlockTime::from_secs(0), id: 0 }, 100, 10)
        .await
        .unwrap();
    assert_eq!(up_to.transfers.len(), 2, "only from blocks that were scanned");
}

/// I11: rows that people edit. What makes no sense accounts for nothing, and the rest is read.
async fn what_people_spoil_holds_up_nothing_else(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("dup", "o").await;
    db.apply("dup", settled("dup")).await;
    scanned(db, &[seen("o/first", 99, 1), seen("dup", 100, 7)]).await;
    let flag = |kind, subject: &str| RaisedFlag {
        payment_id: Some(PaymentId::from("dup")),
        order_id: None,
        flag: Flag { kind, subject: subject.to_owned(), detail: json!({}) },
    };
    let flags = [
        flag(FlagKind::AuthorizationReused, "first"),
        flag(FlagKind::NonceUsedElsewhere, "second"),
        flag(FlagKind::PaidByUnknown, "third"),
    ];
    db.store.account_flags(&flags, &[], at(1)).await.unwrap();
    let spoilt = "UPDATE {flags} SET kind = 'by hand' WHERE subject IN ('first', 'second')";
    db.gateway.execute(spoilt, &[]).await.unwrap();
    db.gateway.execute("UPDATE {refunds_owed} SET amount = 'NaN'", &[]).await.unwrap();

    let page = whole_ledger(db).await;
    assert_eq!(page.transfers.len(), 2);
    let dup = PaymentId::from("dup");
    assert_eq!(page.refunds[&dup].0, RefundStatus::Owed);
    assert_eq!(page.refunds[&dup].1.to_string(), "0", "its money shows as missing");
    assert_eq!(
        page.flags.keys().map(|(kind, _)| *kind).collect::<Vec<_>>(),
        [FlagKind::PaidByUnknown]
    );
    let flagged = db.store.flagged_page(0, 1).await.unwrap();
    assert_eq!(flagged.flags[0].subject, "third", "a full page of those that are known");
    db.gateway.execute("DELETE FROM {transfers}", &[]).await.unwrap();
    assert_eq!(db.store.unbacked(CHAIN, T0, 10).await.unwrap().len(), 1);
}

async fn pages_walk_through_every_transfer_once(db: &TestDb) {
    let transfers: Vec<ScannedTransfer> = (0..25)
        .map(|n| {
            let mut one = seen(&format!("p{n:02}"), 95, n);
            one.transfer.block = block(95 + n / 5, n / 5);
            one
        })
        .collect();
    scanned(db, &transfers).await;
    let mut after = LedgerKey { time: BlockTime::from_secs(0), id: i64::MIN };
    let mut walked = Vec::new();
    loop {
        let page = db.store.ledger_page(CHAIN, &after, 1_000, 4).await.unwrap();
        let Some(last) = page.transfers.last() else { break };
        after = last.key();
        walked.extend(page.transfers.iter().map(|known| known.transfer));
    }
    let expected: Vec<_> = transfers.iter().map(|one| one.transfer).collect();
    assert_eq!(walked, expected);
    let since = LedgerKey { time: block(97, 2).time, id: i64::MIN };
    let window = db.store.ledger_page(CHAIN, &since, 1_000, 100).await.unwrap();
    assert_eq!(window.transfers.len(), 15, "from this block time on, all of it");
}

async fn marks_of_unaccounted_transfers_are_kept(db: &TestDb) {
    scanned(db, &[seen("a", 95, 1), seen("b", 96, 1)]).await;
    assert_eq!(db.store.unaccounted_since(CHAIN).await.unwrap(), None);
    let ids: Vec<i64> = whole_ledger(db).await.transfers.iter().map(|known| known.id).collect();
    db.store.mark_unaccounted(&ids[1..], &[], at(20)).await.unwrap();
    let marked: Vec<bool> = whole_ledger(db).await.transfers.iter().map(|k| k.marked).collect();
    assert_eq!(marked, [false, true]);
    assert_eq!(db.store.unaccounted_since(CHAIN).await.unwrap(), Some(block(96, 4).time));
    assert_eq!(db.store.unaccounted_since(ChainId::new(1)).await.unwrap(), None);
    assert_eq!(db.store.missed_by_scan(CHAIN).await.unwrap(), None, "both were scanned");
    let unseen = "UPDATE {transfers} SET scanned_at = NULL, payment_id = 'p'";
    db.gateway.execute(&format!("{unseen} WHERE block_number = 96"), &[]).await.unwrap();
    assert_eq!(db.store.missed_by_scan(CHAIN).await.unwrap(), Some(96));
    db.store.mark_unaccounted(&ids[..1], &ids[1..], at(21)).await.unwrap();
    let marked: Vec<bool> = whole_ledger(db).await.transfers.iter().map(|k| k.marked).collect();
    assert_eq!(marked, [true, false]);
}

// ---- Ledger to chain

fn settled_row(id: &str, order: &str, created: Timestamp) -> RawPayment {
    RawPayment {
        status: Some("settled".to_owned()),
        created_at: Some(created.as_millis().to_string()),
        ..payment(id, order)
    }
}

async fn settled_at(db: &TestDb, id: &str, order: &str, created: Timestamp) {
    db.gateway.insert_payment(&settled_row(id, order, created)).await.unwrap();
}

/// What was read about a payment that [`settled_at`] wrote.
fn found(id: &str, transfer: Transfer) -> (Payment, Transfer) {
    (settled_row(id, "o", at(1)).parse().unwrap(), transfer)
}

async fn settled_payments_come_by_once_and_only_without_a_transfer(db: &TestDb) {
    db.order("o").await;
    db.payment("unknown", "o").await;
    // Many rows of one moment: pages must neither skip nor repeat any.
    for n in 0..7 {
        settled_at(db, &format!("p{n}"), "o", at(1)).await;
    }
    settled_at(db, "recorded", "o", at(2)).await;
    settled_at(db, "scanned", "o", at(2)).await;
    settled_at(db, "old", "o", T0.saturating_sub(Duration::from_secs(10))).await;
    settled_at(db, "new", "o", at(100)).await;
    let recorded = found("recorded", transfer("recorded", 95, 1));
    db.store.record_found(&[recorded], at(3)).await.unwrap();
    scanned(db, &[seen("scanned", 96, 1)]).await;
    for limit in [1, 2, 3, 100] {
        let mut after: Option<SettledKey> = None;
        let mut met = Vec::new();
        loop {
            let page = db.store.unproven_page(T0, at(100), after.as_ref(), limit).await.unwrap();
            met.extend(page.payments.into_iter().map(|p| p.unwrap().id.to_string()));
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        met.sort();
        assert_eq!(met, ["p0", "p1", "p2", "p3", "p4", "p5", "p6"], "in pages of {limit}");
    }
}

/// I3: a payment with the authorization of one whose transfer was found has none of its own.
async fn a_transfer_that_is_another_payment_s_proves_nothing(db: &TestDb) {
    db.order("o").await;
    settled_at(db, "p", "o", at(1)).await;
    let row = RawPayment {
        status: Some("settled".to_owned()),
        created_at: Some(at(2).as_millis().to_string()),
        id: "q".to_owned(),
        ..payment("p", "o2")
    };
    db.order("o2").await;
    db.gateway.insert_payment(&row).await.unwrap();
    let unproven = async || -> Vec<String> {
        let page = db.store.unproven_page(T0, at(100), None, 10).await.unwrap();
        page.payments.into_iter().map(|p| p.unwrap().id.to_string()).collect()
    };
    scanned(db, &[seen("p", 96, 1)]).await;
    assert!(unproven().await.is_empty(), "the accounting says whose it is");
    db.store.record_found(&[found("p", transfer("p", 96, 1))], at(3)).await.unwrap();
    assert_eq!(unproven().await, ["q"]);
}

/// I4: the row's terms or status were written over while the chain was read. The transfer is not its.
async fn what_was_found_for_a_row_that_is_another_now_is_left(db: &TestDb) {
    db.order("o").await;
    for (id, edit) in [
        ("nonce", "nonce = '0x1111111111111111111111111111111111111111111111111111111111111111'"),
        ("status", "status = 'unknown'"),
        ("unreadable", "rail = 'nonsense'"),
    ] {
        settled_at(db, id, "o", at(1)).await;
        db.gateway
            .execute(&format!("UPDATE payments SET {edit} WHERE id = '{id}'"), &[])
            .await
            .unwrap();
        let read = found(id, transfer(id, 95, 1));
        let books = db.store.record_found(&[read], at(3)).await.unwrap();
        assert_eq!(books, FoundTransfers::default(), "{id}");
    }
    assert_eq!(db.count("{transfers}").await, 0);
}

async fn a_transfer_that_was_found_is_one_payment_s(db: &TestDb) {
    db.order("o").await;
    settled_at(db, "p", "o", at(1)).await;
    settled_at(db, "q", "o", at(1)).await;
    let of = |id: &str| found(id, transfer("p", 95, 1));
    let ids = |ids: &[&str]| -> BTreeSet<PaymentId> {
        ids.iter().copied().map(PaymentId::from).collect()
    };
    let books = db.store.record_found(&[of("p"), of("q")], at(3)).await.unwrap();
    assert_eq!(
        (books.recorded, books.taken),
        (ids(&["p"]), ids(&["q"])),
        "one log is one payment's"
    );
    // A check of its own may have come first.
    let again = found("p", transfer("p", 96, 1));
    let books = db.store.record_found(&[again], at(4)).await.unwrap();
    assert_eq!((books.recorded, books.taken), (ids(&["p"]), ids(&[])));
    assert_eq!(db.store.record_found(&[], at(4)).await.unwrap(), FoundTransfers::default());
    assert_eq!(db.count("{transfers}").await, 1, "a payment has one transfer");
    // Seen by the scan first, then found to be a payment's.
    scanned(db, &[seen("q", 97, 2)]).await;
    let q = found("q", transfer("q", 97, 2));
    assert_eq!(db.store.record_found(&[q], at(5)).await.unwrap().recorded, ids(&["q"]));
    let page = whole_ledger(db).await;
    assert_eq!(page.transfers.len(), 2);
    assert!(page.transfers[1].scanned && page.transfers[1].payment_id.is_some());
}

async fn records_whose_transfer_is_gone_are_found(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("dup", "o").await;
    db.apply("dup", settled("dup")).await;
    let lost = seen("lost", 99, 1);
    scanned(db, &[lost]).await;
    let flag = RaisedFlag {
        payment_id: None,
        order_id: None,
        flag: Flag {
            kind: FlagKind::UnmatchedTransfer,
            subject: log_subject(&lost.transfer),
            detail: json!({
                "token": lost.transfer.token, "pay_to": lost.transfer.to,
                "amount": lost.transfer.value, "tx_hash": lost.transfer.tx_hash,
                "log_index": lost.transfer.log_index,
            }),
        },
    };
    db.store.account_flags(&[flag], &[], at(20)).await.unwrap();
    assert!(db.store.unbacked(CHAIN, T0, 10).await.unwrap().is_empty(), "both transfers are known");
    db.gateway.execute("DELETE FROM {transfers}", &[]).await.unwrap();
    let found = db.store.unbacked(CHAIN, T0, 10).await.unwrap();
    let told: Vec<_> =
        found.iter().map(|u| (u.account, u.receiver == receiver(), u.amount.to_string())).collect();
    let million = "1000000".to_owned();
    assert_eq!(told, [(Account::Owed, true, million.clone()), (Account::Flagged, true, million)]);
    assert_eq!(found[0].subject, "dup");
    assert!(db.store.unbacked(ChainId::new(1), T0, 10).await.unwrap().is_empty());
    let later = at(hours(1));
    assert!(db.store.unbacked(CHAIN, later, 10).await.unwrap().is_empty(), "older than asked for");
}

async fn open_payments_of_a_payer_are_found(db: &TestDb) {
    db.paying_order("o", "p").await;
    settled_at(db, "settled", "o", at(1)).await;
    let payer: Address = payment("p", "o").payer.unwrap().parse().unwrap();
    let settled_payer: Address = payment("settled", "o").payer.unwrap().parse().unwrap();
    let found = db.store.open_payments_of(&[payer, settled_payer], 10).await.unwrap();
    assert_eq!(found, [(payer, PaymentId::from("p"))]);
    assert!(db.store.open_payments_of(&[], 10).await.unwrap().is_empty());
}

// ---- Flags

async fn open_flags_come_in_pages_with_the_rows_they_are_about(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("p", "o").await;
    db.apply("p", settled("p")).await;
    let flag = |payment: Option<&str>, kind: FlagKind| RaisedFlag {
        payment_id: payment.map(PaymentId::from),
        order_id: None,
        flag: Flag { kind, subject: "8453:0x01:2".to_owned(), detail: json!({}) },
    };
    let flags = [
        flag(Some("p"), FlagKind::SettledOrderOver),
        flag(None, FlagKind::UnmatchedTransfer),
        flag(Some("nobody"), FlagKind::MalformedPayment),
    ];
    db.store.account_flags(&flags, &[], at(1)).await.unwrap();
    let mut seen = Vec::new();
    let mut after = 0;
    loop {
        let page = db.store.flagged_page(after, 2).await.unwrap();
        let Some(last) = page.flags.last() else { break };
        after = last.id;
        for flag in &page.flags {
            seen.push(flag.kind);
            if flag.payment_id == Some(PaymentId::from("p")) {
                let p = flag.payment_id.clone().unwrap();
                assert_eq!(
                    page.rows.payments[&p].order_id,
                    page.rows.orders.keys().next().unwrap().clone()
                );
                assert_eq!(page.rows.refunds[&p].0, RefundStatus::Owed);
                assert_eq!(page.finality[&p], Finality::Final);
            }
        }
        assert!(
            page.flags.len() <= 2 && !page.rows.payments.contains_key(&PaymentId::from("nobody"))
        );
    }
    seen.sort();
    let mut all = flags.map(|raised| raised.flag.kind);
    all.sort();
    assert_eq!(seen, all, "each once");
    let open = db.store.flags(&Default::default(), 10).await.unwrap();
    let ids: Vec<i64> = open.iter().map(|flag| flag.id).collect();
    db.store.close_flags(&ids, "alice", "done", at(2)).await.unwrap();
    assert!(db.store.flagged_page(0, 10).await.unwrap().flags.is_empty());
}

async fn money_that_was_nobody_s_and_is_claimed_by_now_is_in_view_again(db: &TestDb) {
    scanned(db, &[seen("late", 100, 3), seen("never", 101, 3)]).await;
    let flag = |id: &str, number: u64| {
        let money = transfer(id, number, 3);
        RaisedFlag {
            payment_id: None,
            order_id: None,
            flag: Flag {
                kind: FlagKind::UnmatchedTransfer,
                subject: log_subject(&money),
                detail: json!({
                    "chain_id": money.chain_id, "tx_hash": money.tx_hash, "log_index": money.log_index
                }),
            },
        }
    };
    let flags = [flag("late", 100), flag("never", 101)];
    db.store.account_flags(&flags, &[], at(1)).await.unwrap();
    let subjects: Vec<String> = flags.iter().map(|raised| raised.flag.subject.clone()).collect();
    assert_eq!(db.store.mark_claimed(&subjects, at(20)).await.unwrap(), 0);
    db.paying_order("o", "late").await;
    assert_eq!(db.store.mark_claimed(&subjects, at(20)).await.unwrap(), 1);
    let marked: Vec<bool> =
        whole_ledger(db).await.transfers.iter().map(|known| known.marked).collect();
    assert_eq!(marked, [true, false]);
}
