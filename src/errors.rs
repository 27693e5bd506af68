//! How an error is told: with everything that caused it.
//!
//! An error's own message never repeats its source; whoever shows it walks the chain, here.

/// An error and everything that caused it, in one line unless a message itself breaks it.
pub fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::error_chain;

    #[test]
    fn every_cause_is_told_outermost_first() {
        let error = anyhow::anyhow!("connection refused").context("no database").context("no run");
        assert_eq!(error_chain(error.as_ref()), "no run: no database: connection refused");
    }
}
