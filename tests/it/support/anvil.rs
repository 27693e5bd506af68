//! anvil
