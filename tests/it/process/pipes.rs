//! Whoever reads a command's output may leave in the middle, as `head` does: the command still does what it
//! was asked, and ends as it would have.

use std::io::pipe;
use std::process::{Command, Stdio};

use crate::support::daemon::BINARY;

#[test]
fn every_command_ends_as_usual_when_nobody_reads_what_it_prints() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("reconciled.toml");
    let database = folder.path().join("gateway.db");
    let text = format!(
        "[database]\nurl = \"sqlite:{}\"\n[[chains]]\nchain_id = 8453\n\
         [[chains.endpoints]]\nname = \"nowhere\"\nurl = \"http://127.0.0.1:9\"\n",
        database.display()
    );
    std::fs::write(&config, text).unwrap();
    for arguments in [
        &["migrate"][..],
        &["flags", "list"],
        &["flags", "list", "--json"],
        &["flags", "close", "1", "--by", "me", "--note", "there is none"],
        &["explain", "nobody"],
        &["explain", "nobody", "--json"],
        &["recheck", "nobody"],
        &["reconcile"],
        &["reconcile", "--json"],
        &["schedule", "show"],
        &["schedule", "show", "--json"],
        &["schedule", "show", "--chain", "5"],
        &["schedule", "tune"],
        &["schedule", "tune", "--json"],
    ] {
        let command = || {
            let mut command = Command::new(BINARY);
            command.args(arguments).arg("--config").arg(&config);
            command
        };
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let nobody_reads = command()
            .stdout(Stdio::from(writer.try_clone().unwrap()))
            .stderr(Stdio::from(writer))
            .status()
            .unwrap();
        let read = command().output().unwrap();
        assert_eq!(nobody_reads.code(), read.status.code(), "{arguments:?}: {read:?}");
        assert_ne!(read.status.code(), Some(101), "{read:?}");
    }
}
