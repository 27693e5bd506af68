//! What the tests stand on: private servers, a gateway to play, keys to sign with.

pub(crate) mod anvil;
pub(crate) mod daemon;
pub(crate) mod postgres;
