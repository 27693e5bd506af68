//! `reconciled demo`: the main job before your eyes. A gateway writes payments whose outcome nobody
//! knows, a simulated chain decides their fates, and the real worker finds out, with time sped up.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use comfy_table::{Table, presets};

use super::Ending;
use super::output::{complain, say};
use crate::domain::Outcome;
use crate::sim::runner::{Audience, Runner, STORY_CHAIN, Told};
use crate::sim::scenario::{ChainAct, GatewaySet, Scenario};
use crate::store::DatabaseUrl;

/// The demo's story. It is a case like any other, with a right ending.
const STORY: &str = include_str!("../sim/demo.toml");

/// A second of the story takes this long, within the bounds below.
const SECOND_TAKES: Duration = Duration::from_millis(25);
/// The longest a step may take, however long it is in the story.
const STEP_MAX: Duration = Duration::from_millis(45);

/// Plays the story and shows it.
pub async fn demo() -> anyhow::Result<Ending> {
    let folder = tempfile::Builder::new().prefix("reconciled-demo-").tempdir()?.keep();
    let database = folder.join("demo.db");
    let scenario = Scenario::parse("demo.toml", STORY)?;
    say!("Payments whose outcome nobody knows, a gateway's SQLite file, a simulated chain over")?;
    say!("JSON-RPC, and the daemon's own worker. A day and a half passes in some seconds.\n")?;
    let url = DatabaseUrl::Sqlite(format!("sqlite:{}", database.display()));
    let mut runner = Runner::new(scenario.clone(), &url).await?;
    let mut narrator = Narrator::default();
    let ended = runner.play(&mut narrator).await?;
    if let Some(error) = narrator.unsaid.take() {
        return Err(error.into());
    }

    say!("\n{}", summary(&scenario, &runner, &narrator).await?)?;
    say!(
        "{} payments were resolved with {} JSON-RPC calls.",
        narrator.decided.len(),
        ended.requests
    )?;
    runner.finish().await?;
    write_config(&folder.join("reconciled.toml"), &database)?;
    say!("\nLook further: every check, every piece of evidence, and what comes next:")?;
    say!(
        "  cargo run --release -- explain reorged --config {}",
        folder.join("reconciled.toml").display()
    )?;
    say!("  the tables are in {}", database.display())?;
    for (at, difference) in &ended.wrong {
        complain!("this is not how the story should end: at {at:?}: {difference}");
    }
    Ok(if ended.wrong.is_empty() { Ending::Good } else { Ending::Wrong })
}

/// A configuration with which `explain` finds the demo's database.
fn write_config(path: &Path, database: &Path) -> std::io::Result<()> {
    let text = format!(
        "[database]\nurl = \"sqlite:{}\"\n\n[[chains]]\nchain_id = {STORY_CHAIN}\n\
         [[chains.endpoints]]\nname = \"simulated\"\nurl = \"http://127.0.0.1:1\"\n",
        database.display()
    );
    std::fs::write(path, text)
}

#[derive(Default)]
struct Narrator {
    /// What the gateway thought of a payment at first.
    thought: BTreeMap<String, String>,
    /// What the chain did about it.
    did: BTreeMap<String, Vec<String>>,
    /// What was decided, in order, and after how long.
    decided: BTreeMap<String, Vec<(Outcome, Option<Duration>)>>,
    /// Why a line could not be written.
    unsaid: Option<std::io::Error>,
}

impl Narrator {
    fn chain_did(&mut self, payment: &str, what: String) {
        self.did.entry(payment.to_owned()).or_default().push(what);
    }

    fn tell_chain(&mut self, at: Duration, act: &ChainAct) -> String {
        let when = short(at);
        match act {
            ChainAct::Transfer { payment, to: None, amount: None, .. } => {
                self.chain_did(payment, format!("landed at {when}"));
                format!("the transfer of {payment} is mined")
            }
            ChainAct::Transfer { payment, .. } => {
                self.chain_did(payment, format!("paid somebody else at {when}"));
                format!("the nonce of {payment} pays somebody else")
            }
            ChainAct::Batch { payments } => {
                for payment in payments {
                    self.chain_did(payment, format!("landed at {when}"));
                }
                format!("one transaction carries {}", payments.join(", "))
            }
            ChainAct::Cancel { payment } => {
                self.chain_did(payment, format!("canceled at {when}"));
                format!("the buyer cancels the authorization of {payment}")
            }
            ChainAct::Revert { payment } => {
                self.chain_did(payment, format!("reverted at {when}"));
                format!("a transaction for {payment} reverts")
            }
            ChainAct::Reorg { depth } => format!("a reorg replaces the last {depth} blocks"),
            ChainAct::BareTransfer { amount, .. } => format!("{amount} arrive without a payment"),
            ChainAct::Park { payment } => format!("the money of {payment} is parked"),
        }
    }
}

#[async_trait]
impl Audience for Narrator {
    async fn hear(&mut self, at: Duration, told: Told) {
        let (who, what) = match told {
            Told::PaymentWritten(payment) => {
                let status = payment.status.code().to_owned();
                let line = format!("{} for order {}: {status}", payment.name, payment.order);
                self.thought.insert(payment.name, status);
                ("gateway", line)
            }
            Told::GatewaySet(GatewaySet::Order { order, status, paid_by, .. }) => {
                let status = status.map(|s| s.code()).unwrap_or("changed");
                let by = paid_by.map(|p| format!(" by {p}")).unwrap_or_default();
                ("gateway", format!("order {order}: {status}{by}"))
            }
            Told::GatewaySet(set) => ("gateway", format!("{set:?}")),
            Told::Chain(act) => ("chain", self.tell_chain(at, &act)),
            Told::Refund(act) => ("refunds", format!("{:?}: {}", act.step, act.payment)),
            Told::Rpc { endpoint, fault, starts } => {
                let what = if starts { "from now on" } else { "no longer" };
                ("endpoint", format!("number {endpoint} is {what}: {fault:?}"))
            }
            Told::Killed => ("daemon", "killed, and started again".to_owned()),
            Told::Resolved { payment, outcome, delay } => {
                let after = delay.map(|d| format!(", {} after its block", short(d)));
                let line = format!("{payment}: {outcome}{}", after.unwrap_or_default());
                self.decided.entry(payment.to_string()).or_default().push((outcome, delay));
                ("reconciled", line)
            }
        };
        if let Err(error) = say!("{:>10}  {who:<10}  {what}", clock(at)) {
            self.unsaid.get_or_insert(error);
        }
    }

    async fn step(&mut self, from: Duration, to: Duration) {
        let gap = to.saturating_sub(from);
        tokio::time::sleep(SECOND_TAKES.mul_f64(gap.as_secs_f64().min(60.0)).min(STEP_MAX)).await;
    }
}

/// Payment, what the gateway thought, what the chain did, what was decided and why, how fast.
async fn summary(
    scenario: &Scenario,
    runner: &Runner,
    narrator: &Narrator,
) -> anyhow::Result<Table> {
    let why = reasons(runner).await?;
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
        "payment",
        "the gateway thought",
        "the chain did",
        "decided",
        "because",
        "detected after",
    ]);
    for (payment, thought) in &narrator.thought {
        let did = narrator.did.get(payment).map(|acts| acts.join(", "));
        let nothing =
            if scenario.payments.get(payment).is_some_and(|p| p.same_authorization_as.is_some()) {
                "the same transfer"
            } else {
                "nothing"
            };
        let decided = narrator.decided.get(payment);
        let outcomes: Vec<&str> =
            decided.into_iter().flatten().map(|(outcome, _)| words(*outcome)).collect();
        let delay = decided.into_iter().flatten().find_map(|(_, delay)| *delay);
        table.add_row([
            payment.clone(),
            thought.clone(),
            did.unwrap_or_else(|| nothing.to_owned()),
            if outcomes.is_empty() {
                "nothing to find out".to_owned()
            } else {
                outcomes.join(", then ")
            },
            why.get(payment).cloned().unwrap_or_default(),
            delay.map(short).unwrap_or_default(),
        ]);
    }
    Ok(table)
}

const fn words(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Waiting => "waiting",
        Outcome::Paid => "paid",
        Outcome::Reinstated => "reinstated and paid",
        Outcome::RefundOwed => "settled, refund owed",
        Outcome::Confirmed => "confirmed",
        Outcome::RefundPaid => "refund paid",
        Outcome::Failed => "failed",
        Outcome::AuthorizationReused => "failed and flagged",
        Outcome::Reopened => "unknown again",
        Outcome::Flagged => "flagged",
    }
}

/// Why each payment ended as it did: the verdict of its last resolution, in words.
async fn reasons(runner: &Runner) -> anyhow::Result<BTreeMap<String, String>> {
    let rows = runner
        .gateway()
        .rows(
            "SELECT payment_id, outcome, verdict, CAST(block_number AS TEXT), CAST(log_index AS TEXT) \
             FROM {resolutions} ORDER BY id",
            &[],
            5,
        )
        .await?;
    let mut why = BTreeMap::new();
    for row in rows {
        let [Some(payment), Some(outcome), Some(verdict), block, log] =
            <[_; 5]>::try_from(row).unwrap_or_default()
        else {
            continue;
        };
        let place = match (block, log) {
            (Some(block), Some(log)) => format!("transfer in block {block}, log {log}"),
            _ => String::new(),
        };
        let text = match (outcome.as_str(), verdict.as_str()) {
            ("authorization_reused", _) => format!("its {place} pays another order"),
            (_, "settled:final") => format!("{place}, final"),
            (_, "settled:tentative") => place,
            (_, "unsettleable:expired") => "unused when its window closed, final".to_owned(),
            (_, "unsettleable:canceled") => "canceled on chain: used is not paid".to_owned(),
            (_, "unsettleable:used_elsewhere") => "its nonce moved other money".to_owned(),
            (_, "pending") => "not landed at the deadline; watched on".to_owned(),
            (_, other) => other.to_owned(),
        };
        why.insert(payment, text);
    }
    Ok(why)
}

fn short(duration: Duration) -> String {
    humantime::format_duration(Duration::from_secs(duration.as_secs())).to_string()
}

/// Hours, minutes and seconds from the start of the story.
fn clock(at: Duration) -> String {
    let secs = at.as_secs();
    format!("{:02}:{:02}:{:02}", secs / 3_600, secs / 60 % 60, secs % 60)
}
