//! What must not be shown of an endpoint: its URL, and whatever of it may be a key.

use percent_encoding::percent_decode_str;
use url::Url;

/// How much of a foreign text is kept for people, in characters.
const EXCERPT_CHARS_MAX: usize = 200;

/// Parts of a URL shorter than this are no secrets, and redacting them would garble messages.
const SECRET_CHARS_MIN: usize = 8;

/// The parts of an endpoint's URL that may be keys, longest first.
pub(super) struct Secrets(Vec<String>);

impl Secrets {
    /// Those of this URL.
    pub(super) fn of(url: &Url) -> Self {
        Self(secrets_of(url))
    }

    /// The beginning of a foreign text, on one line, without the URL's secrets: some endpoints answer
    /// with the key that was refused.
    pub(super) fn excerpt(&self, text: &[u8]) -> String {
        let start = &text[..text.len().min(4 * EXCERPT_CHARS_MAX)];
        let text = self.without(&String::from_utf8_lossy(start));
        text.chars().take(EXCERPT_CHARS_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
    }

    /// The text without them.
    pub(super) fn without(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "[hidden]"))
    }
}

/// The parts of a URL that may be keys, longest first.
fn secrets_of(url: &Url) -> Vec<String> {
    let mut parts = vec![url.as_str().to_owned(), url.path().to_owned(), url.username().to_owned()];
    parts.extend(url.path().split('/').map(str::to_owned));
    parts.extend(url.query().map(str::to_owned));
    parts.extend(url.password().map(str::to_owned));
    parts.extend(url.query_pairs().map(|(_, value)| value.into_owned()));
    // As the provider may repeat them: what stands encoded in a URL, decoded.
    let decoded: Vec<String> = parts
        .iter()
        .map(|part| percent_decode_str(part).decode_utf8_lossy().into_owned())
        .collect();
    parts.extend(decoded);
    parts.retain(|part| part.len() >= SECRET_CHARS_MIN);
    parts.sort_by_key(|part| std::cmp::Reverse(part.len()));
    parts.dedup();
    parts
}
