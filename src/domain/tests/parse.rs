//! Goal: a row that makes no sense is an error that names its column, and never anything worse (I11).

use proptest::prelude::*;

use crate::domain::*;

type Column = (&'static str, fn(&mut RawPayment) -> &mut Option<String>);

/// Every column that is parsed, by name.
const COLUMNS: [Column; 15] = [
    ("order_id", |r| &mut r.order_id),
    ("rail", |r| &mut r.rail),
    ("method", |r| &mut r.method),
    ("chain_id", |r| &mut r.chain_id),
    ("token", |r| &mut r.token),
    ("payer", |r| &mut r.payer),
    ("pay_to", |r| &mut r.pay_to),
    ("amount", |r| &mut r.amount),
    ("nonce", |r| &mut r.nonce),
    ("valid_after", |r| &mut r.valid_after),
    ("valid_before", |r| &mut r.valid_before),
    ("tx_hash", |r| &mut r.tx_hash),
    ("status", |r| &mut r.status),
    ("created_at", |r| &mut r.created_at),
    ("broadcast_at", |r| &mut r.broadcast_at),
];

const OPTIONAL: [&str; 3] = ["valid_after", "tx_hash", "broadcast_at"];

fn good() -> RawPayment {
    let text = |t: &str| Some(t.to_owned());
    RawPayment {
        id: "p1".to_owned(),
        order_id: text("o1"),
        rail: text("x402"),
        method: text("eip3009"),
        chain_id: text("8453"),
        token: text("0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"),
        payer: text("0x857b06519E91e3A54538791bDbb0E22373e36b66"),
        pay_to: text("0x209693Bc6afc0C5328bA36FaF03C514EF312287C"),
        amount: text("1000000"),
        nonce: Some(format!("0x{}", "ab".repeat(32))),
        valid_after: text("1740672089"),
        valid_before: text("1740672154"),
        tx_hash: Some(format!("0x{}", "cd".repeat(32))),
        status: text("unknown"),
        created_at: text("1740672090123"),
        broadcast_at: text("1740672091456"),
    }
}

fn with(column: &str, value: Option<&str>) -> Result<Payment, MalformedPayment> {
    let mut row = good();
    let (_, field) = COLUMNS.iter().find(|(name, _)| *name == column).unwrap();
    *field(&mut row) = value.map(str::to_owned);
    row.parse()
}

#[test]
fn a_good_row_is_read_in_every_column() {
    let payment = good().parse().unwrap();
    assert_eq!(payment.amount.to_string(), "1000000");
    assert_eq!(payment.chain_id.get(), 8453);
    assert_eq!(payment.valid_before, BlockTime::from_secs(1_740_672_154));
    assert_eq!(payment.created_at, Timestamp::from_millis(1_740_672_090_123));
    assert_eq!(payment.started_at(), Timestamp::from_millis(1_740_672_091_456));
    assert_eq!(payment.status, PaymentStatus::Unknown);
}

#[test]
fn a_missing_column_is_named_unless_it_may_be_missing() {
    for (column, _) in COLUMNS {
        match with(column, None) {
            Ok(_) => assert!(OPTIONAL.contains(&column), "{column} is required"),
            Err(error) => {
                assert!(!OPTIONAL.contains(&column), "{column} is optional");
                assert_eq!((error.column, error.found.as_str()), (column, "missing"));
            }
        }
    }
}

#[test]
fn values_that_look_almost_right_are_refused() {
    let of_bytes = |n: usize| format!("0x{}", "ab".repeat(n));
    let address = of_bytes(20);
    let rows: Vec<(&str, String)> = vec![
        ("nonce", of_bytes(31)),
        ("nonce", of_bytes(33)),
        ("nonce", "ab".repeat(32)),
        ("nonce", format!("0x0x{}", "ab".repeat(31))),
        ("nonce", String::new()),
        ("payer", address[2..].to_owned()),
        ("payer", format!("0x{address}")),
        ("payer", format!("{address} ")),
        ("payer", address.replace('a', "g")),
        ("amount", "NaN".to_owned()),
        ("amount", "1.5".to_owned()),
        ("amount", "-1".to_owned()),
        ("amount", "+1".to_owned()),
        ("amount", "1e6".to_owned()),
        ("amount", "0x10".to_owned()),
        ("amount", "1_000".to_owned()),
        ("amount", " 1".to_owned()),
        ("amount", "٣".to_owned()),
        ("amount", String::new()),
        ("amount", format!("1{}", "0".repeat(78))),
        ("chain_id", "0".to_owned()),
        ("chain_id", "-1".to_owned()),
        ("chain_id", "+8453".to_owned()),
        ("chain_id", "eip155:8453".to_owned()),
        ("valid_before", "-1".to_owned()),
        ("valid_before", "1740672154.5".to_owned()),
        ("valid_after", String::new()),
        ("status", "Unknown".to_owned()),
        ("status", "paid".to_owned()),
        ("rail", "X402".to_owned()),
        ("method", String::new()),
        ("order_id", String::new()),
        ("created_at", "yesterday".to_owned()),
        ("created_at", "1740672090".to_owned()),
        ("broadcast_at", "1740672090".to_owned()),
        ("created_at", "99999999999999999999".to_owned()),
        ("tx_hash", of_bytes(31)),
    ];
    for (column, value) in rows {
        let error = with(column, Some(&value)).expect_err(&format!("{column} = {value:?}"));
        assert_eq!(error.column, column);
        assert_eq!(error.payment_id, PaymentId::from("p1"));
    }
}

#[test]
fn an_empty_hint_is_no_hint_and_a_huge_bound_is_for_ever() {
    assert_eq!(with("tx_hash", Some("")).unwrap().tx_hash, None);
    let max = "115792089237316195423570985008687907853269984665640564039457584007913129639935";
    let payment = with("valid_before", Some(max)).unwrap();
    assert_eq!(payment.valid_before, BlockTime::from_secs(u64::MAX));
    assert_eq!(with("amount", Some(max)).unwrap().amount.to_string(), max);
}

#[test]
fn addresses_and_hashes_are_compared_without_case() {
    let mixed = good().parse().unwrap();
    for case in [str::to_lowercase, str::to_uppercase] {
        let mut row = good();
        for name in ["token", "payer", "pay_to", "nonce", "tx_hash"] {
            let (_, field) = COLUMNS.iter().find(|(column, _)| *column == name).unwrap();
            let text = field(&mut row).as_deref().map(case);
            *field(&mut row) = text;
        }
        let payment = row.parse().unwrap();
        assert_eq!(payment, mixed);
        assert!(payment.same_authorization(&mixed));
    }
}

#[test]
fn a_message_repeats_a_bad_value_only_so_far() {
    let error = with("amount", Some(&"é\u{0}\n\"".repeat(10_000))).unwrap_err();
    assert!(error.to_string().chars().count() < 1_000);
}

proptest! {
    /// Whatever stands in a column, it is read, or that very column is named.
    #[test]
    fn any_text_is_read_or_its_column_named(
        column in proptest::sample::select(COLUMNS.map(|(name, _)| name).to_vec()),
        text in prop_oneof![any::<String>(), "(0x)?[0-9a-fA-F]{38,70}", "[-+]?[0-9]{0,90}(\\.[0-9])?"],
    ) {
        if let Err(error) = with(column, Some(&text)) {
            prop_assert_eq!(error.column, column);
        }
    }

    /// Any row at all: no panic, and a row that is read is read as it stands.
    #[test]
    fn a_row_of_arbitrary_text_never_panics(
        texts in proptest::collection::vec(proptest::option::of(any::<String>()), 15),
    ) {
        let mut row = RawPayment::default();
        for ((_, field), text) in COLUMNS.iter().zip(texts) {
            *field(&mut row) = text;
        }
        let error = row.parse().unwrap_err();
        prop_assert!(COLUMNS.iter().any(|(name, _)| *name == error.column));
    }

    #[test]
    fn amounts_and_hashes_come_back_as_they_went_in(
        amount in any::<[u8; 32]>().prop_map(alloy_primitives::U256::from_be_bytes),
        nonce in any::<[u8; 32]>().prop_map(alloy_primitives::B256::from),
    ) {
        prop_assert_eq!(with("amount", Some(&amount.to_string())).unwrap().amount.get(), amount);
        prop_assert_eq!(with("nonce", Some(&nonce.to_string())).unwrap().nonce, nonce);
    }
}
