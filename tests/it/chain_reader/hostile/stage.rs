//! Contracts at a token's address that are no tokens, real money that only looks like a payment, and the
//! payments that claim all of it.

use alloy_primitives::{Address, B256, Bytes, U256, keccak256};
use alloy_sol_types::{SolCall, SolEvent, SolValue, sol};
use reconciled::chain::MULTICALL3;
use reconciled::domain::{Payment, PaymentId};
use serde_json::{Value, json};

use super::super::backend::{Authorization, FINALIZED_AFTER, TestChain, authorization, payment};
use super::super::on_anvil::OnAnvil;

sol! {
    struct Log {
        bytes32[] topics;
        bytes data;
    }
    struct Step {
        address target;
        bytes data;
    }
    function say(uint8 how, bytes what) external;
    function log(Log[] logs) external;
    function act(Step[] steps) external;
    function briefly(Log[] logs) external;
    function mint(address to, uint256 value) external;
    function transfer(address to, uint256 value) external returns (bool);
    function transferWithAuthorization(
        address from, address to, uint256 value, uint256 validAfter, uint256 validBefore,
        bytes32 nonce, bytes signature
    ) external;
    function cancelAuthorization(address authorizer, bytes32 nonce, bytes signature) external;
    event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
    event AuthorizationCanceled(address indexed authorizer, bytes32 indexed nonce);
    event Transfer(address indexed from, address indexed to, uint256 value);
}

/// How a puppet answers.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Answer {
    Bytes,
    Revert,
    BurnAllGas,
    TrueInOddBlocks,
    TrueInOddMinutes,
    Zeros,
}

/// Somebody who is not the merchant.
const ELSEWHERE: Address = Address::repeat_byte(0xe1);

/// A payment that must never be paid, and what may be concluded about it.
pub(super) struct Hostile {
    pub(super) name: &'static str,
    pub(super) payment: Payment,
    pub(super) verdicts: &'static [&'static str],
}

const USED_WITHOUT_LOG: &[&str] = &["inconclusive:used_without_log"];
const USED_WITHOUT_TRANSFER: &[&str] = &["inconclusive:used_without_transfer"];
const USED_ELSEWHERE: &[&str] = &["unsettleable:used_elsewhere"];
const CANCELED: &[&str] = &["unsettleable:canceled"];
const BAD_ANSWER: &[&str] = &["inconclusive:bad_answer"];
const NO_CODE: &[&str] = &["inconclusive:no_code"];
const NO_TOKEN: &[&str] =
    &["inconclusive:no_code", "inconclusive:bad_answer", "inconclusive:rpc_error"];
const UNUSED: &[&str] = &["pending", "unsettleable:expired"];
/// What read used once contradicts "unused" at a later block.
const FLICKERING: &[&str] = &[
    "pending",
    "unsettleable:expired",
    "inconclusive:used_without_log",
    "inconclusive:bad_answer",
];

fn log_of(topics: &[B256], data: Vec<u8>) -> Log {
    Log { topics: topics.to_vec(), data: data.into() }
}

fn used(a: &Authorization) -> Log {
    log_of(&[AuthorizationUsed::SIGNATURE_HASH, a.payer.into_word(), a.nonce], Vec::new())
}

fn canceled(a: &Authorization) -> Log {
    log_of(&[AuthorizationCanceled::SIGNATURE_HASH, a.payer.into_word(), a.nonce], Vec::new())
}

fn moved(from: Address, to: Address, value: u64) -> Log {
    let topics = [Transfer::SIGNATURE_HASH, from.into_word(), to.into_word()];
    log_of(&topics, U256::from(value).abi_encode())
}

fn paid(a: &Authorization) -> Log {
    moved(a.payer, a.to, a.value)
}

/// Everything as it should be.
fn whole(a: &Authorization) -> Vec<Log> {
    vec![used(a), paid(a)]
}

type Logs = fn(&Authorization) -> Vec<Log>;
type Words = fn() -> Vec<u8>;

/// Puppets that say "used" of everything, and what they emit.
const LIARS: [(&str, Logs, &[&str]); 20] = [
    ("says used and never was", |_| Vec::new(), USED_WITHOUT_LOG),
    ("only used", |a| vec![used(a)], USED_WITHOUT_TRANSFER),
    ("only transferred", |a| vec![paid(a)], USED_WITHOUT_LOG),
    (
        "another log between",
        |a| vec![used(a), log_of(&[keccak256("Approval"), a.nonce], Vec::new()), paid(a)],
        USED_WITHOUT_TRANSFER,
    ),
    ("the transfer comes first", |a| vec![paid(a), used(a)], USED_WITHOUT_TRANSFER),
    ("another amount", |a| vec![used(a), moved(a.payer, a.to, a.value - 1)], USED_ELSEWHERE),
    ("another recipient", |a| vec![used(a), moved(a.payer, ELSEWHERE, a.value)], USED_ELSEWHERE),
    ("another payer", |a| vec![used(a), moved(ELSEWHERE, a.to, a.value)], USED_WITHOUT_TRANSFER),
    ("used twice at once", |a| vec![used(a), used(a), paid(a)], BAD_ANSWER),
    (
        "used elsewhere, then here",
        |a| vec![used(a), moved(a.payer, ELSEWHERE, a.value), used(a), paid(a)],
        BAD_ANSWER,
    ),
    (
        "used here, then elsewhere",
        |a| vec![used(a), paid(a), used(a), moved(a.payer, ELSEWHERE, a.value)],
        BAD_ANSWER,
    ),
    ("used, then canceled", |a| vec![used(a), paid(a), canceled(a)], BAD_ANSWER),
    (
        "nothing of the use is indexed",
        |a| {
            let data = [a.payer.into_word(), a.nonce].concat();
            vec![log_of(&[AuthorizationUsed::SIGNATURE_HASH], data), paid(a)]
        },
        USED_WITHOUT_LOG,
    ),
    (
        "the use has a topic too many",
        |a| {
            let mut log = used(a);
            log.topics.push(a.nonce);
            vec![log, paid(a)]
        },
        USED_WITHOUT_LOG,
    ),
    (
        "the use has data",
        |a| vec![Log { data: a.nonce.to_vec().into(), ..used(a) }, paid(a)],
        USED_WITHOUT_LOG,
    ),
    (
        "nothing of the transfer is indexed",
        |a| {
            let data = (a.payer, a.to, U256::from(a.value)).abi_encode();
            vec![used(a), log_of(&[Transfer::SIGNATURE_HASH], data)]
        },
        USED_WITHOUT_TRANSFER,
    ),
    (
        "the transfer's amount is indexed",
        |a| {
            let mut log = paid(a);
            log.topics.push(U256::from(a.value).into());
            vec![used(a), Log { data: Bytes::new(), ..log }]
        },
        USED_WITHOUT_TRANSFER,
    ),
    (
        "the transfer has data too many",
        |a| {
            let data = (U256::from(a.value), U256::ZERO).abi_encode();
            vec![used(a), Log { data: data.into(), ..paid(a) }]
        },
        USED_WITHOUT_TRANSFER,
    ),
    (
        "the transfer has data too few",
        |a| {
            let data = U256::from(a.value).abi_encode()[1..].to_vec();
            vec![used(a), Log { data: data.into(), ..paid(a) }]
        },
        USED_WITHOUT_TRANSFER,
    ),
    (
        "an amount that wraps around",
        |a| {
            let value = U256::MAX - U256::from(a.value);
            vec![used(a), Log { data: value.abi_encode().into(), ..paid(a) }]
        },
        USED_ELSEWHERE,
    ),
];

/// Puppets whose logs are whole, and whose answers are not.
const MUTTERERS: [(&str, Answer, Words, &[&str]); 14] = [
    ("says unused after the use", Answer::Bytes, || false.abi_encode(), UNUSED),
    ("says nothing", Answer::Bytes, Vec::new, NO_CODE),
    ("says 31 bytes", Answer::Bytes, || vec![0; 31], BAD_ANSWER),
    ("says true and one byte", Answer::Bytes, || [true.abi_encode(), vec![0]].concat(), BAD_ANSWER),
    ("says true twice", Answer::Bytes, || (true, true).abi_encode(), BAD_ANSWER),
    ("says two", Answer::Bytes, || U256::from(2).abi_encode(), BAD_ANSWER),
    ("says all ones", Answer::Bytes, || U256::MAX.abi_encode(), BAD_ANSWER),
    (
        "says true at the wrong end",
        Answer::Bytes,
        || [vec![0x80], vec![0; 31]].concat(),
        BAD_ANSWER,
    ),
    ("says true as text", Answer::Bytes, || "true".abi_encode(), BAD_ANSWER),
    ("says 100 kB", Answer::Zeros, || U256::from(100_000).abi_encode(), BAD_ANSWER),
    ("says true and reverts", Answer::Revert, || true.abi_encode(), NO_CODE),
    ("reverts", Answer::Revert, Vec::new, NO_CODE),
    ("burns all gas", Answer::BurnAllGas, Vec::new, NO_TOKEN),
    ("burns all gas as well", Answer::BurnAllGas, Vec::new, NO_TOKEN),
];

/// What the chain holds against us.
pub(super) struct Stage {
    pub(super) chain: OnAnvil,
    pub(super) hostile: Vec<Hostile>,
    wallet: Address,
    signed: u64,
}

impl Stage {
    /// A chain with everything on it that is hostile, all of it final.
    pub(super) async fn start() -> Self {
        let chain = OnAnvil::start().await;
        let wallet = chain.0.anvil.deploy("Wallet", Vec::new()).await;
        let mut stage = Self { chain, hostile: Vec::new(), wallet, signed: 0 };
        let mint = mintCall { to: wallet, value: U256::from(1_000_000_000) };
        stage.send(stage.chain.token(), &mint).await;
        for (name, logs, verdicts) in LIARS {
            let says_used = (Answer::Bytes, true.abi_encode());
            stage.puppet(name, says_used, logs, verdicts).await;
        }
        for (name, how, what, verdicts) in MUTTERERS {
            stage.puppet(name, (how, what()), whole, verdicts).await;
        }
        for (name, how) in [
            ("used in odd blocks", Answer::TrueInOddBlocks),
            ("used in odd minutes", Answer::TrueInOddMinutes),
        ] {
            stage.puppet(name, (how, Vec::new()), |_| Vec::new(), FLICKERING).await;
        }
        stage.real_money_behind_a_forged_use().await;
        stage.a_transfer_of_another_contract().await;
        stage.a_transfer_in_the_next_transaction().await;
        stage.a_token_that_is_gone().await;
        stage.addresses_that_are_no_token().await;
        stage.chain.mine(FINALIZED_AFTER).await;
        stage
    }

    /// What a payer of its own signs.
    pub(super) async fn authorization(&mut self) -> Authorization {
        self.signed += 1;
        authorization(&self.chain, self.signed).await
    }

    async fn send(&self, to: Address, call: &impl SolCall) -> Value {
        self.chain.0.anvil.send_ok(Some(to), call.abi_encode().into()).await
    }

    async fn claim(
        &mut self,
        name: &'static str,
        token: Address,
        a: &Authorization,
        verdicts: &'static [&'static str],
    ) {
        let payment = payment(&self.chain, a).await;
        let id = PaymentId::from(name);
        self.hostile.push(Hostile { name, payment: Payment { id, token, ..payment }, verdicts });
    }

    async fn puppet(
        &mut self,
        name: &'static str,
        (how, what): (Answer, Vec<u8>),
        logs: Logs,
        verdicts: &'static [&'static str],
    ) -> Address {
        let a = self.authorization().await;
        // Claimed first: a payment is written before it is broadcast.
        let puppet = self.chain.0.anvil.deploy("Puppet", Vec::new()).await;
        self.claim(name, puppet, &a, verdicts).await;
        self.send(puppet, &sayCall { how: how as u8, what: what.into() }).await;
        self.send(puppet, &logCall { logs: logs(&a) }).await;
        puppet
    }

    /// The wallet pays the merchant with the real token, directly behind an `AuthorizationUsed` that a
    /// puppet forged; its real authorization went another way.
    async fn real_money_behind_a_forged_use(&mut self) {
        let (token, wallet) = (self.chain.token(), self.wallet);
        let puppet = self.chain.0.anvil.deploy("Puppet", Vec::new()).await;
        let step = |target: Address, data: Vec<u8>| Step { target, data: data.into() };
        let forged = |a: &Authorization| {
            let pay = transferCall { to: a.to, value: U256::from(a.value) };
            [
                step(puppet, logCall { logs: vec![used(a)] }.abi_encode()),
                step(token, pay.abi_encode()),
            ]
        };

        let a = Authorization { payer: wallet, ..self.authorization().await };
        self.claim("real money, never used", token, &a, UNUSED).await;
        self.send(wallet, &actCall { steps: forged(&a).to_vec() }).await;

        let a = Authorization { payer: wallet, ..self.authorization().await };
        self.claim("real money, canceled", token, &a, CANCELED).await;
        self.send(wallet, &actCall { steps: forged(&a).to_vec() }).await;
        let (authorizer, nonce) = (wallet, a.nonce);
        let cancel = cancelAuthorizationCall { authorizer, nonce, signature: Bytes::new() };
        self.send(token, &cancel).await;

        let a = Authorization { payer: wallet, ..self.authorization().await };
        self.claim("real money, used elsewhere", token, &a, USED_ELSEWHERE).await;
        let elsewhere = transferWithAuthorizationCall {
            from: wallet,
            to: ELSEWHERE,
            value: U256::from(a.value),
            validAfter: U256::from(a.valid_after),
            validBefore: U256::from(a.valid_before),
            nonce: a.nonce,
            signature: Bytes::new(),
        };
        let mut steps = vec![step(token, elsewhere.abi_encode())];
        steps.extend(forged(&a));
        self.send(wallet, &actCall { steps }).await;
    }

    async fn a_transfer_of_another_contract(&mut self) {
        let name = "another contract's transfer";
        let says_used = (Answer::Bytes, true.abi_encode());
        let puppet = self.puppet(name, says_used, |_| Vec::new(), USED_WITHOUT_TRANSFER).await;
        let other = self.chain.0.anvil.deploy("Puppet", Vec::new()).await;
        let last = &self.hostile[self.hostile.len() - 1].payment;
        let value = u64::try_from(last.amount.get()).unwrap();
        let use_it = log_of(
            &[AuthorizationUsed::SIGNATURE_HASH, last.payer.into_word(), last.nonce],
            vec![],
        );
        let pay = moved(last.payer, last.pay_to, value);
        let step =
            |target, log| Step { target, data: logCall { logs: vec![log] }.abi_encode().into() };
        let steps = vec![step(puppet, use_it), step(other, pay)];
        self.send(self.wallet, &actCall { steps }).await;
    }

    /// The transfer's index in the block is right, its transaction is not.
    async fn a_transfer_in_the_next_transaction(&mut self) {
        let name = "a transfer in the next transaction";
        let says_used = (Answer::Bytes, true.abi_encode());
        let puppet = self.puppet(name, says_used, |_| Vec::new(), USED_WITHOUT_TRANSFER).await;
        let last = &self.hostile[self.hostile.len() - 1].payment;
        let value = u64::try_from(last.amount.get()).unwrap();
        let use_it = log_of(
            &[AuthorizationUsed::SIGNATURE_HASH, last.payer.into_word(), last.nonce],
            vec![],
        );
        let pay = moved(last.payer, last.pay_to, value);
        let anvil = &self.chain.0.anvil;
        let before = anvil.block("latest").await.number;
        anvil.rpc("evm_setAutomine", json!([false])).await;
        let from = anvil.rpc("eth_accounts", json!([])).await[0].clone();
        for log in [use_it, pay] {
            let data = Bytes::from(logCall { logs: vec![log] }.abi_encode());
            let send = json!([{"from": from, "to": puppet, "data": data, "gas": "0x100000"}]);
            anvil.rpc("eth_sendTransaction", send).await;
        }
        anvil.mine(1).await;
        anvil.rpc("evm_setAutomine", json!([true])).await;
        let logs = anvil
            .rpc("eth_getLogs", json!([{"address": puppet, "fromBlock": format!("{before:#x}")}]))
            .await;
        let places: Vec<_> = logs.as_array().unwrap().iter().map(|log| &log["logIndex"]).collect();
        assert_eq!(places, ["0x0", "0x1"], "both in one block");
    }

    async fn a_token_that_is_gone(&mut self) {
        let says_used = || (Answer::Bytes, true.abi_encode());
        let emptied = self.puppet("its code was taken away", says_used(), whole, NO_CODE).await;
        self.chain.0.anvil.rpc("anvil_setCode", json!([emptied, "0x"])).await;

        let a = self.authorization().await;
        let receipt = self.send(self.wallet, &brieflyCall { logs: whole(&a) }).await;
        let token = serde_json::from_value(receipt["logs"][0]["address"].clone()).unwrap();
        self.claim("destroyed itself", token, &a, NO_CODE).await;
        let code = self.chain.0.anvil.rpc("eth_getCode", json!([token, "latest"])).await;
        assert_eq!(code, "0x", "it is gone");
    }

    async fn addresses_that_are_no_token(&mut self) {
        let batcher = self.chain.0.batcher;
        let nobody = self.chain.payer(0);
        for (name, token) in [
            ("Multicall3 as the token", MULTICALL3),
            ("another contract as the token", batcher),
            ("a person as the token", nobody),
            ("nobody as the token", Address::ZERO),
            ("precompile 1 as the token", Address::with_last_byte(1)),
            ("precompile 2 as the token", Address::with_last_byte(2)),
            ("precompile 3 as the token", Address::with_last_byte(3)),
            ("precompile 4 as the token", Address::with_last_byte(4)),
            ("precompile 5 as the token", Address::with_last_byte(5)),
            ("precompile 6 as the token", Address::with_last_byte(6)),
            ("precompile 7 as the token", Address::with_last_byte(7)),
            ("precompile 8 as the token", Address::with_last_byte(8)),
            ("precompile 9 as the token", Address::with_last_byte(9)),
        ] {
            let a = self.authorization().await;
            self.claim(name, token, &a, NO_TOKEN).await;
        }
    }
}
