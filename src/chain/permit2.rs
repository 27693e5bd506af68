//! Permit2: how a nonce's state is read, and what proves its use (DESIGN section 6).
//!
//! Taken from Uniswap's Permit2 (Uniswap/permit2, `src/SignatureTransfer.sol`), as facts: a nonce is one
//! bit of `nonceBitmap(owner, nonce >> 8)`, set once and never cleared, for all tokens of the owner; a
//! transfer is refused from the second after its deadline on; a use emits no event of Permit2's; the owner
//! can set bits himself, used or not, which emits `UnorderedNonceInvalidation(owner, word, mask)`.
//!
//! So a set bit says neither paid nor canceled, and a `Transfer` of the payer says nothing of a nonce.
//! What is proof:
//!
//! 1. **Called directly.** The transaction of a transfer called one of the known x402 proxies, and its
//!    calldata names this owner, nonce, token and receiver ([`calldata`]). It succeeded, since it logged:
//!    so the proxy had Permit2 use this nonce for this money. Its only transfer from owner to receiver is
//!    the payment; the amount is what the log says. Less than was signed for is right only where a trusted
//!    facilitator sent the transaction and chose it (`upto`): a payer can sign his nonce once more for the
//!    `upto` proxy, name himself as the facilitator, and settle for one base unit. Whatever else moved, and
//!    is not the amount that was asked for, is other money than the payment's.
//! 2. **Called through Multicall3**, in a batch that calls the known proxies and nobody else. Any of its
//!    calls may have failed, so of those for this owner, token and receiver, the ones count whose bit was
//!    unset in the block before and is set in this one. It is proof when they and the transfers that a known
//!    proxy vouched for (its `Settled` event directly behind) are equally many, in the same order, with the
//!    very amounts; and no invalidation of the nonce is in this block. For each of those transfers was made
//!    by one of the calls, and its call counts: equally many, then, means that no other call does.
//!    In any other contract's calldata (a batcher, an ERC-4337 bundle) a call proves nothing: its payer can
//!    put it there, set the bit with a spender of his own, and have the transfer made by another permit,
//!    which then pays twice: once by whoever settled it, and once in the name of the call in sight.
//! 3. **Invalidated.** An invalidation covers the nonce; its bit was unset in the block before; and no
//!    transfer of that block that could be this payment's is unexplained. An owner may also invalidate what
//!    he has used, to look as if he had not paid: hence the look at the block before.
//!
//! Whatever else a bit was set by stays unproven: used without a log, as far as this reader can tell. A
//! caller whose calldata does not hold the call, or an owner who uses the nonce in another protocol or for
//! another token than those asked about, is such a case: the payment is flagged at its deadline, and never
//! paid or failed on a guess. Rules 2 and 3 need the state of an old block; an endpoint that has dropped
//! it gives no evidence about these payments.

mod calldata;
mod found;
mod search;
mod transactions;
mod vouched;

use alloy_primitives::{Address, B256, U256, address};
use alloy_sol_types::{SolCall, sol};

use super::ChainSettings;
use super::asked::Asked;
use super::multicall::StateCall;
pub(super) use calldata::{PermitCall, PermitCalls};

/// Permit2's canonical address, the same on nearly every chain that has it.
pub const PERMIT2: Address = address!("0x000000000022D473030F116dDEE9F6B43aC78BA3");
/// The canonical x402 proxy that moves exactly what was signed for.
pub const X402_EXACT_PROXY: Address = address!("0x402085c248EeA27D92E8b30b2C58ed07f9E20001");
/// The canonical x402 proxy that moves at most what was signed for.
pub const X402_UPTO_PROXY: Address = address!("0x4020A4f3b7b90ccA423B9fabCc0CE57C6C240002");

sol! {
    function nonceBitmap(address owner, uint256 wordPos) external view returns (uint256 bitmap);
}

/// Where Permit2 and the proxies are that may settle with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permit2Settings {
    /// Permit2.
    pub permit2: Address,
    /// The x402 proxies, exact and upto: their code is trusted to do what x402's does.
    pub proxies: Vec<Address>,
    /// The facilitators whose `upto` settlements may be for less than was signed for.
    pub upto_facilitators: Vec<Address>,
}

impl Default for Permit2Settings {
    fn default() -> Self {
        Self {
            permit2: PERMIT2,
            proxies: vec![X402_EXACT_PROXY, X402_UPTO_PROXY],
            upto_facilitators: Vec::new(),
        }
    }
}

/// The word of an owner's bitmap that holds a nonce, and the bit in it.
fn position(nonce: B256) -> (U256, usize) {
    (U256::from_be_bytes(nonce.0) >> 8, usize::from(nonce[31]))
}

fn bitmap_call(permit2: Address, owner: Address, nonce: B256) -> StateCall {
    let call = nonceBitmapCall { owner, wordPos: position(nonce).0 };
    StateCall { target: permit2, what: "nonceBitmap", data: call.abi_encode().into() }
}

/// The word of `nonceBitmap` that holds the nonce: nonces of one owner may share it.
pub(super) fn state_call(settings: &ChainSettings, asked: &Asked) -> StateCall {
    bitmap_call(settings.permit2.permit2, asked.payer, asked.nonce)
}

/// Whether the nonce's bit is set in its word.
pub(super) fn is_used(asked: &Asked, word: U256) -> bool {
    word.bit(position(asked.nonce).1)
}

#[cfg(test)]
mod tests {
    use alloy_primitives::hex;

    use super::*;

    #[test]
    fn a_nonce_is_one_bit_of_one_word() {
        assert_eq!(nonceBitmapCall::SELECTOR, hex!("4fe02b44"));
        let nonce = |n: U256| B256::from(n);
        assert_eq!(position(nonce(U256::ZERO)), (U256::ZERO, 0));
        assert_eq!(position(nonce(U256::from(255))), (U256::ZERO, 255));
        assert_eq!(position(nonce(U256::from(256))), (U256::ONE, 0));
        assert_eq!(position(nonce(U256::MAX)), (U256::MAX >> 8, 255));
    }
}
