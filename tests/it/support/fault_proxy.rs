//! An endpoint that goes wrong as real ones do, in front of an honest chain: an HTTP server that forwards
//! JSON-RPC and spoils what it was told to spoil, with what likelihood, from a seed.
//!
//! [`faults`] are those of an honest node, a bad network and a tired load balancer: a careful reader can
//! tell that something is wrong. [`lies`] are not: only other endpoints can. An endpoint that is asked one
//! thing at a time goes wrong in the same way for the same seed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

pub(crate) mod faults;
pub(crate) mod lies;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use url::Url;

use self::faults::{Delivery, Exchange, Fault};
use self::lies::{Head, Lie};
use super::anvil::http_client;
use super::dice::Dice;

/// What an endpoint is like for a while.
#[derive(Debug, Clone, Default)]
pub(crate) struct Manners {
    /// Of 1,000 requests, so many go wrong.
    pub(crate) faulty_per_mille: u64,
    /// How they go wrong: any of these. One that is named twice is twice as likely.
    pub(crate) faults: Vec<Fault>,
    /// Knows nothing beyond this block, and does not say so.
    pub(crate) frozen_at: Option<u64>,
    /// Says what is not so, all the time.
    pub(crate) lie: Option<Lie>,
}

/// So many faults are tried on one answer.
const TRIES: usize = 8;

/// An endpoint in front of another one. It ends with the test's runtime.
pub(crate) struct FaultProxy {
    url: Url,
    shared: Arc<Shared>,
}

struct Shared {
    upstream: Upstream,
    manners: Mutex<Manners>,
    dice: Mutex<Dice>,
    earlier: Mutex<Option<String>>,
    memory: Mutex<lies::Memory>,
    played: Mutex<BTreeMap<String, u64>>,
    requests: Mutex<u64>,
}

/// The honest chain.
struct Upstream {
    url: Url,
    http: reqwest::Client,
    chain_id: u64,
    /// How far `finalized` is behind the head, and twice as far as `safe`, in blocks.
    finalized_behind: u64,
}

impl Upstream {
    async fn post(&self, body: &Value) -> Value {
        let request = self.http.post(self.url.clone()).header("content-type", "application/json");
        let response = request.body(body.to_string()).send().await.unwrap();
        serde_json::from_slice(&response.bytes().await.unwrap()).unwrap()
    }

    async fn head(&self) -> Head {
        let params = json!(["latest", false]);
        let call =
            json!({"jsonrpc": "2.0", "id": 1, "method": "eth_getBlockByNumber", "params": params});
        let header = self.post(&call).await["result"].take();
        let hash = serde_json::from_value(header["hash"].clone()).unwrap();
        Head { number: number(&header["number"]), hash }
    }
}

/// A hex quantity.
pub(crate) fn number(value: &Value) -> u64 {
    u64::from_str_radix(value.as_str().unwrap().trim_start_matches("0x"), 16).unwrap()
}

impl FaultProxy {
    /// An honest endpoint of this chain, until it is told otherwise. `finalized_behind` is how far
    /// `finalized` is behind the upstream's head.
    pub(crate) async fn start(
        upstream: Url,
        chain_id: u64,
        finalized_behind: u64,
        seed: u64,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            upstream: Upstream { url: upstream, http: http_client(), chain_id, finalized_behind },
            manners: Mutex::default(),
            dice: Mutex::new(Dice::new(seed)),
            earlier: Mutex::default(),
            memory: Mutex::default(),
            played: Mutex::default(),
            requests: Mutex::default(),
        });
        let serving = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                tokio::spawn(converse(connection, Arc::clone(&serving)));
            }
        });
        Self { url: Url::parse(&url).unwrap(), shared }
    }

    /// Where it listens.
    pub(crate) fn url(&self) -> &Url {
        &self.url
    }

    /// From now on it is like this.
    pub(crate) fn behave(&self, manners: Manners) {
        *self.shared.manners.lock().unwrap() = manners;
    }

    /// How it behaves now.
    pub(crate) fn manners(&self) -> Manners {
        self.shared.manners.lock().unwrap().clone()
    }

    /// How often each fault and lie was played.
    pub(crate) fn played(&self) -> BTreeMap<String, u64> {
        self.shared.played.lock().unwrap().clone()
    }

    /// HTTP requests so far.
    pub(crate) fn requests(&self) -> u64 {
        *self.shared.requests.lock().unwrap()
    }
}

/// Serves one connection until one side has enough.
async fn converse(mut connection: TcpStream, shared: Arc<Shared>) {
    let mut read = Vec::new();
    while let Some(body) = read_request(&mut connection, &mut read).await {
        let delivery = shared.answer(&body).await;
        if !deliver(&mut connection, delivery).await {
            return;
        }
    }
}

/// The body of the next request; `None` when there is none any more.
async fn read_request(connection: &mut TcpStream, read: &mut Vec<u8>) -> Option<Vec<u8>> {
    const HEAD_END: &[u8] = b"\r\n\r\n";
    loop {
        if let Some(end) = read.windows(HEAD_END.len()).position(|w| w == HEAD_END) {
            let head = String::from_utf8_lossy(&read[..end]).to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
            let length: usize = length.map_or(0, |length| length.trim().parse().unwrap());
            let start = end + HEAD_END.len();
            if read.len() >= start + length {
                let rest = read.split_off(start + length);
                let request = std::mem::replace(read, rest);
                return Some(request[start..].to_vec());
            }
        }
        // A client that hangs up has had enough.
        match connection.read_buf(read).await {
            Ok(0) | Err(_) => return None,
            Ok(_) => {}
        }
    }
}

/// Whether the connection can be used again.
async fn deliver(connection: &mut TcpStream, delivery: Delivery) -> bool {
    let whole = |status: &str, headers: &str, body: &[u8]| {
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{headers}\r\n");
        [head.as_bytes(), body].concat()
    };
    // The client may be gone by now: that is its own affair.
    match delivery {
        Delivery::Whole { status, headers, body } => {
            connection.write_all(&whole(status, headers, body.as_bytes())).await.is_ok()
        }
        Delivery::CutAt { body, at } => {
            let bytes = whole("200 OK", "", body.as_bytes());
            let sent = bytes.len() - body.len() + at.min(body.len().saturating_sub(1));
            let _ = connection.write_all(&bytes[..sent]).await;
            false
        }
        Delivery::InDrops { body, drops, pause } => {
            let bytes = whole("200 OK", "", body.as_bytes());
            for drop in bytes.chunks(bytes.len().div_ceil(drops)) {
                if connection.write_all(drop).await.is_err() {
                    return false;
                }
                tokio::time::sleep(pause).await;
            }
            true
        }
        Delivery::Reset => {
            let _ = connection.set_zero_linger();
            false
        }
        Delivery::Never => {
            // Until the client hangs up.
            let _ = connection.read(&mut [0]).await;
            false
        }
    }
}

impl Shared {
    async fn answer(&self, body: &[u8]) -> Delivery {
        *self.requests.lock().unwrap() += 1;
        let manners = self.manners.lock().unwrap().clone();
        let is_faulty = self.roll(0..1_000) < manners.faulty_per_mille;
        let request: Value = serde_json::from_slice(body).unwrap();
        let mut exchange = Exchange::new(request, self.upstream.chain_id);
        let mut fault = (is_faulty && !manners.faults.is_empty()).then(|| self.pick(&manners));
        let lag = (fault == Some(Fault::StaleHead)).then(|| self.roll(1..100));
        let known = match (manners.frozen_at, lag) {
            (Some(head), _) => Some(head),
            (None, Some(lag)) => Some(self.upstream.head().await.number.saturating_sub(lag)),
            (None, None) => None,
        };
        if let Some(head) = known {
            exchange.know_only(head, self.upstream.finalized_behind);
        }
        self.ask(&mut exchange).await;
        if let Some(lie) = manners.lie {
            let head = self.upstream.head().await;
            let told = lie.tell(&mut exchange, &mut self.memory.lock().unwrap(), head);
            self.count(told.then(|| format!("{lie:?}")));
        }
        let mut delivery = exchange.honest_delivery();
        let honest = delivery.body().to_owned();
        // Not every fault can befall every answer: then another one does.
        for _ in 0..TRIES {
            let Some(now) = fault else { break };
            let earlier = self.earlier.lock().unwrap().clone();
            let played = {
                let mut dice = self.dice.lock().unwrap();
                now.play(&mut exchange, &mut delivery, earlier, &mut dice)
            };
            if played {
                self.count(Some(format!("{now:?}")));
                break;
            }
            fault = Some(self.pick(&manners)).filter(|fault| *fault != Fault::StaleHead);
        }
        *self.earlier.lock().unwrap() = Some(honest);
        if fault == Some(Fault::Slow) {
            let millis = self.roll(20..150);
            tokio::time::sleep(Duration::from_millis(millis)).await;
        }
        delivery
    }

    fn pick(&self, manners: &Manners) -> Fault {
        *self.dice.lock().unwrap().pick(&manners.faults)
    }

    fn roll(&self, range: std::ops::Range<u64>) -> u64 {
        self.dice.lock().unwrap().roll(range)
    }

    fn count(&self, played: Option<String>) {
        if let Some(name) = played {
            *self.played.lock().unwrap().entry(name).or_default() += 1;
        }
    }

    /// Fills in what the honest chain answers.
    async fn ask(&self, exchange: &mut Exchange) {
        let (places, calls): (Vec<usize>, Vec<Value>) = exchange.open_calls();
        if calls.is_empty() {
            return;
        }
        let mut answers = self.upstream.post(&Value::Array(calls)).await;
        for (place, answer) in places.into_iter().zip(answers.as_array_mut().unwrap()) {
            exchange.answers[place] = answer.take();
        }
    }
}
