//! The transfers into the shop's receivers in a range of finalized blocks, and what identifies each payment.
//!
//! One log filter serves all receivers of a chain. The log directly before a transfer says which
//! authorization moved it; where there is none, the calldata says which permit did. What an endpoint shows is worth is decided elsewhere: here one endpoint is
//! asked, about one range, and every block that it names is read again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use alloy_primitives::{Address, B256, U64, U256};
use alloy_sol_types::SolEvent;
use serde_json::json;

use super::blocks::{header_by_number, header_call, parse_header};
use super::eip3009::{AuthorizationUsed, Transfer as TransferEvent};
use super::endpoint::Endpoint;
use super::error::CallError;
use super::logs::{LogFilter, LogsOf, TokenLog};
use super::permit2::{PermitCall, PermitCalls};
use super::transport::{Call, decode};
use super::{Chain, ChainSettings, bounded};
use crate::domain::{
    Amount, Answers, BlockRef, BlockTime, EndpointName, ReadFailure, ReadFailureKind, Receiver,
    ScanAnswer, ScanHead, ScannedTransfer, Transfer,
};

/// The most transfers in one answer, so that a range is always a bounded amount of memory.
const TRANSFERS_MAX: usize = 20_000;

fn bad(detail: String) -> ReadFailure {
    CallError::BadAnswer(detail).into()
}

impl Chain {
    /// Asks one endpoint after the other where it stands, beginning at the next one each time and with those
    /// that are to be spared last, until `enough` have said so. `cursor` is the
    /// number of the last block that was scanned. Each is given up after `within`.
    pub async fn scan_heads(
        &self,
        cursor: Option<u64>,
        enough: usize,
        within: Duration,
    ) -> Answers<ScanHead> {
        let mut answers = Answers::new();
        for place in self.in_turn(&BTreeSet::new()) {
            let endpoint = &self.endpoints[place];
            if answers.iter().filter(|(_, answer)| answer.is_ok()).count() >= enough {
                break;
            }
            let head = bounded(within, endpoint.scan_head(&self.settings, cursor)).await;
            answers.push((endpoint.name.clone(), head));
        }
        answers
    }

    /// A finalized block at or before `time` and not much before it, as the endpoint has it.
    pub async fn scan_start(
        &self,
        endpoint: &EndpointName,
        time: BlockTime,
        finalized: &BlockRef,
        within: Duration,
    ) -> Result<BlockRef, ReadFailure> {
        let endpoint = self.endpoint(endpoint)?;
        let read = async {
            let block_time = self.settings.block_time;
            let number = endpoint
                .block_at(time, (finalized, finalized), block_time, LogsOf::Receivers)
                .await?;
            endpoint.block_numbered(number).await
        };
        bounded(within, read).await
    }

    /// The block with this number, as the endpoint has it.
    pub async fn scan_block(
        &self,
        endpoint: &EndpointName,
        number: u64,
        within: Duration,
    ) -> Result<BlockRef, ReadFailure> {
        bounded(within, self.endpoint(endpoint)?.block_numbered(number)).await
    }

    /// Every transfer into `receivers` in the blocks `first` to `last`, which must be finalized. A range
    /// that holds too many is [`ReadFailureKind::RangeRefused`].
    pub async fn scan(
        &self,
        endpoint: &EndpointName,
        receivers: &BTreeSet<Receiver>,
        first: u64,
        last: u64,
        within: Duration,
    ) -> Result<ScanAnswer, ReadFailure> {
        let endpoint = self.endpoint(endpoint)?;
        // One answer is about all of them, and the cursors of all move by it.
        let silenced = endpoint.silenced(receivers.iter().map(|receiver| &receiver.token));
        if let Some(failure) = silenced.into_iter().flatten().next() {
            return Err(failure);
        }
        bounded(within, endpoint.scan_transfers(&self.settings, receivers, first, last)).await
    }

    fn endpoint(&self, name: &EndpointName) -> Result<&Endpoint, ReadFailure> {
        let found = self.endpoints.iter().find(|endpoint| endpoint.name == *name);
        let found = found.ok_or_else(|| bad(format!("there is no endpoint {name}")))?;
        found.sickness().map_or(Ok(found.as_ref()), Err)
    }
}

impl Endpoint {
    async fn scan_head(
        &self,
        settings: &ChainSettings,
        cursor: Option<u64>,
    ) -> Result<ScanHead, ReadFailure> {
        if let Some(sick) = self.sickness() {
            return Err(sick);
        }
        let mut calls =
            vec![Call { method: "eth_chainId", params: json!([]) }, header_call("finalized")];
        calls.extend(cursor.map(header_by_number));
        let mut results = self.transport.batch(&calls).await.into_iter();
        let mut next = || results.next().unwrap_or_else(|| Err(no_answer()));
        let chain_id = decode::<U64>("eth_chainId", &next()?)?.to::<u64>();
        if chain_id != settings.chain_id.get() {
            let detail = format!("the endpoint serves chain {chain_id}");
            return Err(ReadFailure::new(ReadFailureKind::WrongChain, detail));
        }
        let finalized = parse_header("finalized", &next()?)?;
        let Some(cursor) = cursor else { return Ok(ScanHead { finalized, at_cursor: None }) };
        if finalized.number < cursor {
            let detail = format!("its finalized block is {}, below {cursor}", finalized.number);
            return Err(ReadFailure::new(ReadFailureKind::StaleHead, detail));
        }
        let at_cursor = numbered(cursor, parse_header("header", &next()?)?)?;
        Ok(ScanHead { finalized, at_cursor: Some(at_cursor) })
    }

    async fn block_numbered(&self, number: u64) -> Result<BlockRef, ReadFailure> {
        let result = self.transport.call(header_by_number(number)).await?;
        numbered(number, parse_header("header", &result)?)
    }

    async fn scan_transfers(
        &self,
        settings: &ChainSettings,
        receivers: &BTreeSet<Receiver>,
        first: u64,
        last: u64,
    ) -> Result<ScanAnswer, ReadFailure> {
        let logs = self.transfer_logs(receivers, first, last).await?;
        let mut nonces = self.nonces(settings, &logs).await?;
        self.permit_nonces(settings, &logs, &mut nonces).await?;
        // Read last: what was canonical while the logs were read is so as of now.
        let mut numbers: BTreeSet<u64> = logs.iter().map(|log| log.block_number).collect();
        numbers.insert(last);
        let blocks = self.blocks_numbered(&numbers).await?;
        let mut transfers = Vec::with_capacity(logs.len());
        for log in &logs {
            let block = match blocks.get(&log.block_number) {
                Some(block) if block.hash == log.block_hash => *block,
                _ => {
                    let detail = format!("block {} is not {}", log.block_number, log.block_hash);
                    return Err(ReadFailure::new(ReadFailureKind::NotCanonical, detail));
                }
            };
            let transfer = transfer(settings, log, block)?;
            transfers.push(ScannedTransfer { transfer, nonce: nonces.get(&place(log)).copied() });
        }
        let last = *blocks.get(&last).ok_or_else(|| bad(format!("block {last} was not read")))?;
        Ok(ScanAnswer { last, transfers })
    }

    /// The `Transfer` logs into the receivers, in the chain's order.
    async fn transfer_logs(
        &self,
        receivers: &BTreeSet<Receiver>,
        first: u64,
        last: u64,
    ) -> Result<Vec<TokenLog>, ReadFailure> {
        let tokens: BTreeSet<Address> = receivers.iter().map(|r| r.token).collect();
        let pay_tos: BTreeSet<B256> = receivers.iter().map(|r| r.pay_to.into_word()).collect();
        let filter = LogFilter {
            of: LogsOf::Receivers,
            tokens: tokens.into_iter().collect(),
            topics: vec![
                vec![TransferEvent::SIGNATURE_HASH],
                Vec::new(),
                pay_tos.into_iter().collect(),
            ],
        };
        let mut logs: Vec<TokenLog> = Vec::new();
        let take = |answer: Vec<TokenLog>| {
            // Tokens and addresses are OR-ed apart: other pairs of them come along.
            let wanted = |log: &TokenLog| receivers.contains(&receiver(log)) && moves_money(log);
            logs.extend(answer.into_iter().filter(wanted));
            logs.len() <= TRANSFERS_MAX
        };
        self.scan_logs(filter, first, last, take).await?;
        if logs.len() > TRANSFERS_MAX {
            let detail = format!("more than {TRANSFERS_MAX} transfers in blocks {first} to {last}");
            return Err(ReadFailure::new(ReadFailureKind::RangeRefused, detail));
        }
        logs.sort_by_key(|log| (log.block_number, log.log_index));
        let is_twice = |pair: &[TokenLog]| place(&pair[0]) == place(&pair[1]);
        if logs.windows(2).any(is_twice) {
            return Err(bad(format!("a log of blocks {first} to {last} came twice")));
        }
        Ok(logs)
    }

    /// The nonces of the authorizations directly before these transfers, by the transfer's place. EIP-3009
    /// has the token emit `AuthorizationUsed` there; another payer's, or another token's, is not it.
    async fn nonces(
        &self,
        settings: &ChainSettings,
        transfers: &[TokenLog],
    ) -> Result<HashMap<Place, B256>, ReadFailure> {
        let mut nonces = HashMap::new();
        let mut rest = transfers;
        while !rest.is_empty() {
            let (some, after) = rest.split_at(payers_prefix(rest, settings.batch_max));
            let (Some(first), Some(last)) = (some.first(), some.last()) else { break };
            let wanted: HashMap<Place, &TokenLog> =
                some.iter().filter_map(|log| Some((place_before(log)?, log))).collect();
            let tokens: BTreeSet<Address> = some.iter().map(|log| log.token).collect();
            let payers: BTreeSet<B256> = some.iter().map(|log| log.topics[1]).collect();
            let filter = LogFilter {
                of: LogsOf::Authorizations,
                tokens: tokens.into_iter().collect(),
                topics: vec![
                    vec![AuthorizationUsed::SIGNATURE_HASH],
                    payers.into_iter().collect(),
                    Vec::new(),
                ],
            };
            let take = |answer: Vec<TokenLog>| {
                for used in answer {
                    let transfer = wanted.get(&place(&used)).filter(|transfer| {
                        transfer.topics[1] == used.topics[1]
                            && transfer.block_hash == used.block_hash
                    });
                    if let Some(transfer) = transfer {
                        nonces.insert(place(transfer), used.topics[2]);
                    }
                }
                true
            };
            self.scan_logs(filter, first.block_number, last.block_number, take).await?;
            rest = after;
        }
        Ok(nonces)
    }

    /// The nonces of the permits that moved the others, as their transactions' calldata has them. It says
    /// which payment a transfer may be, and proves nothing: whoever resolves that payment reads again.
    async fn permit_nonces(
        &self,
        settings: &ChainSettings,
        transfers: &[TokenLog],
        nonces: &mut HashMap<Place, B256>,
    ) -> Result<(), ReadFailure> {
        let others: Vec<&TokenLog> =
            transfers.iter().filter(|log| !nonces.contains_key(&place(log))).collect();
        let calls = self.permit_calls_of(settings, &others).await;
        for log in others {
            match calls.get(&log.tx_hash) {
                Some(Ok((_, calls))) => {
                    nonces.extend(permit_nonce(log, calls).map(|nonce| (place(log), nonce)));
                }
                Some(Err(failure)) => return Err(failure.clone()),
                None => {}
            }
        }
        Ok(())
    }

    async fn blocks_numbered(
        &self,
        numbers: &BTreeSet<u64>,
    ) -> Result<BTreeMap<u64, BlockRef>, ReadFailure> {
        let calls: Vec<Call> = numbers.iter().map(|number| header_by_number(*number)).collect();
        let results = self.transport.batch(&calls).await;
        numbers
            .iter()
            .zip(results)
            .map(|(number, result)| {
                Ok((*number, numbered(*number, parse_header("header", &result?)?)?))
            })
            .collect()
    }
}

fn no_answer() -> CallError {
    CallError::BadAnswer("no answer".to_owned())
}

fn numbered(number: u64, block: BlockRef) -> Result<BlockRef, ReadFailure> {
    match block.number == number {
        true => Ok(block),
        false => Err(bad(format!("asked for block {number}, got {}", block.number))),
    }
}

/// How many of these, at least one, have no more than `payers_max` payers together.
fn payers_prefix(logs: &[TokenLog], payers_max: usize) -> usize {
    let mut payers = BTreeSet::new();
    let fits = |log: &&TokenLog| {
        payers.insert(log.topics[1]);
        payers.len() <= payers_max.max(1)
    };
    logs.iter().take_while(fits).count().max(1)
}

/// Where a log stands: transaction, index within the block, and the contract that emitted it.
type Place = (B256, u64, Address);

fn place(log: &TokenLog) -> Place {
    (log.tx_hash, log.log_index, log.token)
}

/// Where the authorization of a transfer must stand.
fn place_before(transfer: &TokenLog) -> Option<Place> {
    Some((transfer.tx_hash, transfer.log_index.checked_sub(1)?, transfer.token))
}

/// The nonce of the only permit that asks for this transfer.
fn permit_nonce(log: &TokenLog, calls: &PermitCalls) -> Option<B256> {
    let calls = match calls {
        PermitCalls::Direct(call) => std::slice::from_ref(call),
        PermitCalls::Batched(calls) => calls.as_slice(),
        PermitCalls::Unknown => &[],
    };
    let asks = |call: &&PermitCall| {
        log.token == call.token
            && log.topics[1] == call.owner.into_word()
            && log.topics[2] == call.to.into_word()
            && log.data[..] == call.amount.get().to_be_bytes::<32>()
    };
    let mut asking = calls.iter().filter(asks);
    let first = asking.next()?;
    asking.next().is_none().then_some(first.nonce)
}

fn receiver(log: &TokenLog) -> Receiver {
    Receiver { token: log.token, pay_to: Address::from_word(log.topics[2]) }
}

/// A transfer of nothing is nobody's money. Anybody can make one from anybody's address, and they come in
/// floods: each would be a row, and a flag for a person.
fn moves_money(log: &TokenLog) -> bool {
    log.data.is_empty() || log.data.iter().any(|byte| *byte != 0)
}

fn transfer(
    settings: &ChainSettings,
    log: &TokenLog,
    block: BlockRef,
) -> Result<Transfer, ReadFailure> {
    let value = <[u8; 32]>::try_from(&log.data[..])
        .map_err(|_| bad(format!("log {} of {} is no Transfer", log.log_index, log.tx_hash)))?;
    Ok(Transfer {
        chain_id: settings.chain_id,
        token: log.token,
        from: Address::from_word(log.topics[1]),
        to: Address::from_word(log.topics[2]),
        value: Amount::new(U256::from_be_bytes(value)),
        block,
        tx_hash: log.tx_hash,
        log_index: log.log_index,
    })
}
