//! chain_reader
