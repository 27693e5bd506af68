//! A fresh PostgreSQL database per test, cloned from a template that is migrated once per cluster.
//!
//! The cluster itself is brought by `./test.sh`. Test processes run side by side: whoever comes first
//! makes the template, under an advisory lock, and names of clones are random.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use reconciled::store::{DatabaseUrl, connect};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection};
use uuid::Uuid;

/// Where the cluster is.
const VARIABLE: &str = "RECONCILED_TEST_POSTGRES";

/// Any number will do, as long as nobody else in the cluster uses it.
const TEMPLATE_LOCK: i64 = 0x7265_636f_6e63;

/// A database of one test's own, dropped with the value.
pub(crate) struct TestDatabase {
    name: String,
}

impl TestDatabase {
    /// A database as `migrate` leaves it.
    pub(crate) async fn migrated() -> Self {
        let template = template().await;
        Self::create(&format!("TEMPLATE {template}")).await
    }

    /// A database with nothing in it.
    pub(crate) async fn empty() -> Self {
        Self::create("").await
    }

    async fn create(how: &str) -> Self {
        let name = format!("reconciled_test_{}", Uuid::new_v4().simple());
        let mut admin = admin().await;
        run(&mut admin, format!("CREATE DATABASE {name} {how}")).await;
        admin.close().await.expect("the connection closes");
        Self { name }
    }

    /// Its URL.
    pub(crate) fn url(&self) -> String {
        url_of(&self.name)
    }

    /// A connection of the test's own.
    pub(crate) async fn connection(&self) -> PgConnection {
        PgConnection::connect(&self.url()).await.expect("the test's database answers")
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        let name = self.name.clone();
        // The test's runtime may be gone, or busy unwinding: this one is its own.
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime starts").block_on(async {
                let mut admin = admin().await;
                run(&mut admin, format!("DROP DATABASE {name} WITH (FORCE)")).await;
            });
        })
        .join();
        if dropped.is_err() && !std::thread::panicking() {
            panic!("the test's database {} could not be dropped", self.name);
        }
    }
}

fn cluster() -> String {
    std::env::var(VARIABLE)
        .unwrap_or_else(|_| panic!("{VARIABLE} is not set: run ./test.sh, which brings PostgreSQL"))
}

fn url_of(database: &str) -> String {
    let mut url = url::Url::parse(&cluster()).expect("a URL");
    url.set_path(database);
    url.into()
}

async fn admin() -> PgConnection {
    let options: PgConnectOptions = cluster().parse().expect("a PostgreSQL URL");
    options
        .connect()
        .await
        .unwrap_or_else(|error| panic!("the cluster at {VARIABLE} does not answer: {error}"))
}

async fn run(connection: &mut PgConnection, sql: String) {
    sqlx::query(AssertSqlSafe(sql.as_str()))
        .execute(connection)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
}

/// The template's name; makes it where it is missing. It is named after the migrations, so that a
/// cluster that is kept gets a new one when they change.
async fn template() -> String {
    let name = format!("reconciled_template_{:016x}", migrations_hash());
    let mut admin = admin().await;
    sqlx::query("SELECT pg_advisory_lock($1)")
        .bind(TEMPLATE_LOCK)
        .execute(&mut admin)
        .await
        .expect("the lock is got");
    let exists: bool =
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)")
            .bind(&name)
            .fetch_one(&mut admin)
            .await
            .expect("databases are listed");
    if !exists {
        let draft = format!("reconciled_draft_{}", Uuid::new_v4().simple());
        run(&mut admin, format!("CREATE DATABASE {draft}")).await;
        let url = DatabaseUrl::parse(&url_of(&draft)).expect("a URL");
        connect(&url, 1).await.expect("connects").migrate().await.expect("migrates");
        // A template takes its name only once it is whole, and only without connections to it.
        sqlx::query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1")
            .bind(&draft)
            .execute(&mut admin)
            .await
            .expect("connections end");
        run(&mut admin, format!("ALTER DATABASE {draft} RENAME TO {name}")).await;
    }
    // Closing gives the lock back.
    admin.close().await.expect("the connection closes");
    name
}

fn migrations_hash() -> u64 {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/postgres");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("the migrations are there")
        .map(|entry| entry.expect("readable").path())
        .collect();
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in files {
        std::fs::read(file).expect("readable").hash(&mut hasher);
    }
    hasher.finish()
}
