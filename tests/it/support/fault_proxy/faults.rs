//! What goes wrong between an honest chain and its reader. Each of these can be told from a good answer.

use std::time::Duration;

use serde_json::{Value, json};

use super::number;
use crate::support::dice::Dice;

/// One request goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// The answer takes its time.
    Slow,
    /// No answer, ever.
    Hang,
    /// The connection is reset.
    Reset,
    /// The connection ends in the middle of the body.
    CutShort,
    /// The body is whole by its length, and half of the JSON.
    HalfTheJson,
    /// The body comes in small pieces.
    Drips,
    /// Nothing, with status 200.
    EmptyBody,
    /// A page for people, with status 200.
    Html,
    /// A page for people, with status 502.
    BadGateway,
    /// Status 503.
    Unavailable,
    /// Status 500 and no body.
    ServerError,
    /// Status 429.
    SlowDown,
    /// Status 429, with `Retry-After`.
    SlowDownFor,
    /// A good answer under status 429.
    SlowDownNext,
    /// Says it is compressed, and is not.
    Gzip,
    /// A redirect.
    Redirect,
    /// JSON that is no JSON-RPC.
    AnyJson,
    /// Ids that nobody asked with.
    WrongIds,
    /// No ids.
    NoIds,
    /// Ids as text: some servers do, and mean no harm.
    TextIds,
    /// One call of the batch is not answered.
    OneLeftOut,
    /// One call of the batch is answered twice, the second time with another call's answer.
    OneTwice,
    /// The answers come in another order, which is allowed.
    Shuffled,
    /// Two headers of the batch are swapped.
    Swapped,
    /// The answer to an earlier request.
    Earlier,
    /// The result is `null`.
    Null,
    /// The result is `0x`.
    NoData,
    /// No logs.
    NoLogs,
    /// Some of the logs.
    SomeLogs,
    /// Multicall3 says another chain id.
    OtherChain,
    /// Ten megabytes around the answer.
    Huge,
    /// A JSON-RPC error, in one of many shapes.
    RpcError,
    /// One call of the batch fails.
    OneFails,
    /// As of some hundred blocks ago; a log read finds nothing beyond, and says nothing.
    StaleHead,
}

impl Fault {
    /// All of them but [`Self::Hang`] and [`Self::Huge`], which take long.
    pub(crate) const QUICK: [Self; 32] = [
        Self::Slow,
        Self::Reset,
        Self::CutShort,
        Self::HalfTheJson,
        Self::Drips,
        Self::EmptyBody,
        Self::Html,
        Self::BadGateway,
        Self::Unavailable,
        Self::ServerError,
        Self::SlowDown,
        Self::SlowDownFor,
        Self::SlowDownNext,
        Self::Gzip,
        Self::Redirect,
        Self::AnyJson,
        Self::WrongIds,
        Self::NoIds,
        Self::TextIds,
        Self::OneLeftOut,
        Self::OneTwice,
        Self::Shuffled,
        Self::Swapped,
        Self::Earlier,
        Self::Null,
        Self::NoData,
        Self::NoLogs,
        Self::SomeLogs,
        Self::OtherChain,
        Self::RpcError,
        Self::OneFails,
        Self::StaleHead,
    ];
}

/// How an answer goes out.
#[derive(Debug)]
pub(super) enum Delivery {
    Whole { status: &'static str, headers: &'static str, body: String },
    CutAt { body: String, at: usize },
    InDrops { body: String, drops: usize, pause: Duration },
    Reset,
    Never,
}

impl Delivery {
    fn ok(body: String) -> Self {
        Self::Whole { status: "200 OK", headers: "content-type: application/json\r\n", body }
    }

    pub(super) fn body(&self) -> &str {
        match self {
            Self::Whole { body, .. } | Self::CutAt { body, .. } | Self::InDrops { body, .. } => {
                body
            }
            Self::Reset | Self::Never => "",
        }
    }
}

/// The calls of one request, and their answers.
pub(super) struct Exchange {
    chain_id: u64,
    is_batch: bool,
    pub(super) calls: Vec<Value>,
    /// `null` until it is known.
    pub(super) answers: Vec<Value>,
}

impl Exchange {
    pub(super) fn new(request: Value, chain_id: u64) -> Self {
        let (is_batch, calls) = match request {
            Value::Array(calls) => (true, calls),
            call => (false, vec![call]),
        };
        let answers = vec![Value::Null; calls.len()];
        Self { chain_id, is_batch, calls, answers }
    }

    /// What the chain must be asked, and for which place.
    pub(super) fn open_calls(&self) -> (Vec<usize>, Vec<Value>) {
        let all = self.calls.iter().cloned().enumerate();
        all.filter(|(place, _)| self.answers[*place].is_null()).unzip()
    }

    pub(super) fn is(&self, place: usize, method: &str) -> bool {
        self.calls[place]["method"] == method
    }

    fn result(&mut self, place: usize, result: Value) {
        self.answers[place] =
            json!({"jsonrpc": "2.0", "id": self.calls[place]["id"], "result": result});
    }

    fn answers_of(&mut self, method: &str) -> Vec<&mut Value> {
        let of = |call: &Value| call["method"] == method;
        let both = self.calls.iter().zip(&mut self.answers);
        both.filter(|(call, answer)| of(call) && !answer["result"].is_null())
            .map(|(_, answer)| answer)
            .collect()
    }

    /// Asks as a node would answer whose head is `head`.
    pub(super) fn know_only(&mut self, head: u64, finalized_behind: u64) {
        for place in 0..self.calls.len() {
            if self.is(place, "eth_getBlockByNumber") {
                let asked = &mut self.calls[place]["params"][0];
                let behind = match asked.as_str().unwrap() {
                    "latest" => Some(0),
                    "safe" => Some(finalized_behind / 2),
                    "finalized" => Some(finalized_behind),
                    _ => None,
                };
                match behind {
                    Some(behind) => *asked = json!(format!("{:#x}", head.saturating_sub(behind))),
                    None if number(asked) > head => self.result(place, Value::Null),
                    None => {}
                }
            } else if self.is(place, "eth_getLogs") {
                let filter = &mut self.calls[place]["params"][0];
                if !filter["blockHash"].is_null() {
                    continue;
                }
                if number(&filter["fromBlock"]) > head {
                    self.result(place, json!([]));
                } else if number(&filter["toBlock"]) > head {
                    filter["toBlock"] = json!(format!("{head:#x}"));
                }
            }
        }
    }

    fn body(&self) -> String {
        match self.is_batch {
            true => Value::from(self.answers.clone()).to_string(),
            false => self.answers[0].to_string(),
        }
    }

    pub(super) fn honest_delivery(&self) -> Delivery {
        Delivery::ok(self.body())
    }
}

/// Errors as nodes, providers and whatever stands before them word and shape them.
const ERRORS: [&str; 16] = [
    r#"{"code":-32000,"message":"header not found"}"#,
    r#"{"code":-32000,"message":"missing trie node 0xabc (path )"}"#,
    r#"{"code":-32603,"message":"Internal error"}"#,
    r#"{"code":-32601,"message":"the method does not exist/is not available"}"#,
    r#"{"code":-32602,"message":"invalid argument 0: hex string without 0x prefix"}"#,
    r#"{"code":-32005,"message":"daily request count exceeded, request rate limited"}"#,
    r#"{"code":-32005,"message":"query returned more than 10000 results"}"#,
    r#"{"code":-32016,"message":"over rate limit"}"#,
    r#"{"code":429,"message":"Your app has exceeded its compute units per second capacity"}"#,
    r#"{"code":3,"message":"execution reverted","data":"0x"}"#,
    r#"{"code":"SERVER_ERROR","message":{"reason":"upstream"}}"#,
    r#"{"message":"no backend is healthy"}"#,
    r#"{"code":-32000,"message":"out of gas"}"#,
    r#"{"code":-32701,"message":"exceed limit","data":[1,2,3]}"#,
    r#"{}"#,
    r#""boom""#,
];

/// JSON that answers nothing.
const ANY_JSON: [&str; 8] = [
    "null",
    "true",
    "42",
    "\"ok\"",
    "[]",
    "{}",
    "[[]]",
    r#"{"status":"ok","data":{"result":"0x1"}}"#,
];

const HTML: &str = "<!DOCTYPE html><html><head><title>Just a moment...</title></head></html>";

impl Fault {
    /// Spoils the exchange or its delivery. Returns whether there was something to spoil.
    pub(super) fn play(
        self,
        exchange: &mut Exchange,
        delivery: &mut Delivery,
        earlier: Option<String>,
        dice: &mut Dice,
    ) -> bool {
        let body = exchange.body();
        let page = |status, headers, body: &str| Delivery::Whole {
            status,
            headers,
            body: body.to_owned(),
        };
        *delivery = match self {
            Self::Slow | Self::StaleHead => return true,
            Self::Hang => Delivery::Never,
            Self::Reset => Delivery::Reset,
            Self::CutShort => {
                let at = dice.roll(0..body.len() as u64) as usize;
                Delivery::CutAt { body, at }
            }
            Self::HalfTheJson => Delivery::ok(body[..body.len() / 2].to_owned()),
            Self::Drips => Delivery::InDrops { body, drops: 12, pause: Duration::from_millis(4) },
            Self::EmptyBody => Delivery::ok(String::new()),
            Self::Html => page("200 OK", "content-type: text/html\r\n", HTML),
            Self::BadGateway => page("502 Bad Gateway", "content-type: text/html\r\n", HTML),
            Self::Unavailable => page("503 Service Unavailable", "", "no healthy upstream"),
            Self::ServerError => page("500 Internal Server Error", "", ""),
            Self::SlowDown => page("429 Too Many Requests", "", "slow down"),
            Self::SlowDownFor => page("429 Too Many Requests", "retry-after: 1\r\n", ""),
            Self::SlowDownNext => page("429 Too Many Requests", "", &body),
            Self::Gzip => page("200 OK", "content-encoding: gzip\r\n", "\u{1f}\u{8b}\u{8}garbage"),
            Self::Redirect => page("302 Found", "location: /elsewhere\r\n", ""),
            Self::AnyJson => Delivery::ok((*dice.pick(&ANY_JSON)).to_owned()),
            Self::Earlier => match earlier {
                Some(earlier) => Delivery::ok(earlier),
                None => return false,
            },
            Self::Huge => {
                let padding = " ".repeat(10 * 1024 * 1024);
                Delivery::ok(format!("{padding}{body}"))
            }
            _ => {
                if !self.spoil(exchange, dice) {
                    return false;
                }
                exchange.honest_delivery()
            }
        };
        true
    }

    /// Spoils the answers themselves.
    fn spoil(self, exchange: &mut Exchange, dice: &mut Dice) -> bool {
        let count = exchange.answers.len();
        let one = dice.roll(0..count as u64) as usize;
        let error = |answer: &mut Value, dice: &mut Dice| {
            let text: &&str = dice.pick(&ERRORS);
            let error: Value = serde_json::from_str(text).unwrap();
            *answer = json!({"jsonrpc": "2.0", "id": answer["id"], "error": error});
        };
        match self {
            Self::WrongIds => {
                for answer in &mut exchange.answers {
                    answer["id"] = json!(answer["id"].as_u64().unwrap() + 1_000_003);
                }
            }
            Self::NoIds => {
                for answer in &mut exchange.answers {
                    answer["id"] = Value::Null;
                }
            }
            Self::TextIds => {
                for answer in &mut exchange.answers {
                    answer["id"] = json!(answer["id"].to_string());
                }
            }
            Self::OneLeftOut if count > 1 => drop(exchange.answers.remove(one)),
            Self::OneTwice if count > 1 => {
                let mut again = exchange.answers[(one + 1) % count].clone();
                again["id"] = exchange.answers[one]["id"].clone();
                exchange.answers.push(again);
            }
            Self::Shuffled if count > 1 => exchange.answers.reverse(),
            Self::Swapped => return swap_headers(exchange),
            Self::Null => exchange.answers[one]["result"] = Value::Null,
            Self::NoData => {
                let mut calls = exchange.answers_of("eth_call");
                let Some(answer) = calls.first_mut() else { return false };
                answer["result"] = json!("0x");
            }
            Self::NoLogs | Self::SomeLogs => {
                let mut found = exchange.answers_of("eth_getLogs");
                let Some(answer) = found.first_mut() else { return false };
                let logs = answer["result"].as_array_mut().unwrap();
                let kept = if self == Self::NoLogs { 0 } else { logs.len() / 2 };
                let spoilt = kept < logs.len();
                logs.truncate(kept);
                return spoilt;
            }
            Self::OtherChain => {
                let mut spoilt = false;
                let (ours, other) = (word(exchange.chain_id), word(exchange.chain_id + 1));
                for answer in exchange.answers_of("eth_call") {
                    let Some(data) = answer["result"].as_str() else { continue };
                    spoilt |= data.contains(&ours);
                    answer["result"] = json!(data.replace(&ours, &other));
                }
                return spoilt;
            }
            Self::RpcError => {
                let mut spoilt = exchange.answers[0].clone();
                error(&mut spoilt, dice);
                exchange.answers = vec![spoilt; count];
                for (call, answer) in exchange.calls.iter().zip(&mut exchange.answers) {
                    answer["id"] = call["id"].clone();
                }
            }
            Self::OneFails if count > 1 => error(&mut exchange.answers[one], dice),
            _ => return false,
        }
        true
    }
}

/// A 32-byte word in hex, without a prefix.
fn word(number: u64) -> String {
    format!("{number:064x}")
}

/// Swaps the results of the first two calls that ask for different headers.
fn swap_headers(exchange: &mut Exchange) -> bool {
    let mut headers = exchange.answers_of("eth_getBlockByNumber");
    let [first, second, ..] = headers.as_mut_slice() else { return false };
    if first["result"]["hash"] == second["result"]["hash"] {
        return false;
    }
    let (one, other) = (first["result"].take(), second["result"].take());
    (first["result"], second["result"]) = (other, one);
    true
}
