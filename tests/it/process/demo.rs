//! The demo is the first thing anybody runs: it must end as its story says, and what it then tells the reader
//! to run must work.

use std::process::{Command, Output};

use crate::support::daemon::BINARY;

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).join("\n")
}

#[test]
fn the_demo_ends_as_told_and_leaves_a_database_to_explain() {
    let home = tempfile::tempdir().unwrap();
    let demo = Command::new(BINARY).arg("demo").env("TMPDIR", home.path()).output().unwrap();
    assert!(demo.status.success(), "{}", text(&demo));
    assert!(!text(&demo).contains("its  pays another order"), "{}", text(&demo));
    let kept = std::fs::read_dir(home.path()).unwrap().next().unwrap().unwrap().path();
    let explained = Command::new(BINARY)
        .args(["explain", "reorged", "--config"])
        .arg(kept.join("reconciled.toml"))
        .output()
        .unwrap();
    let told = text(&explained);
    assert!(explained.status.success() && told.contains("reorged_after_delivery"), "{told}");
}
