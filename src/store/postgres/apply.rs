//! Applies verdicts: one transaction for a batch (I7), and one per order when the batch is refused, so
//! that one bad row stops nothing else (I11).

use std::collections::{BTreeMap, HashMap};

use sqlx::PgPool;

use super::locked::{lock_watches, read_ledger};
use super::rows::texts;
use super::{finish, watches, write};
use crate::domain::{Decided, Judged, PaymentId, PaymentStatus, Policy, RefundChange, Timestamp};
use crate::errors::error_chain;
use crate::store::row::one_line;
use crate::store::{Applied, ApplyFailure, Lease, OptionalTables, Resolved, StoreError};

/// How often one transaction is tried when others get in its way.
const ATTEMPTS_MAX: usize = 3;

/// Why a transaction did not happen.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApplyError {
    /// The database said no.
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    /// One of our own rows makes no sense.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A payment's order was changed while the rows were being locked.
    #[error("a payment moved to another order meanwhile")]
    Moved,
    /// Somebody else recorded the same log as theirs meanwhile.
    #[error("another payment recorded the same transfer meanwhile")]
    TransferTaken,
    /// A row that was locked did not take its update: a view that does not pass it on, or a rule.
    #[error("{written} of {wanted} rows of {table} took their update; is it an updatable view?")]
    NotWritten {
        /// The table.
        table: &'static str,
        /// Rows to update.
        wanted: usize,
        /// Rows updated.
        written: u64,
    },
}

impl ApplyError {
    /// Whether the same transaction may well succeed on fresh rows.
    fn is_transient(&self) -> bool {
        match self {
            Self::Moved | Self::TransferTaken => true,
            Self::Database(sqlx::Error::Database(error)) => {
                // serialization_failure and deadlock_detected; and two that insert one transfer.
                matches!(error.code().as_deref(), Some("40001" | "40P01"))
                    || (error.is_unique_violation() && error.table() == Some("transfers"))
            }
            _ => false,
        }
    }

    /// The error of the whole call, when the database cannot be reached and no other order would fare
    /// better.
    fn into_unreachable(self) -> Result<StoreError, Self> {
        match self {
            Self::Database(source) => match StoreError::from_sqlx("to apply verdicts", source) {
                unreachable @ StoreError::Unreachable(_) => Ok(unreachable),
                StoreError::Refused { source, .. } => Err(Self::Database(source)),
                other => Err(Self::Store(other)),
            },
            other => Err(other),
        }
    }
}

/// What one call of [`crate::store::Store::apply`] works with.
pub(super) struct Applier<'a> {
    pub(super) pool: &'a PgPool,
    pub(super) optional: OptionalTables,
    pub(super) lease: &'a Lease,
    pub(super) policy: &'a Policy,
    pub(super) now: Timestamp,
}

impl Applier<'_> {
    /// Answers once per judged payment.
    pub(super) async fn apply(&self, batch: Vec<Judged>) -> Result<Vec<Applied>, StoreError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let refused = match self.attempt(&batch).await {
            Ok(applied) => return Ok(applied),
            Err(error) => error.into_unreachable(),
        };
        match refused {
            Ok(unreachable) => return Err(unreachable),
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    payments = batch.len(),
                    "a batch was refused; applying order by order"
                );
            }
        }
        let mut answers = Vec::with_capacity(batch.len());
        for group in self.by_order(batch).await? {
            match self.attempt(&group).await {
                Ok(applied) => answers.extend(applied),
                Err(error) => {
                    let error = error.into_unreachable().map_or_else(Ok, Err)?;
                    let problem = one_line(&error_chain(&error));
                    watches::refuse(self.pool, self.lease, &group, &problem).await?;
                    answers.extend(group.into_iter().map(|judged| Applied {
                        payment_id: judged.payment_id,
                        result: Err(ApplyFailure::Refused(problem.clone())),
                    }));
                }
            }
        }
        Ok(answers)
    }

    /// One transaction, tried again while others get in its way.
    async fn attempt(&self, batch: &[Judged]) -> Result<Vec<Applied>, ApplyError> {
        let mut attempt = 1;
        loop {
            match self.transact(batch.to_vec()).await {
                Err(error) if attempt < ATTEMPTS_MAX && error.is_transient() => {
                    tracing::debug!(%error, attempt, "applying again on fresh rows");
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    async fn transact(&self, batch: Vec<Judged>) -> Result<Vec<Applied>, ApplyError> {
        let mut transaction = self.pool.begin().await?;
        let applied = self.write(&mut transaction, batch).await;
        finish(transaction, applied, ApplyError::from).await
    }

    async fn write(
        &self,
        connection: &mut sqlx::PgConnection,
        batch: Vec<Judged>,
    ) -> Result<Vec<Applied>, ApplyError> {
        let held = lock_watches(connection, self.lease, &batch).await?;
        let (batch, lost): (Vec<Judged>, Vec<Judged>) =
            batch.into_iter().partition(|judged| held.contains(judged.payment_id.as_str()));
        let mut applied: Vec<Applied> = lost
            .into_iter()
            .map(|judged| Applied {
                payment_id: judged.payment_id,
                result: Err(ApplyFailure::LeaseLost),
            })
            .collect();
        if batch.is_empty() {
            return Ok(applied);
        }
        let mut ledger = read_ledger(connection, &batch, self.optional).await?;
        let decided = ledger.resolve_all(batch, self.policy, self.now);
        write::write_all(connection, &decided, self.now).await?;
        applied.extend(decided.iter().map(answer));
        Ok(applied)
    }

    /// The batch by order; a payment without one stands alone.
    async fn by_order(&self, batch: Vec<Judged>) -> Result<Vec<Vec<Judged>>, StoreError> {
        let rows = sqlx::query!(
            r#"SELECT id AS "id!", order_id FROM payments WHERE id = ANY($1::text[])"#,
            &texts(batch.iter().map(|judged| &judged.payment_id)),
        )
        .fetch_all(self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to read the orders of payments", source))?;
        let orders: HashMap<PaymentId, String> = rows
            .into_iter()
            .filter_map(|row| Some((PaymentId::new(row.id), row.order_id?)))
            .collect();
        let mut groups: BTreeMap<(Option<String>, Option<PaymentId>), Vec<Judged>> =
            BTreeMap::new();
        for judged in batch {
            let order = orders.get(&judged.payment_id).cloned();
            let alone = order.is_none().then(|| judged.payment_id.clone());
            groups.entry((order, alone)).or_default().push(judged);
        }
        Ok(groups.into_values().collect())
    }
}

fn answer(decided: &Decided) -> Applied {
    let resolution = &decided.resolution;
    Applied {
        payment_id: decided.judged.payment_id.clone(),
        result: Ok(Resolved {
            outcome: resolution.outcome,
            recorded: resolution.is_recorded(),
            settles: resolution.payment == Some(PaymentStatus::Settled),
            refund: match &resolution.refund {
                RefundChange::Owe(owed) => Some(owed.reason),
                _ => None,
            },
            phase: resolution.watch.next.phase,
        }),
    }
}
