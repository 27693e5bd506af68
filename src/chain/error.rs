//! What can go wrong with one JSON-RPC call, and what it means for the reader.
//!
//! Nodes have no common words for "that range is too wide" or "slow down": the tables here are data, and
//! grow with every node that finds a new phrase.

use crate::domain::{ReadFailure, ReadFailureKind};

/// One JSON-RPC call that gave no result. No variant ever holds the endpoint's URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    /// The method is not on the allow-list (I1); nothing was sent.
    #[error("method {0} is not on the read-only allow-list")]
    NotAllowed(String),
    /// Nothing was sent: the endpoint is left alone, or our own limits are reached.
    #[error("{detail}")]
    NotSent {
        /// The class of what made us leave it alone.
        kind: ReadFailureKind,
        /// For people.
        detail: String,
    },
    /// Connection refused or reset.
    #[error("{0}")]
    Unreachable(String),
    /// No answer within the request timeout.
    #[error("no answer within the request timeout")]
    Timeout,
    /// An HTTP status and no JSON-RPC body.
    #[error("HTTP {status}: {body}")]
    Http {
        /// The status code.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// A JSON-RPC error object.
    #[error("error {code}: {message}")]
    Rpc {
        /// Its code; 0 where it has none.
        code: i64,
        /// Its message, cut.
        message: String,
    },
    /// An answer that is no answer to what was asked.
    #[error("{0}")]
    BadAnswer(String),
}

/// Codes some providers use for nothing but "slow down".
const RATE_LIMIT_CODES: [i64; 3] = [429, -32016, -32029];

/// Phrases that mean "slow down". Lower case.
const RATE_LIMIT_PHRASES: [&str; 13] = [
    "rate limit",
    "rate-limit",
    "ratelimit",
    "too many requests",
    "request rate",
    "requests per second",
    "request count exceeded",
    "compute units",
    "throughput",
    "capacity exceeded",
    "quota",
    "daily",
    "slow down",
];

/// Codes nodes give when a log filter is too wide or its answer too large, among other things.
const RANGE_CODES: [i64; 7] = [-32602, -32005, -32000, -32614, -32701, -32011, 35];

/// Phrases that mean the same whatever the code, or without any. Lower case.
const RANGE_PHRASES: [&str; 22] = [
    "block range",
    "blocks range",
    "range limit",
    "range is too",
    "range too",
    "limited to",
    "query returned more than",
    "more than 10000 results",
    "too many results",
    "too many logs",
    "max results",
    "response size",
    "response is too big",
    "response too large",
    "payload too large",
    "entity too large",
    "exceed maximum block range",
    "exceeds the range",
    "eth_getlogs is limited",
    "limit exceeded",
    "query timeout",
    "log response",
];

/// Phrases under a range code that a smaller range would not mend. Lower case.
const NOT_RANGE_PHRASES: [&str; 7] = [
    "header not found",
    "unknown block",
    "block not found",
    "not canonical",
    "missing trie node",
    "unauthorized",
    "api key",
];

fn any_of(phrases: &[&str], text: &str) -> bool {
    phrases.iter().any(|phrase| text.contains(phrase))
}

impl CallError {
    /// The class that evidence and metrics speak of.
    pub(super) fn kind(&self) -> ReadFailureKind {
        match self {
            Self::NotSent { kind, .. } => *kind,
            Self::Unreachable(_) | Self::Timeout => ReadFailureKind::Unreachable,
            _ if self.is_rate_limit() => ReadFailureKind::RateLimited,
            Self::NotAllowed(_) | Self::Http { .. } | Self::Rpc { .. } => ReadFailureKind::RpcError,
            Self::BadAnswer(_) => ReadFailureKind::BadAnswer,
        }
    }

    fn is_rate_limit(&self) -> bool {
        match self {
            Self::Http { status, body } => {
                *status == 429 || any_of(&RATE_LIMIT_PHRASES, &body.to_lowercase())
            }
            Self::Rpc { code, message } => {
                let message = message.to_lowercase();
                RATE_LIMIT_CODES.contains(code)
                    || any_of(&RATE_LIMIT_PHRASES, &message)
                    || (*code == -32005 && !any_of(&RANGE_PHRASES, &message))
            }
            _ => false,
        }
    }

    /// Whether the answer to a log read says that a smaller range may be answered.
    pub(super) fn is_range_refusal(&self) -> bool {
        match self {
            Self::Http { status: 413, .. } => true,
            _ if self.is_rate_limit() => false,
            Self::Rpc { code, message } => {
                let message = message.to_lowercase();
                any_of(&RANGE_PHRASES, &message)
                    || (RANGE_CODES.contains(code) && !any_of(&NOT_RANGE_PHRASES, &message))
            }
            Self::Http { body: text, .. } | Self::BadAnswer(text) => {
                any_of(&RANGE_PHRASES, &text.to_lowercase())
            }
            Self::NotAllowed(_) | Self::NotSent { .. } | Self::Unreachable(_) | Self::Timeout => {
                false
            }
        }
    }

    /// Whether the request failed, and with it the endpoint or the way to it: the error rate counts this. An
    /// error object is an answer. A log range that is too wide is our fault, which only the asker can tell.
    pub(super) fn is_failure(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Timeout | Self::Http { .. } | Self::BadAnswer(_) => true,
            Self::Rpc { .. } | Self::NotAllowed(_) | Self::NotSent { .. } => false,
        }
    }

    /// Whether a contract call was executed and failed, rather than not answered.
    pub(super) fn is_revert(&self) -> bool {
        matches!(self, Self::Rpc { code, message }
            if *code == 3 || message.to_lowercase().contains("revert"))
    }
}

impl From<CallError> for ReadFailure {
    fn from(error: CallError) -> Self {
        Self::new(error.kind(), error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rpc(code: i64, message: &str) -> CallError {
        CallError::Rpc { code, message: message.to_owned() }
    }

    fn http(status: u16, body: &str) -> CallError {
        CallError::Http { status, body: body.to_owned() }
    }

    /// Errors as nodes and providers word them, and whether a smaller log range may help.
    #[test]
    fn range_refusals_are_told_from_everything_else() {
        let plain = |text: &str| CallError::BadAnswer(text.to_owned());
        let refusals = [
            rpc(-32602, "invalid params: eth_getLogs range over 500 blocks"),
            rpc(-32005, "query returned more than 10000 results"),
            rpc(-32005, "limit exceeded"),
            rpc(-32000, "exceed maximum block range: 5000"),
            rpc(-32000, "block range too large"),
            rpc(
                -32602,
                "Log response size exceeded. You can make eth_getLogs requests with up to a 2K block range",
            ),
            rpc(-32600, "You can make eth_getLogs requests with up to a 10 block range"),
            rpc(-32614, "eth_getLogs is limited to a 10,000 range"),
            rpc(35, "ranges over 10000 blocks are not supported on freetier"),
            rpc(-32701, "exceed limit"),
            rpc(-32002, "query timeout exceeded"),
            rpc(-32603, "Response is too big"),
            http(413, ""),
            http(400, "eth_getLogs block range is limited to 1000"),
            http(503, "backend response too large"),
            plain("block range limit exceeded"),
        ];
        for error in refusals {
            assert!(error.is_range_refusal(), "{error}");
            assert_ne!(error.kind(), ReadFailureKind::RateLimited, "{error}");
        }
        let others = [
            rpc(-32000, "header not found"),
            rpc(-32000, "missing trie node 0xabc"),
            rpc(-32601, "the method eth_getLogs does not exist"),
            rpc(-32603, "internal error"),
            rpc(-32005, "project ID request rate exceeded"),
            rpc(429, "Your app has exceeded its compute units per second capacity"),
            rpc(-32016, "over rate limit"),
            http(429, "block range"),
            http(502, "bad gateway"),
            plain("<html>"),
            CallError::Timeout,
            CallError::Unreachable("connection refused".to_owned()),
        ];
        for error in others {
            assert!(!error.is_range_refusal(), "{error}");
        }
    }

    #[test]
    fn errors_keep_their_class() {
        use ReadFailureKind as Kind;
        let cases = [
            (http(429, ""), Kind::RateLimited),
            (rpc(-32005, "daily request count exceeded, request rate limited"), Kind::RateLimited),
            (rpc(-32005, "try again later"), Kind::RateLimited),
            (rpc(-32005, "daily limit exceeded"), Kind::RateLimited),
            (rpc(-32005, "query returned more than 10000 results"), Kind::RpcError),
            (rpc(-32000, "header not found"), Kind::RpcError),
            (http(500, "oops"), Kind::RpcError),
            (CallError::Timeout, Kind::Unreachable),
            (CallError::Unreachable("reset".to_owned()), Kind::Unreachable),
            (CallError::BadAnswer("not JSON".to_owned()), Kind::BadAnswer),
            (CallError::NotAllowed("eth_sendTransaction".to_owned()), Kind::RpcError),
        ];
        for (error, kind) in cases {
            assert_eq!(error.kind(), kind, "{error}");
        }
    }
}
