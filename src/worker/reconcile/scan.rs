//! Chain to ledger: reads every transfer into the receivers, from the cursors up to `finalized`.
//!
//! A range counts as read when [`agreement`] says so: `policy.quorum` endpoints showed the same, and nobody
//! who was asked showed anything else. At least two are asked wherever there are two.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use super::progress::{Progress, Stage};
use super::{Budget, Reconciler, ScanStart, Step, WatchedReceiver, unless_stopped};
use crate::domain::{
    Agreement, Answers, BlockRef, BlockTime, ChainId, Cursor, EndpointName, Flag, FlagKind,
    PageEnd, RaisedFlag, ReadFailureKind, Receiver, ScanAnswer, ScanHead, agreement, enough,
    next_width,
};
use crate::store::{ScanPage, StoreError};
use crate::worker::WatchedChain;
use crate::worker::driver::Stop;

/// The most pages of one chain in one run; the next run reads on.
const PAGES_MAX: u32 = 2_000;

/// Endpoints that are asked about a range at first, where there are so many.
const ASKED_MIN: usize = 2;

/// Asking where endpoints stand takes no more than one part in so many of the time that is left.
const HEADS_PARTS: usize = 4;

/// The widest page, in ranges of `log_range_max`.
const RANGES_MAX: u64 = 16;

/// How far the scan goes back when its last block, although final, left the chain.
const REWIND_BLOCKS: u64 = 50_000;

/// How many blocks the next page of a chain has: only saves requests.
#[derive(Debug, Default)]
pub(super) struct Widths(Mutex<BTreeMap<ChainId, u64>>);

impl Widths {
    fn get(&self, chain: &WatchedChain) -> u64 {
        let settings = chain.chain.settings();
        let widths = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        widths.get(&settings.chain_id).copied().unwrap_or(settings.log_range_max).max(1)
    }

    /// A page of so many blocks was read, or not.
    fn learn(&self, chain: &WatchedChain, blocks: u64, end: PageEnd) {
        let settings = chain.chain.settings();
        let most = settings.log_range_max.saturating_mul(RANGES_MAX);
        let width = next_width(self.get(chain), blocks, end, most);
        let mut widths = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        widths.insert(settings.chain_id, width);
    }
}

/// What one page of the scan came to.
enum Scanned {
    /// Everything up to `finalized` is read.
    Done,
    /// The cursor moved.
    Advanced {
        /// So many transfers were new.
        new: usize,
        /// It stands at the finalized block.
        is_all: bool,
    },
    /// It did not, and this is why.
    Stuck(String),
}

impl Reconciler {
    pub(super) async fn scan_step(
        &self,
        progress: &mut Progress,
        chain: Option<ChainId>,
        pages: u32,
        stop: &Stop,
    ) -> Result<Step, StoreError> {
        let chains = self.scanned_chains();
        let at = chains.iter().find(|(id, ..)| chain.is_none_or(|chain| *id >= chain));
        let Some((id, watched, receivers)) = at else {
            progress.stage = Stage::Unproven { after: None };
            return Ok(Step::More);
        };
        let next = ChainId::new(id.get().saturating_add(1));
        let next = Stage::Scan { chain: Some(next), pages: 0 };
        let page = self.scan_page(watched, receivers, pages == 0, stop).await;
        let part = format!("{}, chain {id}", progress.stage.name());
        // What the database refuses of one chain keeps no other from being scanned (I11).
        let Some(page) = progress.or_told(&part, page)? else {
            progress.stage = next;
            return Ok(Step::More);
        };
        match page {
            None => return Ok(Step::Stopped),
            Some(Scanned::Done) => progress.stage = next,
            Some(Scanned::Stuck(problem)) => {
                progress.problem(format!("chain {id} is not scanned any further: {problem}"));
                progress.stage = next;
            }
            Some(Scanned::Advanced { new, is_all }) => {
                progress.counts.transfers_found += new as u64;
                progress.stage = match !is_all && pages + 1 < PAGES_MAX {
                    true => Stage::Scan { chain: Some(*id), pages: pages + 1 },
                    false => next,
                };
            }
        }
        Ok(Step::More)
    }

    /// One page; `None` when told to stop.
    async fn scan_page(
        &self,
        watched: &WatchedChain,
        receivers: &[WatchedReceiver],
        is_first: bool,
        stop: &Stop,
    ) -> Result<Option<Scanned>, StoreError> {
        let chain_id = watched.chain.settings().chain_id;
        let is_configured =
            |cursor: &Cursor| receivers.iter().any(|watched| watched.receiver == cursor.receiver);
        let mut cursors = self.store().cursors(chain_id).await?;
        cursors.retain(is_configured);
        let is_new = |watched: &&WatchedReceiver| {
            !cursors.iter().any(|cursor| cursor.receiver == watched.receiver)
        };
        let new: Vec<WatchedReceiver> = receivers.iter().filter(is_new).copied().collect();
        if !new.is_empty() {
            let Some(opened) = unless_stopped(stop, self.open(watched, &new)).await else {
                return Ok(None);
            };
            match opened {
                Err(unclear) => return Ok(Some(self.stuck(chain_id, unclear))),
                Ok(opened) if opened.is_empty() && cursors.is_empty() => {
                    return Ok(Some(Scanned::Done));
                }
                Ok(opened) => {
                    self.store().open_cursors(chain_id, &opened, self.now()).await?;
                    cursors.extend(opened);
                }
            }
        }
        if is_first && let Some(missed) = self.store().missed_by_scan(chain_id).await? {
            // Once in a run: whoever left it out may do so again.
            if let Some(passed) = cursors.iter().find(|c| c.block.number >= missed) {
                let from = passed.block;
                let group: Vec<Cursor> = cursors.into_iter().filter(|c| c.block == from).collect();
                // An answer that left one out may have left out its neighbours.
                let back = missed.saturating_sub(watched.chain.settings().log_range_max);
                let first = group.iter().map(|cursor| cursor.first_block).min().unwrap_or(1);
                let reading = self.read_back(watched, from, back.max(first).saturating_sub(1));
                let Some(read) = unless_stopped(stop, reading).await else { return Ok(None) };
                return self.write(watched, &group, from, read).await.map(Some);
            }
        }
        // Those furthest behind are read together, up to where the next one stands.
        let Some(from) = cursors.iter().map(|cursor| cursor.block).min_by_key(|b| b.number) else {
            return Ok(Some(Scanned::Done));
        };
        let (group, others): (Vec<Cursor>, Vec<Cursor>) =
            cursors.into_iter().partition(|cursor| cursor.block == from);
        let beyond = others.iter().map(|c| c.block.number).filter(|n| *n > from.number).min();
        let limit = beyond.unwrap_or(u64::MAX);
        let Some(read) = unless_stopped(stop, self.read(watched, &group, from, limit)).await else {
            return Ok(None);
        };
        self.write(watched, &group, from, read).await.map(Some)
    }

    /// Where the scan of new receivers starts, as enough endpoints have it: whatever came before is never
    /// looked for (I4).
    async fn open(
        &self,
        watched: &WatchedChain,
        new: &[WatchedReceiver],
    ) -> Result<Vec<Cursor>, Unclear> {
        let budget = self.budget();
        let endpoints = watched.chain.settings().endpoints.len();
        let asked = watched.policy.quorum.max(ASKED_MIN).min(endpoints);
        match self.open_from(watched, new, asked, budget.within(2)).await {
            Err(Unclear::TooFew(_)) if asked < endpoints => {
                self.open_from(watched, new, endpoints, budget).await
            }
            opened => opened,
        }
    }

    async fn open_from(
        &self,
        watched: &WatchedChain,
        new: &[WatchedReceiver],
        asked: usize,
        budget: Budget,
    ) -> Result<Vec<Cursor>, Unclear> {
        let heads = self.heads(watched, None, asked, budget).await;
        let finalized = answered(&heads).map(|(_, head)| head.finalized.number).min();
        let Some(finalized) = finalized else { return Err(Unclear::TooFew(failures(&heads))) };
        let mut numbers: BTreeMap<ScanStart, u64> = BTreeMap::new();
        for WatchedReceiver { start, .. } in new {
            let number = match start {
                ScanStart::Block(first) => first.saturating_sub(1),
                ScanStart::Lookback(_) if numbers.contains_key(start) => continue,
                ScanStart::Lookback(lookback) => {
                    self.first_block_since(watched, *lookback, &heads, budget.within(2)).await?
                }
            };
            // What is not final yet waits for the next run.
            if number <= finalized {
                numbers.insert(*start, number);
            }
        }
        let mut blocks: BTreeMap<u64, BlockRef> = BTreeMap::new();
        for number in numbers.values() {
            if !blocks.contains_key(number) {
                let block = self.read_block(watched, *number, &heads, budget.within(2)).await?;
                blocks.insert(*number, block);
            }
        }
        let cursor = |new: &WatchedReceiver| {
            let block = *blocks.get(numbers.get(&new.start)?)?;
            Some(Cursor { receiver: new.receiver, first_block: block.number + 1, block })
        };
        Ok(new.iter().filter_map(cursor).collect())
    }

    /// The number of a block so long ago: of those that endpoints name, the earliest.
    async fn first_block_since(
        &self,
        watched: &WatchedChain,
        lookback: Duration,
        heads: &Answers<ScanHead>,
        budget: Budget,
    ) -> Result<u64, Unclear> {
        let since = self.now().saturating_sub(lookback).as_millis() / 1_000;
        let since = BlockTime::from_secs(u64::try_from(since).unwrap_or(0));
        let mut starts = Answers::new();
        let mut unasked = answered(heads).count();
        for (endpoint, head) in answered(heads) {
            let within = budget.part(unasked);
            unasked -= 1;
            let start = watched.chain.scan_start(endpoint, since, &head.finalized, within).await;
            starts.push((endpoint.clone(), start));
        }
        let enough = enough_of(watched, heads.len());
        let named: Vec<u64> = answered(&starts).map(|(_, block)| block.number).collect();
        match named.iter().min() {
            Some(earliest) if named.len() >= enough => Ok(*earliest),
            _ => Err(Unclear::TooFew(failures(&starts))),
        }
    }

    /// Where endpoints stand.
    async fn heads(
        &self,
        watched: &WatchedChain,
        cursor: Option<u64>,
        asked: usize,
        budget: Budget,
    ) -> Answers<ScanHead> {
        let endpoints = watched.chain.settings().endpoints.len();
        watched.chain.scan_heads(cursor, asked, budget.part(HEADS_PARTS * endpoints)).await
    }

    /// Asks endpoints where they stand, and for the transfers behind `from`.
    async fn read(
        &self,
        watched: &WatchedChain,
        group: &[Cursor],
        from: BlockRef,
        limit: u64,
    ) -> Read {
        let budget = self.budget();
        let endpoints = watched.chain.settings().endpoints.len();
        let asked = watched.policy.quorum.max(ASKED_MIN).min(endpoints);
        // Whoever says where it stands may still not give its logs: then all the others are asked as well.
        if asked < endpoints {
            let read = self.read_from(watched, group, from, limit, (asked, budget.within(2))).await;
            if !matches!(read, Read::Unclear(Unclear::TooFew(_))) {
                return read;
            }
        }
        self.read_from(watched, group, from, limit, (endpoints, budget)).await
    }

    async fn read_from(
        &self,
        watched: &WatchedChain,
        group: &[Cursor],
        from: BlockRef,
        limit: u64,
        (asked, budget): (usize, Budget),
    ) -> Read {
        let heads = self.heads(watched, Some(from.number), asked, budget).await;
        let enough = enough_of(watched, heads.len());
        let at_cursor: Answers<Option<BlockRef>> = heads
            .iter()
            .map(|(name, head)| {
                (name.clone(), head.as_ref().map(|h| h.at_cursor).map_err(Clone::clone))
            })
            .collect();
        match agreement(&at_cursor, enough) {
            Agreement::Agreed(Some(block)) if block == from => {}
            Agreement::Agreed(_) => {
                return self.read_rewind(watched, group, from, &heads, budget).await;
            }
            Agreement::Disagree => {
                let why = format!("endpoints disagree about block {}", from.number);
                return Read::Unclear(Unclear::Disagree(why));
            }
            Agreement::TooFew => return Read::Unclear(Unclear::TooFew(failures(&heads))),
        }
        let finalized = answered(&heads).map(|(_, head)| head.finalized.number).min();
        let width = self.widths.get(watched);
        let last = finalized.unwrap_or(0).min(limit).min(from.number.saturating_add(width));
        if last <= from.number {
            return Read::NothingNew;
        }
        let receivers: BTreeSet<Receiver> = group.iter().map(|cursor| cursor.receiver).collect();
        let (mut answers, mut share) = (Answers::new(), 0_f64);
        let mut unasked = answered(&heads).count();
        for (endpoint, _) in answered(&heads) {
            let (within, started) = (budget.part(unasked), Instant::now());
            unasked -= 1;
            let first = from.number + 1;
            let answer = watched.chain.scan(endpoint, &receivers, first, last, within).await;
            share = share.max(started.elapsed().as_secs_f64() / within.as_secs_f64().max(1e-3));
            answers.push((endpoint.clone(), answer));
        }
        let blocks = last - from.number;
        match agreement(&answers, enough) {
            Agreement::Agreed(answer) => {
                let transfers = answer.transfers.len();
                let end = match answers.iter().all(|(_, answer)| answer.is_ok()) {
                    true => PageEnd::Read { transfers, share },
                    false => PageEnd::ReadByOthers,
                };
                self.widths.learn(watched, blocks, end);
                Read::Agreed { is_all: Some(answer.last.number) == finalized, answer }
            }
            Agreement::Disagree => Read::Unclear(Unclear::Disagree(format!(
                "endpoints show different transfers in blocks {} to {last}",
                from.number + 1
            ))),
            // Others are asked about the same blocks before fewer are.
            Agreement::TooFew if heads.len() < watched.chain.settings().endpoints.len() => {
                Read::Unclear(Unclear::TooFew(failures(&answers)))
            }
            Agreement::TooFew => {
                self.widths.learn(watched, blocks, PageEnd::Failed);
                let is_too_wide = share >= 1.0
                    || answers.iter().any(|(_, answer)| {
                        answer.as_ref().is_err_and(|f| f.kind == ReadFailureKind::RangeRefused)
                    });
                match is_too_wide && blocks > 1 {
                    true => Read::Narrower,
                    false => Read::Unclear(Unclear::TooFew(failures(&answers))),
                }
            }
        }
    }

    /// The block to go back to when the cursor's left the chain.
    async fn read_rewind(
        &self,
        watched: &WatchedChain,
        group: &[Cursor],
        from: BlockRef,
        heads: &Answers<ScanHead>,
        budget: Budget,
    ) -> Read {
        let first = group.iter().map(|cursor| cursor.first_block).min().unwrap_or(1);
        let number = from.number.saturating_sub(REWIND_BLOCKS).max(first.saturating_sub(1));
        self.read_block(watched, number, heads, budget)
            .await
            .map_or_else(Read::Unclear, Read::Rewind)
    }

    /// The block to go back to because behind it a transfer was left out.
    async fn read_back(&self, watched: &WatchedChain, from: BlockRef, number: u64) -> Read {
        let endpoints = watched.chain.settings().endpoints.len();
        let budget = self.budget();
        let heads = self.heads(watched, Some(from.number), endpoints, budget).await;
        self.read_block(watched, number, &heads, budget)
            .await
            .map_or_else(Read::Unclear, Read::Missed)
    }

    /// A block as enough endpoints have it.
    async fn read_block(
        &self,
        watched: &WatchedChain,
        number: u64,
        heads: &Answers<ScanHead>,
        budget: Budget,
    ) -> Result<BlockRef, Unclear> {
        let mut blocks = Answers::new();
        let mut unasked = answered(heads).count();
        for (endpoint, _) in answered(heads) {
            let within = budget.part(unasked);
            unasked -= 1;
            let block = watched.chain.scan_block(endpoint, number, within).await;
            blocks.push((endpoint.clone(), block));
        }
        match agreement(&blocks, enough_of(watched, heads.len())) {
            Agreement::Agreed(block) => Ok(block),
            Agreement::Disagree => {
                Err(Unclear::Disagree(format!("endpoints disagree about block {number}")))
            }
            Agreement::TooFew => Err(Unclear::TooFew(failures(&blocks))),
        }
    }

    /// The scan stands where it stood.
    fn stuck(&self, chain_id: ChainId, unclear: Unclear) -> Scanned {
        let (cause, why) = match unclear {
            Unclear::Disagree(why) => ("disagreement", why),
            Unclear::TooFew(why) => ("too_few", format!("not enough endpoints answered ({why})")),
        };
        self.metrics.scan_problem(chain_id, cause);
        Scanned::Stuck(why)
    }

    async fn write(
        &self,
        watched: &WatchedChain,
        group: &[Cursor],
        from: BlockRef,
        read: Read,
    ) -> Result<Scanned, StoreError> {
        let chain_id = watched.chain.settings().chain_id;
        let problem = |cause: &str| self.metrics.scan_problem(chain_id, cause);
        let receivers: Vec<Receiver> = group.iter().map(|cursor| cursor.receiver).collect();
        let now = self.now();
        Ok(match read {
            Read::NothingNew => Scanned::Done,
            Read::Narrower => Scanned::Advanced { new: 0, is_all: false },
            Read::Unclear(unclear) => self.stuck(chain_id, unclear),
            Read::Missed(to) => {
                problem("missed");
                tracing::warn!(
                    chain = %chain_id, from = to.number + 1, to = from.number,
                    "the scan was not shown a transfer that its payment's check saw; these blocks are read again"
                );
                if !self.store().rewind(chain_id, &receivers, &from, &to, now).await? {
                    return Ok(Scanned::Stuck("somebody else moved the cursor".to_owned()));
                }
                Scanned::Advanced { new: 0, is_all: false }
            }
            Read::Rewind(to) => {
                problem("rewind");
                tracing::error!(
                    chain = %chain_id, block = from.number, hash = %from.hash, to = to.number,
                    "a block that was final is not canonical any more; what was scanned since is read again"
                );
                let flag = Flag {
                    kind: FlagKind::FinalizedReorg,
                    subject: format!("{chain_id}:{}:{:#x}", from.number, from.hash),
                    detail: json!({ "was_final": from, "read_again_from": to }),
                };
                let raised = RaisedFlag { payment_id: None, order_id: None, flag };
                self.store().account_flags(&[raised], &[], now).await?;
                if !self.store().rewind(chain_id, &receivers, &from, &to, now).await? {
                    return Ok(Scanned::Stuck("somebody else moved the cursor".to_owned()));
                }
                Scanned::Advanced { new: 0, is_all: false }
            }
            Read::Agreed { answer, is_all } => {
                let ScanAnswer { last, transfers } = answer;
                let page = ScanPage { chain_id, receivers, from, to: last, transfers };
                match self.store().ingest(&page, now).await? {
                    None => Scanned::Stuck("somebody else moved the cursor".to_owned()),
                    Some(ingested) => {
                        if !ingested.vanished.is_empty() {
                            self.store().recheck(&ingested.vanished, now).await?;
                        }
                        Scanned::Advanced { new: ingested.new, is_all }
                    }
                }
            }
        })
    }
}

/// How many endpoints must say the same, when so many were asked.
fn enough_of(watched: &WatchedChain, asked: usize) -> usize {
    enough(watched.policy.quorum, asked, watched.chain.settings().endpoints.len())
}

/// What endpoints showed of a page.
enum Read {
    NothingNew,
    Narrower,
    Agreed { answer: ScanAnswer, is_all: bool },
    Rewind(BlockRef),
    Missed(BlockRef),
    Unclear(Unclear),
}

/// Why endpoints showed nothing that the scan may go by.
enum Unclear {
    Disagree(String),
    TooFew(String),
}

fn answered<T>(answers: &Answers<T>) -> impl Iterator<Item = (&EndpointName, &T)> {
    answers.iter().filter_map(|(name, answer)| Some((name, answer.as_ref().ok()?)))
}

fn failures<T>(answers: &Answers<T>) -> String {
    let said: Vec<String> = answers
        .iter()
        .filter_map(|(name, answer)| Some(format!("{name}: {}", answer.as_ref().err()?)))
        .collect();
    said.join("; ")
}
