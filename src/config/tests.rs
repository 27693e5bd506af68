//! Bad configuration is refused with the key's name; the sample file is a configuration.

use super::*;
use crate::worker::ScanStart;

const SAMPLE: &str = include_str!("../../deploy/reconciled.example.toml");

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Vec::new())
}

fn refused(text: &str) -> String {
    let config = match parse(text) {
        Err(error) => return error.to_string(),
        Ok(config) => config,
    };
    let whole = config
        .database_url()
        .map(drop)
        .and_then(|()| config.validate_limits())
        .and_then(|()| config.chains(|_| None).map(drop));
    whole.expect_err("must be refused").to_string()
}

const GOOD: &str = r#"
    [database]
    url = "sqlite:reconciled.db"
    [[chains]]
    chain_id = 8453
    [[chains.endpoints]]
    name = "primary"
    url = "https://rpc.example/key-SECRET"
"#;

#[test]
fn the_sample_file_is_a_configuration() {
    let config = parse(SAMPLE).expect("the sample parses");
    config.database_url().expect("it names a database");
    config.validate_limits().expect("its limits hold");
    let chains = config.chains(|_| Some("https://rpc.example".to_owned())).expect("chains");
    assert!(!chains.is_empty());
}

#[test]
fn receivers_are_read_with_where_their_scan_starts() {
    const PAID: &str = "0x00000000000000000000000000000000000c0ffe";
    let with = |receiver: &str| {
        format!(
            "{GOOD}\n[[chains.receivers]]\ntoken = \"0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913\"\n\
             pay_to = {PAID:?}\n{receiver}"
        )
    };
    let start = |text: &str| {
        let chains = parse(&with(text)).expect("parses").chains(|_| None).expect("chains");
        chains[0].receivers[0].start
    };
    let week = Duration::from_secs(7 * 24 * 3_600);
    assert_eq!(start(""), ScanStart::Lookback(week));
    assert_eq!(start("lookback = \"1h\""), ScanStart::Lookback(Duration::from_secs(3_600)));
    assert_eq!(start("first_block = 1"), ScanStart::Block(1));
    for (text, words) in [
        (with("first_block = 1\nlookback = \"1h\""), "not both"),
        (with("first_block = 0"), "first_block must be at least 1"),
        (with("until = 9"), "unknown field `until`"),
        (with("").replace(PAID, "0x0c0ffe"), "line "),
        (with("").replace(&format!("pay_to = {PAID:?}"), ""), "missing field `pay_to`"),
        (with(&with("")[GOOD.len()..]), "is listed twice"),
        (format!("{GOOD}\n[reconcile]\nwindow = \"1m\""), "reconcile.window must be at least"),
    ] {
        let error = refused(&text);
        assert!(error.contains(words), "{words:?} is in {error:?}");
    }
}

#[test]
fn the_sample_file_shows_the_defaults() {
    let sample = parse(SAMPLE).expect("the sample parses");
    let bare = parse(GOOD).expect("parses");
    assert_eq!(format!("{:?}", sample.policy), format!("{:?}", bare.policy));
    assert_eq!(format!("{:?}", sample.discovery), format!("{:?}", bare.discovery));
    assert_eq!(format!("{:?}", sample.reconcile), format!("{:?}", bare.reconcile));
    assert_eq!(format!("{:?}", sample.schedule), format!("{:?}", bare.schedule));
    assert_eq!(sample.checks.repeats, None, "they would override every fitted schedule");
    assert_eq!(format!("{:?}", sample.shutdown), format!("{:?}", bare.shutdown));
    assert_eq!(format!("{:?}", sample.http), format!("{:?}", bare.http));
    assert_eq!(sample.checks.lease_ttl, bare.checks.lease_ttl);
    assert_eq!(sample.checks.batch_max, bare.checks.batch_max);
    assert_eq!(
        sample.repeats().ok(),
        bare.repeats().ok(),
        "repeats in the sample are the built-in"
    );
}

#[test]
fn unknown_keys_are_refused_by_name() {
    assert!(refused("[database]\nurll = \"x\"").contains("urll"));
    assert!(refused("[databse]\nurl = \"x\"").contains("databse"));
    let chain = GOOD.replace("chain_id = 8453", "chain_id = 8453\nblocktime = \"2s\"");
    assert!(refused(&chain).contains("blocktime"));
}

#[test]
fn bad_values_are_refused_with_their_key() {
    for (from, to, key) in [
        ("chain_id = 8453", "chain_id = 0", "chain_id"),
        ("chain_id = 8453", "chain_id = 8453\npaid_after = \"soon\"", "paid_after"),
        ("chain_id = 8453", "chain_id = 8453\nbatch_max = 0", "batch_max"),
        ("chain_id = 8453", "chain_id = 8453\nbatch_max = 1001", "batch_max"),
        ("https://", "ftp://", "url"),
        ("url = \"sqlite:", "url = \"mysql:", "database.url"),
        ("[[chains]]", "[policy]\nquorum = 2\n[[chains]]", "endpoints"),
        ("[[chains]]", "[policy]\nlate = \"keep\"\n[[chains]]", "keep"),
        ("[[chains]]", "[checks]\nrepeats = [\"2s\", \"1s\"]\n[[chains]]", "checks.repeats"),
        ("[[chains]]", "[schedule]\nwindow = \"1m\"\n[[chains]]", "schedule.window"),
        ("[[chains]]", "[schedule]\nhalf_life = \"0s\"\n[[chains]]", "schedule.half_life"),
        ("[[chains]]", "[schedule]\nread_price = 0.0\n[[chains]]", "schedule.read_price"),
        ("[[chains]]", "[schedule]\ndelay_price = -1\n[[chains]]", "schedule.delay_price"),
        ("[[chains]]", "[schedule]\nreads_budget = 0.5\n[[chains]]", "schedule.reads_budget"),
        ("[[chains]]", "[schedule]\ngap_max = \"100ms\"\n[[chains]]", "schedule.gap_max"),
        ("[[chains]]", "[schedule]\nhorizon = \"1s\"\n[[chains]]", "schedule.horizon"),
        ("[[chains]]", "[schedule]\nhorizon = \"4m\"\n[[chains]]", "schedule.repeat_for"),
        ("[[chains]]", "[schedule]\njitter = 0.9\n[[chains]]", "schedule.jitter"),
        ("[[chains]]", "[checks]\nlease_ttl = \"soon\"\n[[chains]]", "duration"),
        (
            "[[chains]]",
            "[[chains]]\npermit2_proxies = [\"0x0000000000000000000000000000000000000000\"]",
            "permit2_proxies",
        ),
        (
            "[[chains]]",
            "[[chains]]\nupto_facilitators = [\"0x0000000000000000000000000000000000000000\"]",
            "upto_facilitators",
        ),
        (
            "[[chains]]",
            "[[chains]]\nupto_facilitators = [\"0xcA11bde05977b3631167028862bE2a173976CA11\"]",
            "names multicall3",
        ),
        ("url = \"https://rpc.example/key-SECRET\"", "url_env = \"UNSET\"", "UNSET"),
        (
            "[[chains.endpoints]]",
            "[[chains.endpoints]]\nname = \"copy\"\nurl = \"https://rpc.example/key-SECRET\"\n\
             [[chains.endpoints]]",
            "has the URL of \"copy\"",
        ),
    ] {
        let message = refused(&GOOD.replace(from, to));
        assert!(message.contains(key), "{key}: {message}");
        assert!(!message.contains("SECRET"), "a secret is shown: {message}");
    }
}

#[test]
fn the_environment_overrides_and_secrets_are_never_shown() {
    let environment = [
        ("RECONCILED_DATABASE_URL".to_owned(), "postgres://u:SECRET@h/d".to_owned()),
        ("RECONCILED_DISCOVERY_BATCH_MAX".to_owned(), "7".to_owned()),
        ("RECONCILED_TEST_SOMETHING".to_owned(), "ignored".to_owned()),
    ];
    let config = Config::parse(GOOD, environment).expect("parses");
    assert_eq!(config.discovery.batch_max, 7);
    assert!(matches!(config.database_url(), Ok(DatabaseUrl::Postgres(_))));
    assert!(!format!("{config:?}").contains("SECRET"));
    let wrong = [("RECONCILED_POLICY_QUORUM".to_owned(), "many".to_owned())];
    let message = Config::parse(GOOD, wrong).expect_err("refused").to_string();
    assert!(message.contains("policy.quorum"), "{message}");
    let unknown = [("RECONCILED_LOG_COLOUR".to_owned(), "red".to_owned())];
    assert!(Config::parse(GOOD, unknown).expect_err("refused").to_string().contains("colour"));
}

#[test]
fn a_line_that_is_refused_is_named_and_never_quoted() {
    let message = refused("[database]\n\nurll = \"postgres://u:SECRET@h/d\"");
    assert!(message.contains("line 3") && message.contains("urll"), "{message}");
    let endpoint =
        "[[chains]]\nchain_id = 1\nendpoints = [{ name = 7, url = \"https://h/SECRET\" }]";
    for message in [message, refused(endpoint)] {
        assert!(!message.contains("SECRET"), "{message}");
    }
}
