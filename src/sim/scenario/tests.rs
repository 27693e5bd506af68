//! The stories we have all parse, and those that make no sense are refused by name.

use super::*;

fn story(rest: &str) -> Result<Scenario, String> {
    let head = "name = \"n\"\norigin = \"o\"\nteaches = \"t\"\n";
    let end = "\n[[expect]]\nat = \"1h\"\n";
    Scenario::parse("case.toml", &format!("{head}{rest}{end}")).map_err(|error| match &error {
        ScenarioError::Format { source, .. } => format!("{error}: {source}"),
        _ => error.to_string(),
    })
}

fn case(file: &str) -> Scenario {
    Scenario::load(&Path::new("tests/cases").join(file)).unwrap()
}

#[test]
fn every_seeded_case_parses() {
    let mut files: Vec<_> = std::fs::read_dir("tests/cases")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    files.sort();
    assert!(files.len() >= 26, "{} cases", files.len());
    for file in files {
        let scenario = Scenario::load(&file).unwrap_or_else(|error| panic!("{error:?}"));
        for name in scenario.payments.keys() {
            assert!(scenario.payment(name).is_some(), "{}: {name}", file.display());
        }
    }
}

#[test]
fn what_this_version_cannot_run_says_why() {
    for (file, reason) in [
        ("tempo_parked.toml", Some("MPP on Tempo is not read yet")),
        ("refund_closed_by_the_chain.toml", None),
        ("timeout_then_lands.toml", None),
        ("money_without_a_row.toml", None),
        ("settled_without_transfer.toml", None),
        ("rpc_down_past_the_deadline.toml", None),
        ("one_authorization_two_orders.toml", None),
    ] {
        assert_eq!(case(file).unsupported(), reason, "{file}");
    }
}

#[test]
fn what_is_left_out_has_the_documented_default() {
    let scenario = story("[order.o]\n[payment.p1]\n[identifier.i]\npayment = \"p1\"").unwrap();
    let minutes = |n: u64| Duration::from_secs(n * 60);
    assert_eq!(scenario.policy.deadline, minutes(24 * 60));
    assert_eq!(scenario.policy.paid_after, PaidAfter::Confirmations(1));
    assert_eq!(scenario.policy.stale_after, minutes(2));
    assert_eq!(scenario.policy.reconcile_every, minutes(10));
    assert_eq!(scenario.chain.block_time, Duration::from_secs(2));
    assert_eq!(scenario.chain.finalized_lag, minutes(20));
    assert_eq!(scenario.chain.endpoints, 1);
    let order = &scenario.orders["o"];
    assert_eq!((order.kind, order.status), (OrderKind::Order, OrderStatus::Paying));
    assert_eq!(order.quote_expires_at, minutes(15));
    assert_eq!(scenario.identifiers["i"].status, IdentifierStatus::InFlight);

    let payment = scenario.payment("p1").unwrap();
    assert_eq!(payment.order, "o");
    assert_eq!(payment.method, Method::Eip3009);
    assert_eq!(payment.status, PaymentStatus::Unknown);
    assert_eq!((payment.created_at, payment.broadcast_at), (Duration::ZERO, Duration::ZERO));
    assert_eq!(payment.amount.to_string(), "1000000");
    assert_eq!(payment.valid_before, minutes(1));
    assert_eq!(
        story("[chain]\nrail = \"mpp\"\n[order.o]\n[payment.p1]")
            .unwrap()
            .payment("p1")
            .unwrap()
            .method,
        Method::Tempo
    );
}

#[test]
fn payers_and_nonces_are_one_per_payment_unless_the_authorization_is_shared() {
    let shared = case("one_authorization_two_orders.toml");
    let (a, b) = (shared.payment("pa").unwrap(), shared.payment("pb").unwrap());
    assert_eq!((a.payer, a.nonce), (b.payer, b.nonce));
    assert_eq!((a.order.as_str(), b.order.as_str()), ("a", "b"));

    let apart = case("both_unknown_both_land.toml");
    let (a, b) = (apart.payment("p1").unwrap(), apart.payment("p2").unwrap());
    assert_ne!(a.payer, b.payer);
    assert_ne!(a.nonce, b.nonce);
    assert_eq!(a, case("both_unknown_both_land.toml").payment("p1").unwrap());
}

#[test]
fn a_row_written_later_is_as_old_as_its_event() {
    let scenario = case("failed_settle_repaid_then_lands.toml");
    let later = scenario.payment("p2").unwrap();
    assert_eq!(later.created_at, Duration::ZERO, "from the start of the story, as every time");
    assert_eq!(later.status, PaymentStatus::Settled);
    let at_start: Vec<_> = scenario.payments_at_start().into_iter().map(|p| p.name).collect();
    assert_eq!(at_start, ["p1"]);
}

#[test]
fn acts_are_read_with_all_their_keys() {
    let scenario = story(
        r#"
        [stock]
        mug = 1
        [order.o]
        stock = { mug = 1 }
        [payment.p1]
        [[event]]
        at = "1s"
        chain = "transfer"
        payment = "p1"
        to = "0x00000000000000000000000000000000000000e1"
        amount = "5"
        [[event]]
        at = "2s"
        rpc = "log_range_limit"
        blocks = 500
        until = "1h"
        [[event]]
        at = "3s"
        gateway = "set"
        order = "o"
        status = "expired"
        release_stock = true
        [[event]]
        at = "4s"
        daemon = "kill"
        between = "lease_and_read"
        [[event]]
        at = "5s"
        refund = "pay_twice"
        payment = "p1"
        with_nonce = false
        amount = "7"
        [[event]]
        at = "6s"
        clock = "jump"
        by = "3h"
        "#,
    )
    .unwrap();
    let acts: Vec<Act> = scenario.events.into_iter().map(|event| event.act).collect();
    assert_eq!(
        acts,
        [
            Act::Chain(ChainAct::Transfer {
                payment: "p1".to_owned(),
                to: Some(alloy_primitives::address!("0x00000000000000000000000000000000000000e1")),
                amount: Some("5".parse().unwrap()),
                unseen: false,
                by_payer: false,
            }),
            Act::Rpc {
                endpoint: 0,
                fault: crate::sim::Fault::LogRangeLimit(500),
                until: Some(Duration::from_secs(3_600)),
            },
            Act::GatewaySet(GatewaySet::Order {
                order: "o".to_owned(),
                status: Some(OrderStatus::Expired),
                paid_by: None,
                delivered: None,
                release_stock: true,
            }),
            Act::Kill { between: KillPoint::LeaseAndRead },
            Act::Refund(RefundAct {
                step: RefundStep::PayTwice,
                payment: "p1".to_owned(),
                with_nonce: false,
                to: None,
                amount: Some("7".parse().unwrap()),
            }),
            Act::ClockJump { by: Duration::from_secs(3 * 3_600) },
        ]
    );
}

#[test]
fn errors_name_the_file_the_table_and_the_key() {
    let order = "[order.o]\n[payment.p1]\n";
    let event = |keys: &str| format!("{order}[[event]]\nat = \"5s\"\n{keys}");
    for (text, named) in [
        ("[policy]\ndeadlin = \"1h\"".to_owned(), &["unknown field `deadlin`"][..]),
        ("[policy]\ndeadline = \"soon\"".to_owned(), &["deadline", "\"soon\" is no duration"]),
        ("[policy]\npaid_after = \"never\"".to_owned(), &["paid_after", "N confirmations"]),
        ("[policy]\nquorum = 2".to_owned(), &["[policy] quorum", "number of endpoints"]),
        ("[order.o]\nstatus = \"done\"".to_owned(), &["status", "`done`"]),
        ("[order.o]\nstock = { mug = 1 }".to_owned(), &["[order.o] stock", "no mug in [stock]"]),
        ("[payment.p1]".to_owned(), &["[payment.p1] order"]),
        ("[order.a]\n[order.b]\n[payment.p1]".to_owned(), &["[payment.p1] order"]),
        (format!("{order}method = \"tempo\""), &["[payment.p1] method"]),
        (format!("{order}scheme = \"upto\""), &["[payment.p1] scheme", "permit2"]),
        (
            event("chain = \"transfer\"\npayment = \"p1\"\nunseen = true"),
            &["[event at 5s] unseen", "permit2"],
        ),
        (
            event("chain = \"transfer\"\npayment = \"p1\"\nby_payer = true"),
            &["[event at 5s] by_payer", "permit2"],
        ),
        (format!("{order}same_authorization_as = \"p1\""), &["[payment.p1] same_authorization_as"]),
        (format!("{order}amount = \"-1\""), &["amount", "whole number of base units"]),
        (format!("{order}[identifier.i]\npayment = \"p9\""), &["[identifier.i] payment", "p9"]),
        (event("chain = \"transfer\""), &["event at 5s", "missing key `payment`"]),
        (event("chain = \"transfer\"\npayment = \"p9\""), &["[event at 5s] payment", "p9"]),
        (event("chain = \"mint\""), &["event at 5s", "\"mint\" is no act"]),
        (event("chain = \"reorg\"\ndepth = 1\nblocks = 2"), &["event at 5s", "key `blocks`"]),
        (event("chain = \"reorg\"\ndepth = \"x\""), &["event at 5s", "key `depth`"]),
        (event("chain = \"reorg\"\nrpc = \"down\""), &["event at 5s", "exactly one of"]),
        (event("rpc = \"down\"\nendpoint = 1"), &["[event at 5s] endpoint"]),
        (event("rpc = \"down\"\nuntil = \"5s\""), &["[event at 5s] until"]),
        (event("rpc = \"log_range_limit\""), &["event at 5s", "missing key `blocks`"]),
        (event("gateway = \"payment\"\npayment = \"p1\""), &["[event at 5s] payment", "already"]),
        (event("gateway = \"payment\"\npayment = \"p2\"\ncolour = 1"), &["event at 5s", "colour"]),
        (event("gateway = \"set\"\nstatus = \"paid\""), &["event at 5s", "exactly one of"]),
        (event("refund = \"forget\"\npayment = \"p1\""), &["event at 5s", "key `refund`"]),
        ("[[event]]\nclock = \"jump\"\nby = \"1h\"".to_owned(), &["event", "missing key `at`"]),
        (
            format!("{order}[[expect]]\nat = \"1s\"\norders = {{ x = \"paid\" }}"),
            &["[expect at 1s] orders", "x"],
        ),
        (
            format!("{order}[[expect]]\nat = \"1s\"\nreservations = {{ o = \"held\" }}"),
            &["[expect at 1s] reservations"],
        ),
        (
            format!("{order}[[expect]]\nat = \"1s\"\nflags = [\"late:p7\"]"),
            &["[expect at 1s] flags", "p7"],
        ),
        (
            format!("{order}[[expect]]\nat = \"1s\"\nevents = [\"order.paid\"]"),
            &["[expect at 1s] events"],
        ),
    ] {
        let error = story(&text).expect_err(&text);
        for part in ["case.toml"].iter().chain(named) {
            assert!(error.contains(part), "{text}\n--- lacks {part:?}:\n{error}");
        }
    }
}
