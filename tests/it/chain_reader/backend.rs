//! What a chain under test must be able to do, and what every case needs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use alloy_primitives::{Address, B256, U256, keccak256};
use reconciled::chain::{
    Breadth, Chain, ChainSettings, EndpointSettings, Permit2Settings, RpcObserver,
};
use reconciled::clock::ManualClock;
use reconciled::domain::{
    Amount, BlockRef, BlockTime, ChainId, EndpointName, Evidence, Method, Observation, OrderId,
    Payment, PaymentId, PaymentStatus, Rail, ReadFailureKind, Timestamp, failure_of,
};
use url::Url;

pub(crate) use crate::support::anvil::{Authorization, Permit, Through};

/// A chain with one EIP-3009 token and Multicall3, made for one test.
///
/// Blocks are at most a few seconds apart, except where [`Self::advance`] says otherwise. `finalized` is
/// a few blocks behind the head: mining [`FINALIZED_AFTER`] blocks finalizes what is there.
pub(crate) trait TestChain: Sized {
    /// A fresh one, with at least [`HISTORY`] blocks.
    async fn start() -> Self;
    /// Where it speaks JSON-RPC.
    fn url(&self) -> Url;
    /// Its id.
    fn chain_id(&self) -> ChainId;
    /// The token.
    fn token(&self) -> Address;
    /// Payer number `n`, below [`PAYERS`], who holds enough of the token.
    fn payer(&self, n: u64) -> Address;
    /// Who sends the transactions, where nothing else is said.
    fn facilitator(&self) -> Address;
    /// The head.
    async fn head(&self) -> BlockRef;
    /// Uses these authorizations in one transaction, mined in a block of its own.
    async fn transfer(&self, authorizations: &[Authorization]) -> Mined;
    /// Cancels this authorization.
    async fn cancel(&self, authorization: &Authorization) -> Mined;
    /// Settles with these permits in one transaction, mined in a block of its own. The log indices of what
    /// came of it are those of their transfers.
    async fn settle_permits(&self, permits: &[Permit], through: Through) -> Mined;
    /// The owner sets the bits of `mask` in a word of his nonces at Permit2.
    async fn invalidate(&self, owner: Address, word: U256, mask: U256) -> Mined;
    /// Mines a transaction that tries to use this authorization and fails.
    async fn fail(&self, authorization: &Authorization);
    /// Mines blocks.
    async fn mine(&self, count: u64);
    /// Mines a block that is this much younger than the head, or as near to that as the chain can.
    async fn advance(&self, secs: u64);
    /// Replaces the last `depth` blocks by others without their transactions.
    async fn reorg(&self, depth: u64);
    /// Takes the code at Multicall3's address away.
    async fn remove_multicall(&self);
}

/// Longer than any read of a test takes.
const READ_WITHIN: Duration = Duration::from_secs(120);

/// So many blocks exist from the start.
pub(crate) const HISTORY: u64 = 20;
/// So many payers hold the token.
pub(crate) const PAYERS: u64 = 100;
/// So many more blocks finalize what is there.
pub(crate) const FINALIZED_AFTER: u64 = 8;

/// A transaction that was mined.
#[derive(Debug, Clone)]
pub(crate) struct Mined {
    pub(crate) block: BlockRef,
    pub(crate) tx_hash: B256,
    /// The index of each log that shows a consumption, in order.
    pub(crate) logs: Vec<u64>,
}

/// Who is paid.
pub(crate) const PAY_TO: Address = Address::repeat_byte(0x77);

/// An authorization of payer `n` to pay [`PAY_TO`] one unit, good from now on for ten minutes.
pub(crate) async fn authorization(chain: &impl TestChain, n: u64) -> Authorization {
    let now = chain.head().await.time.as_secs();
    Authorization {
        payer: chain.payer(n),
        to: PAY_TO,
        value: 1_000_000,
        valid_after: now - 1,
        valid_before: now + 600,
        nonce: keccak256(format!("nonce {n} {now}")),
    }
}

/// A permit of payer `n` to pay [`PAY_TO`] exactly one unit, good for ten minutes.
pub(crate) async fn permit(chain: &impl TestChain, n: u64) -> Permit {
    let now = chain.head().await.time.as_secs();
    Permit {
        owner: chain.payer(n),
        to: PAY_TO,
        amount: 1_000_000,
        upto: None,
        deadline: now + 600,
        nonce: keccak256(format!("permit {n} {now}")),
    }
}

/// The payment that claims `permit`, started at the head's time.
pub(crate) async fn permit_payment(chain: &impl TestChain, permit: &Permit) -> Payment {
    let authorization = Authorization {
        payer: permit.owner,
        to: permit.to,
        value: permit.amount,
        valid_after: 0,
        valid_before: permit.deadline,
        nonce: permit.nonce,
    };
    Payment { method: Method::Permit2, ..payment(chain, &authorization).await }
}

/// The payment that claims `authorization`, started at the head's time.
pub(crate) async fn payment(chain: &impl TestChain, authorization: &Authorization) -> Payment {
    let now = Timestamp::from(chain.head().await.time);
    Payment {
        id: PaymentId::from(format!("p-{}", authorization.nonce).as_str()),
        order_id: OrderId::from("o"),
        rail: Rail::X402,
        method: Method::Eip3009,
        chain_id: chain.chain_id(),
        token: chain.token(),
        payer: authorization.payer,
        pay_to: authorization.to,
        amount: Amount::new(U256::from(authorization.value)),
        nonce: authorization.nonce,
        valid_after: BlockTime::from_secs(authorization.valid_after),
        valid_before: BlockTime::from_secs(authorization.valid_before),
        tx_hash: None,
        status: PaymentStatus::Unknown,
        created_at: now,
        broadcast_at: Some(now),
    }
}

/// Counts calls by method and outcome.
#[derive(Debug, Default)]
pub(crate) struct Calls(Mutex<BTreeMap<(&'static str, &'static str), usize>>);

impl Calls {
    pub(crate) fn total(&self) -> usize {
        self.0.lock().unwrap().values().sum()
    }

    pub(crate) fn of(&self, method: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|((m, _), _)| *m == method).map(|(_, n)| n).sum()
    }

    pub(crate) fn with_outcome(&self, outcome: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|((_, o), _)| *o == outcome).map(|(_, n)| n).sum()
    }
}

impl RpcObserver for Calls {
    fn called(
        &self,
        _: ChainId,
        _: &EndpointName,
        method: &'static str,
        outcome: &'static str,
        _: Duration,
    ) {
        *self.0.lock().unwrap().entry((method, outcome)).or_default() += 1;
    }
}

/// The reader under test.
pub(crate) struct Reader {
    pub(crate) chain: Chain,
    pub(crate) calls: Arc<Calls>,
    clock: Arc<ManualClock>,
}

/// Settings for `chain`, read through `urls`, named a, b, c, …
pub(crate) fn settings(chain: &impl TestChain, urls: &[Url]) -> ChainSettings {
    let named = urls
        .iter()
        .zip('a'..)
        .map(|(url, name)| EndpointSettings::new(&name.to_string(), url.clone()));
    ChainSettings {
        block_time: Duration::from_secs(1),
        log_lookback: Duration::from_secs(5),
        log_range_max: 1_000,
        batch_max: 250,
        permit2: Permit2Settings {
            upto_facilitators: vec![chain.facilitator()],
            ..Permit2Settings::default()
        },
        request_timeout: Duration::from_secs(20),
        ..ChainSettings::new(chain.chain_id(), named.collect())
    }
}

impl Reader {
    pub(crate) fn with(settings: ChainSettings) -> Self {
        let calls = Arc::new(Calls::default());
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(0)));
        Self { chain: Chain::new(settings, calls.clone(), clock.clone()).unwrap(), calls, clock }
    }

    /// Reads `chain` directly.
    pub(crate) fn of(chain: &impl TestChain) -> Self {
        Self::with(settings(chain, &[chain.url()]))
    }

    pub(crate) async fn read(&self, payments: &[Payment]) -> Vec<Evidence> {
        self.read_at(payments, Breadth::FirstAnswer, 0).await
    }

    /// Sets the local clock.
    pub(crate) fn set_clock(&self, now: Timestamp) {
        self.clock.set(now);
    }

    /// Reads when the local clock shows `now_secs`.
    pub(crate) async fn read_at(
        &self,
        payments: &[Payment],
        breadth: Breadth,
        now_secs: i64,
    ) -> Vec<Evidence> {
        let now = Timestamp::from_millis(now_secs * 1_000);
        self.read_within(payments, breadth, now, READ_WITHIN).await
    }

    /// Reads in no longer than `within`.
    pub(crate) async fn read_within(
        &self,
        payments: &[Payment],
        breadth: Breadth,
        now: Timestamp,
        within: Duration,
    ) -> Vec<Evidence> {
        self.clock.set(now);
        let evidence = self.chain.read(payments, breadth, now, within).await;
        assert_eq!(evidence.len(), payments.len());
        evidence
    }

    pub(crate) async fn read_one(&self, payment: &Payment) -> Evidence {
        self.read(std::slice::from_ref(payment)).await.remove(0)
    }
}

/// What the only endpoint asked observed.
pub(crate) fn observed(evidence: &Evidence) -> &Observation {
    let [reading] = evidence.readings.as_slice() else { panic!("one reading: {evidence:?}") };
    reading.outcome.as_ref().unwrap_or_else(|failure| panic!("{failure}"))
}

/// Why each endpoint asked gave no evidence, or none of how an authorization was used.
pub(crate) fn failures(evidence: &Evidence) -> Vec<Option<ReadFailureKind>> {
    evidence.readings.iter().map(|r| failure_of(&r.outcome).map(|f| f.kind)).collect()
}
