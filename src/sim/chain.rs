//! The simulated chain's state: blocks by virtual time, one EIP-3009 token, Permit2, and reorgs.
//!
//! A block without transactions takes no memory: its number, hash and time follow from arithmetic, so two
//! days of 2 s blocks cost nothing. What a reorg removes is kept under its old branch, because an endpoint
//! that lags still shows it. Signatures and balances are not checked: whoever calls decides what the chain
//! did. No I/O and no clock.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::OnceLock;
use std::time::Duration;

use alloy_primitives::{Address, B256, Bloom, Bytes, U256, address, keccak256};
use alloy_sol_types::{SolEvent, SolValue};

use super::abi;
use crate::chain::{MULTICALL3, PERMIT2};
use crate::domain::{Amount, BlockRef, BlockTime, ChainId, Timestamp};

/// Who sends every transaction: the facilitator. The daemon never looks at it.
pub const FACILITATOR: Address = address!("0x00000000000000000000000000000000000000fa");

/// The chain as it is set up.
#[derive(Debug, Clone)]
pub struct SimSettings {
    /// The chain's id.
    pub chain_id: ChainId,
    /// The time of block 0.
    pub genesis: Timestamp,
    /// From one block to the next; at least a millisecond.
    pub block_time: Duration,
    /// How old a block is when it becomes final.
    pub finalized_lag: Duration,
    /// How old a block is when it becomes safe.
    pub safe_lag: Duration,
    /// The token contract.
    pub token: Address,
}

impl SimSettings {
    /// A chain with `safe` half as far behind as `finalized`.
    pub fn new(
        chain_id: ChainId,
        genesis: Timestamp,
        block_time: Duration,
        finalized_lag: Duration,
        token: Address,
    ) -> Self {
        Self { chain_id, genesis, block_time, finalized_lag, safe_lag: finalized_lag / 2, token }
    }
}

/// One transfer with authorization, as the token executed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Authorized {
    /// Who signed.
    pub payer: Address,
    /// Who is paid.
    pub to: Address,
    /// How much.
    pub value: Amount,
    /// The authorization's nonce.
    pub nonce: B256,
}

/// Where a transaction went, or will go once the chain's time gets there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Included {
    /// The block's number.
    pub number: u64,
    /// The block's time.
    pub time: BlockTime,
    /// The transaction.
    pub tx_hash: B256,
}

/// What the chain refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// The token accepts a (payer, nonce) once, and so does Permit2.
    #[error("authorization {nonce} of {payer} is used or canceled on this branch")]
    NonceUsed {
        /// Who signed.
        payer: Address,
        /// The authorization's nonce.
        nonce: B256,
    },
    /// Permit2 refuses a permit after its deadline.
    #[error("the block's time {time} is after the permit's deadline {deadline}")]
    PermitExpired {
        /// The last second it is taken at.
        deadline: BlockTime,
        /// The block's time.
        time: BlockTime,
    },
    /// Finalized blocks stay.
    #[error(
        "a reorg of {depth} blocks from head {head} would replace block {finalized}, which is final"
    )]
    ReorgTooDeep {
        /// Blocks to replace.
        depth: u64,
        /// The head's number.
        head: u64,
        /// The finalized block's number.
        finalized: u64,
    },
}

/// An event of the token, of Permit2 or of one of its proxies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainEvent {
    /// `AuthorizationUsed`.
    Used(Address, B256),
    /// `AuthorizationCanceled`.
    Canceled(Address, B256),
    /// `Transfer`.
    Transfer(Address, Address, Amount),
    /// `UnorderedNonceInvalidation` of Permit2: owner, word, mask.
    Invalidated(Address, U256, U256),
    /// `Settled` of this proxy.
    ProxySettled(Address),
}

impl ChainEvent {
    /// Who emits it, where `token` is the token.
    pub fn emitter(&self, token: Address) -> Address {
        match *self {
            Self::Used(..) | Self::Canceled(..) | Self::Transfer(..) => token,
            Self::Invalidated(..) => PERMIT2,
            Self::ProxySettled(proxy) => proxy,
        }
    }

    /// The log's topics, the signature first.
    pub fn topics(&self) -> Vec<B256> {
        match *self {
            Self::Used(payer, nonce) => {
                vec![abi::AuthorizationUsed::SIGNATURE_HASH, payer.into_word(), nonce]
            }
            Self::Canceled(payer, nonce) => {
                vec![abi::AuthorizationCanceled::SIGNATURE_HASH, payer.into_word(), nonce]
            }
            Self::Transfer(from, to, _) => {
                vec![abi::Transfer::SIGNATURE_HASH, from.into_word(), to.into_word()]
            }
            Self::Invalidated(owner, ..) => {
                vec![abi::UnorderedNonceInvalidation::SIGNATURE_HASH, owner.into_word()]
            }
            Self::ProxySettled(_) => vec![abi::Settled::SIGNATURE_HASH],
        }
    }

    /// The log's data.
    pub fn data(&self) -> Vec<u8> {
        match self {
            Self::Used(..) | Self::Canceled(..) | Self::ProxySettled(_) => Vec::new(),
            Self::Transfer(_, _, value) => value.get().to_be_bytes::<32>().to_vec(),
            Self::Invalidated(_, word, mask) => (*word, *mask).abi_encode(),
        }
    }
}

/// A mined transaction.
#[derive(Debug, Clone)]
pub struct Transaction {
    /// Its hash.
    pub hash: B256,
    /// Who sent it.
    pub from: Address,
    /// The contract called.
    pub to: Address,
    /// Its calldata, where a reader looks at it.
    pub input: Bytes,
    /// Whether it succeeded.
    pub succeeded: bool,
    /// What it emitted, in order.
    pub events: Vec<ChainEvent>,
    /// The nonces of Permit2 that it set: owner, nonce. No event tells of them.
    permits: Vec<(Address, B256)>,
}

impl Transaction {
    /// What it used up.
    fn spent(&self) -> impl Iterator<Item = Spent> {
        let permits = self.permits.iter().map(|(owner, nonce)| Spent::Permit(*owner, *nonce));
        self.events.iter().filter_map(spent_by).chain(permits)
    }
}

/// What can be used once, and its book.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Spent {
    /// An authorization of the token: payer, nonce.
    Authorization(Address, B256),
    /// A nonce of Permit2: owner, nonce.
    Permit(Address, B256),
}

/// What a block that is not empty holds.
#[derive(Debug, Clone)]
pub struct Contents {
    branch: u32,
    /// The transactions, in order.
    pub transactions: Vec<Transaction>,
    bloom: OnceLock<Bloom>,
}

impl Contents {
    /// The bloom filter of the logs; worked out when a reader first sees it.
    pub fn bloom(&self, token: Address) -> Bloom {
        *self.bloom.get_or_init(|| bloom_of(token, &self.transactions))
    }
}

/// The bloom filter of what these transactions logged.
pub fn bloom_of(token: Address, transactions: &[Transaction]) -> Bloom {
    let mut bloom = Bloom::ZERO;
    for event in transactions.iter().flat_map(|transaction| &transaction.events) {
        bloom.accrue_raw_log(event.emitter(token), &event.topics());
    }
    bloom
}

/// The blocks from `from` on, until the next branch takes over.
#[derive(Debug, Clone, Copy)]
struct Branch {
    from: u64,
    id: u32,
}

/// The chain as it is, or was, seen at one moment: which branch is canonical, and how far it goes.
#[derive(Debug, Clone)]
pub struct View {
    chain_id: ChainId,
    branches: Vec<Branch>,
    now: Timestamp,
}

/// Blocks at regular times: block `first` at `start_ms` after genesis, and the others after it.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    first: u64,
    start_ms: u64,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    number: u64,
    branch: u32,
    index: usize,
}

/// The whole state of a simulated chain.
#[derive(Debug)]
pub struct ChainState {
    settings: SimSettings,
    view: View,
    has_multicall: bool,
    /// Ascending; the first starts at genesis.
    stretches: Vec<Stretch>,
    branches_made: u32,
    transactions_made: u64,
    blocks: BTreeMap<u64, Vec<Contents>>,
    transactions: HashMap<B256, Place>,
    spent: HashMap<Spent, Vec<(u64, u32)>>,
    /// Transactions of blocks that do not exist yet.
    scheduled: BTreeMap<u64, Vec<Transaction>>,
    scheduled_spent: HashSet<Spent>,
}

impl ChainState {
    /// A chain with nothing but its genesis block.
    pub fn new(settings: SimSettings) -> Self {
        let view = View {
            chain_id: settings.chain_id,
            branches: vec![Branch { from: 0, id: 0 }],
            now: settings.genesis,
        };
        Self {
            settings,
            view,
            has_multicall: true,
            stretches: vec![Stretch { first: 0, start_ms: 0 }],
            branches_made: 1,
            transactions_made: 0,
            blocks: BTreeMap::new(),
            transactions: HashMap::new(),
            spent: HashMap::new(),
            scheduled: BTreeMap::new(),
            scheduled_spent: HashSet::new(),
        }
    }

    /// How the chain was set up.
    pub fn settings(&self) -> &SimSettings {
        &self.settings
    }

    /// The chain as it is now.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Makes every block up to `now` exist. Blocks stay: an earlier time changes nothing.
    pub fn set_time(&mut self, now: Timestamp) {
        self.view.now = self.view.now.max(now);
        let later = self.scheduled.split_off(&(self.head(&self.view) + 1));
        for (number, transactions) in std::mem::replace(&mut self.scheduled, later) {
            self.mine(number, transactions);
        }
    }

    fn mine(&mut self, number: u64, transactions: Vec<Transaction>) {
        let branch = self.view.branch_at(number);
        for (index, transaction) in transactions.iter().enumerate() {
            self.transactions.insert(transaction.hash, Place { number, branch, index });
            for key in transaction.spent() {
                self.scheduled_spent.remove(&key);
                self.spent.entry(key).or_default().push((number, branch));
            }
        }
        self.blocks.entry(number).or_default().push(Contents {
            branch,
            transactions,
            bloom: OnceLock::new(),
        });
    }

    /// A transfer with authorization, in the block at `at`.
    ///
    /// That is the first block at or after `at`. A block that exists never changes, since a reader may
    /// have seen it: what comes too late for it goes into the next one, as on any chain. So schedule
    /// before [`Self::set_time`].
    pub fn transfer(&mut self, at: Timestamp, transfer: Authorized) -> Result<Included, SimError> {
        self.include(at, self.settings.token, true, authorized_events(&transfer))
    }

    /// Several transfers with authorization in one transaction, through Multicall3.
    pub fn batch(&mut self, at: Timestamp, transfers: &[Authorized]) -> Result<Included, SimError> {
        let events = transfers.iter().flat_map(authorized_events).collect();
        self.include(at, MULTICALL3, true, events)
    }

    /// The payer cancels an authorization.
    pub fn cancel(
        &mut self,
        at: Timestamp,
        payer: Address,
        nonce: B256,
    ) -> Result<Included, SimError> {
        self.include(at, self.settings.token, true, vec![ChainEvent::Canceled(payer, nonce)])
    }

    /// A transaction that is mined and fails; it changes nothing.
    pub fn revert(&mut self, at: Timestamp) -> Result<Included, SimError> {
        self.include(at, self.settings.token, false, Vec::new())
    }

    /// A transfer that no authorization stands behind.
    pub fn bare_transfer(
        &mut self,
        at: Timestamp,
        from: Address,
        to: Address,
        value: Amount,
    ) -> Result<Included, SimError> {
        self.include(at, self.settings.token, true, vec![ChainEvent::Transfer(from, to, value)])
    }

    fn include(
        &mut self,
        at: Timestamp,
        to: Address,
        succeeded: bool,
        events: Vec<ChainEvent>,
    ) -> Result<Included, SimError> {
        let (input, permits) = (Bytes::new(), Vec::new());
        self.schedule(
            at,
            Transaction {
                hash: B256::ZERO,
                from: FACILITATOR,
                to,
                input,
                succeeded,
                events,
                permits,
            },
        )
    }

    /// A transaction that succeeds, with calldata that readers look at and nonces of Permit2 it sets.
    pub(super) fn include_call(
        &mut self,
        at: Timestamp,
        from: Address,
        to: Address,
        input: Bytes,
        events: Vec<ChainEvent>,
        permits: Vec<(Address, B256)>,
    ) -> Result<Included, SimError> {
        let hash = B256::ZERO;
        self.schedule(at, Transaction { hash, from, to, input, succeeded: true, events, permits })
    }

    fn schedule(
        &mut self,
        at: Timestamp,
        mut transaction: Transaction,
    ) -> Result<Included, SimError> {
        let mut fresh = HashSet::new();
        for spent in transaction.spent() {
            if !fresh.insert(spent) || self.is_taken(spent) {
                let (Spent::Authorization(payer, nonce) | Spent::Permit(payer, nonce)) = spent;
                return Err(SimError::NonceUsed { payer, nonce });
            }
        }
        self.scheduled_spent.extend(fresh);
        let (number, time) = self.next_block_at(at);
        self.transactions_made += 1;
        transaction.hash = transaction_hash(self.settings.chain_id, self.transactions_made);
        let tx_hash = transaction.hash;
        self.scheduled.entry(number).or_default().push(transaction);
        Ok(Included { number, time, tx_hash })
    }

    /// The first block at or after `at` that does not exist yet: its number and time.
    pub(super) fn next_block_at(&self, at: Timestamp) -> (u64, BlockTime) {
        let at_ms = millis(at.since(self.settings.genesis));
        let before = self.newest_at(at);
        let first_from = if self.block_ms(before) < at_ms { before + 1 } else { before };
        let number = first_from.max(self.head(&self.view) + 1);
        (number, self.time_of(number))
    }

    fn is_taken(&self, spent: Spent) -> bool {
        self.scheduled_spent.contains(&spent) || self.is_spent(&self.view, spent, u64::MAX)
    }

    /// Whether a nonce of Permit2 is set, or will be.
    pub(super) fn permit_taken(&self, owner: Address, nonce: B256) -> bool {
        self.is_taken(Spent::Permit(owner, nonce))
    }

    /// Replaces the newest `depth` blocks by empty ones: what they held is gone, and its nonces are unused
    /// again. Transactions of blocks that do not exist yet stay.
    pub fn reorg(&mut self, depth: u64) -> Result<(), SimError> {
        let head = self.head(&self.view);
        let finalized = self.finalized(&self.view);
        if depth > head - finalized {
            return Err(SimError::ReorgTooDeep { depth, head, finalized });
        }
        if depth == 0 {
            return Ok(());
        }
        let from = head - depth + 1;
        self.view.branches.retain(|branch| branch.from < from);
        self.view.branches.push(Branch { from, id: self.branches_made });
        self.branches_made += 1;
        Ok(())
    }

    /// The chain makes no block for `pause` longer than usual, as when its sequencer is out. Transactions
    /// that wait for later blocks come later, too.
    pub fn pause(&mut self, pause: Duration) {
        let next = self.head(&self.view) + 1;
        let start_ms = self.block_ms(next).saturating_add(millis(pause));
        self.stretches.retain(|stretch| stretch.first < next);
        self.stretches.push(Stretch { first: next, start_ms });
    }

    /// Takes the code at Multicall3's address away: not every chain has it.
    pub fn remove_multicall(&mut self) {
        self.has_multicall = false;
    }

    /// Whether Multicall3 is there.
    pub fn has_multicall(&self) -> bool {
        self.has_multicall
    }

    /// The number of the newest block.
    pub fn head(&self, view: &View) -> u64 {
        self.newest_at(view.now)
    }

    /// The number of the newest safe block.
    pub fn safe(&self, view: &View) -> u64 {
        self.newest_at(view.now.saturating_sub(self.settings.safe_lag))
    }

    /// The number of the newest final block.
    pub fn finalized(&self, view: &View) -> u64 {
        self.newest_at(view.now.saturating_sub(self.settings.finalized_lag))
    }

    /// The block with this number, if it exists.
    pub fn block(&self, view: &View, number: u64) -> Option<BlockRef> {
        (number <= self.head(view)).then(|| BlockRef {
            number,
            hash: view.hash_of(number),
            time: self.time_of(number),
        })
    }

    /// The number of the canonical block with this hash.
    pub fn number_of(&self, view: &View, hash: B256) -> Option<u64> {
        let number = U256::from_be_slice(&hash[24..]).to::<u64>();
        (number <= self.head(view) && view.hash_of(number) == hash).then_some(number)
    }

    /// The hash of the block before this one.
    pub fn parent_hash(&self, view: &View, number: u64) -> B256 {
        number.checked_sub(1).map_or(B256::ZERO, |parent| view.hash_of(parent))
    }

    /// What the canonical block with this number holds; `None` when it is empty or does not exist.
    pub fn contents(&self, view: &View, number: u64) -> Option<&Contents> {
        (number <= self.head(view)).then_some(())?;
        let branch = view.branch_at(number);
        self.blocks.get(&number)?.iter().find(|contents| contents.branch == branch)
    }

    /// The canonical blocks of a range that are not empty. Costs nothing for those that are.
    pub fn contents_between<'a>(
        &'a self,
        view: &'a View,
        first: u64,
        last: u64,
    ) -> impl Iterator<Item = (u64, &'a Contents)> {
        let last = last.min(self.head(view));
        let range = (first <= last).then(|| self.blocks.range(first..=last));
        range.into_iter().flatten().filter_map(move |(number, branches)| {
            let branch = view.branch_at(*number);
            branches.iter().find(|contents| contents.branch == branch).map(|c| (*number, c))
        })
    }

    /// How much of the token `to` has received on the canonical branch.
    pub fn received(&self, to: Address) -> Amount {
        let blocks = self.contents_between(&self.view, 0, u64::MAX);
        blocks
            .flat_map(|(_, contents)| &contents.transactions)
            .flat_map(|transaction| &transaction.events)
            .filter_map(|event| match event {
                ChainEvent::Transfer(_, receiver, value) if *receiver == to => Some(*value),
                _ => None,
            })
            .fold(Amount::ZERO, Amount::saturating_add)
    }

    /// Where a transaction is: block number and index; `None` unless its block is canonical.
    pub fn find_transaction(&self, view: &View, hash: B256) -> Option<(u64, usize)> {
        let place = self.transactions.get(&hash)?;
        let canonical =
            place.number <= self.head(view) && view.branch_at(place.number) == place.branch;
        canonical.then_some((place.number, place.index))
    }

    /// `authorizationState` as of block `number`: whether the nonce is used or canceled.
    pub fn nonce_used(&self, view: &View, payer: Address, nonce: B256, number: u64) -> bool {
        self.is_spent(view, Spent::Authorization(payer, nonce), number)
    }

    /// Whether a nonce of Permit2 is set as of block `number`.
    pub fn permit_used(&self, view: &View, owner: Address, nonce: B256, number: u64) -> bool {
        self.is_spent(view, Spent::Permit(owner, nonce), number)
    }

    fn is_spent(&self, view: &View, spent: Spent, number: u64) -> bool {
        let last = number.min(self.head(view));
        self.spent.get(&spent).is_some_and(|uses| {
            uses.iter().any(|(at, branch)| *at <= last && view.branch_at(*at) == *branch)
        })
    }

    fn block_time_ms(&self) -> u64 {
        millis(self.settings.block_time).max(1)
    }

    fn stretch(&self, is_before: impl Fn(&Stretch) -> bool) -> (Stretch, Option<&Stretch>) {
        let after = self.stretches.partition_point(is_before);
        let genesis = Stretch { first: 0, start_ms: 0 };
        let current = after.checked_sub(1).map_or(genesis, |at| self.stretches[at]);
        (current, self.stretches.get(after))
    }

    /// The newest block at `moment`; the genesis block before that.
    fn newest_at(&self, moment: Timestamp) -> u64 {
        let ms = millis(moment.since(self.settings.genesis));
        let (stretch, next) = self.stretch(|stretch| stretch.start_ms <= ms);
        let regular = stretch.first + (ms - stretch.start_ms) / self.block_time_ms();
        next.map_or(regular, |next| regular.min(next.first - 1))
    }

    /// A block's time, in milliseconds after genesis.
    fn block_ms(&self, number: u64) -> u64 {
        let (stretch, _) = self.stretch(|stretch| stretch.first <= number);
        let regular = (number - stretch.first).saturating_mul(self.block_time_ms());
        stretch.start_ms.saturating_add(regular)
    }

    /// A block's time in whole seconds; blocks closer together than a second share one.
    fn time_of(&self, number: u64) -> BlockTime {
        let after = Duration::from_millis(self.block_ms(number));
        let at = self.settings.genesis.saturating_add(after);
        BlockTime::from_secs(u64::try_from(at.as_millis() / 1_000).unwrap_or(0))
    }
}

impl View {
    fn branch_at(&self, number: u64) -> u32 {
        let after = self.branches.partition_point(|branch| branch.from <= number);
        // The first branch starts at genesis, so there always is one.
        after.checked_sub(1).map_or(0, |at| self.branches[at].id)
    }

    /// A block's hash: keccak of chain, branch and number, its last 8 bytes the number, so that a block
    /// can be found by hash without an index of every block there is.
    fn hash_of(&self, number: u64) -> B256 {
        let mut seed = [0; 20];
        seed[..8].copy_from_slice(&self.chain_id.get().to_be_bytes());
        seed[8..12].copy_from_slice(&self.branch_at(number).to_be_bytes());
        seed[12..].copy_from_slice(&number.to_be_bytes());
        let mut hash = keccak256(seed);
        hash[24..].copy_from_slice(&number.to_be_bytes());
        hash
    }
}

fn authorized_events(transfer: &Authorized) -> Vec<ChainEvent> {
    let Authorized { payer, to, value, nonce } = *transfer;
    vec![ChainEvent::Used(payer, nonce), ChainEvent::Transfer(payer, to, value)]
}

/// The authorization an event tells of.
fn spent_by(event: &ChainEvent) -> Option<Spent> {
    match *event {
        ChainEvent::Used(payer, nonce) | ChainEvent::Canceled(payer, nonce) => {
            Some(Spent::Authorization(payer, nonce))
        }
        ChainEvent::Transfer(..) | ChainEvent::Invalidated(..) | ChainEvent::ProxySettled(_) => {
            None
        }
    }
}

fn transaction_hash(chain_id: ChainId, count: u64) -> B256 {
    let [chain_id, count] = [chain_id.get().to_be_bytes(), count.to_be_bytes()];
    keccak256([b"transaction".as_slice(), &chain_id, &count].concat())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "chain_tests.rs"]
mod tests;
