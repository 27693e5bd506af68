//! The repeats, and the two checks that no schedule may skip.

use std::time::Duration;

use crate::domain::Timestamp;
use crate::schedule::{Schedule, ScheduleError};

#[test]
fn offsets_must_rise_and_be_few() {
    let secs = |list: &[u64]| list.iter().map(|s| Duration::from_secs(*s)).collect::<Vec<_>>();
    assert_eq!(Schedule::new(vec![]), Err(ScheduleError::Empty));
    assert_eq!(Schedule::new(secs(&[0, 2, 2])), Err(ScheduleError::NotRising));
    assert_eq!(
        Schedule::new((0..65).map(Duration::from_secs).collect()),
        Err(ScheduleError::TooMany)
    );
    assert!(Schedule::new(secs(&[0, 2, 5])).is_ok());
}

#[test]
fn missed_repeats_are_skipped_not_made_up_for() {
    let schedule = Schedule::default();
    let opened = Timestamp::from_millis(1_000_000);
    let after = |secs| opened.saturating_add(Duration::from_secs(secs));
    assert_eq!(schedule.next_repeat(opened, opened, opened), Some(after(2)));
    assert_eq!(schedule.next_repeat(opened, opened, after(60)), Some(after(80)));
    assert_eq!(schedule.next_repeat(opened, opened, after(300)), None);
}
