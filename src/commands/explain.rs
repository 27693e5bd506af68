//! `reconciled explain`: tells the story of one payment, or of every payment of an order.

use std::fmt::Write as _;

use serde_json::Value;

use super::output::{complain, say, say_text};
use super::{Ending, open_store};
use crate::cli::ConfigArgs;
use crate::domain::{PaymentId, Phase, Watch};
use crate::store::{STORY_CHECKS_MAX, Store, Story};

/// Tells the story.
pub async fn explain(args: &ConfigArgs, id: &str, json: bool) -> anyhow::Result<Ending> {
    let store = open_store(&args.config).await?;
    let stories = stories(store.as_ref(), id).await?;
    if json {
        say!("{}", serde_json::to_string_pretty(&stories)?)?;
    } else if stories.is_empty() {
        complain!("there is no payment and no order {id}; ids are compared letter by letter");
    } else {
        let texts: Vec<String> = stories.iter().map(tell).collect();
        say_text!("{}", texts.join("\n"))?;
    }
    Ok(if stories.is_empty() { Ending::Wrong } else { Ending::Good })
}

/// The story of the payment with this id; else those of the order's payments.
pub async fn stories(store: &dyn Store, id: &str) -> anyhow::Result<Vec<Story>> {
    if let Some(story) = store.story(&PaymentId::from(id)).await? {
        return Ok(vec![story]);
    }
    let mut stories = Vec::new();
    for payment in store.payments_of_order(id).await? {
        stories.extend(store.story(&payment).await?);
    }
    Ok(stories)
}

/// One story as text.
pub fn tell(story: &Story) -> String {
    let mut out = String::new();
    section(&mut out, &format!("payment {}", word(&story.payment["id"])), Some(&story.payment));
    match &story.order {
        Some(order) => section(&mut out, &format!("order {}", word(&order["id"])), Some(order)),
        None => section(&mut out, "order: there is no such row", None),
    }
    rows(&mut out, "other payments of the order", &story.siblings);
    rows(&mut out, "stock", &story.reservations);
    rows(&mut out, "identifiers", &story.identifiers);
    if !story.checks.is_empty() {
        let most = usize::try_from(STORY_CHECKS_MAX).unwrap_or(usize::MAX);
        let cut = if story.checks.len() >= most { " (the newest)" } else { "" };
        line(&mut out, &format!("checks{cut}"));
        for check in &story.checks {
            let block = check.block.map(|n| format!("  block {n}")).unwrap_or_default();
            let detail = check.detail.as_deref().map(|d| format!("  {d}")).unwrap_or_default();
            line(&mut out, &format!("  {}  {}{block}{detail}", check.at, check.verdict));
        }
    }
    for resolution in &story.resolutions {
        section(
            &mut out,
            &format!("resolution: {}", word(&resolution["outcome"])),
            Some(resolution),
        );
    }
    if let Some(refund) = &story.refund {
        section(&mut out, &format!("refund {}", word(&refund["status"])), Some(refund));
    }
    rows(&mut out, "flags", &story.flags);
    rows(&mut out, "events", &story.events);
    line(&mut out, &format!("next: {}", next(story.watch.as_ref())));
    out
}

/// What comes next, and when.
fn next(watch: Option<&Watch>) -> String {
    let Some(watch) = watch else {
        return "it is not followed: its status is not one that needs to be found out".to_owned();
    };
    let waiting_for = match watch.phase {
        Phase::Targeted => "the repeats go on",
        Phase::Reconcile => "the repeats are over; every full reconcile reads it",
        Phase::Late => "failed at the deadline, and watched until it can never land",
        Phase::Finality => "settled, and watched until its block is final",
        Phase::Closed => return "closed: nothing more can happen".to_owned(),
    };
    match watch.next_check_at {
        Some(at) => format!("{waiting_for}; the next check of its own is at {at}"),
        None => format!("{waiting_for}; no check of its own is planned"),
    }
}

fn line(out: &mut String, text: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{text}");
}

fn section(out: &mut String, title: &str, row: Option<&Value>) {
    line(out, title);
    let Some(Value::Object(columns)) = row else { return };
    for (name, value) in columns {
        if name != "id" && !value.is_null() {
            line(out, &format!("  {name:<18} {}", word(value)));
        }
    }
}

fn rows(out: &mut String, title: &str, rows: &[Value]) {
    if rows.is_empty() {
        return;
    }
    line(out, title);
    for row in rows {
        let Value::Object(columns) = row else { continue };
        let text: Vec<String> = columns
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| format!("{name}={}", word(value)))
            .collect();
        line(out, &format!("  {}", text.join("  ")));
    }
}

fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
