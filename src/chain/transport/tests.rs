//! What the way to an endpoint refuses, hides and puts in order.

use std::sync::Mutex;

use super::*;
use crate::chain::{EndpointLimits, ErrorRateLimits};
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
    let gate = Gate::new(&EndpointLimits::default(), clock.clone(), timeout);
    let errors = ErrorMeter::new(ErrorRateLimits::default(), clock);
    let transport =
        Transport::new(ChainId::new(1), name, url, timeout, seen.clone(), gate, errors).unwrap();
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
        (http(&format!("302 Found\r\nlocation: http://127.0.0.1:1/{KEY}"), KEY), Kind::RpcError),
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
    // A key that a URL must encode comes back as it is.
    let (port, _) = server(http("200 OK", "who is k3y+k3y/k3y=?")).await;
    for url in ["k3y%2Bk3y%2Fk3y%3D/", "?key=k3y%2Bk3y%2Fk3y%3D"] {
        let url = format!("http://127.0.0.1:{port}/{url}");
        let error = transport(&url, &Arc::default()).call(call("eth_chainId")).await.unwrap_err();
        assert!(!error.to_string().contains("k3y+"), "{error}");
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
    let body = br#"[{"id":8,"result":"b"},{"id":null,"error":{"code":429,"message":"slow down"}}]"#;
    let results = parse_answers(body, 7, 2).unwrap();
    assert_eq!(results[0].as_ref().unwrap_err().kind(), ReadFailureKind::RateLimited);
    assert_eq!(results[1].as_ref().unwrap().get(), "\"b\"");
    assert!(parse_answers(br#"{"id":7,"result":"a"}"#, 7, 2).is_none(), "one answer to two");
    assert!(parse_answers(br#"{"result":"a"}"#, 7, 1).unwrap()[0].is_err(), "whose is it?");
}

#[tokio::test]
async fn a_batch_that_is_refused_in_part_starts_the_backoff() {
    let part = r#"[{"id":0,"result":"0x1"},{"id":1,"error":{"code":429,"message":"slow"}}]"#;
    let whole = r#"[{"id":null,"error":{"code":429,"message":"slow"}}]"#;
    for body in [part, whole] {
        let (port, _) = server(http("200 OK", body)).await;
        let transport = transport(&format!("http://127.0.0.1:{port}"), &Arc::new(Seen::default()));
        let answered = transport.exchange(&[call("eth_chainId"), call("eth_call")]).await;
        let kinds: Vec<_> =
            answered.unwrap().iter().map(|r| r.as_ref().err().map(CallError::kind)).collect();
        assert_eq!(kinds[1], Some(ReadFailureKind::RateLimited), "{body}");
        assert!(transport.is_spared(), "{body}");
    }
}

#[test]
fn two_answers_to_one_call_are_none() {
    let body = br#"[{"id":0,"result":"a"},{"id":1,"result":"b"},{"id":0,"result":"c"}]"#;
    let results = parse_answers(body, 0, 2).unwrap();
    assert!(matches!(results[0], Err(CallError::BadAnswer(_))));
    assert_eq!(results[1].as_ref().unwrap().get(), "\"b\"");
}

#[test]
fn what_paces_teaches_or_reverts_is_no_failure_and_the_rest_is() {
    let rpc = |code, message: &str| CallError::Rpc { code, message: message.to_owned() };
    let http = |status| CallError::Http { status, body: String::new() };
    let good = || Ok(RawValue::NULL.to_owned());
    let missing = || Err(CallError::BadAnswer("left out".to_owned()));
    let wide = || rpc(-32005, "query returned more than 10000 results");
    type Case = (u16, Result<Vec<CallResult>, CallError>, Option<bool>);
    let cases: [Case; 18] = [
        (200, Ok(vec![good(), good()]), Some(false)),
        (200, Ok(vec![good(), missing()]), Some(true)),
        (200, Err(CallError::BadAnswer("not JSON-RPC".to_owned())), Some(true)),
        (200, Err(CallError::Timeout), Some(true)),
        (200, Err(CallError::Unreachable("reset".to_owned())), Some(true)),
        (500, Err(http(500)), Some(true)),
        (502, Err(http(502)), Some(true)),
        (403, Err(http(403)), Some(true)),
        (503, Err(http(503)), None),
        (429, Err(http(429)), None),
        (413, Err(http(413)), Some(false)),
        (200, Ok(vec![good(), Err(rpc(429, "slow down"))]), None),
        (200, Ok(vec![Err(rpc(3, "execution reverted"))]), Some(false)),
        (500, Ok(vec![Err(rpc(3, "execution reverted"))]), Some(false)),
        (500, Ok(vec![Err(rpc(-32603, "internal error"))]), Some(true)),
        (200, Ok(vec![Err(rpc(-32603, "internal error"))]), Some(false)),
        (200, Ok(vec![Err(wide())]), Some(false)),
        (503, Ok(vec![Err(wide())]), Some(false)),
    ];
    for (status, answered, failed) in cases {
        assert_eq!(has_failed(status, &answered, true), failed, "{status}: {answered:?}");
    }
    // Whoever reads no logs asked for no range.
    for error in [http(413), CallError::BadAnswer("response size is above 1 bytes".to_owned())] {
        assert_eq!(has_failed(200, &Err(error.clone()), true), Some(false), "{error}");
        assert_eq!(has_failed(200, &Err(error.clone()), false), Some(true), "{error}");
    }
    assert_eq!(has_failed(503, &Ok(vec![Err(wide())]), false), None);
}

#[tokio::test]
async fn only_an_answer_that_did_not_fail_ends_the_doublings() {
    let body = r#"{"id":0,"result":"0x1"}"#;
    for (status, body, ends) in [("200 OK", body, true), ("502 Bad Gateway", "", false)] {
        let (port, _) = server(http(status, body)).await;
        let transport = transport(&format!("http://127.0.0.1:{port}"), &Arc::new(Seen::default()));
        // The clock of the gate stands still, and what is spared for no time is over at once.
        transport.gate.refused_before(ReadFailureKind::RateLimited);
        let _ = transport.exchange(&[call("eth_chainId")]).await;
        assert_eq!(transport.gate.refusals() == 0, ends, "{status}");
    }
}
