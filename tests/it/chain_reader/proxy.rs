//! A small HTTP server in front of a chain that changes answers: an endpoint with a fault.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use serde_json::{Value, json};
use url::Url;

use crate::support::anvil::http_client;

/// Sees a call and its answer (with `result` or `error`), and may change the answer.
type Change = dyn Fn(&Value, &mut Value) + Send + Sync;

struct Upstream {
    url: Url,
    http: reqwest::Client,
    change: Box<Change>,
}

/// Starts an endpoint that answers as `upstream` does, but for `change`. It ends with the test's runtime.
pub(crate) async fn proxy(
    upstream: Url,
    change: impl Fn(&Value, &mut Value) + Send + Sync + 'static,
) -> Url {
    let state = Arc::new(Upstream { url: upstream, http: http_client(), change: Box::new(change) });
    let router = Router::new().route("/", post(forward)).with_state(state);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    Url::parse(&url).unwrap()
}

async fn forward(State(upstream): State<Arc<Upstream>>, body: String) -> String {
    let calls: Value = serde_json::from_str(&body).unwrap();
    let response = upstream
        .http
        .post(upstream.url.clone())
        .header("content-type", "application/json")
        .body(body)
        .send()
        .await
        .unwrap();
    let mut answers: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    match (&calls, &mut answers) {
        (Value::Array(calls), Value::Array(answers)) => {
            for answer in answers {
                let call = calls.iter().find(|call| call["id"] == answer["id"]).unwrap();
                (upstream.change)(call, answer);
            }
        }
        (call, answer) => (upstream.change)(call, answer),
    }
    answers.to_string()
}

/// Starts an endpoint that answers as `upstream` does, but never a request with a call that `hangs`.
pub(crate) async fn hanging_at(
    upstream: Url,
    hangs: impl Fn(&Value) -> bool + Send + Sync + 'static,
) -> Url {
    let forwards = proxy(upstream, |_, _| {}).await;
    let (http, hangs) = (http_client(), Arc::new(hangs));
    let answer = move |body: String| {
        let (forwards, http, hangs) = (forwards.clone(), http.clone(), hangs.clone());
        async move {
            let calls: Value = serde_json::from_str(&body).unwrap();
            let calls = calls.as_array().cloned().unwrap_or_else(|| vec![calls]);
            if calls.iter().any(|call| hangs(call)) {
                std::future::pending::<()>().await;
            }
            http.post(forwards).body(body).send().await.unwrap().text().await.unwrap()
        }
    };
    let router = Router::new().route("/", post(answer));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    Url::parse(&url).unwrap()
}

/// Makes an answer an error.
pub(crate) fn refuse(answer: &mut Value, code: i64, message: &str) {
    *answer = json!({
        "jsonrpc": "2.0",
        "id": answer["id"],
        "error": {"code": code, "message": message},
    });
}

/// Whether a call asks for the logs of one block by its hash.
pub(crate) fn asks_by_hash(call: &Value) -> bool {
    call["method"] == "eth_getLogs" && !call["params"][0]["blockHash"].is_null()
}

/// How many blocks a call of `eth_getLogs` asks for; `None` for every other call.
pub(crate) fn log_blocks(call: &Value) -> Option<u64> {
    let filter = (call["method"] == "eth_getLogs").then(|| &call["params"][0])?;
    if asks_by_hash(call) {
        return Some(1);
    }
    let number = |field: &str| {
        u64::from_str_radix(filter[field].as_str().unwrap().trim_start_matches("0x"), 16).unwrap()
    };
    Some(number("toBlock") - number("fromBlock") + 1)
}
