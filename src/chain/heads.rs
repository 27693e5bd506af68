//! Where an endpoint stands: its newest block, and the blocks that no reorg removes.

use alloy_primitives::{U64, U256};
use serde_json::json;

use super::ChainSettings;
use super::blocks::{header_by_number, header_call, parse_header};
use super::endpoint::Endpoint;
use super::error::CallError;
use super::multicall::check_chain_id;
use super::transport::{Call, decode};
use crate::domain::{BlockRef, ReadFailure, ReadFailureKind, Timestamp};

/// Where an endpoint stands, and at which block it is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    /// The block that states are read at.
    pub(super) head: BlockRef,
    /// The `safe` block, where it is asked for; not above `head`.
    pub(super) safe: Option<BlockRef>,
    /// The `finalized` block; not above `head`.
    pub(super) finalized: BlockRef,
}

fn bad(detail: String) -> CallError {
    CallError::BadAnswer(detail)
}

impl Endpoint {
    /// The newest block and the marked ones. The chain id is asked along until it was once the right one:
    /// after that, the state reads go on checking it.
    pub(super) async fn heads(&self, settings: &ChainSettings) -> Result<Heads, ReadFailure> {
        let mut tags = vec!["latest", "finalized"];
        tags.extend(settings.read_safe.then_some("safe"));
        let mut calls: Vec<_> = tags.iter().map(|tag| header_call(tag)).collect();
        let ask_chain_id = !self.memory().is_right_chain;
        if ask_chain_id {
            calls.push(Call { method: "eth_chainId", params: json!([]) });
        }
        let mut results = self.transport.batch(&calls).await;
        if ask_chain_id && let Some(result) = results.pop() {
            let id: U64 = decode("eth_chainId", &result?)?;
            check_chain_id(settings, U256::from(id))?;
            self.memory().is_right_chain = true;
        }
        let mut blocks = Vec::with_capacity(tags.len());
        for (tag, result) in tags.iter().zip(results) {
            blocks.push(parse_header(tag, &result?)?);
        }
        let (head, safe) = (blocks[0], blocks.get(2).copied());
        for (tag, block) in tags.iter().zip(&blocks).skip(1) {
            let same_number = block.number == head.number;
            if block.number > head.number || same_number && block.hash != head.hash {
                return Err(bad(format!(
                    "the {tag} block {} is not at or below the head {}",
                    block.number, head.number
                ))
                .into());
            }
        }
        let finalized = blocks[1];
        if let Some(safe) = safe.filter(|safe| safe.number < finalized.number) {
            return Err(bad(format!(
                "the finalized block {} is above the safe block {}",
                finalized.number, safe.number
            ))
            .into());
        }
        Ok(Heads { head, safe, finalized })
    }

    /// Takes note of a head; an error when it is stale.
    pub(super) fn see_head(
        &self,
        settings: &ChainSettings,
        head: &BlockRef,
        now: Timestamp,
    ) -> Result<(), ReadFailure> {
        self.memory().pulse.see(head, now, settings.head_age_max)
    }

    /// The same endpoint, to be read at block `number`, which is at or below its head.
    pub(super) async fn heads_at(&self, heads: &Heads, number: u64) -> Result<Heads, ReadFailure> {
        if number == heads.head.number {
            return Ok(*heads);
        }
        let result = self.transport.call(header_by_number(number)).await?;
        let block = parse_header("header", &result)?;
        if block.number != number {
            return Err(bad(format!("asked for block {number}, got {}", block.number)).into());
        }
        // What is below a marked block is as final as that block is.
        let marked = |mark: BlockRef| match mark.number {
            at if at > number => Ok(block),
            at if at == number && mark.hash != block.hash => Err(ReadFailure::new(
                ReadFailureKind::NotCanonical,
                format!("block {number} is {} and {}", mark.hash, block.hash),
            )),
            _ => Ok(mark),
        };
        Ok(Heads {
            head: block,
            safe: heads.safe.map(marked).transpose()?,
            finalized: marked(heads.finalized)?,
        })
    }
}
