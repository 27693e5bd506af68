//! Blocks by time, nonce states by block, and what a reorg takes away.

use super::*;

const TOKEN: Address = address!("0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913");
const MERCHANT: Address = address!("0x00000000000000000000000000000000000000c1");
const GENESIS_SECS: u64 = 1_700_000_000;

fn at(secs: f64) -> Timestamp {
    Timestamp::from_millis(GENESIS_SECS as i64 * 1_000 + (secs * 1_000.0) as i64)
}

fn chain_of(block_time: Duration) -> ChainState {
    let lag = Duration::from_secs(20 * 60);
    ChainState::new(SimSettings::new(ChainId::new(8453), at(0.0), block_time, lag, TOKEN))
}

fn chain() -> ChainState {
    chain_of(Duration::from_secs(2))
}

fn payer(n: u64) -> Address {
    Address::from_word(U256::from(n + 1_000).into())
}

fn nonce(n: u64) -> B256 {
    U256::from(n).into()
}

fn payment(n: u64) -> Authorized {
    let value = Amount::new(U256::from(1_000_000));
    Authorized { payer: payer(n), to: MERCHANT, value, nonce: nonce(n) }
}

fn used(chain: &ChainState, n: u64, number: u64) -> bool {
    chain.nonce_used(chain.view(), payer(n), nonce(n), number)
}

fn block(chain: &ChainState, number: u64) -> BlockRef {
    chain.block(chain.view(), number).unwrap()
}

#[test]
fn blocks_appear_as_time_passes_and_each_knows_its_parent() {
    let mut chain = chain();
    assert_eq!(chain.head(chain.view()), 0);
    chain.set_time(at(5.9));
    assert_eq!(chain.head(chain.view()), 2);
    chain.set_time(at(1.0));
    assert_eq!(chain.head(chain.view()), 2, "blocks stay");
    assert_eq!(block(&chain, 2).time.as_secs(), GENESIS_SECS + 4);
    assert_eq!(chain.block(chain.view(), 3), None);
    assert_eq!(chain.parent_hash(chain.view(), 0), B256::ZERO);
    for number in 1..=2 {
        assert_eq!(chain.parent_hash(chain.view(), number), block(&chain, number - 1).hash);
        assert_eq!(chain.number_of(chain.view(), block(&chain, number).hash), Some(number));
    }
    assert_eq!(chain.number_of(chain.view(), B256::repeat_byte(7)), None);
}

#[test]
fn blocks_closer_than_a_second_share_one() {
    let mut chain = chain_of(Duration::from_millis(250));
    chain.set_time(at(2.0));
    assert_eq!(chain.head(chain.view()), 8);
    let times: Vec<u64> = (0..=8).map(|n| block(&chain, n).time.as_secs() - GENESIS_SECS).collect();
    assert_eq!(times, [0, 0, 0, 0, 1, 1, 1, 1, 2]);
}

#[test]
fn a_pause_moves_every_later_block_and_no_earlier_one() {
    let mut chain = chain();
    chain.set_time(at(5.0));
    let waiting = chain.transfer(at(8.0), payment(1)).unwrap();
    assert_eq!(waiting.number, 4);
    chain.pause(Duration::from_secs(60));
    chain.pause(Duration::from_secs(40));
    chain.set_time(at(105.9));
    assert_eq!(chain.head(chain.view()), 2);
    assert_eq!(chain.transfer(at(50.0), payment(2)).unwrap().time.as_secs(), GENESIS_SECS + 106);
    chain.set_time(at(110.0));
    let times: Vec<u64> = (0..=5).map(|n| block(&chain, n).time.as_secs() - GENESIS_SECS).collect();
    assert_eq!(times, [0, 2, 4, 106, 108, 110]);
    assert!(used(&chain, 1, 4) && !used(&chain, 1, 3));
    assert!(used(&chain, 2, 3));
    assert_eq!(chain.transfer(at(113.0), payment(3)).unwrap().number, 7);
    chain.set_time(at(106.0 + 20.0 * 60.0 - 1.0));
    assert_eq!(chain.finalized(chain.view()), 2, "the newest that is old enough");
}

#[test]
fn safe_and_finalized_follow_the_head_by_age_and_start_at_genesis() {
    let mut chain = chain();
    chain.set_time(at(599.0));
    assert_eq!((chain.safe(chain.view()), chain.finalized(chain.view())), (0, 0));
    chain.set_time(at(48.0 * 3_600.0));
    assert_eq!(chain.head(chain.view()), 86_400);
    assert_eq!(chain.safe(chain.view()), 86_400 - 300);
    assert_eq!(chain.finalized(chain.view()), 86_400 - 600);
}

#[test]
fn a_transfer_is_in_the_block_at_its_time_and_used_from_there_on() {
    let mut chain = chain();
    let included = chain.transfer(at(12.0), payment(1)).unwrap();
    assert_eq!((included.number, included.time.as_secs()), (6, GENESIS_SECS + 12));
    assert_eq!(chain.transfer(at(12.1), payment(2)).unwrap().number, 7);
    chain.set_time(at(11.9));
    assert!(!used(&chain, 1, u64::MAX), "the block is not there yet");
    assert_eq!(chain.find_transaction(chain.view(), included.tx_hash), None);
    chain.set_time(at(60.0));
    assert!(!used(&chain, 1, 5));
    assert!(used(&chain, 1, 6));
    assert!(used(&chain, 1, 30));
    assert!(!used(&chain, 3, 30));
    assert_eq!(chain.find_transaction(chain.view(), included.tx_hash), Some((6, 0)));
    assert_eq!(
        chain.contents(chain.view(), 6).unwrap().transactions[0].events,
        [
            ChainEvent::Used(payer(1), nonce(1)),
            ChainEvent::Transfer(payer(1), MERCHANT, payment(1).value)
        ]
    );
}

#[test]
fn a_block_that_was_seen_never_changes() {
    let mut chain = chain();
    chain.set_time(at(12.0));
    let late = chain.transfer(at(4.0), payment(1)).unwrap();
    assert_eq!(late.number, 7);
    assert!(chain.contents(chain.view(), 2).is_none());
}

#[test]
fn an_authorization_is_used_or_canceled_once() {
    let mut chain = chain();
    chain.transfer(at(4.0), payment(1)).unwrap();
    let again = Err(SimError::NonceUsed { payer: payer(1), nonce: nonce(1) });
    assert_eq!(chain.transfer(at(4.0), payment(1)), again, "before it is mined");
    chain.set_time(at(10.0));
    assert_eq!(chain.transfer(at(20.0), payment(1)), again, "and after");
    assert_eq!(chain.cancel(at(20.0), payer(1), nonce(1)), again);

    chain.cancel(at(20.0), payer(2), nonce(2)).unwrap();
    assert!(chain.transfer(at(30.0), payment(2)).is_err());
    assert!(chain.batch(at(30.0), &[payment(3), payment(3)]).is_err());
    chain.batch(at(30.0), &[payment(3), payment(4)]).unwrap();
    chain.set_time(at(40.0));
    assert!(used(&chain, 2, 20) && used(&chain, 3, 20) && used(&chain, 4, 20));
}

#[test]
fn a_reverted_transaction_and_a_bare_transfer_use_no_nonce() {
    let mut chain = chain();
    let reverted = chain.revert(at(2.0)).unwrap();
    chain.bare_transfer(at(2.0), payer(1), MERCHANT, payment(1).value).unwrap();
    chain.set_time(at(2.0));
    let contents = chain.contents(chain.view(), 1).unwrap();
    assert!(!contents.transactions[0].succeeded && contents.transactions[0].events.is_empty());
    assert_eq!(contents.transactions[0].hash, reverted.tx_hash);
    assert!(contents.transactions[1].succeeded);
    chain.transfer(at(3.0), payment(1)).unwrap();
}

#[test]
fn a_reorg_takes_blocks_transactions_and_nonce_states_away() {
    let mut chain = chain();
    chain.transfer(at(12.0), payment(1)).unwrap();
    let gone = chain.transfer(at(30.0), payment(2)).unwrap();
    let coming = chain.transfer(at(50.0), payment(3)).unwrap();
    chain.set_time(at(40.0));
    let (kept, replaced) = (block(&chain, 14), block(&chain, 15));
    let before = chain.view().clone();

    chain.reorg(6).unwrap();
    assert_eq!(chain.head(chain.view()), 20);
    assert_eq!(block(&chain, 14), kept);
    assert_ne!(block(&chain, 15).hash, replaced.hash);
    assert_eq!(chain.parent_hash(chain.view(), 15), kept.hash);
    assert_eq!(chain.number_of(chain.view(), replaced.hash), None);
    assert!(used(&chain, 1, 20));
    assert!(!used(&chain, 2, 20));
    assert!(chain.contents(chain.view(), 15).is_none());
    assert_eq!(chain.find_transaction(chain.view(), gone.tx_hash), None);

    // A lagging endpoint still shows what was there.
    assert_eq!(chain.number_of(&before, replaced.hash), Some(15));
    assert!(chain.nonce_used(&before, payer(2), nonce(2), 20));
    assert_eq!(chain.find_transaction(&before, gone.tx_hash), Some((15, 0)));

    // What is gone can come again, and what was yet to come still does.
    let again = chain.transfer(at(44.0), payment(2)).unwrap();
    chain.set_time(at(60.0));
    assert!(used(&chain, 2, 22) && !used(&chain, 2, 21));
    assert_eq!(chain.find_transaction(chain.view(), again.tx_hash), Some((22, 0)));
    assert_eq!(chain.find_transaction(chain.view(), coming.tx_hash), Some((25, 0)));
    assert!(!chain.nonce_used(&before, payer(2), nonce(2), 14));
}

#[test]
fn a_reorg_below_an_older_one_buries_it() {
    let mut chain = chain();
    chain.set_time(at(40.0));
    let first: Vec<B256> = (10..=20).map(|n| block(&chain, n).hash).collect();
    chain.reorg(3).unwrap();
    let second = block(&chain, 18).hash;
    chain.reorg(10).unwrap();
    let third: Vec<B256> = (10..=20).map(|n| block(&chain, n).hash).collect();
    assert_eq!(first[0], third[0]);
    assert!(first[1..].iter().zip(&third[1..]).all(|(a, b)| a != b));
    assert_ne!(second, third[8]);
    assert_eq!(chain.number_of(chain.view(), second), None);
}

#[test]
fn finalized_blocks_stay() {
    let mut chain = chain();
    chain.set_time(at(1_300.0));
    assert_eq!(chain.finalized(chain.view()), 50);
    assert_eq!(
        chain.reorg(601),
        Err(SimError::ReorgTooDeep { depth: 601, head: 650, finalized: 50 })
    );
    chain.reorg(600).unwrap();
}

#[test]
fn the_bloom_filter_holds_what_the_block_logged_and_little_else() {
    let mut chain = chain();
    chain.transfer(at(2.0), payment(1)).unwrap();
    chain.revert(at(4.0)).unwrap();
    chain.set_time(at(4.0));
    let bloom = chain.contents(chain.view(), 1).unwrap().bloom(TOKEN);
    let has = |bytes: &[u8]| bloom.contains_input(alloy_primitives::BloomInput::Raw(bytes));
    assert!(has(TOKEN.as_slice()) && has(nonce(1).as_slice()));
    assert!(has(payer(1).into_word().as_slice()) && has(MERCHANT.into_word().as_slice()));
    assert!(!has(nonce(2).as_slice()));
    assert_eq!(chain.contents(chain.view(), 2).unwrap().bloom(TOKEN), Bloom::ZERO);
}

#[test]
fn a_hundred_thousand_payments_over_two_days_are_no_burden() {
    let mut chain = chain();
    for n in 0..10_000 {
        let ten: Vec<Authorized> = (n * 10..n * 10 + 10).map(payment).collect();
        chain.batch(at(n as f64 * 17.0), &ten).unwrap();
    }
    chain.set_time(at(48.0 * 3_600.0));
    let last = chain.head(chain.view());
    assert!((0..100_000).all(|n| used(&chain, n, last)));
    let found: usize = chain
        .contents_between(chain.view(), 0, u64::MAX)
        .flat_map(|(_, contents)| &contents.transactions)
        .map(|transaction| transaction.events.len())
        .sum();
    assert_eq!(found, 200_000);
}
