//! From a database URL to a connected store.

use std::sync::Arc;

use super::postgres::PostgresStore;
use super::sqlite::SqliteStore;
use super::{Store, StoreError};

/// Where the database is. Never shown: it may hold a password.
#[derive(Clone)]
pub enum DatabaseUrl {
    /// `postgres://…`
    Postgres(String),
    /// `sqlite:PATH` or `sqlite://PATH`
    Sqlite(String),
}

impl DatabaseUrl {
    /// Tells the kind of database by the URL's scheme.
    pub fn parse(url: &str) -> Result<Self, StoreError> {
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            Ok(Self::Postgres(url.to_owned()))
        } else if url.starts_with("sqlite:") {
            Ok(Self::Sqlite(url.to_owned()))
        } else {
            Err(StoreError::Url("must start with postgres:// or sqlite:".to_owned()))
        }
    }
}

impl std::fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Postgres(_) => f.write_str("postgres://…"),
            Self::Sqlite(_) => f.write_str("sqlite:…"),
        }
    }
}

/// Connects, with at most `connections_max` connections.
pub async fn connect(
    url: &DatabaseUrl,
    connections_max: u32,
) -> Result<Arc<dyn Store>, StoreError> {
    match url {
        DatabaseUrl::Postgres(url) => {
            Ok(Arc::new(PostgresStore::connect(url, connections_max).await?))
        }
        DatabaseUrl::Sqlite(url) => Ok(Arc::new(SqliteStore::connect(url, connections_max).await?)),
    }
}
