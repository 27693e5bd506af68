//! What a known proxy vouches for in a transaction, and which of a batch's calls that was (rule 2).

use alloy_primitives::Address;

use super::Permit2Settings;
use super::calldata::{PermitCall, is_settled_event};
use super::found::{Moved, parse_transfer};
use super::transactions::Receipt;
use crate::domain::Amount;

/// The transfers between these parties that a known proxy vouched for, in order: log index and value.
///
/// The proxy's event stands directly behind the transfer; only other logs of the token (an `Approval`, say)
/// may stand between.
pub(super) fn vouched(
    receipt: &Receipt,
    settings: &Permit2Settings,
    parties: (Address, Address, Address),
) -> Vec<(u64, Amount)> {
    let (token, from, to) = parties;
    let mut last: Option<(u64, Address, Address, Amount)> = None;
    let mut vouched = Vec::new();
    for log in &receipt.logs {
        if log.address == token {
            if let Some((from, to, value)) = parse_transfer(&log.topics, &log.data) {
                last = Some((log.log_index.to(), from, to, value));
            }
            continue;
        }
        let is_settled = settings.proxies.contains(&log.address)
            && log.topics.first().is_some_and(is_settled_event);
        if let Some((index, f, t, value)) = last.take()
            && is_settled
            && (f, t) == (from, to)
        {
            vouched.push((index, value));
        }
    }
    vouched
}

/// Which of the batched calls made this transfer: only when all of them came through, in their order and
/// with their amounts.
pub(super) fn vouched_call(
    moved: &Moved,
    calls: &[PermitCall],
    vouched: &[(u64, Amount)],
) -> Option<PermitCall> {
    let all_came_through = calls.len() == vouched.len()
        && calls.iter().zip(vouched).all(|(call, (_, value))| call.amount == *value);
    let place = vouched.iter().position(|(index, _)| *index == moved.log.log_index)?;
    calls.get(place).filter(|_| all_came_through).copied()
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{B256, Bytes, U256, keccak256};
    use alloy_sol_types::SolEvent;
    use serde_json::{Value, json};

    use super::*;
    use crate::chain::logs::TokenLog;
    use crate::chain::permit2::found::Transfer;

    const TOKEN: Address = Address::repeat_byte(1);
    const PAYER: Address = Address::repeat_byte(2);
    const SHOP: Address = Address::repeat_byte(3);
    const PROXY: Address = Address::repeat_byte(4);
    const OTHER: Address = Address::repeat_byte(5);

    fn settings() -> Permit2Settings {
        let permit2 = Address::repeat_byte(6);
        Permit2Settings { permit2, proxies: vec![PROXY], upto_facilitators: Vec::new() }
    }

    fn transfer(from: Address, to: Address, value: u64) -> Value {
        let topics = [Transfer::SIGNATURE_HASH, from.into_word(), to.into_word()];
        let data = Bytes::from(U256::from(value).to_be_bytes::<32>());
        json!({ "address": TOKEN, "topics": topics, "data": data })
    }

    fn bare(address: Address, event: &str) -> Value {
        json!({ "address": address, "topics": [keccak256(event)], "data": "0x" })
    }

    fn receipt(mut logs: Vec<Value>) -> Receipt {
        for (index, log) in logs.iter_mut().enumerate() {
            log["logIndex"] = json!(format!("{index:#x}"));
        }
        let hash = B256::repeat_byte(9);
        let receipt = json!({
            "transactionHash": hash, "blockHash": hash, "blockNumber": "0x1", "logs": logs,
        });
        serde_json::from_value(receipt).unwrap()
    }

    fn vouched_in(logs: Vec<Value>) -> Vec<u64> {
        let found = vouched(&receipt(logs), &settings(), (TOKEN, PAYER, SHOP));
        found.into_iter().map(|(index, _)| index).collect()
    }

    #[test]
    fn a_proxy_vouches_for_the_transfer_directly_before_its_event() {
        let pays = || transfer(PAYER, SHOP, 5);
        let settled = || bare(PROXY, "Settled()");
        let approval = || bare(TOKEN, "Approval(address,address,uint256)");
        assert_eq!(vouched_in(vec![pays(), settled()]), [0]);
        assert_eq!(vouched_in(vec![pays(), approval(), settled()]), [0], "the token's own log");
        let with_permit = bare(PROXY, "SettledWithPermit()");
        assert_eq!(vouched_in(vec![approval(), pays(), with_permit, pays(), settled()]), [1, 3]);
        for (logs, why) in [
            (vec![pays()], "nobody vouches"),
            (vec![settled(), pays()], "before it"),
            (vec![pays(), bare(OTHER, "Settled()")], "not a proxy"),
            (vec![pays(), bare(PROXY, "Paid()")], "another event"),
            (vec![pays(), bare(OTHER, "Noise()"), settled()], "something in between"),
            (vec![pays(), transfer(PAYER, OTHER, 1), settled()], "another transfer in between"),
            (vec![transfer(PAYER, OTHER, 5), settled()], "to somebody else"),
            (vec![transfer(OTHER, SHOP, 5), settled()], "from somebody else"),
        ] {
            assert!(vouched_in(logs).is_empty(), "{why}");
        }
    }

    #[test]
    fn a_batched_call_counts_only_when_all_of_them_came_through_as_they_say() {
        let amount = |units: u64| Amount::new(U256::from(units));
        let call = |nonce: u8, units: u64| PermitCall {
            owner: PAYER,
            nonce: B256::repeat_byte(nonce),
            token: TOKEN,
            to: SHOP,
            amount: amount(units),
            upto: None,
        };
        let log = |index: u64| TokenLog {
            token: TOKEN,
            topics: vec![Transfer::SIGNATURE_HASH, PAYER.into_word(), SHOP.into_word()],
            data: Bytes::from(U256::from(5).to_be_bytes::<32>()),
            block_number: 1,
            block_hash: B256::ZERO,
            tx_hash: B256::ZERO,
            log_index: index,
        };
        let nonce_of = |index: u64, calls: &[PermitCall], vouched: &[(u64, Amount)]| {
            let moved = Moved::parse(log(index)).unwrap();
            vouched_call(&moved, calls, vouched).map(|call| call.nonce[0])
        };
        let both = [call(1, 5), call(2, 7)];
        let came_through = [(0, amount(5)), (4, amount(7))];
        assert_eq!(nonce_of(0, &both, &came_through), Some(1));
        assert_eq!(nonce_of(4, &both, &came_through), Some(2));
        assert_eq!(nonce_of(2, &both, &came_through), None, "nobody vouches for this one");
        assert_eq!(nonce_of(0, &both, &came_through[..1]), None, "one of two: which?");
        assert_eq!(nonce_of(0, &both[..1], &came_through), None, "a call that nobody sees");
        let swapped = [call(2, 7), call(1, 5)];
        assert_eq!(nonce_of(0, &swapped, &came_through), None, "in another order");
        assert_eq!(nonce_of(0, &[], &[]), None);
    }
}
