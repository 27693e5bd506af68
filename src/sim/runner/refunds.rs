//! The refund process of a story: it claims records by SQL and pays them on the chain, as a gateway's own
//! batch would, and forgets to write down that it did.

use std::time::Duration;

use alloy_primitives::{Address, B256, address};

use super::Runner;
use crate::domain::Amount;
use crate::sim::SimError;
use crate::sim::chain::Authorized;
use crate::sim::scenario::{RefundAct, RefundStep};

/// The wallet that pays refunds.
const REFUND_WALLET: Address = address!("0x00000000000000000000000000000000000ef41d");

/// Another one.
const OTHER_WALLET: Address = address!("0x00000000000000000000000000000000000ef42d");

/// How often the daemon looks for refunds while a story has any paid.
pub(super) const SEARCH_EVERY: Duration = Duration::from_secs(60);

/// What the process knows of a record.
struct Record {
    payer: Address,
    amount: Amount,
    nonce: B256,
}

impl Runner {
    /// Puts a refund into the block at `now`, which must not exist yet.
    pub(super) async fn mine_refund(&self, now: Duration, act: &RefundAct) -> anyhow::Result<()> {
        let (wallet, times) = match act.step {
            RefundStep::Pay => (REFUND_WALLET, 1),
            RefundStep::PayTwice => (REFUND_WALLET, 2),
            RefundStep::PayElsewhere => (OTHER_WALLET, 1),
            RefundStep::Claim | RefundStep::Release | RefundStep::Void => return Ok(()),
        };
        let record = self.record(&act.payment).await?;
        let (to, value) = (act.to.unwrap_or(record.payer), act.amount.unwrap_or(record.amount));
        let at = self.at(now);
        let mut chain = self.server.chain().lock();
        for time in 0..times {
            if !act.with_nonce {
                chain.bare_transfer(at, wallet, to, value)?;
                continue;
            }
            let refund = Authorized { payer: wallet, to, value, nonce: record.nonce };
            match chain.transfer(at, refund) {
                Ok(_) if time == 0 => {}
                Ok(_) => anyhow::bail!("the token took one nonce twice"),
                // What the token does to the second one.
                Err(SimError::NonceUsed { .. }) if time > 0 => {
                    chain.revert(at)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// What the process does to the record.
    pub(super) async fn write_refund(&self, now: Duration, act: &RefundAct) -> anyhow::Result<()> {
        let (sql, from) = match act.step {
            RefundStep::Claim => (
                "UPDATE {refunds_owed} SET status = 'claimed', claimed_by = 'batch', \
                 claimed_at = ?t WHERE payment_id = ? AND status = 'owed'",
                "owed",
            ),
            RefundStep::Release => (
                "UPDATE {refunds_owed} SET status = 'owed', claimed_by = NULL, claimed_at = \
                 CASE WHEN ?t IS NULL THEN claimed_at END WHERE payment_id = ? AND status = 'claimed'",
                "claimed",
            ),
            RefundStep::Void => (
                "UPDATE {refunds_owed} SET status = 'void', \
                 note = CASE WHEN ?t IS NULL THEN note ELSE 'called off' END \
                 WHERE payment_id = ? AND status = 'owed'",
                "owed",
            ),
            RefundStep::Pay | RefundStep::PayTwice | RefundStep::PayElsewhere => return Ok(()),
        };
        let at = self.at(now).as_millis().to_string();
        let changed = self.gateway.execute(sql, &[Some(&at), Some(&act.payment)]).await?;
        anyhow::ensure!(changed == 1, "payment {} has no refund that is {from}", act.payment);
        Ok(())
    }

    async fn record(&self, payment: &str) -> anyhow::Result<Record> {
        let sql = "SELECT payer, CAST(amount AS TEXT), refund_nonce FROM {refunds_owed} \
                   WHERE payment_id = ?";
        let rows = self.gateway.rows(sql, &[Some(payment)], 3).await?;
        let missing = || anyhow::anyhow!("payment {payment} has no refund record to pay");
        let mut columns = rows.into_iter().next().ok_or_else(missing)?.into_iter().flatten();
        let mut next = || columns.next().ok_or_else(missing);
        Ok(Record {
            payer: next()?.parse()?,
            amount: next()?.parse().map_err(|_| missing())?,
            nonce: next()?.parse()?,
        })
    }
}
