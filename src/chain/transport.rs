//! JSON-RPC over HTTP: the one place that builds an HTTP client, and the one gate every call passes.
//!
//! The gate refuses every method that is not on [`ALLOWED_METHODS`], so nothing built on it can send a
//! transaction (I1). It retries nothing: the next check is the retry. Errors keep their class and never
//! hold the URL, which may hold a key.

mod answers;
mod secrets;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use reqwest::Client;
use reqwest::redirect::Policy;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use url::Url;
use uuid::Uuid;

use super::RpcObserver;
use super::error::CallError;
use super::error_rate::ErrorMeter;
use super::gate::Gate;
use crate::domain::{ChainId, EndpointName, ReadFailureKind};
use crate::errors::error_chain;
pub(super) use answers::decode;
use answers::parse_answers;
use secrets::Secrets;

/// Every method the daemon can send: all of them read, none of them writes (I1).
pub(super) const ALLOWED_METHODS: [&str; 6] = [
    "eth_chainId",
    "eth_getBlockByNumber",
    "eth_call",
    "eth_getLogs",
    "eth_getTransactionByHash",
    "eth_getTransactionReceipt",
];

/// The most calls in one HTTP request; more are split.
pub(super) const BATCH_CALLS_MAX: usize = 100;

/// The largest answer that is read: a hostile or broken endpoint must not fill the memory.
const RESPONSE_BYTES_MAX: usize = 32 * 1024 * 1024;

/// No connection for this long is a failure, where the request timeout is not shorter still.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(10);

/// Builds an HTTP client: with timeouts, without redirects, TLS by ring.
#[allow(clippy::disallowed_methods, reason = "this is the one place")]
fn http_client(request_timeout: Duration) -> Result<Client, reqwest::Error> {
    static PROVIDER: Once = Once::new();
    // An error only says that one is installed already, and then it is ours or as good.
    PROVIDER.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
    Client::builder()
        .connect_timeout(request_timeout.min(CONNECT_TIMEOUT_MAX))
        .timeout(request_timeout)
        .redirect(Policy::none())
        .user_agent(concat!("reconciled/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(reqwest::Error::without_url)
}

/// One JSON-RPC call.
#[derive(Debug, Clone)]
pub(super) struct Call {
    /// The method; sent only if it is on the allow-list.
    pub(super) method: &'static str,
    /// Its parameters, as an array.
    pub(super) params: Value,
}

/// What came of one call: its undecoded result.
pub(super) type CallResult = Result<Box<RawValue>, CallError>;

/// The way to one endpoint.
pub(super) struct Transport {
    client: Client,
    url: Url,
    secrets: Secrets,
    chain_id: ChainId,
    endpoint: EndpointName,
    observer: Arc<dyn RpcObserver>,
    /// No two calls of this process have one id, and hardly any two of all processes behind one proxy: so
    /// an answer that was meant for another request is known by it.
    gate: Gate,
    errors: ErrorMeter,
    next_id: AtomicU64,
}

/// Ids begin below this, and stay whole numbers in every JSON parser.
const FIRST_ID_BITS: u32 = 48;

impl Transport {
    /// Sets up the client; connects to nobody yet. The error never holds the URL.
    pub(super) fn new(
        chain_id: ChainId,
        endpoint: EndpointName,
        url: Url,
        request_timeout: Duration,
        observer: Arc<dyn RpcObserver>,
        gate: Gate,
        errors: ErrorMeter,
    ) -> Result<Self, String> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(format!(
                "endpoint {endpoint}: the URL must begin with http:// or https://"
            ));
        }
        let client = http_client(request_timeout).map_err(|error| {
            format!("endpoint {endpoint}: no HTTP client: {}", error_chain(&error))
        })?;
        let (random, _) = Uuid::new_v4().as_u64_pair();
        let next_id = AtomicU64::new(random >> (u64::BITS - FIRST_ID_BITS));
        Ok(Self {
            client,
            secrets: Secrets::of(&url),
            url,
            chain_id,
            endpoint,
            observer,
            gate,
            errors,
            next_id,
        })
    }

    /// Whether the endpoint is left alone at the moment.
    pub(super) fn is_spared(&self) -> bool {
        self.gate.spared_for().is_some()
    }

    /// How many of its requests fail, in words, where that are too many for the endpoint to be believed.
    pub(super) fn error_rate(&self) -> Option<String> {
        self.errors.sickness()
    }

    /// Sends one call.
    pub(super) async fn call(&self, call: Call) -> CallResult {
        let mut results = self.batch(std::slice::from_ref(&call)).await;
        results.pop().unwrap_or_else(|| Err(CallError::BadAnswer("no answer".to_owned())))
    }

    /// Sends calls, at most [`BATCH_CALLS_MAX`] in one request and no more than the gate lets through; one result per call, in order.
    pub(super) async fn batch(&self, calls: &[Call]) -> Vec<CallResult> {
        let mut results = Vec::with_capacity(calls.len());
        for chunk in calls.chunks(self.gate.calls_max().min(BATCH_CALLS_MAX)) {
            let mut started = Instant::now();
            let answered = match chunk.iter().find(|c| !ALLOWED_METHODS.contains(&c.method)) {
                Some(refused) => Err(CallError::NotAllowed(refused.method.to_owned())),
                None => match self.gate.enter(chunk.len()).await {
                    Ok(_slot) => {
                        started = Instant::now();
                        self.exchange(chunk).await
                    }
                    Err(not_sent) => {
                        results.extend(chunk.iter().map(|_| Err(not_sent.clone())));
                        continue;
                    }
                },
            };
            let answered =
                answered.unwrap_or_else(|error| chunk.iter().map(|_| Err(error.clone())).collect());
            let took = started.elapsed();
            for (call, result) in chunk.iter().zip(&answered) {
                let outcome = result.as_ref().map_or_else(|error| error.kind().code(), |_| "ok");
                self.observer.called(self.chain_id, &self.endpoint, call.method, outcome, took);
            }
            results.extend(answered);
        }
        results
    }

    /// One HTTP request. `Ok` holds one result per call.
    async fn exchange(&self, calls: &[Call]) -> Result<Vec<CallResult>, CallError> {
        let count = calls.len() as u64;
        let first_id = self.next_id.fetch_add(count, Ordering::Relaxed);
        let mut requests: Vec<Value> = calls
            .iter()
            .zip(first_id..)
            .map(|(call, id)| {
                json!({"jsonrpc": "2.0", "id": id, "method": call.method, "params": call.params})
            })
            .collect();
        // Some nodes refuse batches of one.
        let request = match requests.len() {
            1 => requests.remove(0),
            _ => Value::Array(requests),
        };
        let response = self
            .client
            .post(self.url.clone())
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .body(request.to_string())
            .send()
            .await
            .map_err(|error| self.unreachable(error))
            .inspect_err(|error| {
                self.count(true);
                if *error == CallError::Timeout {
                    self.gate.refused(None, ReadFailureKind::Unreachable);
                }
            })?;
        let status = response.status().as_u16();
        let retry_after = response.headers().get(reqwest::header::RETRY_AFTER);
        let retry_after =
            retry_after.and_then(|at| at.to_str().ok()).and_then(|at| self.gate.retry_after(at));
        let answered = self.read_answers(response, first_id, count).await;
        let reads_logs = calls.iter().any(|call| call.method == "eth_getLogs");
        let has_failed = has_failed(status, &answered, reads_logs);
        self.mind(status, retry_after, &answered, has_failed);
        if let Some(has_failed) = has_failed {
            self.count(has_failed);
        }
        answered
    }

    /// Counts one request, and says so once when it made the endpoint sick, or well.
    fn count(&self, has_failed: bool) {
        let Some(is_sick) = self.errors.note(has_failed) else { return };
        let (chain, endpoint) = (self.chain_id, &self.endpoint);
        self.observer.error_rate(chain, endpoint, is_sick);
        match self.errors.sickness() {
            Some(detail) => tracing::error!(
                %chain, %endpoint, detail,
                "the endpoint is sick: too many requests fail; it gives no evidence until fewer do"
            ),
            None => tracing::info!(%chain, %endpoint, "few requests to the endpoint fail again"),
        }
    }

    /// Leaves an endpoint alone that asks for it, or that takes connections and says nothing. Only a request
    /// that did not fail ends that.
    fn mind(
        &self,
        status: u16,
        retry_after: Option<Duration>,
        answered: &Result<Vec<CallResult>, CallError>,
        has_failed: Option<bool>,
    ) {
        let of_all = |is: &dyn Fn(&CallError) -> bool| match answered {
            Err(error) => is(error),
            Ok(results) => results.iter().all(|result| result.as_ref().is_err_and(is)),
        };
        let is_limited = |error: &CallError| error.kind() == ReadFailureKind::RateLimited;
        // Of a batch, one call is enough: the rest of the plan's allowance is gone.
        let is_any_limited = match answered {
            Err(error) => is_limited(error),
            Ok(results) => results.iter().any(|result| result.as_ref().is_err_and(is_limited)),
        };
        if is_any_limited {
            self.gate.refused(retry_after, ReadFailureKind::RateLimited);
        } else if status == 503 && has_failed.is_none() {
            self.gate.refused(retry_after, ReadFailureKind::RpcError);
        } else if of_all(&|error| *error == CallError::Timeout) {
            self.gate.refused(None, ReadFailureKind::Unreachable);
        } else if has_failed == Some(false) {
            self.gate.answered();
        }
    }

    async fn read_answers(
        &self,
        response: reqwest::Response,
        first_id: u64,
        count: u64,
    ) -> Result<Vec<CallResult>, CallError> {
        let status = response.status().as_u16();
        let body = self.read_body(response).await?;
        if status == 429 {
            return Err(CallError::Http { status, body: self.secrets.excerpt(&body) });
        }
        match parse_answers(&body, first_id, count) {
            Some(answers) => {
                Ok(answers.into_iter().map(|a| a.map_err(|e| self.redact(e))).collect())
            }
            None if status == 200 => {
                Err(CallError::BadAnswer(format!("not JSON-RPC: {}", self.secrets.excerpt(&body))))
            }
            None => Err(CallError::Http { status, body: self.secrets.excerpt(&body) }),
        }
    }

    async fn read_body(&self, mut response: reqwest::Response) -> Result<Vec<u8>, CallError> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.unreachable(error))? {
            if body.len() + chunk.len() > RESPONSE_BYTES_MAX {
                return Err(CallError::BadAnswer(format!(
                    "response size is above {RESPONSE_BYTES_MAX} bytes"
                )));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    fn unreachable(&self, error: reqwest::Error) -> CallError {
        if error.is_timeout() {
            return CallError::Timeout;
        }
        CallError::Unreachable(self.secrets.without(&error_chain(&error.without_url())))
    }

    fn redact(&self, error: CallError) -> CallError {
        match error {
            CallError::Rpc { code, message } => {
                CallError::Rpc { code, message: self.secrets.excerpt(message.as_bytes()) }
            }
            other => other,
        }
    }
}

/// Whether a request failed, for the error rate. `None`: the endpoint asked to be spared, which is seen to
/// by the gate. That a range is too wide can only be said to who `reads_logs`.
fn has_failed(
    status: u16,
    answered: &Result<Vec<CallResult>, CallError>,
    reads_logs: bool,
) -> Option<bool> {
    let errors: Vec<&CallError> = match answered {
        Err(error) => vec![error],
        Ok(results) => results.iter().filter_map(|result| result.as_ref().err()).collect(),
    };
    let any = |is: &dyn Fn(&CallError) -> bool| errors.iter().any(|error| is(error));
    let is_too_wide = |error: &CallError| reads_logs && error.is_range_refusal();
    let is_ours = any(&|error| is_too_wide(error) || error.is_revert());
    if status == 503 && !is_ours || any(&|error| error.kind() == ReadFailureKind::RateLimited) {
        return None;
    }
    let server_error = status >= 500 && !errors.is_empty() && !is_ours;
    Some(server_error || any(&|error| error.is_failure() && !is_too_wide(error)))
}
