//! Resolving a batch on locked rows (I7), and what happens when the database refuses.

use sqlx::SqliteConnection;

use super::watches::{WatchWrite, write_check, write_watch};
use super::write::write;
use super::{SqliteStore, failed, finish, id_list, load};
use crate::domain::{Decided, Judged, PaymentStatus, Policy, RefundChange, Timestamp};
use crate::errors::error_chain;
use crate::store::row::one_line;
use crate::store::{Applied, ApplyFailure, Lease, Resolved, StoreError};

const OPERATION: &str = "to apply resolutions";

pub(super) async fn apply(
    store: &SqliteStore,
    lease: &Lease,
    batch: Vec<Judged>,
    policy: &Policy,
    now: Timestamp,
) -> Result<Vec<Applied>, StoreError> {
    if batch.is_empty() {
        return Ok(Vec::new());
    }
    let error = match apply_together(store, lease, batch.clone(), policy, now).await {
        Err(error) if !matches!(error, StoreError::Unreachable(_)) => error,
        done => return done,
    };
    tracing::warn!(
        error = error_chain(&error),
        payments = batch.len(),
        "the database refused a batch; every order of it is applied alone"
    );
    let mut applied = Vec::with_capacity(batch.len());
    for group in by_order(store, batch).await? {
        match apply_together(store, lease, group.clone(), policy, now).await {
            Ok(done) => applied.extend(done),
            Err(error @ StoreError::Unreachable(_)) => return Err(error),
            Err(error) => {
                let problem = one_line(&error_chain(&error));
                applied.extend(refuse(store, lease, group, &problem).await?);
            }
        }
    }
    Ok(applied)
}

/// Everything or nothing of `batch`, in one transaction.
async fn apply_together(
    store: &SqliteStore,
    lease: &Lease,
    batch: Vec<Judged>,
    policy: &Policy,
    now: Timestamp,
) -> Result<Vec<Applied>, StoreError> {
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        let (held, lost) = by_lease(&mut tx, lease, batch).await?;
        let mut applied: Vec<Applied> = lost
            .into_iter()
            .map(|judged| Applied {
                payment_id: judged.payment_id,
                result: Err(ApplyFailure::LeaseLost),
            })
            .collect();
        let mut ledger = load::ledger(&mut tx, &held, store.tables()).await?;
        for decided in ledger.resolve_all(held, policy, now) {
            write(&mut tx, lease, &decided, now).await?;
            applied.push(answer(&decided));
        }
        Ok(applied)
    }
    .await;
    finish(tx, OPERATION, result).await
}

fn answer(decided: &Decided) -> Applied {
    let resolution = &decided.resolution;
    let resolved = Resolved {
        outcome: resolution.outcome,
        recorded: resolution.is_recorded(),
        settles: resolution.payment == Some(PaymentStatus::Settled),
        refund: match &resolution.refund {
            RefundChange::Owe(owed) => Some(owed.reason),
            _ => None,
        },
        phase: resolution.watch.next.phase,
    };
    Applied { payment_id: decided.judged.payment_id.clone(), result: Ok(resolved) }
}

/// Parts those whose watch the lease still holds from those it has lost.
async fn by_lease(
    conn: &mut SqliteConnection,
    lease: &Lease,
    batch: Vec<Judged>,
) -> Result<(Vec<Judged>, Vec<Judged>), StoreError> {
    let held: Vec<String> = sqlx::query_scalar(
        "SELECT payment_id FROM reconciled_watches
         WHERE lease_token = ?1 AND payment_id IN (SELECT value FROM json_each(?2))",
    )
    .bind(lease.token.to_string())
    .bind(id_list(batch.iter().map(|judged| judged.payment_id.as_str())))
    .fetch_all(conn)
    .await
    .map_err(failed(OPERATION))?;
    Ok(batch.into_iter().partition(|j| held.iter().any(|id| id == j.payment_id.as_str())))
}

/// The batch in groups of one order each; a payment whose order cannot be told is a group of its own.
async fn by_order(store: &SqliteStore, batch: Vec<Judged>) -> Result<Vec<Vec<Judged>>, StoreError> {
    let ids = id_list(batch.iter().map(|judged| judged.payment_id.as_str()));
    let mut conn = store.reader.acquire().await.map_err(failed(OPERATION))?;
    let payments = load::raw_payments(&mut conn, &ids).await?;
    let mut groups: Vec<(Option<&str>, Vec<Judged>)> = Vec::new();
    for judged in batch {
        let order = payments
            .iter()
            .find(|raw| raw.id == judged.payment_id.as_str())
            .and_then(|raw| raw.order_id.as_deref());
        match groups.iter_mut().find(|(known, _)| order.is_some() && *known == order) {
            Some((_, group)) => group.push(judged),
            None => groups.push((order, vec![judged])),
        }
    }
    Ok(groups.into_iter().map(|(_, group)| group).collect())
}

/// Gives back the watches of payments that the database refused to resolve: the check is written down
/// with the database's words, nothing else changes, and the next check tries again.
async fn refuse(
    store: &SqliteStore,
    lease: &Lease,
    group: Vec<Judged>,
    problem: &str,
) -> Result<Vec<Applied>, StoreError> {
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        for judged in &group {
            let write = WatchWrite {
                phase: None,
                next_check_at: Some(judged.due.open.at.unwrap_or(judged.due.finality)),
                restart_at: None,
            };
            if write_watch(&mut tx, lease, judged, &write).await? {
                let detail = one_line(&format!("not applied: {problem}"));
                write_check(&mut tx, judged, Some(&detail)).await?;
            }
        }
        Ok(())
    }
    .await;
    finish(tx, OPERATION, result).await?;
    Ok(group
        .into_iter()
        .map(|judged| Applied {
            payment_id: judged.payment_id,
            result: Err(ApplyFailure::Refused(problem.to_owned())),
        })
        .collect())
}
