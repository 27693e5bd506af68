//! The simulated chain's endpoints: HTTP on a free loopback port, one path each.
//!
//! Every endpoint shows the same chain and has its own faults and its own count of calls.

use std::future::IntoFuture;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use url::Url;

use super::fault::{Fault, FaultKind, Faults};
use super::{SimChain, node};

/// The largest request body taken, in bytes.
const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The server could not start, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum SimServerError {
    /// No free loopback port, or the listener failed.
    #[error("the simulated node's HTTP server failed")]
    Io(#[from] std::io::Error),
    /// The listener's address is no base for a URL.
    #[error("the simulated node has no URL")]
    Url(#[from] url::ParseError),
    /// The serving task panicked.
    #[error("the simulated node's HTTP server panicked")]
    Panicked(#[from] tokio::task::JoinError),
}

struct Endpoint {
    faults: Mutex<Faults>,
    requests: AtomicU64,
}

impl Endpoint {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Shared {
    chain: SimChain,
    endpoints: Vec<Endpoint>,
}

/// Endpoints of one simulated chain. They stop when this is dropped; [`Self::stop`] also waits for it.
pub struct SimServer {
    urls: Vec<Url>,
    shared: Arc<Shared>,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<std::io::Result<()>>,
}

impl SimServer {
    /// Starts `endpoints` endpoints of `chain` on a free loopback port.
    pub async fn start(chain: SimChain, endpoints: usize) -> Result<Self, SimServerError> {
        let new_endpoint =
            || Endpoint { faults: Mutex::new(Faults::default()), requests: AtomicU64::new(0) };
        let endpoints: Vec<Endpoint> =
            std::iter::repeat_with(new_endpoint).take(endpoints).collect();
        let shared = Arc::new(Shared { chain, endpoints });
        let router = Router::new()
            .route("/{endpoint}", post(handle))
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .with_state(Arc::clone(&shared));

        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let urls = (0..shared.endpoints.len())
            .map(|index| Url::parse(&format!("http://{address}/{index}")))
            .collect::<Result<_, _>>()?;
        let (stop, stopped) = oneshot::channel();
        let server = axum::serve(listener, router).with_graceful_shutdown(async {
            // A dropped sender asks to stop as well.
            let _: Result<(), oneshot::error::RecvError> = stopped.await;
        });
        Ok(Self { urls, shared, stop, serving: tokio::spawn(server.into_future()) })
    }

    /// One URL per endpoint.
    pub fn urls(&self) -> &[Url] {
        &self.urls
    }

    /// The chain behind the endpoints.
    pub fn chain(&self) -> &SimChain {
        &self.shared.chain
    }

    /// JSON-RPC calls so far, of all endpoints together; a batch of n counts n, whatever came of it.
    pub fn requests(&self) -> u64 {
        self.shared.endpoints.iter().map(|e| e.requests.load(Ordering::Relaxed)).sum()
    }

    /// JSON-RPC calls to one endpoint so far; 0 for one that does not exist.
    pub fn requests_to(&self, endpoint: usize) -> u64 {
        self.shared.endpoints.get(endpoint).map_or(0, |e| e.requests.load(Ordering::Relaxed))
    }

    /// Turns a fault of one endpoint on, as of the chain's state now. Returns whether there is such an
    /// endpoint.
    pub fn set_fault(&self, endpoint: usize, fault: Fault) -> bool {
        let Some(endpoint) = self.shared.endpoints.get(endpoint) else { return false };
        let view = self.shared.chain.lock().view().clone();
        endpoint.faults().set(fault, &view);
        true
    }

    /// Turns a fault of one endpoint off. Returns whether there is such an endpoint.
    pub fn clear_fault(&self, endpoint: usize, kind: FaultKind) -> bool {
        let Some(endpoint) = self.shared.endpoints.get(endpoint) else { return false };
        endpoint.faults().clear(kind);
        true
    }

    /// Stops listening, lets requests in flight finish, and waits for both.
    pub async fn stop(self) -> Result<(), SimServerError> {
        drop(self.stop);
        self.serving.await??;
        Ok(())
    }
}

async fn handle(
    State(shared): State<Arc<Shared>>,
    Path(index): Path<usize>,
    body: Bytes,
) -> Response {
    let Some(endpoint) = shared.endpoints.get(index) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let request: Option<Value> = serde_json::from_slice(&body).ok();
    let calls = request.as_ref().map_or(1, node::calls_in);
    endpoint.requests.fetch_add(calls, Ordering::Relaxed);

    let faults = endpoint.faults().clone();
    if faults.has(Fault::Down) {
        return (StatusCode::SERVICE_UNAVAILABLE, "no healthy upstream").into_response();
    }
    if faults.has(Fault::RateLimited) {
        return (StatusCode::TOO_MANY_REQUESTS, "rate limit exceeded").into_response();
    }
    let answer = match request {
        Some(request) => node::answer(&shared.chain.lock(), &faults, &request),
        None => Some(node::invalid_request()),
    };
    match answer {
        Some(answer) => {
            ([(header::CONTENT_TYPE, "application/json")], answer.to_string()).into_response()
        }
        None => StatusCode::NO_CONTENT.into_response(),
    }
}
