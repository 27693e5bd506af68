//! `reconciled drill`: runs seeded cases and says which ended right.
//!
//! Seeded cases prove only that we catch what somebody already imagined; every real incident becomes one
//! more file, before its fix.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

use comfy_table::{Table, presets};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::Ending;
use super::output::say;
use crate::cli::{DrillArgs, DrillStore};
use crate::config::ConfigError;
use crate::errors::error_chain;
use crate::sim::runner::{Ended, Nobody, Runner};
use crate::sim::scenario::Scenario;
use crate::sim::stage::Stage;

/// How one case ended.
enum Case {
    Ran(Ended),
    /// The story could not be played to its end.
    Broke(String),
    NotSupported(&'static str),
}

/// Runs every case, each on a fresh database and a chain and clock of its own, as many at once as there are
/// processors: the time goes into the full reconciles of days.
pub async fn drill(args: &DrillArgs) -> anyhow::Result<Ending> {
    let mut waiting = Vec::new();
    for file in case_files(&args.cases)? {
        let name = file.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        waiting.push((name, Scenario::load(&file)?));
    }
    let at_once = available_parallelism().map_or(1, NonZero::get);
    let mut waiting = waiting.into_iter().enumerate();
    let mut playing = JoinSet::new();
    let mut played = BTreeMap::new();
    loop {
        while playing.len() < at_once
            && let Some((place, (name, scenario))) = waiting.next()
        {
            let (store, server) = (args.store, args.postgres.clone());
            playing.spawn(async move { (place, name, case(scenario, store, server).await) });
        }
        let Some(done) = playing.join_next().await else { break };
        let (place, name, case) = done?;
        played.insert(place, (name, case));
    }
    // Only once all are over, so that no stage is left standing.
    let cases: Vec<(String, Case)> = played
        .into_values()
        .map(|(name, case)| Ok((name, case?)))
        .collect::<anyhow::Result<_>>()?;
    let wrong = cases.iter().filter(|(_, case)| case.is_wrong()).count();
    if args.json {
        say!("{}", serde_json::to_string_pretty(&as_json(&cases))?)?;
    } else {
        print_table(&cases)?;
    }
    Ok(if wrong == 0 { Ending::Good } else { Ending::Wrong })
}

async fn case(
    scenario: Scenario,
    store: DrillStore,
    server: Option<String>,
) -> anyhow::Result<Case> {
    Ok(match scenario.unsupported() {
        Some(reason) => Case::NotSupported(reason),
        None => run(scenario, stage(store, server).await?).await,
    })
}

async fn stage(store: DrillStore, server: Option<String>) -> anyhow::Result<Stage> {
    match (store, server) {
        (DrillStore::Sqlite, _) => Stage::sqlite(),
        (DrillStore::Postgres, Some(url)) => Stage::postgres(&url).await,
        (DrillStore::Postgres, None) => {
            Err(usage("--store postgres", "needs --postgres URL of a server").into())
        }
    }
}

/// Plays one story. Whatever becomes of it, its stage is struck and the next case runs.
async fn run(scenario: Scenario, stage: Stage) -> Case {
    let played = play(scenario, &stage).await;
    let struck = stage.strike().await;
    match played.and_then(|ended| struck.map(|()| ended)) {
        Ok(ended) => Case::Ran(ended),
        Err(error) => Case::Broke(error_chain(error.as_ref())),
    }
}

async fn play(scenario: Scenario, stage: &Stage) -> anyhow::Result<Ended> {
    let mut runner = Runner::new(scenario, &stage.url()).await?;
    let ended = runner.play(&mut Nobody).await;
    runner.finish().await?;
    ended
}

fn usage(key: &str, problem: &str) -> ConfigError {
    ConfigError::Value { key: key.to_owned(), problem: problem.to_owned() }
}

/// Every case file named, and every one in the folders named, in order of name.
fn case_files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let folder = std::fs::read_dir(path)?.collect::<Result<Vec<_>, _>>()?;
            let mut cases: Vec<PathBuf> =
                folder.into_iter().map(|entry| entry.path()).filter(|p| is_case(p)).collect();
            cases.sort();
            files.append(&mut cases);
        } else {
            files.push(path.clone());
        }
    }
    if files.is_empty() {
        return Err(usage("PATH", "names no case file (*.toml)").into());
    }
    Ok(files)
}

fn is_case(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "toml")
}

impl Case {
    fn is_wrong(&self) -> bool {
        match self {
            Self::Ran(ended) => !ended.wrong.is_empty(),
            Self::Broke(_) => true,
            Self::NotSupported(_) => false,
        }
    }

    /// The longest of its detection delays.
    fn delay(&self) -> Option<Duration> {
        match self {
            Self::Ran(ended) => ended.delays.values().max().copied(),
            Self::Broke(_) | Self::NotSupported(_) => None,
        }
    }

    fn requests(&self) -> u64 {
        match self {
            Self::Ran(ended) => ended.requests,
            Self::Broke(_) | Self::NotSupported(_) => 0,
        }
    }

    fn word(&self) -> &'static str {
        match self {
            Self::Ran(ended) if ended.wrong.is_empty() => "right",
            Self::Ran(_) | Self::Broke(_) => "WRONG",
            Self::NotSupported(_) => "not supported yet",
        }
    }

    /// What differs, or why it was not run.
    fn remarks(&self) -> Vec<String> {
        match self {
            Self::Ran(ended) => ended
                .wrong
                .iter()
                .map(|(at, difference)| {
                    format!("at {}: {difference}", humantime::format_duration(*at))
                })
                .collect(),
            Self::Broke(error) => vec![error.clone()],
            Self::NotSupported(reason) => vec![(*reason).to_owned()],
        }
    }
}

fn count(cases: &[(String, Case)], word: &str) -> usize {
    cases.iter().filter(|(_, case)| case.word() == word).count()
}

fn print_table(cases: &[(String, Case)]) -> std::io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["case", "ended", "detected after", "reads", ""]);
    for (name, case) in cases {
        let delay = case.delay().map(|d| humantime::format_duration(d).to_string());
        table.add_row([
            name.clone(),
            case.word().to_owned(),
            delay.unwrap_or_default(),
            case.requests().to_string(),
            case.remarks().join("\n"),
        ]);
    }
    say!("{table}")?;
    let requests: u64 = cases.iter().map(|(_, case)| case.requests()).sum();
    say!(
        "{} right, {} wrong, {} not supported yet; {requests} RPC requests",
        count(cases, "right"),
        count(cases, "WRONG"),
        count(cases, "not supported yet"),
    )
}

fn as_json(cases: &[(String, Case)]) -> Value {
    let rows: Vec<Value> = cases
        .iter()
        .map(|(name, case)| {
            json!({
                "case": name,
                "ended": case.word().to_lowercase(),
                "detection_delay_seconds": case.delay().map(|d| d.as_secs_f64()),
                "rpc_requests": case.requests(),
                "remarks": case.remarks(),
            })
        })
        .collect();
    json!({
        "cases": rows,
        "right": count(cases, "right"),
        "wrong": count(cases, "WRONG"),
        "not_supported_yet": count(cases, "not supported yet"),
        "rpc_requests": cases.iter().map(|(_, case)| case.requests()).sum::<u64>(),
    })
}
