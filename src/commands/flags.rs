//! `reconciled flags`: lists what waits for a person, and closes what a person has decided.

use anyhow::Context as _;
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::output::{complain, say, say_text};
use super::{Ending, open_store};
use crate::cli::{FlagsCloseArgs, FlagsListArgs};
use crate::clock::{Clock, SystemClock};
use crate::domain::{OrderId, PaymentId, StoredFlag};
use crate::store::{CloseOutcome, FlagFilter};

/// How much of a flag's detail one line shows.
const DETAIL_CHARS_MAX: usize = 100;

/// Lists flags, oldest first.
pub async fn list(args: &FlagsListArgs) -> anyhow::Result<Ending> {
    let store = open_store(&args.config.config).await?;
    let filter = FlagFilter {
        kind: args.kind,
        payment_id: args.payment.as_deref().map(PaymentId::from),
        closed_too: args.all,
    };
    // One more than is shown says whether there are more.
    let mut flags = store.flags(&filter, args.limit.saturating_add(1)).await?;
    let most = usize::try_from(args.limit).context("--limit is too large for this machine")?;
    let more = flags.len() > most;
    flags.truncate(most);
    if args.json {
        say!("{}", serde_json::to_string_pretty(&json!({ "flags": flags, "more": more }))?)?;
    } else {
        say_text!("{}", table(&flags))?;
        if more {
            say!(
                "There are more: these are the {most} oldest. Narrow with --kind or --payment, or raise \
                 --limit."
            )?;
        }
        if flags.is_empty() {
            say!("No flag {}.", if args.all { "was ever raised" } else { "is open" })?;
        }
    }
    Ok(Ending::Good)
}

/// Closes flags in somebody's name.
pub async fn close(args: &FlagsCloseArgs) -> anyhow::Result<Ending> {
    let store = open_store(&args.config.config).await?;
    // Named twice, it is closed once.
    let mut ids = Vec::with_capacity(args.ids.len());
    for id in &args.ids {
        if !ids.contains(id) {
            ids.push(*id);
        }
    }
    let outcomes = store.close_flags(&ids, &args.by, &args.note, SystemClock.now()).await?;
    if args.json {
        let answers: Vec<Value> = ids
            .iter()
            .zip(&outcomes)
            .map(|(id, outcome)| json!({ "id": id, "outcome": outcome }))
            .collect();
        say!("{}", serde_json::to_string_pretty(&answers)?)?;
    } else {
        for (id, outcome) in ids.iter().zip(&outcomes) {
            match outcome {
                CloseOutcome::Closed => say!("flag {id} is closed")?,
                CloseOutcome::ClosedBefore(closing) => complain!(
                    "flag {id} was closed before, at {} by {}: {}",
                    closing.at,
                    closing.by,
                    closing.note
                ),
                CloseOutcome::Unknown => complain!(
                    "there is no flag {id}; `reconciled flags list` shows those that are open"
                ),
            }
        }
    }
    let all_closed = outcomes.iter().all(|outcome| *outcome == CloseOutcome::Closed);
    Ok(if all_closed { Ending::Good } else { Ending::Wrong })
}

/// One line per flag, under a heading; nothing for no flags.
fn table(flags: &[StoredFlag]) -> String {
    if flags.is_empty() {
        return String::new();
    }
    let mut table = Table::new();
    let header = ["id", "opened", "kind", "payment", "order", "detail"];
    table.load_style(presets::NOTHING).set_header(header);
    for flag in flags {
        let id_or = |id: Option<&str>| id.unwrap_or("-").to_owned();
        table.add_row([
            flag.id.to_string(),
            flag.opened_at.to_string(),
            flag.kind.code().to_owned(),
            id_or(flag.payment_id.as_ref().map(PaymentId::as_str)),
            id_or(flag.order_id.as_ref().map(OrderId::as_str)),
            detail(flag),
        ]);
    }
    format!("{table}\n")
}

/// What is known, in short; and of a closed one, its end.
fn detail(flag: &StoredFlag) -> String {
    let text = match &flag.detail {
        Value::Object(fields) if fields.len() == 1 => {
            fields.values().next().map(ToString::to_string).unwrap_or_default()
        }
        other => other.to_string(),
    };
    let subject =
        if flag.subject.is_empty() { String::new() } else { format!("{} ", flag.subject) };
    let text: String = format!("{subject}{text}")
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(DETAIL_CHARS_MAX)
        .collect();
    match &flag.closed {
        None => text,
        Some(closing) => format!("closed {} by {}: {}", closing.at, closing.by, closing.note),
    }
}
