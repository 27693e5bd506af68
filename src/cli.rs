//! The command line.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::domain::{CLOSED_BY_ITSELF, FlagKind, Rail};

/// Finds out what happened to payments whose settlement outcome nobody knows.
///
/// Exit codes: 0 good, 1 something is wrong that the command was asked to find or do, 2 usage or
/// configuration.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The configuration file.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The configuration file.
    #[arg(
        long,
        global = true,
        env = "RECONCILED_CONFIG",
        default_value = "reconciled.toml",
        value_name = "FILE"
    )]
    pub config: PathBuf,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Follow payments, read the chain and write down the truth, until told to stop.
    Run(ConfigArgs),
    /// Create or upgrade the tables.
    Migrate(ConfigArgs),
    /// Tell the story of one payment, or of every payment of an order.
    Explain {
        /// The id of a payment or an order.
        id: String,
        /// JSON instead of text.
        #[arg(long)]
        json: bool,
        /// The configuration.
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Have payments checked now, whatever their schedule says.
    Recheck {
        /// Ids of payments.
        #[arg(required = true, num_args = 1..=RECHECK_MAX)]
        ids: Vec<String>,
        /// JSON instead of text.
        #[arg(long)]
        json: bool,
        /// The configuration.
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Show how long payments take to settle and when they are checked, or fit that anew.
    Schedule(ScheduleArgs),
    /// List what only a person can decide, and close what was decided.
    #[command(subcommand)]
    Flags(FlagsCommand),
    /// Have the books compared with the chain: every open payment, every transfer, every settled payment.
    ///
    /// Without --once the running daemon is asked to, and does so within seconds.
    Reconcile {
        /// Do it here and now and report it, or wait for the one that is under way.
        ///
        /// Exit code 1: money is not accounted for, a flag was raised, or something could not be done.
        #[arg(long)]
        once: bool,
        /// JSON instead of text.
        #[arg(long)]
        json: bool,
        /// The configuration.
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Show the main job on a simulated chain: payments with different fates, each resolved and explained.
    Demo,
    /// Run a folder of seeded cases and say which ended right.
    Drill(DrillArgs),
}

/// The most payments one `recheck` takes.
const RECHECK_MAX: usize = 1_000;

/// The schedules of repeats.
#[derive(Debug, Args)]
pub struct ScheduleArgs {
    /// What to do with them.
    #[command(subcommand)]
    pub command: ScheduleCommand,
    /// The configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
}

/// What to do with flags.
#[derive(Debug, Subcommand)]
pub enum FlagsCommand {
    /// List open flags, oldest first.
    List(FlagsListArgs),
    /// Close flags, with a note of what was decided. One whose cause comes back opens again.
    Close(FlagsCloseArgs),
}

/// Which flags to list.
#[derive(Debug, Args)]
pub struct FlagsListArgs {
    /// Of this kind only.
    #[arg(long, value_parser = flag_kind(), value_name = "KIND")]
    pub kind: Option<FlagKind>,
    /// About this payment only.
    #[arg(long, value_name = "ID")]
    pub payment: Option<String>,
    /// Closed ones too.
    #[arg(long)]
    pub all: bool,
    /// The most flags to list.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// JSON instead of text.
    #[arg(long)]
    pub json: bool,
    /// The configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
}

/// What to do with schedules.
#[derive(Debug, Subcommand)]
pub enum ScheduleCommand {
    /// Show measured settle latency with the check times on it, and the figures beside it.
    Show {
        /// Whose.
        #[command(flatten)]
        series: SeriesArgs,
        /// JSON instead of text.
        #[arg(long)]
        json: bool,
        /// Write the plot to a file as SVG too; needs one rail on one chain.
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
    /// Fit now, and show what would change.
    Tune {
        /// Whose.
        #[command(flatten)]
        series: SeriesArgs,
        /// JSON instead of text.
        #[arg(long)]
        json: bool,
        /// Keep each fit as a version, and use those that are better.
        #[arg(long)]
        apply: bool,
    },
}

/// Which rail on which chain; all when left out.
#[derive(Debug, Args)]
pub struct SeriesArgs {
    /// `x402` or `mpp`.
    #[arg(long, value_parser = parse_rail)]
    pub rail: Option<Rail>,
    /// The chain's id.
    #[arg(long, value_name = "ID")]
    pub chain: Option<u64>,
}

fn parse_rail(text: &str) -> Result<Rail, String> {
    Rail::from_code(text).ok_or_else(|| "must be x402 or mpp".to_owned())
}

/// Which flags to close, and what is to be remembered of it.
#[derive(Debug, Args)]
pub struct FlagsCloseArgs {
    /// Ids of flags, as `flags list` shows them.
    #[arg(required = true, num_args = 1..=FLAGS_CLOSE_MAX)]
    pub ids: Vec<i64>,
    /// What was decided, for whoever reads it later.
    #[arg(long, value_parser = said, value_name = "TEXT")]
    pub note: String,
    /// Who decided it.
    #[arg(long, env = "USER", value_parser = somebody, value_name = "NAME")]
    pub by: String,
    /// JSON instead of text.
    #[arg(long)]
    pub json: bool,
    /// The configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
}

/// The most flags one `flags close` takes.
const FLAGS_CLOSE_MAX: usize = 1_000;

fn flag_kind() -> impl TypedValueParser<Value = FlagKind> {
    PossibleValuesParser::new(FlagKind::ALL.iter().map(|kind| kind.code()))
        .try_map(|code| FlagKind::from_code(&code).ok_or("is not the kind of any flag"))
}

fn said(text: &str) -> Result<String, &'static str> {
    let text = text.trim();
    if text.is_empty() { Err("say what was decided") } else { Ok(text.to_owned()) }
}

fn somebody(name: &str) -> Result<String, &'static str> {
    match said(name) {
        Ok(name) if name == CLOSED_BY_ITSELF => Err("is what the daemon signs with; name a person"),
        Ok(name) => Ok(name),
        Err(_) => Err("name a person"),
    }
}

/// Which cases to run, and where.
#[derive(Debug, Args)]
pub struct DrillArgs {
    /// Case files, or folders of them.
    #[arg(default_value = "tests/cases", value_name = "PATH")]
    pub cases: Vec<PathBuf>,
    /// The kind of database.
    #[arg(long, value_enum, default_value = "sqlite")]
    pub store: DrillStore,
    /// A PostgreSQL server on which databases may be created and dropped, for `--store postgres`.
    #[arg(long, env = "RECONCILED_DRILL_POSTGRES", value_name = "URL", hide_env_values = true)]
    pub postgres: Option<String>,
    /// JSON instead of text.
    #[arg(long)]
    pub json: bool,
}

/// The kind of database to run cases on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DrillStore {
    /// A temporary file.
    Sqlite,
    /// A temporary database on the server given.
    Postgres,
}
