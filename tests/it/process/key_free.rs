//! key_free
