//! `[[chains.endpoints]]`, and what they are tested with.

use alloy_primitives::{Address, B256};
use serde::Deserialize;
use url::Url;

use super::defaults;
use crate::chain::{EndpointLimits, EndpointSettings, KnownUsed};
use crate::config::{ConfigError, Secret, Span, bad};

/// `[[chains.known_used]]`
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownUsedSection {
    /// The token.
    pub token: Address,
    /// Who signed.
    pub payer: Address,
    /// The authorization's nonce.
    pub nonce: B256,
    /// The block that used or canceled it.
    pub block: u64,
}

impl KnownUsedSection {
    pub(super) const fn known(&self) -> KnownUsed {
        let Self { token, payer, nonce, block } = *self;
        KnownUsed { token, payer, nonce, block }
    }
}

/// `[[chains.endpoints]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointSection {
    /// Shown in logs, metrics and evidence.
    pub name: String,
    /// Where it is.
    #[serde(default)]
    pub url: Option<Secret>,
    /// The environment variable that holds the URL.
    #[serde(default)]
    pub url_env: Option<String>,
    /// Overrides the chain's `request_timeout`.
    #[serde(default)]
    pub request_timeout: Option<Span>,
    /// The most HTTP requests at a time.
    #[serde(default = "defaults::concurrency_max")]
    pub concurrency_max: usize,
    /// The most calls per second.
    #[serde(default)]
    pub requests_per_second: Option<u32>,
}

impl EndpointSection {
    pub(super) fn configured(
        &self,
        key: &str,
        environment: &impl Fn(&str) -> Option<String>,
    ) -> Result<EndpointSettings, ConfigError> {
        let text = match (&self.url, &self.url_env) {
            (Some(url), None) => url.0.clone(),
            (None, Some(name)) => environment(name).ok_or_else(|| {
                bad(format!("{key}.url_env"), format!("names {name}, which is not set"))
            })?,
            _ => return Err(bad(key, "must have either url or url_env")),
        };
        // The parser's own message could repeat the URL, which may hold a secret.
        let url = Url::parse(&text)
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or_else(|| bad(format!("{key}.url"), "must be an http:// or https:// URL"))?;
        if self.concurrency_max == 0 {
            return Err(bad(format!("{key}.concurrency_max"), "must be at least 1"));
        }
        if self.requests_per_second == Some(0) {
            let problem = "must be at least 1; leave it out for no limit";
            return Err(bad(format!("{key}.requests_per_second"), problem));
        }
        if self.request_timeout.is_some_and(|span| span.0.is_zero()) {
            return Err(bad(format!("{key}.request_timeout"), "must be longer than \"0s\""));
        }
        let limits = EndpointLimits {
            request_timeout: self.request_timeout.map(|span| span.0),
            concurrency_max: self.concurrency_max,
            calls_per_second: self.requests_per_second,
        };
        Ok(EndpointSettings { limits, ..EndpointSettings::new(&self.name, url) })
    }
}
