//! `/metrics`, `/healthz` and `/readyz`, for machines. Nothing here changes anything.
//!
//! Work on the database runs in a task of its own: a client that hangs up must not drop a database
//! future half way.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::Mutex as AsyncMutex;

use crate::clock::Clock;
use crate::errors::error_chain;
use crate::store::Store;
use crate::telemetry::Metrics;
use crate::worker::{Stop, TaskState};

/// What the pages are made from.
pub struct Pages {
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    /// Set once the database was reached: the pages are served before that, and say so.
    working: OnceLock<Working>,
    /// One scrape asks the database at a time.
    scraping: AsyncMutex<()>,
}

struct Working {
    store: Arc<dyn Store>,
    tasks: Vec<Arc<Mutex<TaskState>>>,
}

impl Pages {
    /// Pages of a process that has not reached its database yet: alive, not ready.
    pub fn new(clock: Arc<dyn Clock>, metrics: Metrics) -> Self {
        Self { clock, metrics, working: OnceLock::new(), scraping: AsyncMutex::new(()) }
    }

    /// From now on the process works. A second call changes nothing.
    pub fn set_working(&self, store: Arc<dyn Store>, tasks: Vec<Arc<Mutex<TaskState>>>) {
        let _already = self.working.set(Working { store, tasks });
    }

    async fn refresh_figures(&self) {
        let _one_at_a_time = self.scraping.lock().await;
        let Some(working) = self.working.get() else { return self.metrics.set_figures(None) };
        let store = &working.store;
        let figures = match store.figures(self.clock.now()).await {
            Ok(figures) => store.runs().await.map(|runs| (figures, runs)),
            Err(error) => Err(error),
        };
        match figures {
            Ok((figures, runs)) => {
                self.metrics.set_figures(Some(&figures));
                self.metrics.set_runs(&runs);
            }
            Err(error) => {
                tracing::warn!(error = error_chain(&error), "figures could not be read");
                self.metrics.set_figures(None);
            }
        }
    }

    async fn problems(&self) -> Vec<String> {
        let Some(working) = self.working.get() else {
            return vec!["database: not reached yet".to_owned()];
        };
        let ping = working.store.ping().await;
        let database = ping.err().map(|e| format!("database: {}", error_chain(&e)));
        let tasks = working.tasks.iter().filter_map(|task| {
            let state = task.lock().unwrap_or_else(PoisonError::into_inner);
            state.last_error.as_ref().map(|error| format!("{}: {error}", state.name))
        });
        database.into_iter().chain(tasks).collect()
    }
}

/// Serves until a stop is requested.
pub async fn serve(listener: TcpListener, pages: Arc<Pages>, stop: Stop) -> std::io::Result<()> {
    let app = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(pages);
    axum::serve(listener, app).with_graceful_shutdown(async move { stop.requested().await }).await
}

async fn metrics(State(pages): State<Arc<Pages>>) -> Response {
    let scrape = tokio::spawn(async move {
        pages.refresh_figures().await;
        pages.metrics.render()
    });
    match scrape.await {
        Ok(Ok(text)) => {
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
        }
        Ok(Err(error)) => problem(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// Ready: the database answers, and no task failed in its last activation.
async fn readyz(State(pages): State<Arc<Pages>>) -> Response {
    let problems = tokio::spawn(async move { pages.problems().await }).await;
    match problems {
        Ok(problems) if problems.is_empty() => "ready\n".into_response(),
        Ok(problems) => problem(StatusCode::SERVICE_UNAVAILABLE, problems.join("\n")),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

fn problem(status: StatusCode, text: String) -> Response {
    (status, format!("{text}\n")).into_response()
}
