//! Goal: `judge` never says more than the evidence proves (I2, DESIGN section 6).
//!
//! First the table, row by row; then properties over arbitrary evidence.

use proptest::prelude::*;

use super::support::*;
use crate::domain::NonceState::{Unused, Used};
use crate::domain::*;

fn policy(quorum: usize, positive_quorum: usize) -> Policy {
    Policy { quorum, positive_quorum, ..Policy::default() }
}

fn judged(policy: &Policy, views: Vec<View>) -> Verdict {
    judge(&payment("p", "o"), &evidence(views), policy)
}

/// The verdict in one line: word, reason, block, and how many agree.
fn told(verdict: &Verdict) -> String {
    let block = verdict.block().map_or(String::new(), |b| format!(" @{}", b.number));
    match verdict {
        Verdict::Pending { agreeing, .. } => format!("pending{block} x{agreeing}"),
        other => format!("{}:{}{block}", other.kind(), other.reason().unwrap_or("-")),
    }
}

/// What it is about, the policy, what the endpoints answer, and the verdict as [`told`].
type Row = (&'static str, Policy, Vec<View>, &'static str);

fn assert_table(rows: Vec<Row>) {
    for (name, policy, views, expected) in rows {
        assert_eq!(told(&judged(&policy, views)), expected, "{name}");
    }
}

const WITHOUT_LOG: NonceState = NonceState::UsedWithoutLog { from_block: 0, to_block: 10 };

fn unread(kind: ReadFailureKind) -> NonceState {
    NonceState::UsedUnread(ReadFailure::new(kind, "its logs"))
}

fn refused() -> NonceState {
    unread(ReadFailureKind::RateLimited)
}

fn own(at: u64) -> NonceState {
    Used(paying(&payment("p", "o"), block(at), 4))
}

fn less(at: u64) -> NonceState {
    Used(paying_less(&payment("p", "o"), block(at)))
}

fn gone(at: u64) -> NonceState {
    Used(canceled(block(at)))
}

fn without_transfer(at: u64) -> NonceState {
    let mut consumption = canceled(block(at));
    consumption.kind = ConsumptionKind::WithoutTransfer;
    Used(consumption)
}

#[test]
fn one_endpoint_every_row_of_the_table() {
    let one = || policy(1, 1);
    assert_table(vec![
        (
            "own transfer at the head",
            one(),
            vec![Ok(view(10, 5, own(10)))],
            "settled:tentative @10",
        ),
        ("own transfer finalized", one(), vec![Ok(view(10, 5, own(5)))], "settled:final @5"),
        (
            "another amount, finalized",
            one(),
            vec![Ok(view(10, 5, less(5)))],
            "unsettleable:used_elsewhere @10",
        ),
        (
            "another amount, not finalized",
            one(),
            vec![Ok(view(10, 5, less(6)))],
            "inconclusive:not_finalized",
        ),
        ("canceled, finalized", one(), vec![Ok(view(10, 5, gone(5)))], "unsettleable:canceled @10"),
        (
            "canceled, not finalized",
            one(),
            vec![Ok(view(10, 5, gone(6)))],
            "inconclusive:not_finalized",
        ),
        (
            "used without log",
            one(),
            vec![Ok(view(10, 5, WITHOUT_LOG))],
            "inconclusive:used_without_log",
        ),
        (
            "used without transfer",
            one(),
            vec![Ok(view(10, 9, without_transfer(5)))],
            "inconclusive:used_without_transfer",
        ),
        ("unused within the window", one(), vec![Ok(view(10, 5, Unused))], "pending @10 x1"),
        (
            "unused, window over, not finalized",
            one(),
            vec![Ok(view(40, 29, Unused))],
            "pending @40 x1",
        ),
        (
            "unused, a finalized block at valid_before exactly",
            one(),
            vec![Ok(view(40, 30, Unused))],
            "unsettleable:expired @40",
        ),
        ("nobody asked", one(), vec![], "inconclusive:not_asked"),
    ]);
    for kind in ReadFailureKind::ALL {
        assert_eq!(
            told(&judged(&one(), vec![Err(*kind)])),
            format!("inconclusive:{}", kind.code()),
            "a failed read proves nothing"
        );
    }
}

/// The same at a head of another fork.
fn on_fork(mut seen: Observation) -> Observation {
    seen.head = block_of_fork(seen.head.number, 1);
    seen
}

fn finalized_on_fork(mut seen: Observation) -> Observation {
    seen.finalized = block_of_fork(seen.finalized.number, 1);
    seen
}

/// With the finalized block's time that of block `number`.
fn finalized_at(mut seen: Observation, number: u64) -> Observation {
    seen.finalized.time = block(number).time;
    seen
}

/// The same block hash, transaction and log, in a block that is said to have another number.
fn renumbered(mut nonce: NonceState, number: u64) -> NonceState {
    if let NonceState::Used(consumption) = &mut nonce {
        consumption.log.block.number = number;
    }
    nonce
}

#[test]
fn several_endpoints_quorum_and_lag() {
    let down = || Err(ReadFailureKind::Unreachable);
    assert_table(vec![
        (
            "one matched positive wins over everybody else",
            policy(2, 1),
            vec![Ok(view(50, 40, Unused)), Ok(view(50, 40, own(20))), Ok(view(50, 40, gone(20)))],
            "settled:final @20",
        ),
        (
            "a positive short of its quorum proves nothing, and no negative either",
            policy(1, 2),
            vec![Ok(view(50, 40, Unused)), Ok(view(50, 40, own(20)))],
            "inconclusive:quorum_not_met",
        ),
        (
            "a positive quorum that one endpoint sees at depth only is too shallow",
            Policy { paid_after: PaidAfter::Confirmations(5), ..policy(1, 2) },
            vec![Ok(view(24, 10, own(20))), Ok(view(23, 10, own(20)))],
            "inconclusive:too_shallow",
        ),
        (
            "one that lies about how old the log's block is makes it neither deep nor final",
            Policy { paid_after: PaidAfter::Finalized, ..policy(2, 2) },
            vec![Ok(view(21, 10, own(20))), Ok(view(21, 10, renumbered(own(20), 1)))],
            "inconclusive:endpoints_disagree",
        ),
        (
            "and takes nothing from those who agree on it",
            policy(2, 2),
            vec![
                Ok(view(21, 10, own(20))),
                Ok(view(21, 10, own(20))),
                Ok(view(21, 10, renumbered(own(20), 1))),
            ],
            "settled:tentative @20",
        ),
        (
            "final needs the positive quorum to have finalized it",
            policy(1, 2),
            vec![Ok(view(24, 20, own(20))), Ok(view(23, 10, own(20)))],
            "settled:tentative @20",
        ),
        (
            "a canceled nonce against an unused one at a newer head",
            policy(1, 1),
            vec![Ok(view(50, 40, gone(20))), Ok(view(20, 10, Unused))],
            "inconclusive:endpoints_disagree",
        ),
        (
            "a head that is older than the cancellation is lag, not contradiction",
            policy(1, 1),
            vec![Ok(view(50, 40, gone(20))), Ok(view(19, 10, Unused))],
            "unsettleable:canceled @50",
        ),
        (
            "lag is not agreement",
            policy(2, 1),
            vec![Ok(view(50, 40, gone(20))), Ok(view(19, 10, Unused))],
            "inconclusive:quorum_not_met",
        ),
        (
            "the quorum must have finalized the cancellation",
            policy(2, 1),
            vec![Ok(view(50, 40, gone(20))), Ok(view(50, 19, gone(20)))],
            "inconclusive:quorum_not_met",
        ),
        (
            "two endpoints that name different causes disagree",
            policy(1, 1),
            vec![Ok(view(50, 40, gone(20))), Ok(view(50, 40, less(20)))],
            "inconclusive:endpoints_disagree",
        ),
        (
            "a node without logs does not contradict one with them",
            policy(1, 1),
            vec![Ok(view(50, 40, gone(20))), Ok(view(50, 40, WITHOUT_LOG))],
            "unsettleable:canceled @50",
        ),
        (
            "used without log against unused",
            policy(1, 1),
            vec![Ok(view(50, 40, WITHOUT_LOG)), Ok(view(50, 40, Unused))],
            "inconclusive:endpoints_disagree",
        ),
        (
            "I2: used, and its logs could not be read, against unused",
            policy(1, 1),
            vec![Ok(view(50, 40, Unused)), Ok(view(50, 40, refused())), down()],
            "inconclusive:endpoints_disagree",
        ),
        (
            "I2: the same at a newer block than the unused one, which may lag",
            policy(1, 1),
            vec![Ok(view(49, 40, Unused)), Ok(view(50, 40, refused()))],
            "inconclusive:rate_limited",
        ),
        (
            "used, and its logs could not be read, beside one with them",
            policy(1, 1),
            vec![Ok(view(50, 40, refused())), Ok(view(50, 40, gone(20)))],
            "unsettleable:canceled @50",
        ),
        (
            "a transfer wins over a search that failed",
            policy(1, 1),
            vec![Ok(view(50, 40, refused())), Ok(view(50, 40, own(20)))],
            "settled:final @20",
        ),
        (
            "used, and nobody could read its logs",
            policy(1, 1),
            vec![Ok(view(50, 40, refused())), down()],
            "inconclusive:rate_limited",
        ),
        (
            "used, without a log or a search for one",
            policy(1, 1),
            vec![Ok(view(50, 40, refused())), Ok(view(50, 40, WITHOUT_LOG))],
            "inconclusive:used_without_log",
        ),
        (
            "expiry short of the quorum is still pending",
            policy(2, 1),
            vec![Ok(view(50, 30, Unused)), Ok(view(50, 29, Unused))],
            "pending @50 x2",
        ),
        (
            "expiry is judged at the block that the quorum was read at",
            policy(2, 1),
            vec![Ok(view(900, 30, Unused)), Ok(view(49, 30, Unused)), Ok(view(49, 31, Unused))],
            "unsettleable:expired @49",
        ),
        (
            "endpoints read at different blocks make up no quorum of an expiry",
            policy(2, 1),
            vec![Ok(view(50, 30, Unused)), Ok(view(49, 30, Unused)), down()],
            "pending @50 x1",
        ),
        (
            "a cancellation is judged at the block that the quorum was read at",
            policy(2, 1),
            vec![
                Ok(view(900, 40, gone(20))),
                Ok(view(49, 40, gone(20))),
                Ok(view(49, 41, gone(20))),
            ],
            "unsettleable:canceled @49",
        ),
        (
            "endpoints read at different blocks make up no quorum of a cancellation",
            policy(2, 1),
            vec![Ok(view(900, 40, gone(20))), Ok(view(49, 40, gone(20)))],
            "inconclusive:quorum_not_met",
        ),
        (
            "a block of the same number with another hash is another chain",
            policy(1, 1),
            vec![Ok(view(50, 30, Unused)), Ok(on_fork(view(50, 30, Unused)))],
            "inconclusive:endpoints_disagree",
        ),
        (
            "so is another finalized block of the same number",
            policy(1, 1),
            vec![Ok(view(50, 30, Unused)), Ok(finalized_on_fork(view(50, 30, Unused)))],
            "inconclusive:endpoints_disagree",
        ),
        (
            "and a finalized block that is higher and yet older",
            policy(1, 1),
            vec![Ok(view(50, 30, Unused)), Ok(finalized_at(view(50, 31, Unused), 29))],
            "inconclusive:endpoints_disagree",
        ),
        (
            "a third that contradicts keeps two from ending a payment",
            policy(2, 1),
            vec![Ok(view(50, 40, gone(20))), Ok(view(50, 40, gone(20))), Ok(view(50, 40, Unused))],
            "inconclusive:endpoints_disagree",
        ),
        (
            "unused at an older block than one that is used without log is lag",
            policy(1, 1),
            vec![Ok(view(50, 40, WITHOUT_LOG)), Ok(view(49, 40, Unused))],
            "inconclusive:used_without_log",
        ),
        (
            "a lagging endpoint does not agree about a newer head",
            policy(1, 1),
            vec![Ok(view(25, 5, Unused)), Ok(view(10, 5, Unused))],
            "pending @25 x1",
        ),
        (
            "of three, two were read at block 24",
            policy(2, 1),
            vec![Ok(view(24, 5, Unused)), Ok(view(25, 5, Unused)), Ok(view(24, 5, Unused))],
            "pending @24 x2",
        ),
        (
            "fewer answers than the quorum",
            policy(2, 1),
            vec![Ok(view(25, 5, Unused)), down()],
            "pending @25 x1",
        ),
        (
            "one failure beside an answer changes nothing",
            policy(1, 1),
            vec![down(), Ok(view(25, 5, Unused))],
            "pending @25 x1",
        ),
    ]);
}

#[test]
fn paid_after_counts_from_the_transfers_own_block() {
    let after = |paid_after| Policy { paid_after, ..policy(1, 1) };
    let confirmations = |n| after(PaidAfter::Confirmations(n));
    let safe_at = |safe: Option<u64>| {
        let mut seen = view(25, 10, own(20));
        seen.safe = safe.map(block);
        vec![Ok(seen)]
    };
    assert_table(vec![
        (
            "1 at the head",
            confirmations(1),
            vec![Ok(view(20, 1, own(20)))],
            "settled:tentative @20",
        ),
        (
            "2 at the head",
            confirmations(2),
            vec![Ok(view(20, 1, own(20)))],
            "inconclusive:too_shallow",
        ),
        (
            "2, one on top",
            confirmations(2),
            vec![Ok(view(21, 1, own(20)))],
            "settled:tentative @20",
        ),
        ("safe is not read", after(PaidAfter::Safe), safe_at(None), "inconclusive:too_shallow"),
        ("safe is below", after(PaidAfter::Safe), safe_at(Some(19)), "inconclusive:too_shallow"),
        ("safe is there", after(PaidAfter::Safe), safe_at(Some(20)), "settled:tentative @20"),
        (
            "what is finalized is safe",
            after(PaidAfter::Safe),
            vec![Ok(view(25, 20, own(20)))],
            "settled:final @20",
        ),
        (
            "finalized is below",
            after(PaidAfter::Finalized),
            vec![Ok(view(25, 19, own(20)))],
            "inconclusive:too_shallow",
        ),
        (
            "finalized is there",
            after(PaidAfter::Finalized),
            vec![Ok(view(25, 20, own(20)))],
            "settled:final @20",
        ),
    ]);
}

#[test]
fn answers_that_fit_no_chain_are_no_evidence() {
    let mut finalized_above_head = view(10, 5, Unused);
    finalized_above_head.finalized = block(400);
    let mut finalized_later = view(10, 5, Unused);
    finalized_later.finalized.time = BlockTime::from_secs(10_000);
    let consumed_above_head = view(10, 5, own(11));
    let mut top = view(10, 5, own(1));
    top.head = BlockRef { number: u64::MAX, ..block(10) };
    assert_table(vec![
        (
            "finalized above the head",
            policy(1, 1),
            vec![Ok(finalized_above_head)],
            "inconclusive:bad_answer",
        ),
        (
            "finalized later than the head",
            policy(1, 1),
            vec![Ok(finalized_later)],
            "inconclusive:bad_answer",
        ),
        (
            "a log above the head",
            policy(1, 1),
            vec![Ok(consumed_above_head)],
            "inconclusive:bad_answer",
        ),
        ("the last block number", policy(1, 1), vec![Ok(top)], "settled:final @1"),
    ]);
}

#[test]
fn an_endpoint_that_answers_twice_agrees_only_with_itself() {
    let payment = payment("p", "o");
    let twice = |nonce| Evidence {
        readings: vec![
            reading("a", Ok(view(50, 40, NonceState::clone(&nonce)))),
            reading("a", Ok(view(50, 40, nonce))),
        ],
    };
    let both = policy(2, 2);
    assert_eq!(told(&judge(&payment, &twice(Unused), &both)), "pending @50 x1");
    assert_eq!(told(&judge(&payment, &twice(gone(20)), &both)), "inconclusive:quorum_not_met");
    assert_eq!(told(&judge(&payment, &twice(own(20)), &both)), "inconclusive:quorum_not_met");
}

#[test]
fn a_transfer_must_match_in_every_field() {
    let asked = payment("p", "o");
    let shown = vec![Ok(view(50, 40, own(20)))];
    let differs: [fn(&mut Payment); 3] =
        [|p| p.amount = amount(1_000_001), |p| p.pay_to = TOKEN, |p| p.payer = TOKEN];
    assert_eq!(told(&judge(&asked, &evidence(shown.clone()), &policy(1, 1))), "settled:final @20");
    for change in differs {
        let mut other = asked.clone();
        change(&mut other);
        assert_eq!(
            told(&judge(&other, &evidence(shown.clone()), &policy(1, 1))),
            "unsettleable:used_elsewhere @50"
        );
    }
}

// ---- Properties

fn any_nonce_state(head: u64) -> impl Strategy<Value = NonceState> {
    let at = 0..=head;
    prop_oneof![
        4 => Just(Unused),
        1 => Just(WITHOUT_LOG),
        1 => proptest::sample::select(ReadFailureKind::ALL).prop_map(unread),
        2 => (at.clone(), 0..2u64).prop_map(|(n, fork)| {
            Used(paying(&payment("p", "o"), block_of_fork(n, fork), 4))
        }),
        2 => (at.clone(), 0..2u64).prop_map(|(n, fork)| {
            Used(paying_less(&payment("p", "o"), block_of_fork(n, fork)))
        }),
        2 => at.clone().prop_map(gone),
        1 => at.prop_map(without_transfer),
    ]
}

fn any_outcome() -> impl Strategy<Value = View> {
    let observed = (1..60u64)
        .prop_flat_map(|head| {
            (Just(head), 0..=head, 0..=head, any::<bool>(), any_nonce_state(head))
        })
        .prop_map(|(head, finalized, safe, has_safe, nonce)| {
            let safe = has_safe.then(|| block(safe.max(finalized)));
            Observation { safe, ..view(head, finalized, nonce) }
        });
    // Often enough at one block, and now and then on a fork.
    let observed = (observed, 0..10u8).prop_map(|(seen, kind)| match kind {
        0 => on_fork(seen),
        1..5 if seen.finalized.number <= 30 => match seen.nonce {
            Used(consumption) if consumption.log.block.number > 30 => seen,
            _ => Observation { head: block(30), safe: None, ..seen },
        },
        _ => seen,
    });
    prop_oneof![
        6 => observed.prop_map(Ok),
        1 => proptest::sample::select(ReadFailureKind::ALL).prop_map(Err),
    ]
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let paid_after = prop_oneof![
        (1..6u64).prop_map(PaidAfter::Confirmations),
        Just(PaidAfter::Safe),
        Just(PaidAfter::Finalized),
    ];
    (1..4usize, 1..4usize, paid_after).prop_map(|(quorum, positive_quorum, paid_after)| Policy {
        paid_after,
        ..policy(quorum, positive_quorum)
    })
}

fn is_own(outcome: &View) -> bool {
    let own = payment("p", "o");
    matches!(outcome, Ok(Observation { nonce: Used(Consumption {
        kind: ConsumptionKind::Transferred(seen), ..
    }), .. }) if seen.value == own.amount)
}

/// One more failure may be the one that is named; nothing else may change.
fn without_failure(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Inconclusive(Inconclusive::ReadFailed(_)) => {
            Verdict::Inconclusive(Inconclusive::NotAsked)
        }
        other => other,
    }
}

proptest! {
    #[test]
    fn without_a_matching_transfer_nothing_is_settled(
        outcomes in proptest::collection::vec(any_outcome(), 0..6),
        policy in any_policy(),
    ) {
        let verdict = judged(&policy, outcomes.clone());
        let showing = outcomes.iter().filter(|o| is_own(o)).count();
        if let Verdict::Settled(settlement) = verdict {
            prop_assert!(showing >= policy.positive_quorum);
            prop_assert!(settlement.transfer.pays(&payment("p", "o")));
        }
    }

    #[test]
    fn failures_alone_prove_nothing(
        kinds in proptest::collection::vec(proptest::sample::select(ReadFailureKind::ALL), 0..6),
        policy in any_policy(),
    ) {
        let verdict = judged(&policy, kinds.into_iter().map(Err).collect());
        prop_assert!(matches!(verdict, Verdict::Inconclusive(_)));
    }

    #[test]
    fn a_further_failure_changes_no_verdict(
        outcomes in proptest::collection::vec(any_outcome(), 1..6),
        kind in proptest::sample::select(ReadFailureKind::ALL),
        at in any::<proptest::sample::Index>(),
        policy in any_policy(),
    ) {
        let mut more = outcomes.clone();
        more.insert(at.index(outcomes.len() + 1), Err(kind));
        prop_assert_eq!(
            without_failure(judged(&policy, more)),
            without_failure(judged(&policy, outcomes))
        );
    }

    /// The proof behind every failed payment (I2): enough endpoints, each by finalized facts.
    #[test]
    fn a_negative_rests_on_a_quorum_of_finalized_facts(
        outcomes in proptest::collection::vec(any_outcome(), 0..6),
        policy in any_policy(),
    ) {
        let Verdict::Unsettleable { reason, as_of, consumption } = judged(&policy, outcomes.clone())
        else { return Ok(()) };
        prop_assert!(!outcomes.iter().any(is_own), "a positive wins");
        let proves = |seen: &Observation| seen.head == as_of && match (reason, consumption) {
            (Unsettleable::Expired, None) => {
                seen.nonce == Unused && seen.finalized.time >= payment("p", "o").valid_before
            }
            (Unsettleable::Canceled | Unsettleable::UsedElsewhere, Some(consumption)) => {
                seen.nonce == Used(consumption)
                    && seen.finalized.number >= consumption.log.block.number
            }
            _ => false,
        };
        let proofs = outcomes.iter().flatten().filter(|seen| proves(seen)).count();
        prop_assert!(proofs >= policy.quorum, "{} of {}", proofs, policy.quorum);
        let contradicts = |seen: &Observation| match consumption {
            None => seen.nonce != Unused,
            Some(c) => seen.nonce == Unused && seen.head.number >= c.log.block.number,
        };
        prop_assert!(!outcomes.iter().flatten().any(contradicts));
    }

    #[test]
    fn pending_counts_only_endpoints_read_at_its_block(
        outcomes in proptest::collection::vec(any_outcome(), 0..6),
        policy in any_policy(),
    ) {
        let Verdict::Pending { as_of, agreeing } = judged(&policy, outcomes.clone())
        else { return Ok(()) };
        let unused: Vec<BlockRef> =
            outcomes.iter().flatten().filter(|s| s.nonce == Unused).map(|s| s.head).collect();
        let agreeing_at = |at: &BlockRef| unused.iter().filter(|head| *head == at).count();
        prop_assert_eq!(agreeing, agreeing_at(&as_of));
        for other in unused.iter().filter(|head| head.number > as_of.number) {
            prop_assert!(agreeing_at(other) < policy.quorum, "a newer block has the quorum");
        }
        if agreeing < policy.quorum {
            prop_assert!(unused.iter().all(|head| agreeing_at(head) <= agreeing));
        }
    }

    /// A lie about a negative is caught as long as one honest endpoint was asked as well.
    #[test]
    fn who_contradicts_is_named_and_ends_nothing(
        outcomes in proptest::collection::vec(any_outcome(), 0..6),
        policy in any_policy(),
    ) {
        let shown = evidence(outcomes.clone());
        let pairs = disagreements(&shown);
        for (one, other) in &pairs {
            prop_assert!(one < other);
            let both = shown.readings.iter().filter(|r| r.endpoint == *one || r.endpoint == *other);
            let two = Evidence { readings: both.cloned().collect() };
            prop_assert_eq!(disagreements(&two).len(), 1, "the two alone contradict each other");
        }
        let verdict = judged(&policy, outcomes.clone());
        let disagree = verdict == Verdict::Inconclusive(Inconclusive::EndpointsDisagree);
        if !outcomes.iter().any(is_own) {
            prop_assert_eq!(disagree, !pairs.is_empty());
        }
        if matches!(verdict, Verdict::Unsettleable { .. } | Verdict::Pending { .. }) {
            prop_assert!(pairs.is_empty());
        }
    }

    #[test]
    fn the_order_of_readings_does_not_matter(
        (outcomes, shuffled) in proptest::collection::vec(any_outcome(), 0..6)
            .prop_map(|outcomes| evidence(outcomes).readings)
            .prop_flat_map(|readings| (Just(readings.clone()), Just(readings).prop_shuffle())),
        policy in any_policy(),
    ) {
        let payment = payment("p", "o");
        let one = judge(&payment, &Evidence { readings: outcomes }, &policy);
        let other = judge(&payment, &Evidence { readings: shuffled }, &policy);
        prop_assert_eq!(one, other);
    }
}
