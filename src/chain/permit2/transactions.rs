//! Reads of transactions and receipts, and of a nonce's bit in an old block: in batches, and only about
//! logs that are already known.

use std::collections::HashMap;

use alloy_primitives::{Address, B256, Bytes, U64};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use serde_json::value::RawValue;

use super::calldata::{PermitCalls, PermitId, permit_calls};
use super::{Permit2Settings, bitmap_call, position};
use crate::chain::ChainSettings;
use crate::chain::endpoint::Endpoint;
use crate::chain::error::CallError;
use crate::chain::logs::TokenLog;
use crate::chain::multicall::parse_single;
use crate::chain::transport::{Call, decode};
use crate::domain::{ReadFailure, ReadFailureKind};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Transaction {
    hash: B256,
    block_hash: Option<B256>,
    block_number: Option<U64>,
    from: Address,
    to: Option<Address>,
    input: Bytes,
}

/// What a transaction did, log by log.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Receipt {
    transaction_hash: B256,
    block_hash: Option<B256>,
    block_number: Option<U64>,
    /// Its logs, in order.
    pub(super) logs: Vec<ReceiptLog>,
}

/// A log of a receipt.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReceiptLog {
    /// Who emitted it.
    pub(super) address: Address,
    /// Its topics.
    pub(super) topics: Vec<B256>,
    /// Its data.
    pub(super) data: Bytes,
    /// Its index within the block.
    pub(super) log_index: U64,
}

/// Whether an answer about a transaction is about the one that made `log`, in the block the log is in.
fn check_place(
    what: &str,
    log: &TokenLog,
    hash: B256,
    block_hash: Option<B256>,
    block_number: Option<U64>,
) -> Result<(), ReadFailure> {
    if hash != log.tx_hash {
        let detail = format!("{what}: asked for {}, got {hash}", log.tx_hash);
        return Err(ReadFailure::new(ReadFailureKind::BadAnswer, detail));
    }
    if block_hash != Some(log.block_hash) || block_number != Some(U64::from(log.block_number)) {
        let detail =
            format!("{what}: {hash} is not in block {}, where its log was", log.block_number);
        return Err(ReadFailure::new(ReadFailureKind::NotCanonical, detail));
    }
    Ok(())
}

/// Decodes the answer about a log's transaction. There is one, since there is a log of it.
fn decode_found<T: DeserializeOwned>(
    what: &str,
    log: &TokenLog,
    result: &RawValue,
) -> Result<T, ReadFailure> {
    if result.get() == "null" {
        let detail = format!("{what}: {} is not there, and its log is", log.tx_hash);
        return Err(ReadFailure::new(ReadFailureKind::BadAnswer, detail));
    }
    Ok(decode(what, result)?)
}

impl Endpoint {
    /// Asks `method` about the transaction of each log, once each.
    async fn of_transactions<T: DeserializeOwned>(
        &self,
        method: &'static str,
        logs: &[&TokenLog],
    ) -> HashMap<B256, Result<T, ReadFailure>> {
        let by_hash: HashMap<B256, &TokenLog> =
            logs.iter().map(|log| (log.tx_hash, *log)).collect();
        let asked: Vec<&TokenLog> = by_hash.into_values().collect();
        let calls: Vec<Call> =
            asked.iter().map(|log| Call { method, params: json!([log.tx_hash]) }).collect();
        let results = self.transport.batch(&calls).await;
        let found = |(log, result): (&TokenLog, Result<Box<RawValue>, CallError>)| {
            let found = result
                .map_err(ReadFailure::from)
                .and_then(|result| decode_found::<T>(method, log, &result));
            (log.tx_hash, found)
        };
        asked.into_iter().zip(results).map(found).collect()
    }

    /// Who sent each log's transaction, and which permits it was asked to settle.
    pub(in crate::chain) async fn permit_calls_of(
        &self,
        settings: &ChainSettings,
        logs: &[&TokenLog],
    ) -> HashMap<B256, Result<(Address, PermitCalls), ReadFailure>> {
        const METHOD: &str = "eth_getTransactionByHash";
        let mut found = self.of_transactions::<Transaction>(METHOD, logs).await;
        let of_log = |log: &&TokenLog| {
            let calls = found.remove(&log.tx_hash)?.and_then(|tx| {
                check_place(METHOD, log, tx.hash, tx.block_hash, tx.block_number)?;
                let calls = permit_calls(&settings.permit2, settings.multicall3, tx.to, &tx.input);
                Ok((tx.from, calls))
            });
            Some((log.tx_hash, calls))
        };
        logs.iter().filter_map(of_log).collect()
    }

    /// The receipt of each log's transaction.
    pub(super) async fn receipts_of(
        &self,
        logs: &[&TokenLog],
    ) -> HashMap<B256, Result<Receipt, ReadFailure>> {
        const METHOD: &str = "eth_getTransactionReceipt";
        let mut found = self.of_transactions::<Receipt>(METHOD, logs).await;
        let of_log = |log: &&TokenLog| {
            let receipt = found.remove(&log.tx_hash)?.and_then(|r| {
                check_place(METHOD, log, r.transaction_hash, r.block_hash, r.block_number)?;
                Ok(r)
            });
            Some((log.tx_hash, receipt))
        };
        logs.iter().filter_map(of_log).collect()
    }

    /// Whether the bit of each permit's nonce is set as of a block; one result each, in order.
    pub(super) async fn bits_at(
        &self,
        settings: &Permit2Settings,
        asked: &[(PermitId, u64)],
    ) -> Vec<Result<bool, ReadFailure>> {
        let calls: Vec<_> = asked
            .iter()
            .map(|((owner, nonce), _)| bitmap_call(settings.permit2, *owner, *nonce))
            .collect();
        let batch: Vec<Call> = calls
            .iter()
            .zip(asked)
            .map(|(call, (_, block))| Call {
                method: "eth_call",
                params: json!([{"to": call.target, "data": call.data}, format!("{block:#x}")]),
            })
            .collect();
        let results = self.transport.batch(&batch).await;
        let bits = calls.iter().zip(asked).zip(results).map(|((call, ((_, nonce), _)), result)| {
            parse_single(call, result).map(|word| word.bit(position(*nonce).1))
        });
        bits.collect()
    }
}
