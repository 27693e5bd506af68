//! The search for what used each nonce: logs first, then the transactions of those logs that can matter.
//!
//! It begins where the first of its payments can have been used, each time anew. There is nothing to go on from:
//! what reads used at a block was used at or before it, so that when a search up to there shows nothing, only
//! another answer about the same blocks can.

use std::collections::BTreeSet;

use alloy_primitives::Address;

use super::calldata::PermitId;
use super::found::{Moved, Search};
use crate::chain::ChainSettings;
use crate::chain::asked::Asked;
use crate::chain::endpoint::Endpoint;
use crate::chain::logs::{LogScan, LogsOf, READS_MAX, TokenLog};
use crate::chain::read::{Findings, FoundAt};
use crate::domain::{ConsumptionKind, ReadFailure, ReadFailureKind};

impl Endpoint {
    /// Looks for what used the nonces of one group in the blocks of `range`.
    ///
    /// What cannot be read because there is too much of it is asked again for fewer payers at a time, as
    /// long as there are log reads left for the group.
    pub(in crate::chain) async fn find_permit2(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        group: &[usize],
        range: (u64, u64),
    ) -> Findings {
        let mut findings = Findings::new();
        let mut reads_left = READS_MAX;
        let width = self.memory().log_widths.of(LogsOf::Permits).blocks();
        let mut left = vec![group.to_vec()];
        while let Some(mut group) = left.pop() {
            let mut search = Search::new(settings, group.iter().map(|index| &asked[*index]));
            let searched = self.search_permits(&mut search, range, &mut reads_left).await;
            let is_too_much =
                searched.as_ref().is_err_and(|f| f.kind == ReadFailureKind::RangeRefused);
            if is_too_much && reads_left > 0 {
                group.retain(|index| {
                    let finding = search.finding(&asked[*index], range, &searched);
                    let is_open = search.is_open_still(&asked[*index]);
                    if !is_open {
                        findings.insert(*index, finding);
                    }
                    is_open
                });
                if let Some(halves) = halves(asked, &group) {
                    // What was refused may have been too much of somebody who is in the other half.
                    self.memory().log_widths.of(LogsOf::Permits).restore(width);
                    left.extend(halves);
                    continue;
                }
            }
            let finding =
                |index: &usize| (*index, search.finding(&asked[*index], range, &searched));
            findings.extend(group.iter().map(finding));
        }
        findings
    }

    async fn search_permits(
        &self,
        search: &mut Search<'_>,
        range: (u64, u64),
        reads_left: &mut usize,
    ) -> Result<(), ReadFailure> {
        let width = self.memory().log_widths.of(LogsOf::Permits).blocks();
        let mut scan = LogScan::new(self, search.filter(), range, *reads_left);
        let mut payers = search.payers();
        let searched = loop {
            let logs = match scan.next().await {
                Ok(Some(logs)) => logs,
                Ok(None) => break Ok(()),
                Err(failure) => break Err(failure),
            };
            let candidates = search.sort(logs);
            if let Err(failure) = self.examine(search, candidates).await {
                break Err(failure);
            }
            self.examine_batched(search).await;
            let still_open = search.payers();
            if still_open.is_empty() {
                break Ok(());
            }
            if still_open != payers {
                // Nobody else's logs are of interest any more.
                payers = still_open;
                scan.filter = search.filter();
            }
            if search.has_given_up() {
                // Whose logs were too many is no longer asked about: they may be what narrowed the ranges.
                self.memory().log_widths.of(LogsOf::Permits).restore(width);
            }
        };
        *reads_left = reads_left.saturating_sub(scan.reads());
        searched?;
        self.examine_invalidated(search).await;
        if !search.open.is_empty() {
            let others = std::mem::take(&mut search.others);
            self.examine(search, others).await?;
            self.examine_batched(search).await;
        }
        Ok(())
    }

    /// Reads the transactions of these transfers. An error is about the whole search.
    async fn examine(
        &self,
        search: &mut Search<'_>,
        candidates: Vec<Moved>,
    ) -> Result<(), ReadFailure> {
        let candidates = search.admit(candidates);
        let logs: Vec<&TokenLog> = candidates.iter().map(|one| &one.log).collect();
        let calls = self.permit_calls_of(search.settings, &logs).await;
        for moved in &candidates {
            match calls.get(&moved.log.tx_hash) {
                Some(Ok((sender, calls))) => search.note_calls(moved, *sender, calls),
                // Whoever does not answer is not asked again and again: others are waiting.
                Some(Err(failure)) if failure.kind == ReadFailureKind::Unreachable => {
                    return Err(failure.clone());
                }
                Some(Err(failure)) => search.fail_all_of(moved.from, failure),
                None => {
                    let detail = format!("transaction {} was not read", moved.log.tx_hash);
                    let failure = ReadFailure::new(ReadFailureKind::BadAnswer, detail);
                    search.fail_all_of(moved.from, &failure);
                }
            }
        }
        Ok(())
    }

    /// Rule 2: calls through Multicall3.
    async fn examine_batched(&self, search: &mut Search<'_>) {
        let batched = std::mem::take(&mut search.batched);
        if batched.is_empty() {
            return;
        }
        let logs: Vec<&TokenLog> = batched.iter().map(|(moved, _)| &moved.log).collect();
        let receipts = self.receipts_of(&logs).await;
        let moments: Vec<(PermitId, u64)> = batched
            .iter()
            .flat_map(|(moved, calls)| calls.iter().map(|call| (call.id(), moved.log.block_number)))
            .flat_map(|(permit, block)| [(permit, block.saturating_sub(1)), (permit, block)])
            .collect();
        let bits = self.bits_at(&search.settings.permit2, &moments).await;
        let mut bits = bits.chunks(2);
        for (moved, calls) in &batched {
            let flips: Vec<_> =
                calls.iter().copied().zip(bits.by_ref().take(calls.len())).collect();
            if let Err(failure) =
                search.note_batched(moved, &flips, receipts.get(&moved.log.tx_hash))
            {
                search.fail_all_of(moved.from, &failure);
            }
        }
    }

    /// Rule 3: nonces their owner set himself.
    async fn examine_invalidated(&self, search: &mut Search<'_>) {
        let likely: Vec<(PermitId, TokenLog)> = search
            .invalidated
            .iter()
            .filter(|(permit, log)| {
                search.open.contains(*permit)
                    && !search.unexplained.contains(&(permit.0, log.block_number))
            })
            .map(|(permit, log)| (*permit, log.clone()))
            .collect();
        let before =
            |(permit, log): &(PermitId, TokenLog)| (*permit, log.block_number.saturating_sub(1));
        let moments: Vec<(PermitId, u64)> = likely.iter().map(before).collect();
        let bits = self.bits_at(&search.settings.permit2, &moments).await;
        for ((permit, log), bit) in likely.into_iter().zip(bits) {
            match bit {
                Ok(false) => {
                    search.open.remove(&permit);
                    let canceled = (FoundAt::from(&log), ConsumptionKind::Canceled);
                    search.found.insert(permit, canceled);
                }
                Ok(true) => {}
                Err(failure) => drop(search.failed.insert(permit, failure)),
            }
        }
    }
}

/// The payments of each half of the payers; `None` where all are of one payer.
fn halves(asked: &[Asked], group: &[usize]) -> Option<[Vec<usize>; 2]> {
    let payers: BTreeSet<Address> = group.iter().map(|index| asked[*index].payer).collect();
    let middle = payers.iter().nth(payers.len() / 2).filter(|_| payers.len() > 1)?;
    let (first, second) = group.iter().partition(|index| asked[**index].payer < *middle);
    Some([first, second])
}
