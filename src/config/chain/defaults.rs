//! What holds of a chain where nothing is configured.

use alloy_primitives::Address;

use crate::chain::{ChainSettings, EndpointLimits};
use crate::config::{Span, secs};
use crate::domain::ChainId;

/// What [`ChainSettings::new`] sets where nothing else is configured.
fn chain() -> ChainSettings {
    ChainSettings::new(ChainId::new(0), Vec::new())
}
pub(super) fn block_time() -> Span {
    Span(chain().block_time)
}
pub(super) fn finality_margin() -> Span {
    secs(30 * 60)
}
pub(super) fn head_age_max() -> Span {
    Span(chain().head_age_max)
}
pub(super) fn head_lag_max() -> Span {
    Span(chain().head_lag_max)
}
pub(super) fn log_lookback() -> Span {
    Span(chain().log_lookback)
}
pub(super) fn log_range_max() -> u64 {
    chain().log_range_max
}
pub(super) fn batch_max() -> usize {
    chain().batch_max
}
pub(super) fn request_timeout() -> Span {
    Span(chain().request_timeout)
}
pub(super) fn hedge_after() -> Span {
    Span(chain().hedge_after)
}
pub(super) fn error_window() -> Span {
    Span(chain().error_rate.window)
}
pub(super) fn error_requests_min() -> u32 {
    chain().error_rate.requests_min
}
pub(super) fn error_share_max() -> f64 {
    chain().error_rate.share_max
}
pub(super) fn concurrency_max() -> usize {
    EndpointLimits::default().concurrency_max
}
pub(super) fn multicall3() -> Address {
    chain().multicall3
}
pub(super) fn permit2() -> Address {
    chain().permit2.permit2
}
pub(super) fn permit2_proxies() -> Vec<Address> {
    chain().permit2.proxies
}
