//! reorgs
