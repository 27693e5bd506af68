//! Parses, sets up, dispatches, and turns the ending into an exit code.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use reconciled::cli::{Cli, Command, FlagsCommand};
use reconciled::commands::output::tell_error;
use reconciled::commands::{self, Ending};
use reconciled::errors::error_chain;

/// How long threads that cannot be interrupted are waited for at the end.
const SHUTDOWN_MAX: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell_error(format_args!("error: the runtime could not be started: {error}"));
            return ExitCode::from(1);
        }
    };
    let result = runtime.block_on(dispatch(cli.command));
    // A name lookup that hangs must not hold up the end.
    runtime.shutdown_timeout(SHUTDOWN_MAX);
    match result {
        Ok(ending) => ending.into(),
        Err(error) => {
            tell_error(format_args!("error: {}", error_chain(error.as_ref())));
            commands::exit_code_of(&error)
        }
    }
}

async fn dispatch(command: Command) -> anyhow::Result<Ending> {
    match command {
        Command::Run(config) => commands::run::run(&config).await,
        Command::Migrate(config) => commands::migrate::migrate(&config).await,
        Command::Explain { id, json, config } => {
            commands::explain::explain(&config, &id, json).await
        }
        Command::Recheck { ids, json, config } => {
            commands::recheck::recheck(&config, &ids, json).await
        }
        Command::Schedule(args) => commands::schedule::schedule(&args).await,
        Command::Flags(FlagsCommand::List(args)) => commands::flags::list(&args).await,
        Command::Flags(FlagsCommand::Close(args)) => commands::flags::close(&args).await,
        Command::Reconcile { once: true, json, config } => {
            commands::reconcile::once(&config, json).await
        }
        Command::Reconcile { once: false, json, config } => {
            commands::reconcile::request(&config, json).await
        }
        Command::Demo => commands::demo::demo().await,
        Command::Drill(args) => commands::drill::drill(&args).await,
    }
}
