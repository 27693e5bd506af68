//! JSON-RPC over HTTP: the one place that builds an HTTP client, and the one gate every call passes.
//!
//! The gate refuses every method that is not on [`ALLOWED_METHODS`], so nothing built on it can send a
//! transaction (I1). It retries nothing: the next check is the retry. Errors keep their class and never
//! hold the URL, which may hold a key.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use reqwest::Client;
use reqwest::redirect::Policy;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use url::Url;
use uuid::Uuid;

use super::RpcObserver;
use super::error::CallError;
use super::gate::Gate;
use crate::domain::{ChainId, EndpointName, ReadFailureKind};
use crate::errors::error_chain;

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

/// How much of a foreign text is kept for people, in characters.
const EXCERPT_CHARS_MAX: usize = 200;

/// No connection for this long is a failure, where the request timeout is not shorter still.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(10);

/// Parts of a URL shorter than this are no secrets, and redacting them would garble messages.
const SECRET_CHARS_MIN: usize = 8;

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
    secrets: Vec<String>,
    chain_id: ChainId,
    endpoint: EndpointName,
    observer: Arc<dyn RpcObserver>,
    /// No two calls of this process have one id, and hardly any two of all processes behind one proxy: so
    /// an answer that was meant for another request is known by it.
    gate: Gate,
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
            secrets: secrets_of(&url),
            url,
            chain_id,
            endpoint,
            observer,
            gate,
            next_id,
        })
    }

    /// Whether the endpoint is left alone at the moment.
    pub(super) fn is_spared(&self) -> bool {
        self.gate.spared_for().is_some()
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
                if *error == CallError::Timeout {
                    self.gate.refused(None, ReadFailureKind::Unreachable);
                }
            })?;
        let status = response.status().as_u16();
        let retry_after = response.headers().get(reqwest::header::RETRY_AFTER);
        let retry_after =
            retry_after.and_then(|at| at.to_str().ok()).and_then(|at| self.gate.retry_after(at));
        let answered = self.read_answers(response, first_id, count).await;
        self.mind(status, retry_after, &answered);
        answered
    }

    /// Leaves an endpoint alone that asks for it, or that takes connections and says nothing.
    fn mind(
        &self,
        status: u16,
        retry_after: Option<Duration>,
        answered: &Result<Vec<CallResult>, CallError>,
    ) {
        let of_all = |is: &dyn Fn(&CallError) -> bool| match answered {
            Err(error) => is(error),
            Ok(results) => results.iter().all(|result| result.as_ref().is_err_and(is)),
        };
        let too_wide = of_all(&|error| error.is_range_refusal());
        let is_limited = |error: &CallError| error.kind() == ReadFailureKind::RateLimited;
        let limited = of_all(&is_limited);
        let partly_limited = answered.as_ref().is_ok_and(|results| {
            results.iter().any(|result| result.as_ref().is_err_and(is_limited))
        });
        if limited {
            self.gate.refused(retry_after, ReadFailureKind::RateLimited);
        } else if status == 503 && !too_wide {
            self.gate.refused(retry_after, ReadFailureKind::RpcError);
        } else if of_all(&|error| *error == CallError::Timeout) {
            self.gate.refused(None, ReadFailureKind::Unreachable);
        } else if !partly_limited {
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
            return Err(CallError::Http { status, body: self.excerpt(&body) });
        }
        match parse_answers(&body, first_id, count) {
            Some(answers) => {
                Ok(answers.into_iter().map(|a| a.map_err(|e| self.redact(e))).collect())
            }
            None if status == 200 => {
                Err(CallError::BadAnswer(format!("not JSON-RPC: {}", self.excerpt(&body))))
            }
            None => Err(CallError::Http { status, body: self.excerpt(&body) }),
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
        CallError::Unreachable(self.without_secrets(&error_chain(&error.without_url())))
    }

    fn redact(&self, error: CallError) -> CallError {
        match error {
            CallError::Rpc { code, message } => {
                CallError::Rpc { code, message: self.excerpt(message.as_bytes()) }
            }
            other => other,
        }
    }

    /// The beginning of a foreign text, on one line, without the URL's secrets: some endpoints answer
    /// with the key that was refused.
    fn excerpt(&self, text: &[u8]) -> String {
        let start = &text[..text.len().min(4 * EXCERPT_CHARS_MAX)];
        let text = self.without_secrets(&String::from_utf8_lossy(start));
        text.chars().take(EXCERPT_CHARS_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
    }

    fn without_secrets(&self, text: &str) -> String {
        self.secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "[hidden]"))
    }
}

/// The parts of a URL that may be keys, longest first.
fn secrets_of(url: &Url) -> Vec<String> {
    let mut parts = vec![url.as_str().to_owned(), url.path().to_owned(), url.username().to_owned()];
    parts.extend(url.path().split('/').map(str::to_owned));
    parts.extend(url.query().map(str::to_owned));
    parts.extend(url.password().map(str::to_owned));
    parts.extend(url.query_pairs().map(|(_, value)| value.into_owned()));
    parts.retain(|part| part.len() >= SECRET_CHARS_MIN);
    parts.sort_by_key(|part| std::cmp::Reverse(part.len()));
    parts.dedup();
    parts
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    id: Value,
    result: Option<Box<RawValue>>,
    error: Option<ErrorObject>,
}

#[derive(Deserialize)]
struct ErrorObject {
    #[serde(default)]
    code: Value,
    #[serde(default)]
    message: Value,
}

impl Answer {
    /// Its id, where it is one of ours: a number, which some servers give back as text.
    fn id(&self) -> Option<u64> {
        self.id.as_u64().or_else(|| self.id.as_str()?.parse().ok())
    }

    fn into_result(self) -> CallResult {
        match (self.error, self.result) {
            (Some(error), _) => Err(CallError::Rpc {
                code: error.code.as_i64().unwrap_or(0),
                message: match error.message {
                    Value::String(text) => text,
                    other => other.to_string(),
                },
            }),
            (None, Some(result)) => Ok(result),
            (None, None) => Ok(RawValue::NULL.to_owned()),
        }
    }
}

/// `None`: not JSON-RPC. Else one result per call, put in order by id.
fn parse_answers(body: &[u8], first_id: u64, count: u64) -> Option<Vec<CallResult>> {
    let is_list = body.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'[');
    if !is_list {
        let answer: Answer = serde_json::from_slice(body).ok()?;
        return parse_answer(answer, first_id, count);
    }
    let answers: Vec<Answer> = serde_json::from_slice(body).ok()?;
    let mut by_id: HashMap<u64, CallResult> = HashMap::new();
    // Whoever did not read the batch does not know its ids: that error is about all that has no answer.
    let mut of_the_rest: Option<CallError> = None;
    for answer in answers {
        let Some(id) = answer.id() else {
            of_the_rest = of_the_rest.or_else(|| answer.into_result().err());
            continue;
        };
        let twice = || CallError::BadAnswer("the batch's answer has this call twice".to_owned());
        by_id
            .entry(id)
            .and_modify(|result| *result = Err(twice()))
            .or_insert_with(|| answer.into_result());
    }
    let left_out = || CallError::BadAnswer("the batch's answer leaves this call out".to_owned());
    let missing = || of_the_rest.clone().unwrap_or_else(left_out);
    let ids = first_id..first_id.saturating_add(count);
    Some(ids.map(|id| by_id.remove(&id).unwrap_or_else(|| Err(missing()))).collect())
}

/// The answer to the only call, or one error for all of them.
fn parse_answer(answer: Answer, first_id: u64, count: u64) -> Option<Vec<CallResult>> {
    let is_error = answer.error.is_some();
    if !is_error && (count != 1 || answer.result.is_none() && answer.id.is_null()) {
        return None;
    }
    // Whoever could not read the request does not know its id; a result always comes with one.
    let is_ours = match answer.id() {
        Some(id) => (first_id..first_id.saturating_add(count)).contains(&id),
        None => is_error,
    };
    let result = match is_ours {
        true => answer.into_result(),
        false => Err(CallError::BadAnswer("an answer to another request".to_owned())),
    };
    Some((0..count).map(|_| result.clone()).collect())
}

/// Decodes a result; one of another shape is a bad answer.
pub(super) fn decode<T: DeserializeOwned>(what: &str, result: &RawValue) -> Result<T, CallError> {
    // The parser's own words would quote the answer, which may be long or hold a key.
    serde_json::from_str(result.get()).map_err(|error| {
        let place = error.column();
        CallError::BadAnswer(format!("{what}: not of the expected form at character {place}"))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::chain::EndpointLimits;
    use crate::clock::ManualClock;
    use crate::domain::Timestamp;
    #[derive(Default)]
    struct Seen(Mutex<Vec<(&'static str, &'static str)>>);

    impl RpcObserver for Seen {
        fn called(
            &self,
            _: ChainId,
            _: &EndpointName,
            method: &'static str,
            outcome: &'static str,
            _: Duration,
        ) {
            self.0.lock().unwrap().push((method, outcome));
        }
    }

    fn transport(url: &str, seen: &Arc<Seen>) -> Transport {
        let url = Url::parse(url).unwrap();
        let name = EndpointName::new("a");
        let timeout = Duration::from_secs(5);
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(0)));
        let gate = Gate::new(&EndpointLimits::default(), clock, timeout);
        let transport =
            Transport::new(ChainId::new(1), name, url, timeout, seen.clone(), gate).unwrap();
        // The answers below were written beforehand.
        Transport { next_id: AtomicU64::new(0), ..transport }
    }

    /// A server that gives this HTTP response to every request, and counts connections.
    async fn server(response: String) -> (u16, Arc<Mutex<usize>>) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let count = Arc::new(Mutex::new(0));
        let counted = count.clone();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                *counted.lock().unwrap() += 1;
                let mut buffer = vec![0; 65_536];
                let _ = socket.read(&mut buffer).await;
                let _ = socket.write_all(response.as_bytes()).await;
            }
        });
        (port, count)
    }

    fn http(status: &str, body: &str) -> String {
        format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
    }

    fn call(method: &'static str) -> Call {
        Call { method, params: json!([]) }
    }

    #[tokio::test]
    async fn i1_methods_off_the_allow_list_are_refused_and_never_sent() {
        let (port, connections) = server(http("200 OK", r#"{"id":0,"result":"0x1"}"#)).await;
        let seen = Arc::new(Seen::default());
        let transport = transport(&format!("http://127.0.0.1:{port}"), &seen);
        for method in [
            "eth_sendRawTransaction",
            "eth_sendTransaction",
            "eth_sign",
            "personal_sign",
            "anvil_mine",
            "debug_setHead",
        ] {
            let batch = [call("eth_chainId"), call(method)];
            for result in transport.batch(&batch).await {
                assert_eq!(result.unwrap_err(), CallError::NotAllowed(method.to_owned()));
            }
        }
        assert_eq!(*connections.lock().unwrap(), 0, "nothing was sent");
        transport.call(call("eth_chainId")).await.unwrap();
        assert_eq!(*connections.lock().unwrap(), 1, "the server can be reached");
        assert!(ALLOWED_METHODS.iter().all(|m| {
            !["send", "sign", "set", "submit"].iter().any(|verb| m.to_lowercase().contains(verb))
        }));
    }

    #[tokio::test]
    async fn errors_keep_their_class_and_hide_the_url() {
        const KEY: &str = "k3yk3yk3yk3y";
        let closed = {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            listener.local_addr().unwrap().port()
        };
        let echo = format!(r#"{{"id":0,"error":{{"code":-32001,"message":"bad key {KEY}"}}}}"#);
        use ReadFailureKind as Kind;
        let cases = [
            (http("429 Too Many Requests", r#"{"id":0,"result":"0x1"}"#), Kind::RateLimited),
            (http("502 Bad Gateway", &format!("<html>no {KEY}")), Kind::RpcError),
            (http("302 Found", "elsewhere"), Kind::RpcError),
            (
                http(&format!("302 Found\r\nlocation: http://127.0.0.1:1/{KEY}"), KEY),
                Kind::RpcError,
            ),
            (http(&format!("503 {KEY}\r\nretry-after: {KEY}"), KEY), Kind::RpcError),
            (http("200 OK", &echo), Kind::RpcError),
            (http("400 Bad Request", &echo), Kind::RpcError),
            (http("200 OK", &format!("who is {KEY}?")), Kind::BadAnswer),
            (http("200 OK", "{}"), Kind::BadAnswer),
            (String::new(), Kind::Unreachable),
        ];
        for (response, kind) in cases {
            let (port, _) = server(response.clone()).await;
            let seen = Arc::new(Seen::default());
            let url = format!("http://127.0.0.1:{port}/v2/{KEY}?key={KEY}");
            let error = transport(&url, &seen).call(call("eth_chainId")).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{response}: {error}");
            let text = format!("{error} {error:?}");
            assert!(!text.contains(KEY), "{text}");
            assert_eq!(*seen.0.lock().unwrap(), [("eth_chainId", kind.code())]);
        }
        let seen = Arc::new(Seen::default());
        let url = format!("http://127.0.0.1:{closed}/v2/{KEY}");
        let error = transport(&url, &seen).call(call("eth_chainId")).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unreachable);
        assert!(!error.to_string().contains(KEY) && !error.to_string().contains("/v2"), "{error}");
    }

    #[tokio::test]
    async fn https_is_spoken_and_a_server_that_does_not_is_unreachable() {
        let (port, connections) = server(http("200 OK", r#"{"id":0,"result":"0x1"}"#)).await;
        let seen = Arc::new(Seen::default());
        let transport = transport(&format!("https://127.0.0.1:{port}"), &seen);
        let error = transport.call(call("eth_chainId")).await.unwrap_err();
        assert_eq!(error.kind(), ReadFailureKind::Unreachable, "{error}");
        assert_eq!(*connections.lock().unwrap(), 1, "it got as far as the handshake");
    }

    #[tokio::test]
    async fn an_answer_above_the_limit_is_not_read_to_its_end() {
        let body = "x".repeat(RESPONSE_BYTES_MAX + 1);
        let (port, _) = server(http("200 OK", &body)).await;
        let seen = Arc::new(Seen::default());
        let transport = transport(&format!("http://127.0.0.1:{port}"), &seen);
        let error = transport.call(call("eth_getLogs")).await.unwrap_err();
        assert_eq!(error.kind(), ReadFailureKind::BadAnswer);
        assert!(error.is_range_refusal(), "a smaller range has a smaller answer");
    }

    #[tokio::test]
    async fn an_answer_to_another_request_is_no_answer() {
        let (port, _) = server(http("200 OK", r#"{"id":0,"result":"0x1"}"#)).await;
        let seen = Arc::new(Seen::default());
        let transport = transport(&format!("http://127.0.0.1:{port}"), &seen);
        transport.call(call("eth_chainId")).await.unwrap();
        // A proxy that gives the first answer again.
        let error = transport.call(call("eth_chainId")).await.unwrap_err();
        assert_eq!(error, CallError::BadAnswer("an answer to another request".to_owned()));
    }

    #[test]
    fn answers_are_put_in_order_by_id_and_missing_ones_fail_alone() {
        let body = br#"[{"id":9,"result":"c"},{"id":"7","error":{"code":3,"message":"reverted"}}]"#;
        let results = parse_answers(body, 7, 3).unwrap();
        assert_eq!(
            results[0].as_ref().unwrap_err(),
            &CallError::Rpc { code: 3, message: "reverted".into() }
        );
        assert!(matches!(results[1], Err(CallError::BadAnswer(_))));
        assert_eq!(results[2].as_ref().unwrap().get(), "\"c\"");
        let whole =
            parse_answers(br#"{"id":null,"error":{"code":-32000,"message":"no"}}"#, 7, 2).unwrap();
        assert!(whole.iter().all(|r| matches!(r, Err(CallError::Rpc { code: -32000, .. }))));
        let body =
            br#"[{"id":8,"result":"b"},{"id":null,"error":{"code":429,"message":"slow down"}}]"#;
        let results = parse_answers(body, 7, 2).unwrap();
        assert_eq!(results[0].as_ref().unwrap_err().kind(), ReadFailureKind::RateLimited);
        assert_eq!(results[1].as_ref().unwrap().get(), "\"b\"");
        assert!(parse_answers(br#"{"id":7,"result":"a"}"#, 7, 2).is_none(), "one answer to two");
        assert!(parse_answers(br#"{"result":"a"}"#, 7, 1).unwrap()[0].is_err(), "whose is it?");
    }

    #[tokio::test]
    async fn a_batch_that_is_refused_in_part_ends_no_backoff() {
        let part = r#"[{"id":0,"result":"0x1"},{"id":1,"error":{"code":429,"message":"slow"}}]"#;
        let whole = r#"[{"id":null,"error":{"code":429,"message":"slow"}}]"#;
        for body in [part, whole] {
            let (port, _) = server(http("200 OK", body)).await;
            let transport =
                transport(&format!("http://127.0.0.1:{port}"), &Arc::new(Seen::default()));
            transport.gate.refused(None, ReadFailureKind::RpcError);
            let answered = transport.exchange(&[call("eth_chainId"), call("eth_call")]).await;
            let kinds: Vec<_> =
                answered.unwrap().iter().map(|r| r.as_ref().err().map(CallError::kind)).collect();
            assert_eq!(kinds[1], Some(ReadFailureKind::RateLimited), "{body}");
            assert!(transport.is_spared(), "{body}: the backoff goes on");
        }
    }

    #[test]
    fn two_answers_to_one_call_are_none() {
        let body = br#"[{"id":0,"result":"a"},{"id":1,"result":"b"},{"id":0,"result":"c"}]"#;
        let results = parse_answers(body, 0, 2).unwrap();
        assert!(matches!(results[0], Err(CallError::BadAnswer(_))));
        assert_eq!(results[1].as_ref().unwrap().get(), "\"b\"");
    }
}
