//! stops
