//! Proof of the pure core: decision tables first, then properties over arbitrary evidence, then a model
//! of a whole shop (chain, gateway, daemon) run through arbitrary histories.

mod support;

mod conservation;
mod flags;
mod histories;
mod judge;
mod model;
mod parse;
mod permit2;
mod refunds;
mod resolve;
mod standing;
