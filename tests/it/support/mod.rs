//! What the tests stand on: private servers, a gateway to play, keys to sign with.

pub mod anvil;
pub mod postgres;
