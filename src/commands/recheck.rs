//! `reconciled recheck`: has payments checked now. The daemon does the checking; this only makes them due.

use super::output::{complain, say};
use super::{Ending, open_store};
use crate::cli::ConfigArgs;
use crate::clock::{Clock, SystemClock};
use crate::domain::PaymentId;

/// Makes the payments due now.
pub async fn recheck(args: &ConfigArgs, ids: &[String], json: bool) -> anyhow::Result<Ending> {
    let store = open_store(&args.config).await?;
    let ids: Vec<PaymentId> = ids.iter().map(|id| PaymentId::from(id.as_str())).collect();
    let found = store.recheck(&ids, SystemClock.now()).await?;
    let missing: Vec<&PaymentId> = ids.iter().filter(|id| !found.contains(id)).collect();
    if json {
        say!("{}", serde_json::json!({ "due": found, "not_found": missing }))?;
    } else {
        for id in &found {
            say!("payment {id} is due now; the running daemon checks it at its next poll")?;
        }
        for id in &missing {
            complain!(
                "there is no payment {id}; `reconciled explain ORDER` lists an order's payments"
            );
        }
    }
    Ok(if missing.is_empty() { Ending::Good } else { Ending::Wrong })
}
