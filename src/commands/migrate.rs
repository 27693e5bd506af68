//! `reconciled migrate`: creates or upgrades the tables.

use super::Ending;
use super::output::say;
use crate::cli::ConfigArgs;
use crate::config::Config;
use crate::store::connect;

/// Creates or upgrades the tables.
pub async fn migrate(args: &ConfigArgs) -> anyhow::Result<Ending> {
    let config = Config::load(&args.config)?;
    let store = connect(&config.database_url()?, config.database.connections_max).await?;
    store.migrate().await?;
    let optional = store.verify_schema().await?;
    say!("the tables are up to date")?;
    for (there, what) in [
        (optional.stock, "stock_reservations and stock: stock is left alone"),
        (optional.identifiers, "payment_identifiers: retries are not answered"),
    ] {
        if !there {
            say!("absent, and optional: {what}")?;
        }
    }
    Ok(Ending::Good)
}
