//! The stories we have all parse, and those that make no sense are refused by name.

use super::*;

fn story(rest: &str) -> Result<Scenario, String> {
    let head = "name = \"n\"\norigin = \"o\"\nteaches = \"t\"\n";
    let end = "\n[[expect]]\nat = \"1h\"\n";
    Scenario::parse("case.toml", &format!("{head}{rest}{end}")).map_err(|error| match &error {
        ScenarioError::Format { source, .. } => format!("{error}: {source}"),
        _ => error.to_string(),
    })
}
