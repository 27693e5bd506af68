//! Everything that needs a real database, a real EVM or the real binary. `./test.sh` brings them.

mod chain_reader;
mod process;
mod store_conformance;
mod support;
