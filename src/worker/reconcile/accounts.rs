//! Accounting for what arrived: compares the scan with orders, refunds and flags, transfer by transfer (I4).
//!
//! Money that a payment claims and nobody resolved has that payment checked now; money that nobody claims
//! is flagged. Transfers are walked through from the start of the window, or from the oldest that is still
//! not accounted for: a drift does not end by growing old.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::Address;
use serde_json::json;

use super::progress::{AccountsPlace, Progress, ReceiverTotals, Stage};
use super::{Reconciler, Step, WatchedReceiver};
use crate::domain::{
    BlockTime, ChainId, Cursor, FlagKind, KnownTransfer, LedgerKey, LedgerPage, PaymentId,
    RaisedFlag, Receiver, Scanned, Timestamp, Totals,
};
use crate::store::StoreError;

/// Records without a transfer that one run tells of, per chain.
const UNBACKED_MAX: u32 = 1_000;

/// Payments named in a flag as those its money may have been meant by.
const CANDIDATES_MAX: u32 = 100;

/// Since when, of a chain whose accounting has not started.
const NOT_STARTED: BlockTime = BlockTime::from_secs(0);

impl Reconciler {
    pub(super) async fn accounts_step(
        &self,
        progress: &mut Progress,
        place: AccountsPlace,
    ) -> Result<Step, StoreError> {
        let chains = self.scanned_chains();
        let at = chains.iter().find(|(id, ..)| place.chain.is_none_or(|chain| *id >= chain));
        let Some((chain_id, _, receivers)) = at else {
            let found_something = place.round == 0 && progress.counts.taken_up > 0;
            progress.stage = match found_something {
                true => Stage::Settle { batches: 0 },
                false => Stage::Over,
            };
            return Ok(Step::More);
        };
        let (chain_id, round) = (*chain_id, place.round);
        let page = self.account_next(progress, chain_id, receivers, place).await;
        let part = format!("{}, chain {chain_id}", progress.stage.name());
        let next = progress.or_told(&part, page)?.unwrap_or_else(|| {
            progress.leave_out(chain_id);
            None
        });
        // One chain's rows keep no other chain's from being accounted for (I11).
        progress.stage = Stage::Accounts(next.unwrap_or_else(|| {
            let chain = Some(ChainId::new(chain_id.get().saturating_add(1)));
            let nowhere = LedgerKey { time: NOT_STARTED, id: i64::MIN };
            AccountsPlace { round, chain, since: NOT_STARTED, after: nowhere }
        }));
        Ok(Step::More)
    }

    /// The next page of a chain; returns where the one after it starts, and `None` after the last.
    async fn account_next(
        &self,
        progress: &mut Progress,
        chain_id: ChainId,
        receivers: &[WatchedReceiver],
        place: AccountsPlace,
    ) -> Result<Option<AccountsPlace>, StoreError> {
        let configured: BTreeSet<Receiver> = receivers.iter().map(|w| w.receiver).collect();
        let cursors: Vec<Cursor> = self
            .store()
            .cursors(chain_id)
            .await?
            .into_iter()
            .filter(|cursor| configured.contains(&cursor.receiver))
            .collect();
        let place = match place.chain {
            Some(chain) if chain == chain_id && place.since != NOT_STARTED => place,
            _ => self.start_chain(progress, chain_id, &cursors, place.round).await?,
        };
        let last_block = cursors.iter().map(|cursor| cursor.block.number).max().unwrap_or(0);
        let size = self.settings.page_size;
        let page = self.store().ledger_page(chain_id, &place.after, last_block, size).await?;
        let is_last = page.transfers.len() < usize::try_from(size).unwrap_or(usize::MAX);
        let after = page.transfers.last().map_or(place.after, KnownTransfer::key);
        let accounted = self.account_page(progress, chain_id, &page, &cursors).await;
        let part = format!("{}, a page of chain {chain_id}", progress.stage.name());
        if progress.or_told(&part, accounted)?.is_none() {
            progress.leave_out(chain_id);
        }
        if is_last {
            self.account_unbacked(progress, chain_id, place.since).await?;
        }
        Ok((!is_last).then_some(AccountsPlace { after, ..place }))
    }

    /// Since when this chain's transfers are accounted for.
    async fn start_chain(
        &self,
        progress: &mut Progress,
        chain_id: ChainId,
        cursors: &[Cursor],
        round: u8,
    ) -> Result<AccountsPlace, StoreError> {
        let window = self.now().saturating_sub(self.settings.window).as_millis() / 1_000;
        // Never [`NOT_STARTED`].
        let window = BlockTime::from_secs(u64::try_from(window).unwrap_or(0).max(1));
        let marked = self.store().unaccounted_since(chain_id).await?;
        let since = marked.map_or(window, |marked| marked.min(window));
        progress.totals.extend(cursors.iter().map(|cursor| ReceiverTotals {
            chain_id,
            receiver: cursor.receiver,
            since,
            up_to: cursor.block,
            totals: Totals::default(),
        }));
        let after = LedgerKey { time: since, id: i64::MIN };
        Ok(AccountsPlace { round, chain: Some(chain_id), since, after })
    }

    async fn account_page(
        &self,
        progress: &mut Progress,
        chain_id: ChainId,
        page: &LedgerPage,
        cursors: &[Cursor],
    ) -> Result<(), StoreError> {
        let scanned: BTreeMap<Receiver, Scanned> = cursors
            .iter()
            .map(|c| (c.receiver, Scanned { first: c.first_block, last: c.block.number }))
            .collect();
        let mut account = page.account(&scanned);
        let now = self.now();
        self.name_candidates(&mut account.raise, page).await?;
        if !account.raise.is_empty() || !account.close.is_empty() {
            self.store().account_flags(&account.raise, &account.close, now).await?;
        }
        let take_up: Vec<PaymentId> = account.take_up.into_iter().collect();
        if !take_up.is_empty() {
            let found = self.store().recheck(&take_up, now).await?;
            tracing::info!(payments = found.len(), "money was found that nobody had resolved");
            progress.counts.taken_up += found.len() as u64;
        }
        self.store().mark_unaccounted(&account.mark, &account.unmark, now).await?;
        progress.counts.flags_raised += account.raise.len() as u64;
        progress.counts.flags_closed += account.close.len() as u64;
        progress.counts.transfers_accounted += page.transfers.len() as u64;
        progress.add_totals(chain_id, &account.totals);
        progress.unaccounted(account.unaccounted);
        Ok(())
    }

    /// Names the open payments of those who sent money that nobody claims: it may be a try to pay one.
    async fn name_candidates(
        &self,
        raise: &mut [RaisedFlag],
        page: &LedgerPage,
    ) -> Result<(), StoreError> {
        let unmatched: BTreeSet<String> = raise
            .iter()
            .filter(|raised| raised.flag.kind == FlagKind::UnmatchedTransfer)
            .map(|raised| raised.flag.subject.clone())
            .collect();
        if unmatched.is_empty() {
            return Ok(());
        }
        let subject = |known: &KnownTransfer| crate::domain::log_subject(&known.transfer);
        let senders: BTreeMap<String, Address> = page
            .transfers
            .iter()
            .map(|known| (subject(known), known.transfer.from))
            .filter(|(subject, _)| unmatched.contains(subject))
            .collect();
        let payers: BTreeSet<Address> = senders.values().copied().collect();
        let payers: Vec<Address> = payers.into_iter().collect();
        let open = self.store().open_payments_of(&payers, CANDIDATES_MAX).await?;
        for RaisedFlag { flag, .. } in raise {
            let sender = senders.get(&flag.subject);
            let same = open.iter().filter(|(payer, _)| Some(payer) == sender);
            if let Some(candidates) = flag.detail["candidates"].as_array_mut() {
                candidates.extend(
                    same.map(
                        |(_, id)| json!({ "payment": id, "why": "an open one of this payer" }),
                    ),
                );
            }
        }
        Ok(())
    }

    async fn account_unbacked(
        &self,
        progress: &mut Progress,
        chain_id: ChainId,
        since: BlockTime,
    ) -> Result<(), StoreError> {
        let since = Timestamp::from(since);
        let unbacked = self.store().unbacked(chain_id, since, UNBACKED_MAX).await?;
        let configured = self.receivers.get(&chain_id);
        let mut totals = BTreeMap::new();
        let mut unaccounted = Vec::new();
        for record in unbacked {
            let is_ours = |w: &WatchedReceiver| w.receiver == record.receiver;
            if configured.is_some_and(|receivers| receivers.iter().any(is_ours)) {
                unaccounted.push(record.add_to(&mut totals));
            }
        }
        progress.add_totals(chain_id, &totals);
        progress.unaccounted(unaccounted);
        Ok(())
    }
}
