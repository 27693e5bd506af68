//! A fresh database for one story, and its end.

use std::str::FromStr;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};
use tempfile::TempDir;
use uuid::Uuid;

use crate::store::DatabaseUrl;

/// A fresh, empty database.
pub enum Stage {
    /// A file in a temporary folder that is removed with it.
    Sqlite(TempDir),
    /// A database of its own on a server.
    Postgres {
        /// The server, as somebody who may create databases.
        server: Box<PgConnectOptions>,
        /// The database's name.
        name: String,
        /// Its URL.
        url: String,
    },
}

impl Stage {
    /// A file in a temporary folder.
    pub fn sqlite() -> anyhow::Result<Self> {
        Ok(Self::Sqlite(tempfile::Builder::new().prefix("reconciled-").tempdir()?))
    }

    /// A database of its own on the server at `url`.
    pub async fn postgres(url: &str) -> anyhow::Result<Self> {
        let server = PgConnectOptions::from_str(url)
            .map_err(|_| anyhow::anyhow!("the PostgreSQL server's URL must be postgres://…"))?;
        let name = format!("reconciled_{}", Uuid::new_v4().simple());
        let mut connection = server.connect().await?;
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}")))
            .execute(&mut connection)
            .await?;
        connection.close().await?;
        let mut database = url::Url::parse(url)?;
        database.set_path(&name);
        Ok(Self::Postgres { server: Box::new(server), name, url: database.to_string() })
    }

    /// Where it is.
    pub fn url(&self) -> DatabaseUrl {
        match self {
            Self::Sqlite(folder) => {
                DatabaseUrl::Sqlite(format!("sqlite:{}", folder.path().join("story.db").display()))
            }
            Self::Postgres { url, .. } => DatabaseUrl::Postgres(url.clone()),
        }
    }

    /// Removes it.
    pub async fn strike(self) -> anyhow::Result<()> {
        match self {
            Self::Sqlite(folder) => folder.close()?,
            Self::Postgres { server, name, .. } => {
                let mut connection = server.connect().await?;
                let drop = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
                sqlx::raw_sql(AssertSqlSafe(drop)).execute(&mut connection).await?;
                connection.close().await?;
            }
        }
        Ok(())
    }
}
