//! JSON-RPC answers: which call each one is to, and what it holds.

use std::collections::HashMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use super::CallResult;
use crate::chain::error::CallError;

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
pub(super) fn parse_answers(body: &[u8], first_id: u64, count: u64) -> Option<Vec<CallResult>> {
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
pub(in crate::chain) fn decode<T: DeserializeOwned>(
    what: &str,
    result: &RawValue,
) -> Result<T, CallError> {
    // The parser's own words would quote the answer, which may be long or hold a key.
    serde_json::from_str(result.get()).map_err(|error| {
        let place = error.column();
        CallError::BadAnswer(format!("{what}: not of the expected form at character {place}"))
    })
}
