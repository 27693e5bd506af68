//! anvil, a real EVM, with a USDC-like token behind a proxy, Multicall3 and a batcher on it.
//!
//! Every test has its own, on a port the system chose; it ends with the test.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use alloy_primitives::{Address, B256, Bytes, U256, address, keccak256};
use alloy_signer::SignerSync;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{Eip712Domain, SolCall, SolStruct, SolValue, eip712_domain, sol};
use reconciled::chain::{MULTICALL3, PERMIT2, X402_EXACT_PROXY, X402_UPTO_PROXY};
use reconciled::domain::BlockRef;
use serde_json::{Value, json};
use url::Url;

use super::node::Node;

/// anvil's own default.
pub(crate) const ANVIL_CHAIN_ID: u64 = 31_337;

/// No answer from anvil for this long fails the test.
const PATIENCE: Duration = Duration::from_secs(30);

/// So many of the last blocks can be asked about states, and be taken away.
const STATES_KEPT: &str = "300";

/// Below the gas one transaction may have on recent forks.
const GAS: &str = "0xf42400";

mod abi {
    use super::sol;

    sol! {
        struct TransferWithAuthorization {
            address from;
            address to;
            uint256 value;
            uint256 validAfter;
            uint256 validBefore;
            bytes32 nonce;
        }
        struct CancelAuthorization {
            address authorizer;
            bytes32 nonce;
        }
        function mint(address to, uint256 value) external;
        function transfer(address to, uint256 value) external returns (bool);
        function cancelAuthorization(address authorizer, bytes32 nonce, bytes signature) external;
        function batch(address target, bytes[] calls) external;
        function forge(address authorizer, bytes32 nonce, address to, uint256 value) external;
        function obscured(address target, bytes inverted) external;
        function invalidateUnorderedNonces(uint256 wordPos, uint256 mask) external;
        struct Call3 { address target; bool allowFailure; bytes callData; }
        function aggregate3(Call3[] calls) external payable;
    }

    /// What is signed for, and called with, at the exact proxy.
    pub(super) mod exact {
        alloy_sol_types::sol! {
            struct TokenPermissions { address token; uint256 amount; }
            struct Witness { address to; uint256 validAfter; }
            struct PermitWitnessTransferFrom {
                TokenPermissions permitted;
                address spender;
                uint256 nonce;
                uint256 deadline;
                Witness witness;
            }
            struct PermitTransferFrom { TokenPermissions permitted; uint256 nonce; uint256 deadline; }
            function settle(
                PermitTransferFrom permit, address owner, Witness witness, bytes signature
            ) external;
        }
    }

    /// What is signed for, and called with, at the upto proxy: here with an EIP-2612 permit in front, for
    /// tests to see both.
    pub(super) mod upto {
        alloy_sol_types::sol! {
            struct TokenPermissions { address token; uint256 amount; }
            struct Witness { address to; address facilitator; uint256 validAfter; }
            struct PermitWitnessTransferFrom {
                TokenPermissions permitted;
                address spender;
                uint256 nonce;
                uint256 deadline;
                Witness witness;
            }
            struct PermitTransferFrom { TokenPermissions permitted; uint256 nonce; uint256 deadline; }
            struct EIP2612Permit { uint256 value; uint256 deadline; bytes32 r; bytes32 s; uint8 v; }
            function settleWithPermit(
                EIP2612Permit permit2612, PermitTransferFrom permit, uint256 amount, address owner,
                Witness witness, bytes signature
            ) external;
        }
    }

    /// The overload that takes the signature in parts.
    pub(super) mod parts {
        alloy_sol_types::sol! {
            function transferWithAuthorization(
                address from, address to, uint256 value, uint256 validAfter, uint256 validBefore,
                bytes32 nonce, uint8 v, bytes32 r, bytes32 s
            ) external;
        }
    }

    /// The overload that takes the signature as bytes.
    pub(super) mod whole {
        alloy_sol_types::sol! {
            function transferWithAuthorization(
                address from, address to, uint256 value, uint256 validAfter, uint256 validBefore,
                bytes32 nonce, bytes signature
            ) external;
        }
    }
}

/// What a payer signs (EIP-3009 `TransferWithAuthorization`). Value in base units, times in Unix seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Authorization {
    pub(crate) payer: Address,
    pub(crate) to: Address,
    pub(crate) value: u64,
    pub(crate) valid_after: u64,
    pub(crate) valid_before: u64,
    pub(crate) nonce: B256,
}

/// A permit for one of x402's proxies, and what is settled with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Permit {
    pub(crate) owner: Address,
    pub(crate) to: Address,
    pub(crate) amount: u64,
    /// How much the upto proxy moves; `None` is for the exact proxy.
    pub(crate) upto: Option<u64>,
    pub(crate) deadline: u64,
    pub(crate) nonce: B256,
}

impl Permit {
    pub(crate) fn proxy(&self) -> Address {
        if self.upto.is_some() { X402_UPTO_PROXY } else { X402_EXACT_PROXY }
    }
}

/// Who sends anvil's transactions, where nothing else is said: its first account.
pub(crate) const ANVIL_SENDER: Address = address!("0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266");

/// How a permit reaches its proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Through {
    /// The transaction calls the proxy.
    Nobody,
    /// So it does, and the payer sends it himself.
    Payer,
    /// It calls Multicall3, with the call in its calldata.
    Multicall3,
    /// It calls a contract in whose calldata the call cannot be found.
    Obscurity,
}

/// The key of payer number `n`: anyone can know it.
pub(crate) fn payer_key(n: u64) -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&keccak256(format!("payer {n}"))).unwrap()
}

fn tool(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set: run ./test.sh"))
}

fn contract(name: &str, part: &str) -> Bytes {
    let path = format!("{}/{name}.json", tool("RECONCILED_TEST_CONTRACTS"));
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{path}: {error}: run ./test.sh"));
    let json: Value = serde_json::from_str(&text).unwrap();
    json[part].as_str().unwrap().parse().unwrap()
}

/// A running anvil.
pub(crate) struct Anvil {
    process: Child,
    node: Node,
}

impl Drop for Anvil {
    fn drop(&mut self) {
        // By its own id, which stays taken until it is waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Anvil {
    /// Starts anvil; `finalized` is two epochs of `slots_in_an_epoch` blocks behind the head.
    pub(crate) async fn start(slots_in_an_epoch: u64) -> Self {
        let mut process = Command::new(tool("RECONCILED_TEST_ANVIL"))
            .args(["--port", "0", "--accounts", "1"])
            // States in memory only: a reorg far from genesis loses the storage of those on disk.
            .args(["--prune-history", STATES_KEPT, "--slots-in-an-epoch"])
            .arg(slots_in_an_epoch.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("anvil starts: run ./test.sh");
        let output = process.stdout.take().unwrap();
        let (found, address) = mpsc::channel();
        // Reads on after that: a full pipe would stop anvil.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(address) = line.strip_prefix("Listening on ") {
                    let _ = found.send(address.to_owned());
                }
            }
        });
        let address = tokio::task::spawn_blocking(move || address.recv_timeout(PATIENCE));
        let mut anvil = Self { process, node: Node::at(Url::parse("http://x/").unwrap()) };
        let address = address.await.unwrap().expect("anvil says where it listens");
        anvil.node = Node::at(Url::parse(&format!("http://{address}")).unwrap());
        anvil
    }

    /// As a node that anybody can ask.
    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// Where it listens.
    pub(crate) fn url(&self) -> Url {
        self.node.url()
    }

    /// Any JSON-RPC call.
    pub(crate) async fn rpc(&self, method: &str, params: Value) -> Value {
        self.node.rpc(method, params).await
    }

    /// The block with this tag or hex number.
    pub(crate) async fn block(&self, block: &str) -> BlockRef {
        self.node.block(block).await
    }

    /// Mines `count` blocks, one second apart.
    pub(crate) async fn mine(&self, count: u64) {
        self.rpc("anvil_mine", json!([format!("{count:#x}"), "0x1"])).await;
    }

    /// Mines a block that is `secs` younger than the head.
    pub(crate) async fn advance(&self, secs: u64) {
        let time = self.block("latest").await.time.as_secs() + secs;
        self.rpc("evm_setNextBlockTimestamp", json!([time])).await;
        self.rpc("anvil_mine", json!(["0x1"])).await;
    }

    /// Replaces the last `depth` blocks by empty ones; their transactions are gone.
    pub(crate) async fn reorg(&self, depth: u64) {
        self.rpc("anvil_reorg", json!([depth, []])).await;
        self.rpc("anvil_dropAllTransactions", json!([])).await;
    }

    /// Keeps the state, to come back to with [`Self::revert`].
    pub(crate) async fn snapshot(&self) -> Value {
        self.rpc("evm_snapshot", json!([])).await
    }

    /// Goes back to a snapshot.
    pub(crate) async fn revert(&self, snapshot: Value) {
        assert_eq!(self.rpc("evm_revert", json!([snapshot])).await, json!(true));
    }

    /// Sends from anvil's own account, has it mined, and returns the receipt.
    pub(crate) async fn send(&self, to: Option<Address>, data: Bytes) -> Value {
        let from = self.rpc("eth_accounts", json!([])).await[0].clone();
        self.send_from(from, to, data).await
    }

    /// Lets this account send transactions.
    async fn impersonate(&self, account: Address) {
        self.rpc("anvil_setBalance", json!([account, "0xde0b6b3a7640000"])).await;
        self.rpc("anvil_impersonateAccount", json!([account])).await;
    }

    async fn send_from(&self, from: Value, to: Option<Address>, data: Bytes) -> Value {
        let mut transaction = json!({"from": from, "data": data, "gas": GAS});
        if let Some(to) = to {
            transaction["to"] = json!(to);
        }
        let hash = self.rpc("eth_sendTransaction", json!([transaction])).await;
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            let receipt = self.rpc("eth_getTransactionReceipt", json!([hash])).await;
            if !receipt.is_null() {
                return receipt;
            }
            assert!(std::time::Instant::now() < deadline, "no receipt of {hash}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The same, and it must succeed.
    pub(crate) async fn send_ok(&self, to: Option<Address>, data: Bytes) -> Value {
        let receipt = self.send(to, data).await;
        assert_eq!(receipt["status"], "0x1", "{receipt}");
        receipt
    }

    /// Deploys a contract of tests/contracts.
    pub(crate) async fn deploy(&self, name: &str, arguments: Vec<u8>) -> Address {
        let mut code = contract(name, "bytecode").to_vec();
        code.extend(arguments);
        let receipt = self.send_ok(None, code.into()).await;
        serde_json::from_value(receipt["contractAddress"].clone()).unwrap()
    }
}

/// A client for talking to nodes as a test, rather than as the daemon.
#[allow(clippy::disallowed_methods, reason = "not the daemon's own client")]
pub(crate) fn http_client() -> reqwest::Client {
    // Taken by whichever test comes first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().timeout(PATIENCE).no_proxy().build().unwrap()
}

/// A token on an anvil, with what it takes to use it.
pub(crate) struct TokenOnAnvil {
    pub(crate) anvil: Anvil,
    pub(crate) token: Address,
    pub(crate) batcher: Address,
    payers: std::collections::HashMap<Address, PrivateKeySigner>,
}

/// Payers that hold the token from the start.
pub(crate) const RICH_PAYERS: u64 = 100;

/// What each of them holds.
const RICHES: u64 = 1_000_000_000_000;

impl TokenOnAnvil {
    /// Starts anvil and deploys everything on it.
    pub(crate) async fn start(slots_in_an_epoch: u64) -> Self {
        let anvil = Anvil::start(slots_in_an_epoch).await;
        let code = contract("Multicall3", "deployedBytecode");
        anvil.rpc("anvil_setCode", json!([MULTICALL3, code])).await;
        for (address, name) in
            [(PERMIT2, "Permit2"), (X402_EXACT_PROXY, "ExactProxy"), (X402_UPTO_PROXY, "UptoProxy")]
        {
            let code = contract(name, "deployedBytecode");
            anvil.rpc("anvil_setCode", json!([address, code])).await;
        }
        let implementation = anvil.deploy("Token", Vec::new()).await;
        let token = anvil.deploy("TokenProxy", implementation.abi_encode()).await;
        let batcher = anvil.deploy("Batcher", Vec::new()).await;
        let payers = (0..RICH_PAYERS).map(payer_key).map(|key| (key.address(), key)).collect();
        let chain = Self { anvil, token, batcher, payers };
        let mint =
            |to: &Address| abi::mintCall { to: *to, value: U256::from(RICHES) }.abi_encode().into();
        chain.batch(chain.payers.keys().map(mint).collect()).await;
        chain
    }

    fn domain(&self) -> Eip712Domain {
        eip712_domain! {
            name: "USD Coin",
            version: "2",
            chain_id: ANVIL_CHAIN_ID,
            verifying_contract: self.token,
        }
    }

    fn sign(&self, payer: Address, message: &impl SolStruct) -> alloy_primitives::Signature {
        let digest = message.eip712_signing_hash(&self.domain());
        self.payers[&payer].sign_hash_sync(&digest).unwrap()
    }

    fn sign_transfer(&self, a: &Authorization) -> alloy_primitives::Signature {
        let message = abi::TransferWithAuthorization {
            from: a.payer,
            to: a.to,
            value: U256::from(a.value),
            validAfter: U256::from(a.valid_after),
            validBefore: U256::from(a.valid_before),
            nonce: a.nonce,
        };
        self.sign(a.payer, &message)
    }

    /// Calldata of the overload that takes the signature as bytes.
    pub(crate) fn transfer_call(&self, a: &Authorization) -> Bytes {
        abi::whole::transferWithAuthorizationCall {
            from: a.payer,
            to: a.to,
            value: U256::from(a.value),
            validAfter: U256::from(a.valid_after),
            validBefore: U256::from(a.valid_before),
            nonce: a.nonce,
            signature: self.sign_transfer(a).as_bytes().into(),
        }
        .abi_encode()
        .into()
    }

    /// Sends `transferWithAuthorization` with the signature in parts; the receipt, whatever it says.
    pub(crate) async fn transfer(&self, a: &Authorization) -> Value {
        let signature = self.sign_transfer(a);
        let call = abi::parts::transferWithAuthorizationCall {
            from: a.payer,
            to: a.to,
            value: U256::from(a.value),
            validAfter: U256::from(a.valid_after),
            validBefore: U256::from(a.valid_before),
            nonce: a.nonce,
            v: 27 + u8::from(signature.v()),
            r: signature.r().into(),
            s: signature.s().into(),
        };
        self.anvil.send(Some(self.token), call.abi_encode().into()).await
    }

    /// Sends `cancelAuthorization`, which must succeed.
    pub(crate) async fn cancel(&self, a: &Authorization) -> Value {
        let message = abi::CancelAuthorization { authorizer: a.payer, nonce: a.nonce };
        let signature = self.sign(a.payer, &message).as_bytes().into();
        let call = abi::cancelAuthorizationCall { authorizer: a.payer, nonce: a.nonce, signature };
        self.anvil.send_ok(Some(self.token), call.abi_encode().into()).await
    }

    /// Moves money without an authorization; it must succeed.
    pub(crate) async fn give(&self, from: Address, to: Address, value: u64) -> Value {
        self.anvil.impersonate(from).await;
        let call = abi::transferCall { to, value: U256::from(value) }.abi_encode();
        let receipt = self.anvil.send_from(json!(from), Some(self.token), call.into()).await;
        assert_eq!(receipt["status"], "0x1", "{receipt}");
        receipt
    }

    /// Sends several calls of the token in one transaction, which must succeed.
    pub(crate) async fn batch(&self, calls: Vec<Bytes>) -> Value {
        let receipt = self.try_batch(calls).await;
        assert_eq!(receipt["status"], "0x1", "{receipt}");
        receipt
    }

    /// The same, whatever becomes of it: all of them succeed or none.
    pub(crate) async fn try_batch(&self, calls: Vec<Bytes>) -> Value {
        let call = abi::batchCall { target: self.token, calls };
        self.anvil.send(Some(self.batcher), call.abi_encode().into()).await
    }

    /// Emits the events of a transfer by authorization from a contract that is not the token.
    pub(crate) async fn forge(&self, a: &Authorization) -> Value {
        let call = abi::forgeCall {
            authorizer: a.payer,
            nonce: a.nonce,
            to: a.to,
            value: U256::from(a.value),
        };
        self.anvil.send_ok(Some(self.batcher), call.abi_encode().into()).await
    }

    fn sign_permit(&self, owner: Address, message: &impl SolStruct) -> Bytes {
        let domain = eip712_domain! {
            name: "Permit2",
            chain_id: ANVIL_CHAIN_ID,
            verifying_contract: PERMIT2,
        };
        let digest = message.eip712_signing_hash(&domain);
        self.payers[&owner].sign_hash_sync(&digest).unwrap().as_bytes().into()
    }

    /// Calldata of the permit's proxy, called by `caller`.
    pub(crate) fn settle_call(&self, permit: &Permit, caller: Address) -> Bytes {
        let (spender, owner, to) = (permit.proxy(), permit.owner, permit.to);
        let (nonce, deadline) = (U256::from_be_bytes(permit.nonce.0), U256::from(permit.deadline));
        let most = U256::from(permit.amount);
        match permit.upto {
            None => {
                use abi::exact::*;
                let permitted = TokenPermissions { token: self.token, amount: most };
                let witness = Witness { to, validAfter: U256::ZERO };
                let signature = self.sign_permit(
                    owner,
                    &PermitWitnessTransferFrom {
                        permitted: permitted.clone(),
                        spender,
                        nonce,
                        deadline,
                        witness: witness.clone(),
                    },
                );
                let permit = PermitTransferFrom { permitted, nonce, deadline };
                settleCall { permit, owner, witness, signature }.abi_encode().into()
            }
            Some(amount) => {
                use abi::upto::*;
                let permitted = TokenPermissions { token: self.token, amount: most };
                let witness = Witness { to, facilitator: caller, validAfter: U256::ZERO };
                let signature = self.sign_permit(
                    owner,
                    &PermitWitnessTransferFrom {
                        permitted: permitted.clone(),
                        spender,
                        nonce,
                        deadline,
                        witness: witness.clone(),
                    },
                );
                settleWithPermitCall {
                    permit2612: EIP2612Permit {
                        value: most,
                        deadline,
                        r: B256::repeat_byte(1),
                        s: B256::repeat_byte(2),
                        v: 27,
                    },
                    permit: PermitTransferFrom { permitted, nonce, deadline },
                    amount: U256::from(amount),
                    owner,
                    witness,
                    signature,
                }
                .abi_encode()
                .into()
            }
        }
    }

    /// Settles with these permits in one transaction; the receipt, whatever it says. Only Multicall3 takes
    /// more than one, or fails one without the others.
    pub(crate) async fn settle_permits(&self, permits: &[Permit], through: Through) -> Value {
        let one = permits[0];
        let (to, data) = match through {
            Through::Nobody => {
                let accounts = self.anvil.rpc("eth_accounts", json!([])).await;
                assert_eq!(accounts[0].as_str().unwrap().parse(), Ok(ANVIL_SENDER));
                (one.proxy(), self.settle_call(&one, ANVIL_SENDER))
            }
            Through::Payer => {
                self.anvil.impersonate(one.owner).await;
                let call = self.settle_call(&one, one.owner);
                return self.anvil.send_from(json!(one.owner), Some(one.proxy()), call).await;
            }
            Through::Multicall3 => {
                let call = |permit: &Permit| abi::Call3 {
                    target: permit.proxy(),
                    allowFailure: true,
                    callData: self.settle_call(permit, MULTICALL3),
                };
                let calls = permits.iter().map(call).collect();
                (MULTICALL3, abi::aggregate3Call { calls }.abi_encode().into())
            }
            Through::Obscurity => {
                let call = self.settle_call(&one, self.batcher);
                let inverted: Vec<u8> = call.iter().map(|byte| !byte).collect();
                let target = one.proxy();
                let call = abi::obscuredCall { target, inverted: inverted.into() };
                (self.batcher, call.abi_encode().into())
            }
        };
        self.anvil.send(Some(to), data).await
    }

    /// The owner sets the bits of `mask` in a word of his nonces; it must succeed.
    pub(crate) async fn invalidate(&self, owner: Address, word: U256, mask: U256) -> Value {
        self.anvil.impersonate(owner).await;
        let call = abi::invalidateUnorderedNoncesCall { wordPos: word, mask };
        let receipt =
            self.anvil.send_from(json!(owner), Some(PERMIT2), call.abi_encode().into()).await;
        assert_eq!(receipt["status"], "0x1", "{receipt}");
        receipt
    }
}
