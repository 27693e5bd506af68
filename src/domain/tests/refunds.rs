//! What a search for refunds proves, first as a table, then over arbitrary readings.

use alloy_primitives::{Address, B256};
use proptest::prelude::*;

use super::support::*;
use crate::domain::*;

const WALLET: Address = Address::repeat_byte(0x77);
const STRANGER: Address = Address::repeat_byte(0x88);
const NONCE: B256 = B256::repeat_byte(0x99);

fn refund() -> SearchedRefund {
    SearchedRefund {
        id: 1,
        payment_id: PaymentId::from("p1"),
        order_id: OrderId::from("o"),
        chain_id: CHAIN,
        token: TOKEN,
        payer: Address::repeat_byte(0x33),
        amount: amount(1_000_000),
        refund_nonce: NONCE,
        status: RefundStatus::Claimed,
        paid_tx: None,
        detected_at: secs(100),
        searched_to: Some(50),
        begun_at: Some(secs(200)),
        is_use_seen: false,
        was_malformed: false,
    }
}

/// The refund as it should be, by `authorizer`, in block `number`.
fn paid_by(authorizer: Address, number: u64) -> NonceUse {
    let SearchedRefund { payer, amount, .. } = refund();
    let transferred = SeenTransfer {
        log_index: 4,
        token: TOKEN,
        from: authorizer,
        to: payer,
        value: amount,
        at_most: None,
    };
    NonceUse {
        token: TOKEN,
        authorizer,
        nonce: NONCE,
        consumption: Consumption {
            log: LogRef { block: block(number), tx_hash: B256::repeat_byte(0xaa), log_index: 3 },
            kind: ConsumptionKind::Transferred(transferred),
        },
    }
}

fn with_kind(used: NonceUse, kind: ConsumptionKind) -> NonceUse {
    NonceUse { consumption: Consumption { kind, ..used.consumption }, ..used }
}

fn with_transfer(used: NonceUse, change: impl Fn(&mut SeenTransfer)) -> NonceUse {
    let ConsumptionKind::Transferred(mut seen) = used.consumption.kind else { unreachable!() };
    change(&mut seen);
    with_kind(used, ConsumptionKind::Transferred(seen))
}

/// One endpoint searched blocks 40 to 100, the newest final one.
fn shows(endpoint: &str, uses: Vec<NonceUse>) -> RefundReading {
    let search = RefundSearch {
        from_block: 40,
        to_block: 100,
        finalized: block(100),
        slack: 10,
        uses,
        flooded: [].into(),
        consumed: [].into(),
        unread: [].into(),
    };
    RefundReading { endpoint: EndpointName::new(endpoint), outcome: Ok(search) }
}

fn shows_but(
    endpoint: &str,
    uses: Vec<NonceUse>,
    change: impl Fn(&mut RefundSearch),
) -> RefundReading {
    let mut reading = shows(endpoint, uses);
    change(reading.outcome.as_mut().unwrap());
    reading
}

const NOW: Timestamp = Timestamp::from_millis(300_000);

fn fails(endpoint: &str) -> RefundReading {
    let failure = ReadFailure::new(ReadFailureKind::Unreachable, "test");
    RefundReading { endpoint: EndpointName::new(endpoint), outcome: Err(failure) }
}

fn anybody() -> RefundPolicy {
    RefundPolicy { wallets: Vec::new(), quorum: 1 }
}

fn ours() -> RefundPolicy {
    RefundPolicy { wallets: vec![WALLET], quorum: 1 }
}

/// `paid`, `flagged`, both or nothing.
fn said(uses: Vec<NonceUse>, policy: &RefundPolicy) -> &'static str {
    let finding = judge_refund(&refund(), &[shows("a", uses)], policy, NOW);
    match (finding.paid.is_some(), finding.flags.is_empty()) {
        (true, true) => "paid",
        (true, false) => "paid, flagged",
        (false, false) => "flagged",
        (false, true) => "nothing",
    }
}

#[test]
fn the_refund_is_the_transfer_of_exactly_what_is_owed_to_exactly_whom_it_is_owed() {
    let good = || paid_by(WALLET, 60);
    for policy in [anybody(), ours()] {
        assert_eq!(said(vec![], &policy), "nothing", "I2, mirrored: silence changes nothing");
        assert_eq!(said(vec![good()], &policy), "paid");
        for wrong in [
            with_transfer(good(), |t| t.value = amount(999_999)),
            with_transfer(good(), |t| t.value = amount(1_000_001)),
            with_transfer(good(), |t| t.to = STRANGER),
            with_kind(good(), ConsumptionKind::Canceled),
        ] {
            assert_eq!(said(vec![wrong], &policy), "flagged", "{wrong:?}");
        }
        let other_token = NonceUse { token: STRANGER, ..good() };
        let other_nonce = NonceUse { nonce: B256::ZERO, ..good() };
        assert_eq!(said(vec![other_token, other_nonce], &policy), "nothing");
    }
}

/// A limited node may show the use and not the transfer behind it.
#[test]
fn a_use_whose_transfer_is_not_to_be_seen_says_nothing_and_is_searched_for_again() {
    let half = with_kind(paid_by(WALLET, 60), ConsumptionKind::WithoutTransfer);
    assert_eq!(said(vec![half], &ours()), "nothing");
    let finding = judge_refund(&refund(), &[shows("a", vec![half])], &ours(), NOW);
    assert_eq!((finding.searched_to, finding.is_complete), (None, false));
}

#[test]
fn whose_money_it_is_matters_only_where_wallets_are_named() {
    assert_eq!(said(vec![paid_by(STRANGER, 60)], &anybody()), "paid", "it reached the buyer");
    assert_eq!(said(vec![paid_by(STRANGER, 60)], &ours()), "nothing");
    let less = with_transfer(paid_by(STRANGER, 60), |t| t.value = amount(1));
    assert_eq!(said(vec![less], &ours()), "nothing", "a stranger's use of the nonce says nothing");
}

#[test]
fn a_buyer_who_pays_himself_is_not_refunded_and_raises_no_flag() {
    let payer = refund().payer;
    assert_eq!(said(vec![paid_by(payer, 60)], &anybody()), "nothing");
    let less = with_transfer(paid_by(payer, 60), |t| t.value = amount(1));
    assert_eq!(said(vec![less], &anybody()), "nothing");
}

#[test]
fn a_second_refund_is_flagged_and_what_else_strangers_do_is_not() {
    let twice = vec![paid_by(WALLET, 60), paid_by(STRANGER, 61)];
    assert_eq!(said(twice.clone(), &both()), "paid, flagged", "the money went out twice");
    assert_eq!(said(twice.clone(), &anybody()), "paid, flagged");
    assert_eq!(said(twice, &ours()), "paid", "others' money is their own");
    let less = with_transfer(paid_by(STRANGER, 61), |t| t.value = amount(1));
    assert_eq!(said(vec![paid_by(WALLET, 60), less], &anybody()), "paid");
}

fn both() -> RefundPolicy {
    RefundPolicy { wallets: vec![WALLET, STRANGER], quorum: 1 }
}

/// I6, mirrored: money that went back a second time, or after its refund was called off, is a person's.
#[test]
fn a_closed_record_is_never_changed_and_what_goes_back_all_the_same_is_flagged() {
    let pays = |by, number: u64| {
        let mut used = paid_by(by, number);
        used.consumption.log.tx_hash = B256::from(alloy_primitives::U256::from(number));
        used
    };
    let hash =
        |number: u64| Some(format!("{:#x}", B256::from(alloy_primitives::U256::from(number))));
    let by_hand = || Some("wire 12".to_owned());
    type Case = (RefundStatus, Option<String>, Vec<NonceUse>, usize);
    let cases: Vec<Case> = vec![
        (RefundStatus::Paid, hash(60), vec![], 0),
        (RefundStatus::Paid, hash(60), vec![pays(WALLET, 60)], 0),
        (RefundStatus::Paid, hash(60), vec![pays(STRANGER, 61)], 1),
        (RefundStatus::Paid, hash(60), vec![pays(WALLET, 60), pays(STRANGER, 61)], 1),
        (RefundStatus::Paid, hash(61), vec![pays(WALLET, 60), pays(STRANGER, 61)], 1),
        (RefundStatus::Paid, hash(60), vec![pays(WALLET, 60), pays(STRANGER, 60)], 1),
        (RefundStatus::Paid, by_hand(), vec![pays(WALLET, 60)], 1),
        (RefundStatus::Void, None, vec![], 0),
        (RefundStatus::Void, None, vec![pays(WALLET, 60)], 1),
        (RefundStatus::Void, None, vec![pays(WALLET, 60), pays(STRANGER, 61)], 2),
    ];
    for (status, paid_tx, uses, expected) in cases {
        let refund = SearchedRefund { status, paid_tx, ..refund() };
        let told = format!("{refund:?} {uses:?}");
        for (policy, expected) in [(both(), expected), (anybody(), expected.min(1))] {
            let finding = judge_refund(&refund, &[shows("a", uses.clone())], &policy, NOW);
            let kinds: Vec<FlagKind> = finding.flags.iter().map(|flag| flag.kind).collect();
            assert_eq!(kinds, vec![FlagKind::RefundedAgain; expected], "{told}");
            assert_eq!((finding.paid.is_none(), finding.restart), (true, false), "{told}");
            assert_eq!((finding.searched_to, finding.is_complete), (Some(100), true), "{told}");
        }
        let unsaid = judge_refund(&refund, &[fails("a")], &both(), NOW);
        assert!(unsaid.flags.is_empty() && unsaid.searched_to.is_none());
    }
}

/// A person wrote `paid` and not by what: the chain adds that.
#[test]
fn a_record_set_paid_by_hand_gets_its_transaction() {
    let refund = SearchedRefund { status: RefundStatus::Paid, ..refund() };
    let uses = vec![paid_by(WALLET, 60), paid_by(STRANGER, 61)];
    let finding = judge_refund(&refund, &[shows("a", uses)], &both(), NOW);
    assert_eq!((finding.paid.is_some(), finding.flags.len()), (true, 1));
}

/// Whoever is not paid any more has nothing to hide: nobody is asked about a crowd of strangers.
#[test]
fn a_flood_of_a_closed_record_asks_nobody() {
    let flood = shows_but("a", vec![], |search| search.flooded = [NONCE].into());
    let refund = SearchedRefund { status: RefundStatus::Void, ..refund() };
    let finding = judge_refund(&refund, &[flood], &anybody(), NOW);
    assert_eq!((finding.problem, finding.flags.len()), (Some(SearchProblem::TooManyUses), 0));
}

#[test]
fn strangers_share_one_flag_and_each_of_our_wallets_has_its_own() {
    let uses: Vec<NonceUse> = (1..=40)
        .map(|n| paid_by(Address::repeat_byte(n), 60))
        .map(|used| with_transfer(used, |t| t.value = amount(1)))
        .collect();
    let finding = judge_refund(&refund(), &[shows("a", uses.clone())], &anybody(), NOW);
    assert_eq!(finding.flags.len(), 1, "nobody can flood a person with flags");
    assert!(finding.flags[0].detail.to_string().len() < 8_000);
    let wallets = vec![Address::repeat_byte(1), Address::repeat_byte(2)];
    let named = RefundPolicy { wallets, quorum: 1 };
    assert_eq!(judge_refund(&refund(), &[shows("a", uses)], &named, NOW).flags.len(), 2);
}

#[test]
fn the_first_on_the_chain_is_the_one_that_paid() {
    let uses = vec![paid_by(STRANGER, 61), paid_by(WALLET, 60)];
    let finding = judge_refund(&refund(), &[shows("a", uses)], &anybody(), NOW);
    let paid = finding.paid.unwrap();
    assert_eq!((paid.log.block, paid.log.log_index), (block(60), 4));
    assert!(paid.evidence.to_string().contains(&WALLET.to_string().to_lowercase()));
}

#[test]
fn a_block_that_is_not_final_closes_nothing() {
    let mut reading = shows("a", vec![paid_by(WALLET, 60)]);
    reading.outcome.as_mut().unwrap().finalized = block(59);
    let finding = judge_refund(&refund(), &[reading], &anybody(), NOW);
    assert!(finding.paid.is_none() && finding.flags.is_empty());
}

#[test]
fn where_a_quorum_is_asked_for_one_word_is_not_enough_and_the_blocks_are_searched_again() {
    let two = RefundPolicy { quorum: 2, ..anybody() };
    let pays = || vec![paid_by(WALLET, 60)];
    let finding = judge_refund(&refund(), &[shows("a", pays()), fails("b")], &two, NOW);
    assert_eq!((finding.searched_to, finding.paid.is_none()), (None, true));
    let finding = judge_refund(&refund(), &[shows("a", pays()), shows("a", pays())], &two, NOW);
    assert!(finding.paid.is_none(), "one that answers twice agrees only with itself");
    let finding = judge_refund(&refund(), &[shows("a", pays()), shows("b", vec![])], &two, NOW);
    assert_eq!((finding.searched_to, finding.paid.is_none()), (None, true));
    let finding = judge_refund(&refund(), &[shows("a", pays()), shows("b", pays())], &two, NOW);
    assert_eq!((finding.searched_to, finding.paid.is_some()), (Some(100), true));
}

#[test]
fn the_search_is_complete_only_when_it_reached_the_newest_final_block() {
    let mut reading = shows("a", vec![]);
    let finding = judge_refund(&refund(), &[reading.clone()], &anybody(), NOW);
    assert_eq!((finding.searched_to, finding.is_complete), (Some(100), true));
    reading.outcome.as_mut().unwrap().to_block = 80;
    let finding = judge_refund(&refund(), &[reading], &anybody(), NOW);
    assert_eq!((finding.searched_to, finding.is_complete), (Some(80), false));
}

fn told(readings: &[RefundReading], policy: &RefundPolicy) -> RefundFinding {
    judge_refund(&refund(), readings, policy, NOW)
}

/// I11: endpoints with unequal ranges get on, to the last block that both have searched.
#[test]
fn endpoints_are_compared_over_the_blocks_that_both_have_searched() {
    let two = RefundPolicy { quorum: 2, ..anybody() };
    let pays = || vec![paid_by(WALLET, 90)];
    let narrow = || shows_but("b", vec![], |search| search.to_block = 70);
    let finding = told(&[shows("a", pays()), narrow()], &two);
    let expected = (Some(70), false, None, true);
    let said = (finding.searched_to, finding.is_complete, finding.problem, finding.paid.is_none());
    assert_eq!(said, expected, "the use is in a block that is still to come");
    let late = shows_but("b", vec![], |search| search.from_block = 95);
    assert_eq!(told(&[shows("a", pays()), late], &two).searched_to, Some(100));
    let finding = told(&[shows("a", pays()), shows("b", vec![])], &two);
    assert_eq!(finding.problem, Some(SearchProblem::Disagreement));
    assert_eq!((finding.searched_to, finding.is_complete), (None, false));
    let third = told(&[shows("a", pays()), shows("b", vec![]), shows("c", pays())], &two);
    assert!(third.paid.is_some(), "the next endpoint settles it");
}

#[test]
fn a_flooded_nonce_costs_only_its_own_record_and_a_person_is_told() {
    let flood = shows_but("a", vec![], |search| search.flooded = [NONCE].into());
    let finding = told(std::slice::from_ref(&flood), &anybody());
    assert_eq!(finding.problem, Some(SearchProblem::TooManyUses));
    assert_eq!((finding.searched_to, finding.flags.len()), (None, 1));
    let other = SearchedRefund { refund_nonce: B256::ZERO, ..refund() };
    let finding = judge_refund(&other, &[flood], &anybody(), NOW);
    assert_eq!((finding.problem, finding.searched_to), (None, Some(100)));
}

/// I2, mirrored: the state says that the wallet paid, and the endpoint's logs do not.
#[test]
fn silence_of_the_logs_about_a_nonce_that_is_used_passes_no_block_over() {
    let silent = || shows_but("a", vec![], |search| search.consumed = [1].into());
    let finding = told(&[silent()], &ours());
    assert_eq!(finding.problem, Some(SearchProblem::NotShown));
    assert_eq!((finding.searched_to, finding.is_complete, finding.restart), (None, false, false));
    let later = judge_refund(&refund(), &[silent()], &ours(), secs(200 + 3_600));
    assert!(later.restart, "an earlier block may have been passed over");
    let more = shows_but("a", vec![], |search| {
        search.consumed = [1].into();
        search.to_block = 80;
    });
    assert_eq!(told(&[more], &ours()).searched_to, Some(80), "it may be in a later block");
    let finding = told(&[silent(), shows("b", vec![paid_by(WALLET, 60)])], &ours());
    assert!(finding.paid.is_some() && finding.problem.is_none());
    let known = SearchedRefund { is_use_seen: true, ..refund() };
    assert_eq!(judge_refund(&known, &[silent()], &ours(), NOW).problem, None, "it was seen before");
    let unread = shows_but("a", vec![], |search| search.unread = [1].into());
    assert_eq!(told(std::slice::from_ref(&unread), &ours()).problem, Some(SearchProblem::NotShown));
    assert_eq!(told(&[unread, shows("b", vec![])], &ours()).problem, None);
}

#[test]
fn without_wallets_a_record_in_hand_is_searched_for_from_its_first_block_once_a_day() {
    let restarts = |policy: &RefundPolicy, status, secs_later: u64| {
        let refund = SearchedRefund { status, ..refund() };
        judge_refund(&refund, &[shows("a", vec![])], policy, secs(200 + secs_later)).restart
    };
    assert!(restarts(&anybody(), RefundStatus::Claimed, 86_400));
    assert!(restarts(&anybody(), RefundStatus::Sent, 86_400));
    assert!(!restarts(&anybody(), RefundStatus::Claimed, 86_399));
    assert!(!restarts(&anybody(), RefundStatus::Owed, 86_400), "nobody is paying it");
    assert!(!restarts(&ours(), RefundStatus::Claimed, 86_400), "the state is read there");
}

/// An endpoint that was wrong about the chain by thousands of blocks spoils nothing for good.
#[test]
fn a_search_said_to_be_beyond_the_final_block_is_not_believed() {
    let at = |searched_to| {
        let refund = SearchedRefund { searched_to: Some(searched_to), ..refund() };
        judge_refund(&refund, &[shows_but("a", vec![], |s| s.to_block = 80)], &ours(), NOW)
    };
    assert_eq!(at(90).searched_to, Some(90), "the page began with an older record");
    assert_eq!(at(105).searched_to, Some(100), "an endpoint a little behind");
    assert_eq!(at(100_000).searched_to, Some(80), "garbage");
}

fn any_use() -> impl Strategy<Value = NonceUse> {
    let addresses = || prop_oneof![Just(WALLET), Just(STRANGER), Just(refund().payer)];
    let values = prop_oneof![Just(0u64), Just(999_999), Just(1_000_000)];
    let kinds = (addresses(), values, 0u8..4).prop_map(|(to, value, kind)| match kind {
        0 => ConsumptionKind::Canceled,
        1 => ConsumptionKind::WithoutTransfer,
        _ => ConsumptionKind::Transferred(SeenTransfer {
            log_index: 4,
            token: TOKEN,
            from: WALLET,
            to,
            value: amount(value),
            at_most: None,
        }),
    });
    (addresses(), kinds, 40u64..130, any::<bool>()).prop_map(|(by, kind, number, ours)| NonceUse {
        nonce: if ours { NONCE } else { B256::ZERO },
        ..with_kind(paid_by(by, number), kind)
    })
}

fn any_reading() -> impl Strategy<Value = RefundReading> {
    let names = prop_oneof![Just("a"), Just("b"), Just("c")];
    let uses = proptest::collection::vec(any_use(), 0..6);
    (names, proptest::option::of(uses)).prop_map(|(name, uses)| match uses {
        Some(uses) => shows(name, uses),
        None => fails(name),
    })
}

proptest! {
    /// Whatever is read: a record is closed only by money that reached its buyer in a final block.
    #[test]
    fn only_the_refund_itself_closes_a_record(
        readings in proptest::collection::vec(any_reading(), 0..5),
        named in any::<bool>(),
        quorum in 0usize..3,
        status in proptest::sample::select(RefundStatus::ALL),
    ) {
        let policy = RefundPolicy { quorum, ..if named { ours() } else { anybody() } };
        let refund = SearchedRefund { status, ..refund() };
        let finding = judge_refund(&refund, &readings, &policy, NOW);
        if let Some(paid) = &finding.paid {
            prop_assert!(status.is_unfinished() || status == RefundStatus::Paid);
            let shown = |reading: &&RefundReading| {
                let Ok(search) = &reading.outcome else { return false };
                search.uses.iter().any(|used| {
                    let ConsumptionKind::Transferred(seen) = used.consumption.kind else { return false };
                    used.nonce == NONCE
                        && used.authorizer != refund.payer
                        && (!named || used.authorizer == WALLET)
                        && (seen.to, seen.value) == (refund.payer, refund.amount)
                        && used.consumption.log.block.number <= search.finalized.number
                        && used.consumption.log.block == paid.log.block
                })
            };
            let by: std::collections::BTreeSet<_> =
                readings.iter().filter(shown).map(|reading| &reading.endpoint).collect();
            prop_assert!(by.len() >= quorum.max(1));
        }
        let mut reversed = readings.clone();
        reversed.reverse();
        let distinct = readings.iter().map(|r| &r.endpoint).collect::<std::collections::BTreeSet<_>>();
        if distinct.len() == readings.len() {
            prop_assert_eq!(judge_refund(&refund, &reversed, &policy, NOW), finding.clone());
        }
        if readings.iter().all(|reading| reading.outcome.is_err()) {
            prop_assert!(finding.paid.is_none() && finding.flags.is_empty());
            prop_assert_eq!(finding.searched_to, None);
        }
    }
}
