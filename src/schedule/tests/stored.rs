//! A stored schedule reads back as it was, and a damaged one is refused.

use std::time::Duration;

use proptest::prelude::*;

use super::support::*;
use crate::schedule::{AgeTable, FitSettings, Schedule, fit};

proptest! {
    #[test]
    fn any_fitted_schedule_reads_back(counts in any_counts(300), read in 0.001..20.0_f64) {
        let mut settings = FitSettings::for_block_time(Duration::from_secs(2));
        settings.objective = crate::schedule::Objective::Prices(crate::schedule::Prices {
            read,
            delay_second: 0.5,
        });
        let schedule = fit(&counts, &settings).unwrap().schedule;
        let text = serde_json::to_string(&schedule).unwrap();
        prop_assert!(text.len() < 8_000, "{} bytes", text.len());
        prop_assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule);
    }

    #[test]
    fn any_table_reads_back(ahead in proptest::collection::vec(0..4_u16, 1..60)) {
        let bins = u16::try_from(ahead.len()).unwrap();
        let next = (0..bins).zip(&ahead).map(|(at, ahead)| {
            (*ahead > 0).then(|| (at + ahead).min(bins))
        });
        let table = AgeTable::new(grid(1, ahead.len()), secs(0.25), next.collect()).unwrap();
        let text = serde_json::to_string(&table).unwrap();
        prop_assert_eq!(serde_json::from_str::<AgeTable>(&text).unwrap(), table);
    }
}

#[test]
fn offsets_read_back() {
    let text = serde_json::to_string(&Schedule::default()).unwrap();
    assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), Schedule::default(), "{text}");
}

#[test]
fn a_damaged_table_is_refused() {
    let table = |bins: u32, next: &str| {
        format!(
            r#"{{"kind":"by_age","table":{{"grid":{{"step_ms":1000,"bins":{bins}}},"visible_after_ms":500,"next":{next}}}}}"#
        )
    };
    let good = table(4, "[[0,2],[2,3],[3,null]]");
    assert!(serde_json::from_str::<Schedule>(&good).is_ok(), "{good}");
    for (bad, says) in [
        (table(4, "[[0,2],[3,3]]"), "later edge"),
        (table(4, "[[0,2],[2,1]]"), "later edge"),
        (table(4, "[[0,5]]"), "later edge"),
        (table(4, "[[1,2]]"), "start at 0"),
        (table(4, "[[0,2],[0,3]]"), "rise"),
        (table(4, "[[0,2],[4,null]]"), "inside the grid"),
        (table(4, "[]"), "start at 0"),
        (table(0, "[[0,null]]"), "bins"),
        (table(5_000, "[[0,null]]"), "bins"),
        (good.replace("1000", "1"), "step"),
        (good.replace("\"kind\"", "\"kin\""), "kind"),
        (good.replace("500", "1000000000"), "visible_after"),
        (r#"{"kind":"offsets","offsets_ms":[]}"#.to_owned(), "at least one"),
    ] {
        let refused = serde_json::from_str::<Schedule>(&bad).unwrap_err().to_string();
        assert!(refused.contains(says), "{bad}: {refused}");
    }
    let every_step = (0..100).map(|at| format!("[{at},{}]", at + 1)).collect::<Vec<_>>().join(",");
    let refused = serde_json::from_str::<Schedule>(&table(100, &format!("[{every_step}]")));
    assert!(refused.unwrap_err().to_string().contains("at most 64"));
}
