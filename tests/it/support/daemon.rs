//! The real binary as a process: `run` with its pages and logs, and the other commands.
//!
//! Settings are fast, so that no test waits for a schedule. A daemon that is dropped is killed by its
//! id; when its test fails, its logs are printed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::anvil::http_client;

/// The binary under test.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_reconciled");

/// A condition that does not hold after this long fails the test.
const PATIENCE: Duration = Duration::from_secs(90);

/// How often a condition is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(40);

/// The logs printed when a test fails.
const LOG_LINES_SHOWN: usize = 150;

/// Waits until `look` says `Ok`; its last `Err` tells what was seen instead.
pub(crate) async fn eventually<T>(
    what: &str,
    mut look: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    let started = Instant::now();
    loop {
        match look().await {
            Ok(found) => return found,
            Err(seen) if started.elapsed() > PATIENCE => {
                panic!("not in {PATIENCE:?}: {what}; seen: {seen}")
            }
            Err(_) => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

/// A configuration to be written to a file: sections of `key = value`, and chains.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    sections: BTreeMap<&'static str, BTreeMap<&'static str, String>>,
    chains: String,
    environment: Vec<(String, String)>,
}

impl Settings {
    /// Everything fast, and no chain.
    pub(crate) fn fast(database_url: &str) -> Self {
        let empty =
            Self { sections: BTreeMap::new(), chains: String::new(), environment: Vec::new() };
        empty
            .text("database", "url", database_url)
            .set("database", "connections_max", "4")
            .text("http", "listen", "127.0.0.1:0")
            .text("log", "format", "json")
            .text("discovery", "every", "100ms")
            .text("discovery", "stale_after", "2s")
            .set(
                "checks",
                "repeats",
                r#"["0s", "200ms", "500ms", "1s", "2s", "3s", "5s", "8s", "13s"]"#,
            )
            .text("checks", "lease_ttl", "5s")
            .text("reconcile", "cron", "* * * * * *")
            .text("shutdown", "grace", "10s")
    }

    /// Sets a key to TOML.
    pub(crate) fn set(mut self, section: &'static str, key: &'static str, toml: &str) -> Self {
        self.sections.entry(section).or_default().insert(key, toml.to_owned());
        self
    }

    /// Leaves a key out.
    pub(crate) fn without(mut self, section: &'static str, key: &'static str) -> Self {
        self.sections.entry(section).or_default().remove(key);
        self
    }

    /// Sets a key to a text.
    pub(crate) fn text(self, section: &'static str, key: &'static str, text: &str) -> Self {
        self.set(section, key, &format!("{text:?}"))
    }

    /// Adds a chain, and its endpoints by name and URL. Heads may stand still: anvil mines when it is
    /// told to.
    pub(crate) fn chain(mut self, chain_id: u64, endpoints: &[(&str, &str)]) -> Self {
        let text = &mut self.chains;
        write!(
            text,
            "\n[[chains]]\nchain_id = {chain_id}\nblock_time = \"1s\"\nfinality_margin = \"2s\"\n\
             head_age_max = \"24h\"\nrequest_timeout = \"20s\"\n"
        )
        .unwrap();
        for (name, url) in endpoints {
            write!(text, "[[chains.endpoints]]\nname = {name:?}\nurl = {url:?}\n").unwrap();
        }
        self
    }

    /// Sets a key of the first chain to TOML.
    pub(crate) fn of_chain(mut self, key: &str, toml: &str) -> Self {
        let endpoints = "[[chains.endpoints]]";
        self.chains = self.chains.replacen(endpoints, &format!("{key} = {toml}\n{endpoints}"), 1);
        self
    }

    /// Adds a receiver to the last chain, scanned from its first block on.
    pub(crate) fn receiver(mut self, token: &str, pay_to: &str) -> Self {
        write!(
            self.chains,
            "[[chains.receivers]]\ntoken = {token:?}\npay_to = {pay_to:?}\nfirst_block = 1\n"
        )
        .unwrap();
        self
    }

    /// Sets an environment variable of the process.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    fn toml(&self) -> String {
        let mut text = String::new();
        for (section, keys) in &self.sections {
            writeln!(text, "[{section}]").unwrap();
            for (key, value) in keys {
                writeln!(text, "{key} = {value}").unwrap();
            }
        }
        text + &self.chains
    }

    /// Writes the file.
    pub(crate) fn write(self) -> ConfigFile {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reconciled.toml");
        std::fs::write(&path, self.toml()).unwrap();
        ConfigFile { path, _folder: folder, environment: self.environment }
    }
}

/// A configuration file in a folder of its own, and what goes with it.
pub(crate) struct ConfigFile {
    path: PathBuf,
    _folder: tempfile::TempDir,
    environment: Vec<(String, String)>,
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl ConfigFile {
    /// Names another file, that is not there.
    pub(crate) fn moved_to(mut self, name: &str) -> Self {
        self.path.set_file_name(name);
        self
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(BINARY);
        command.args(arguments).arg("--config").arg(&self.path).stdin(Stdio::null());
        // What the person who runs the tests has set is not what is tested.
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RECONCILED_")) {
            command.env_remove(name);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a command to its end.
    pub(crate) async fn run(&self, arguments: &[&str]) -> Ended {
        let mut command = self.command(arguments);
        let output = tokio::task::spawn_blocking(move || command.output());
        let Output { status, stdout, stderr } = output.await.unwrap().unwrap();
        Ended {
            code: status.code().expect("it was not ended by a signal"),
            stdout: String::from_utf8(stdout).unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
        }
    }

    /// Starts a command that is going to be killed.
    pub(crate) fn spawn(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts")
    }

    /// What `explain --json` says of one payment.
    pub(crate) async fn explain(&self, payment: &str) -> Value {
        let ended = self.run(&["explain", payment, "--json"]).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        let mut stories: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(stories.as_array().map(Vec::len), Some(1), "{stories}");
        stories[0].take()
    }

    /// What `explain` says of a payment or an order to a person.
    pub(crate) async fn explain_text(&self, id: &str) -> String {
        let ended = self.run(&["explain", id]).await;
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.stdout
    }

    /// Starts `run`, and returns when it serves its pages.
    pub(crate) async fn start(&self) -> Daemon {
        let mut process = self
            .command(&["run"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let logs = Arc::new(Mutex::new(Vec::new()));
        let errors = process.stderr.take().unwrap();
        let sink = Arc::clone(&logs);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                sink.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        let mut daemon = Daemon {
            process,
            reader: Some(reader),
            logs,
            listen: String::new(),
            http: http_client(),
        };
        let listen = eventually("it serves its pages", async || {
            if let Some(status) = daemon.process.try_wait().unwrap() {
                panic!("it ended with {status}:\n{}", daemon.logs().join("\n"));
            }
            daemon
                .logs_with("serving")
                .iter()
                .find_map(|line| line["listen"].as_str().map(str::to_owned))
                .ok_or_else(|| "no such line".to_owned())
        });
        daemon.listen = listen.await;
        daemon
    }

    /// The same, and returns when it works.
    pub(crate) async fn start_ready(&self) -> Daemon {
        let daemon = self.start().await;
        daemon.ready().await;
        daemon
    }
}

/// A running daemon.
pub(crate) struct Daemon {
    process: Child,
    reader: Option<std::thread::JoinHandle<()>>,
    logs: Arc<Mutex<Vec<String>>>,
    listen: String,
    http: reqwest::Client,
}

/// The lines of `/metrics`: series with its labels, and value.
#[derive(Debug)]
pub(crate) struct Series(BTreeMap<String, f64>);

impl Series {
    /// The value of a series that must exist; `name` is without the prefix `reconciled_`.
    pub(crate) fn get(&self, name: &str) -> f64 {
        let name = format!("reconciled_{name}");
        *self.0.get(&name).unwrap_or_else(|| panic!("no series {name} in {:#?}", self.0))
    }

    /// The sum of all series that begin so.
    pub(crate) fn sum(&self, beginning: &str) -> f64 {
        let beginning = format!("reconciled_{beginning}");
        self.0.iter().filter(|(name, _)| name.starts_with(&beginning)).map(|(_, value)| value).sum()
    }
}

impl Daemon {
    /// The status and body of one of its pages.
    pub(crate) async fn page(&self, path: &str) -> (u16, String) {
        let url = format!("http://{}{path}", self.listen);
        let response = self.http.get(url).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    /// Waits until it says that it works.
    pub(crate) async fn ready(&self) {
        eventually("/readyz says ready", async || match self.page("/readyz").await {
            (200, _) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
    }

    /// `/metrics` as served.
    pub(crate) async fn metrics_text(&self) -> String {
        let (status, text) = self.page("/metrics").await;
        assert_eq!(status, 200, "{text}");
        text
    }

    /// `/metrics`, parsed.
    pub(crate) async fn metrics(&self) -> Series {
        let text = self.metrics_text().await;
        let series = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        });
        Series(series.collect())
    }

    /// Every line it logged so far.
    pub(crate) fn logs(&self) -> Vec<String> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The logged objects whose message contains `text`.
    pub(crate) fn logs_with(&self, text: &str) -> Vec<Value> {
        self.logs()
            .iter()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|line| line["message"].as_str().is_some_and(|message| message.contains(text)))
            .collect()
    }

    /// Asks it to stop, and returns its exit code and how long it took.
    pub(crate) async fn sigterm(&mut self) -> (i32, Duration) {
        let started = Instant::now();
        // The id is this process's own: it was not waited for yet.
        let killed = Command::new("kill").arg(self.process.id().to_string()).status().unwrap();
        assert!(killed.success(), "it runs");
        let status = eventually("it stops", async || {
            self.process.try_wait().unwrap().ok_or_else(|| self.logs().join("\n"))
        })
        .await;
        self.read_all();
        (status.code().expect("it was not ended by a signal"), started.elapsed())
    }

    /// Ends it without a chance to do anything.
    pub(crate) fn kill9(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.read_all();
    }

    fn read_all(&mut self) {
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // By its own id, which stays taken until it is waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.read_all();
        let logs = self.logs();
        let panicked = logs.iter().any(|line| line.contains("panicked"));
        if std::thread::panicking() || panicked {
            let first = logs.len().saturating_sub(LOG_LINES_SHOWN);
            eprintln!("---- the daemon's logs\n{}", logs[first..].join("\n"));
        }
        if panicked && !std::thread::panicking() {
            panic!("the daemon panicked; its logs are above");
        }
    }
}
