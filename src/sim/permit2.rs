//! Permit2 and the two x402 proxies on the simulated chain: what their transactions look like to a reader.

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_sol_types::SolCall;

use super::abi::{self, exact, upto};
use super::chain::{ChainEvent, ChainState, Included, SimError, View};
use crate::chain::{MULTICALL3, PERMIT2, X402_EXACT_PROXY, X402_UPTO_PROXY};
use crate::domain::{Amount, BlockTime, Timestamp};

/// A permit, and what is settled with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permitted {
    /// Who signed.
    pub owner: Address,
    /// Who is paid, by the witness.
    pub to: Address,
    /// What was signed for.
    pub amount: Amount,
    /// What moves: less, or `None` for the exact proxy, which moves what was signed for.
    pub upto: Option<Amount>,
    /// Who settles: of `upto`, whoever the payer names.
    pub settler: Address,
    /// The permit's nonce.
    pub nonce: B256,
    /// The last second at which Permit2 takes it.
    pub deadline: BlockTime,
}

impl Permitted {
    fn proxy(&self) -> Address {
        if self.upto.is_some() { X402_UPTO_PROXY } else { X402_EXACT_PROXY }
    }

    fn value(&self) -> Amount {
        self.upto.unwrap_or(self.amount)
    }

    /// The call of the proxy, as a facilitator sends it. Nobody checks its signature here.
    fn call(&self, token: Address) -> Vec<u8> {
        let (owner, to, signature) = (self.owner, self.to, Bytes::from(vec![0x1b; 65]));
        let (most, nonce) = (self.amount.get(), U256::from_be_bytes(self.nonce.0));
        let deadline = U256::from(self.deadline.as_secs());
        match self.upto {
            None => {
                let permitted = exact::TokenPermissions { token, amount: most };
                let permit = exact::PermitTransferFrom { permitted, nonce, deadline };
                let witness = exact::Witness { to, validAfter: U256::ZERO };
                exact::settleCall { permit, owner, witness, signature }.abi_encode()
            }
            Some(amount) => {
                let permitted = upto::TokenPermissions { token, amount: most };
                let permit = upto::PermitTransferFrom { permitted, nonce, deadline };
                let witness =
                    upto::Witness { to, facilitator: self.settler, validAfter: U256::ZERO };
                let amount = amount.get();
                upto::settleCall { permit, amount, owner, witness, signature }.abi_encode()
            }
        }
    }

    fn events(&self) -> [ChainEvent; 2] {
        let moved = ChainEvent::Transfer(self.owner, self.to, self.value());
        [moved, ChainEvent::ProxySettled(self.proxy())]
    }
}

impl ChainState {
    /// Settles with a permit, by a call of its proxy, in the block at `at` (see [`Self::transfer`]).
    pub fn settle_permit(
        &mut self,
        at: Timestamp,
        permit: &Permitted,
    ) -> Result<Included, SimError> {
        let call = permit.call(self.settings().token);
        self.include_permits(at, std::slice::from_ref(permit), permit.proxy(), call)
    }

    /// Settles with several permits in one transaction, through Multicall3.
    pub fn batch_permits(
        &mut self,
        at: Timestamp,
        permits: &[Permitted],
    ) -> Result<Included, SimError> {
        let token = self.settings().token;
        let call = |permit: &Permitted| abi::Call3 {
            target: permit.proxy(),
            allowFailure: true,
            callData: permit.call(token).into(),
        };
        let calls = permits.iter().map(call).collect();
        self.include_permits(at, permits, MULTICALL3, abi::aggregate3Call { calls }.abi_encode())
    }

    /// Settles with a permit through a contract in whose calldata the call cannot be found.
    pub fn settle_permit_unseen(
        &mut self,
        at: Timestamp,
        permit: &Permitted,
    ) -> Result<Included, SimError> {
        let obscured = permit.call(self.settings().token).into_iter().map(|byte| !byte).collect();
        self.include_permits(at, std::slice::from_ref(permit), MULTICALL3, obscured)
    }

    fn include_permits(
        &mut self,
        at: Timestamp,
        permits: &[Permitted],
        to: Address,
        input: Vec<u8>,
    ) -> Result<Included, SimError> {
        // A block that is asked for too late comes later: what counts is the block it will be in.
        let time = self.next_block_at(at).1;
        if let Some(late) = permits.iter().find(|permit| time > permit.deadline) {
            return Err(SimError::PermitExpired { deadline: late.deadline, time });
        }
        let events = permits.iter().flat_map(Permitted::events).collect();
        let used = permits.iter().map(|permit| (permit.owner, permit.nonce)).collect();
        self.include_call(at, permits[0].settler, to, input.into(), events, used)
    }

    /// The owner sets the bits of `mask` in a word of his nonces, used or not.
    pub fn invalidate(
        &mut self,
        at: Timestamp,
        owner: Address,
        word: U256,
        mask: U256,
    ) -> Result<Included, SimError> {
        let call = abi::invalidateUnorderedNoncesCall { wordPos: word, mask }.abi_encode();
        let events = vec![ChainEvent::Invalidated(owner, word, mask)];
        let bits = (0..256).filter(|bit| mask.bit(*bit));
        let nonces = bits.map(|bit| B256::from((word << 8) | U256::from(bit)));
        let unset = nonces.filter(|nonce| !self.permit_taken(owner, *nonce));
        let unset: Vec<_> = unset.map(|nonce| (owner, nonce)).collect();
        self.include_call(at, owner, PERMIT2, call.into(), events, unset)
    }

    /// `nonceBitmap` as of block `number`.
    pub fn nonce_bitmap(&self, view: &View, owner: Address, word: U256, number: u64) -> U256 {
        let set = |bit: &usize| {
            let nonce = B256::from((word << 8) | U256::from(*bit));
            self.permit_used(view, owner, nonce, number)
        };
        let bits = (0..256usize).filter(set);
        bits.fold(U256::ZERO, |word, bit| word | (U256::ONE << bit))
    }
}
