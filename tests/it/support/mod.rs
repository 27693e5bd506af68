//! What the tests stand on: private servers, a gateway to play, keys to sign with.

pub(crate) mod anvil;
pub(crate) mod daemon;
pub(crate) mod dice;
pub(crate) mod fault_proxy;
pub(crate) mod node;
pub(crate) mod postgres;
pub(crate) mod worker;
