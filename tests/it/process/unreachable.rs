//! unreachable
