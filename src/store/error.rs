//! What can go wrong with the database, kept apart by what a caller should do about it.

/// What can go wrong with the database.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The URL in the configuration cannot be used.
    #[error("database.url {0}")]
    Url(String),
    /// The database cannot be reached; nothing was lost, try again.
    #[error("the database cannot be reached")]
    Unreachable(#[source] sqlx::Error),
    /// A table or column of the contract is missing.
    #[error(
        "the database lacks {missing}; run `reconciled migrate`, or expose a view of that name"
    )]
    Schema {
        /// What is missing.
        missing: String,
    },
    /// A migration failed.
    #[error("migrating the database failed")]
    Migrate(#[source] Box<sqlx::migrate::MigrateError>),
    /// One of our own rows makes no sense.
    #[error("table {table}, column {column} holds {found}; was it edited by hand?")]
    Inconsistent {
        /// The table.
        table: &'static str,
        /// The column.
        column: &'static str,
        /// What it holds.
        found: String,
    },
    /// The database refused a statement.
    #[error("the database refused {operation}")]
    Refused {
        /// What was being done.
        operation: &'static str,
        /// Its own words.
        #[source]
        source: sqlx::Error,
    },
}

/// SQLSTATEs of a PostgreSQL that will answer again by itself: too many connections, shutting down,
/// crashed, starting up.
const PASSING: [&str; 4] = ["53300", "57P01", "57P02", "57P03"];

/// The SQLSTATE class of connections that failed.
const CONNECTION_CLASS: &str = "08";

impl StoreError {
    /// Sorts a driver's error by what a caller should do about it.
    pub fn from_sqlx(operation: &'static str, source: sqlx::Error) -> Self {
        match source {
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => Self::Unreachable(source),
            sqlx::Error::Database(ref error)
                if error.code().is_some_and(|code| is_passing(&code)) =>
            {
                Self::Unreachable(source)
            }
            _ => Self::Refused { operation, source },
        }
    }
}

fn is_passing(code: &str) -> bool {
    // SQLite's codes are shorter.
    code.len() == 5 && (PASSING.contains(&code) || code.starts_with(CONNECTION_CLASS))
}
