//! Everything that needs a real database, a real EVM or the real binary. `./test.sh` brings them.

mod chain_reader;
mod postgres;
mod process;
mod sim_node;
mod store_conformance;
mod support;
