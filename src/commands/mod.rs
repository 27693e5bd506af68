//! One file per subcommand, and how a command ends.

pub mod demo;
pub mod drill;
pub mod explain;
pub mod flags;
pub mod migrate;
pub mod output;
pub mod recheck;
pub mod reconcile;
pub mod run;
pub mod schedule;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use crate::config::{Config, ConfigError};
use crate::store::{Store, StoreError, connect};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// All is well.
    Good,
    /// Something is wrong that the command was asked to find or do.
    Wrong,
}

impl From<Ending> for ExitCode {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Good => Self::SUCCESS,
            Ending::Wrong => Self::from(1),
        }
    }
}

/// The exit code for usage and configuration errors; 1 for everything else.
pub fn exit_code_of(error: &anyhow::Error) -> ExitCode {
    // A database URL is parsed by the driver, when it connects.
    let is_url = matches!(error.downcast_ref::<StoreError>(), Some(StoreError::Url(_)));
    if is_url || error.downcast_ref::<ConfigError>().is_some() {
        return ExitCode::from(2);
    }
    ExitCode::from(1)
}

/// Connects to the configured database and checks its tables: for commands that only look.
async fn open_store(config: &Path) -> anyhow::Result<Arc<dyn Store>> {
    let config = Config::load(config)?;
    let store = connect(&config.database_url()?, config.database.connections_max).await?;
    store.verify_schema().await?;
    Ok(store)
}
