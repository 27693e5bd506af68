//! Chain to ledger: reads every transfer into the receivers, from the cursors up to `finalized`.
//!
//! A range counts as read when [`agreement`] says so: `policy.quorum` endpoints showed the same, and nobody
//! who was asked showed anything else. At least two are asked wherever there are two.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde_json::json;

use super::progress::{Progress, Stage};
use super::{Reconciler, ScanStart, Step, WatchedReceiver, unless_stopped};
use crate::domain::{
    Agreement, Answers, BlockRef, BlockTime, ChainId, Cursor, EndpointName, Flag, FlagKind,
    RaisedFlag, ReadFailureKind, Receiver, ScanAnswer, ScanHead, agreement,
};
use crate::store::{ScanPage, StoreError};
use crate::worker::WatchedChain;
use crate::worker::driver::Stop;

/// The most pages of one chain in one run; the next run reads on.
const PAGES_MAX: u32 = 2_000;

/// Endpoints that are asked about a range, where there are so many.
const ASKED_MIN: usize = 2;

/// A page grows while it holds fewer transfers than this.
const FEW_TRANSFERS: usize = 1_000;

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

    fn set(&self, chain: &WatchedChain, width: u64) {
        let settings = chain.chain.settings();
        let most = settings.log_range_max.saturating_mul(RANGES_MAX);
        let mut widths = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        widths.insert(settings.chain_id, width.clamp(1, most));
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
                Err(problem) => return Ok(Some(Scanned::Stuck(problem))),
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

    /// Where the scan of new receivers starts.
    async fn open(
        &self,
        watched: &WatchedChain,
        new: &[WatchedReceiver],
    ) -> Result<Vec<Cursor>, String> {
        let (chain, within) = (&watched.chain, self.read_budget());
        let heads = chain.scan_heads(None, 1, within).await;
        let Some((endpoint, head)) = answered(&heads).next() else { return Err(failures(&heads)) };
        let finalized = head.finalized;
        let mut cursors = Vec::with_capacity(new.len());
        for WatchedReceiver { receiver, start } in new {
            let block = match start {
                ScanStart::Block(first) if first.saturating_sub(1) > finalized.number => continue,
                ScanStart::Block(first) => {
                    chain.scan_block(endpoint, first.saturating_sub(1), within).await
                }
                ScanStart::Lookback(lookback) => {
                    let since = self.now().saturating_sub(*lookback).as_millis() / 1_000;
                    let since = BlockTime::from_secs(u64::try_from(since).unwrap_or(0));
                    chain.scan_start(endpoint, since, &finalized, within).await
                }
            };
            let block = block.map_err(|failure| format!("{endpoint}: {failure}"))?;
            let first_block = block.number + 1;
            cursors.push(Cursor { receiver: *receiver, first_block, block });
        }
        Ok(cursors)
    }

    /// Asks endpoints where they stand, and for the transfers behind `from`.
    async fn read(
        &self,
        watched: &WatchedChain,
        group: &[Cursor],
        from: BlockRef,
        limit: u64,
    ) -> Read {
        let endpoints = watched.chain.settings().endpoints.len();
        let quorum = watched.policy.quorum;
        let asked = quorum.max(ASKED_MIN).min(endpoints);
        let mut read = self.read_from(watched, group, from, limit, asked).await;
        // Whoever says where it stands may still not give its logs: then all the others are asked as well.
        if matches!(read, Read::TooFew(_)) && asked < endpoints {
            read = self.read_from(watched, group, from, limit, endpoints).await;
        }
        read
    }

    async fn read_from(
        &self,
        watched: &WatchedChain,
        group: &[Cursor],
        from: BlockRef,
        limit: u64,
        asked: usize,
    ) -> Read {
        let (chain, within) = (&watched.chain, self.read_budget());
        let quorum = watched.policy.quorum;
        let heads = chain.scan_heads(Some(from.number), asked, within).await;
        let at_cursor: Answers<Option<BlockRef>> = heads
            .iter()
            .map(|(name, head)| {
                (name.clone(), head.as_ref().map(|h| h.at_cursor).map_err(Clone::clone))
            })
            .collect();
        match agreement(&at_cursor, quorum) {
            Agreement::Agreed(Some(block)) if block == from => {}
            Agreement::Agreed(_) => return self.read_rewind(watched, group, from, &heads).await,
            Agreement::Disagree => {
                return Read::Disagree(format!("endpoints disagree about block {}", from.number));
            }
            Agreement::TooFew => return Read::TooFew(failures(&heads)),
        }
        let finalized = answered(&heads).map(|(_, head)| head.finalized.number).min();
        let width = self.widths.get(watched);
        let last = finalized.unwrap_or(0).min(limit).min(from.number.saturating_add(width));
        if last <= from.number {
            return Read::NothingNew;
        }
        let receivers: BTreeSet<Receiver> = group.iter().map(|cursor| cursor.receiver).collect();
        let mut answers = Answers::new();
        for (endpoint, _) in answered(&heads) {
            let answer = chain.scan(endpoint, &receivers, from.number + 1, last, within).await;
            answers.push((endpoint.clone(), answer));
        }
        match agreement(&answers, quorum) {
            Agreement::Agreed(answer) => {
                Read::Agreed { is_all: Some(answer.last.number) == finalized, answer }
            }
            Agreement::Disagree => Read::Disagree(format!(
                "endpoints show different transfers in blocks {} to {last}",
                from.number + 1
            )),
            Agreement::TooFew => {
                let too_many = answers.iter().any(|(_, answer)| {
                    answer.as_ref().is_err_and(|f| f.kind == ReadFailureKind::RangeRefused)
                });
                if too_many && last > from.number + 1 {
                    self.widths.set(watched, (last - from.number) / 2);
                    return Read::Narrower;
                }
                Read::TooFew(failures(&answers))
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
    ) -> Read {
        let first = group.iter().map(|cursor| cursor.first_block).min().unwrap_or(1);
        let number = from.number.saturating_sub(REWIND_BLOCKS).max(first.saturating_sub(1));
        self.read_block(watched, number, heads).await.map_or_else(|read| read, Read::Rewind)
    }

    /// The block to go back to because behind it a transfer was left out.
    async fn read_back(&self, watched: &WatchedChain, from: BlockRef, number: u64) -> Read {
        let endpoints = watched.chain.settings().endpoints.len();
        let within = self.read_budget();
        let heads = watched.chain.scan_heads(Some(from.number), endpoints, within).await;
        self.read_block(watched, number, &heads).await.map_or_else(|read| read, Read::Missed)
    }

    /// A block as enough endpoints have it.
    async fn read_block(
        &self,
        watched: &WatchedChain,
        number: u64,
        heads: &Answers<ScanHead>,
    ) -> Result<BlockRef, Read> {
        let mut blocks = Answers::new();
        for (endpoint, _) in answered(heads) {
            let block = watched.chain.scan_block(endpoint, number, self.read_budget()).await;
            blocks.push((endpoint.clone(), block));
        }
        match agreement(&blocks, watched.policy.quorum) {
            Agreement::Agreed(block) => Ok(block),
            Agreement::Disagree => {
                Err(Read::Disagree(format!("endpoints disagree about block {number}")))
            }
            Agreement::TooFew => Err(Read::TooFew(failures(&blocks))),
        }
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
            Read::TooFew(why) => {
                problem("too_few");
                Scanned::Stuck(format!("not enough endpoints answered ({why})"))
            }
            Read::Disagree(why) => {
                problem("disagreement");
                Scanned::Stuck(why)
            }
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
                self.widen(watched, &from, &answer);
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

    /// A wide page that holds little may be wider still.
    fn widen(&self, watched: &WatchedChain, from: &BlockRef, answer: &ScanAnswer) {
        let width = self.widths.get(watched);
        if answer.transfers.len() < FEW_TRANSFERS && answer.last.number - from.number >= width {
            self.widths.set(watched, width.saturating_mul(2));
        }
    }
}

/// What endpoints showed of a page.
enum Read {
    NothingNew,
    Narrower,
    Agreed { answer: ScanAnswer, is_all: bool },
    Rewind(BlockRef),
    Missed(BlockRef),
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
