//! A node as a test talks to it: any JSON-RPC call, past the daemon's own reader.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use alloy_primitives::U64;
use reconciled::domain::{BlockRef, BlockTime};
use serde_json::{Value, json};
use url::Url;

use super::anvil::http_client;

/// Where a node listens, and how it is asked.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    url: Url,
    http: reqwest::Client,
}

impl Node {
    pub(crate) fn at(url: Url) -> Self {
        Self { url, http: http_client() }
    }

    /// Where it listens.
    pub(crate) fn url(&self) -> Url {
        self.url.clone()
    }

    /// Any JSON-RPC call, which must succeed.
    pub(crate) async fn rpc(&self, method: &str, params: Value) -> Value {
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        let response = self
            .http
            .post(self.url.clone())
            .header("content-type", "application/json")
            .body(request.to_string())
            .send()
            .await
            .unwrap();
        let mut answer: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        assert!(answer["error"].is_null(), "{method} {params}: {}", answer["error"]);
        answer["result"].take()
    }

    /// The block with this tag or hex number.
    pub(crate) async fn block(&self, block: &str) -> BlockRef {
        let header = self.rpc("eth_getBlockByNumber", json!([block, false])).await;
        let number = |field: &str| -> u64 {
            serde_json::from_value::<U64>(header[field].clone()).unwrap().to()
        };
        BlockRef {
            number: number("number"),
            hash: serde_json::from_value(header["hash"].clone()).unwrap(),
            time: BlockTime::from_secs(number("timestamp")),
        }
    }
}
