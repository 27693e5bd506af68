//! Which schedule a watch follows: the version it started on, else the newest adopted one.
//!
//! One handle is shared by the checks, which only look, and by whoever talks to the database: the checks
//! read no database while they read a chain. Versions never change, so what is known needs no second look.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::domain::Watch;
use crate::errors::error_chain;
use crate::schedule::Schedule;
use crate::store::schedules::{Series, Version};
use crate::store::{Store, StoreError};

/// Which schedules may be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Following {
    /// Only the configured or built-in repeats: `checks.repeats` is set, and overrides every version.
    #[default]
    Configured,
    /// A watch keeps the version it started on; new ones take the built-in repeats.
    Started,
    /// New watches take the newest adopted version.
    Adopted,
}

/// The most versions kept in memory, beside those that one batch follows. A version is a few kilobytes; when
/// there are more, all that the batch at hand does not follow are forgotten, and read again when they are wanted.
const KNOWN_MAX: usize = 256;

/// The versions in use.
#[derive(Debug, Default)]
pub struct Schedules {
    following: Following,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    adopted: BTreeMap<Series, Arc<Schedule>>,
    /// `None`: there is no such version, or it makes no sense.
    known: BTreeMap<i64, Option<Arc<Schedule>>>,
}

impl Schedules {
    /// Knows none yet.
    pub fn new(following: Following) -> Self {
        Self { following, inner: Mutex::default() }
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Every change is one insertion, so what is there is whole whoever panicked.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads which versions are in use: another replica may have adopted one. Returns the newest ones of
    /// every series.
    pub async fn refresh(&self, store: &dyn Store) -> Result<Vec<Version>, StoreError> {
        let newest = store.newest_versions().await?;
        let adopted = newest.iter().filter(|version| version.fitted.adopted);
        let adopted =
            adopted.filter_map(|version| Some((version.fitted.series, readable(version)?)));
        let adopted: BTreeMap<Series, Arc<Schedule>> = adopted.collect();
        self.inner().adopted = adopted;
        Ok(newest)
    }

    /// Reads the versions that these watches follow and that are not known yet, in one go. A database that
    /// does not answer is told of and stops nothing: the built-in repeats serve meanwhile.
    pub async fn load<'a>(
        &self,
        store: &dyn Store,
        watches: impl IntoIterator<Item = &'a Watch> + Send,
    ) {
        if self.following == Following::Configured {
            return;
        }
        let wanted: BTreeSet<i64> =
            watches.into_iter().filter_map(|watch| watch.schedule_id).collect();
        let missing: Vec<i64> = {
            let inner = self.inner();
            wanted.iter().filter(|id| !inner.known.contains_key(id)).copied().collect()
        };
        if missing.is_empty() {
            return;
        }
        let found = match store.versions(&missing).await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(
                    error = error_chain(&error),
                    "schedules could not be read; their watches follow the built-in repeats for now"
                );
                return;
            }
        };
        let found: BTreeMap<i64, Arc<Schedule>> =
            found.iter().filter_map(|version| Some((version.id, readable(version)?))).collect();
        let mut inner = self.inner();
        if inner.known.len() + missing.len() > KNOWN_MAX {
            inner.known.retain(|id, _| wanted.contains(id));
        }
        for id in missing {
            let schedule = found.get(&id).cloned();
            if schedule.is_none() {
                tracing::warn!(
                    schedule = id,
                    "there is no such version of the schedule, or it makes no sense; its watches follow the built-in repeats"
                );
            }
            inner.known.insert(id, schedule);
        }
    }

    /// Whether new watches take the newest adopted version: only then is what it promises to be expected.
    pub fn adopts(&self) -> bool {
        self.following == Following::Adopted
    }

    /// The version in use for new watches of a series.
    pub fn adopted(&self, series: Series) -> Option<Arc<Schedule>> {
        match self.following {
            Following::Configured | Following::Started => None,
            Following::Adopted => self.inner().adopted.get(&series).cloned(),
        }
    }

    /// The version that a watch follows; `None`: the configured or built-in repeats. It counts from the
    /// watch's first check on: until then nothing was decided by it.
    pub fn of(&self, watch: &Watch, series: Series) -> Option<Arc<Schedule>> {
        match (self.following, watch.checks_done, watch.schedule_id) {
            (Following::Configured, _, _) => None,
            (_, 0, _) => self.adopted(series),
            (_, _, Some(id)) => self.inner().known.get(&id).cloned().flatten(),
            (_, _, None) => None,
        }
    }
}

/// The schedule of a version, with its id; told of when it cannot be read.
fn readable(version: &Version) -> Option<Arc<Schedule>> {
    match serde_json::from_value::<Schedule>(version.fitted.policy.clone()) {
        Ok(mut schedule) => {
            schedule.id = Some(version.id);
            Some(Arc::new(schedule))
        }
        Err(error) => {
            tracing::warn!(
                schedule = version.id,
                %error,
                "this version of the schedule makes no sense; the built-in repeats take its place"
            );
            None
        }
    }
}

#[cfg(test)]
mod tests;
