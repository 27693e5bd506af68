//! The scan from chain to ledger: where it stands, and whether what endpoints showed may move it on.
//!
//! A scan that moves on too early loses money for good, so one endpoint's word moves it only where no second
//! one can be heard, and no endpoint may have shown a transfer that the others left out. Pure.

use alloy_primitives::B256;
use serde::{Deserialize, Serialize};

use super::{BlockRef, EndpointName, ReadFailure, Receiver, Transfer};

/// A transfer into a receiver, as a scan of the chain saw it in a finalized block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScannedTransfer {
    /// The money that moved.
    pub transfer: Transfer,
    /// The nonce of the authorization that moved it; `None` when none did.
    pub nonce: Option<B256>,
}

/// Where the scan of one receiver stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// Who is paid.
    pub receiver: Receiver,
    /// The first block that was read.
    pub first_block: u64,
    /// The last one.
    pub block: BlockRef,
}

/// Where an endpoint stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanHead {
    /// Its finalized block.
    pub finalized: BlockRef,
    /// Its block with the number of the cursor's.
    pub at_cursor: Option<BlockRef>,
}

/// What an endpoint showed of a range of blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanAnswer {
    /// The range's last block.
    pub last: BlockRef,
    /// Every transfer into the receivers, in the chain's order.
    pub transfers: Vec<ScannedTransfer>,
}

/// Answers of endpoints, in the order asked.
pub type Answers<T> = Vec<(EndpointName, Result<T, ReadFailure>)>;

/// Whether endpoints agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Agreement<T> {
    /// As many as are needed say this, and nobody else.
    Agreed(T),
    /// Two of them say different things.
    Disagree,
    /// Not enough of them said anything.
    TooFew,
}

/// What the endpoints agree on: `quorum` answers that are the same, and none that is different.
pub fn agreement<T: PartialEq + Clone>(answers: &Answers<T>, quorum: usize) -> Agreement<T> {
    let mut given = answers.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    let Some(first) = given.next() else { return Agreement::TooFew };
    let mut same = 1;
    for other in given {
        if other != first {
            return Agreement::Disagree;
        }
        same += 1;
    }
    if same < quorum { Agreement::TooFew } else { Agreement::Agreed(first.clone()) }
}

/// Endpoints that are heard about a range, where there are so many.
const HEARD_MIN: usize = 2;

/// How many endpoints must say the same, when so many of a chain's were asked: `quorum`; and a second one
/// wherever one is left that may be heard, because who leaves out money is only found out by another.
pub fn enough(quorum: usize, asked: usize, endpoints: usize) -> usize {
    match asked < endpoints {
        true => quorum.max(HEARD_MIN).min(endpoints),
        false => quorum,
    }
}

/// A page grows while it holds fewer transfers than this.
const FEW_TRANSFERS: usize = 1_000;

/// A page grows while it takes less than this share of its time: one twice as wide must fit as well.
const SHORT_SHARE: f64 = 0.4;

/// How a page of a scan ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PageEnd {
    /// Everybody who was asked showed it.
    Read {
        /// How many transfers it holds.
        transfers: usize,
        /// The share of its time that the slowest endpoint needed.
        share: f64,
    },
    /// Somebody did not; others did.
    ReadByOthers,
    /// Not enough endpoints showed it.
    Failed,
}

/// How many blocks the next page has, after one of `blocks`, when pages have `width` now and at most `max`.
/// Whatever a page failed for, a narrower one may do: a width that nobody can read would stop the scan for
/// good.
pub fn next_width(width: u64, blocks: u64, end: PageEnd, max: u64) -> u64 {
    let next = match end {
        PageEnd::Failed => width.min(blocks) / 2,
        PageEnd::Read { transfers, share }
            if transfers < FEW_TRANSFERS && share < SHORT_SHARE && blocks >= width =>
        {
            width.saturating_mul(2)
        }
        PageEnd::Read { .. } | PageEnd::ReadByOthers => width,
    };
    next.clamp(1, max.max(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::ReadFailureKind;

    fn answers(given: &[Option<u8>]) -> Answers<u8> {
        let failure = ReadFailure::new(ReadFailureKind::Unreachable, "no answer");
        given
            .iter()
            .enumerate()
            .map(|(i, one)| (EndpointName::new(&i.to_string()), one.ok_or(failure.clone())))
            .collect()
    }

    /// I4: a range that anybody shows more of is not done with.
    #[test]
    fn a_range_is_read_when_enough_endpoints_show_the_same_and_nobody_shows_anything_else() {
        type Case<'a> = (&'a [Option<u8>], usize, Agreement<u8>);
        let cases: [Case<'_>; 9] = [
            (&[Some(1)], 1, Agreement::Agreed(1)),
            (&[Some(1)], 2, Agreement::TooFew),
            (&[Some(1), None], 1, Agreement::Agreed(1)),
            (&[None, Some(1)], 1, Agreement::Agreed(1)),
            (&[Some(1), None], 2, Agreement::TooFew),
            (&[Some(1), Some(2)], 1, Agreement::Disagree),
            (&[Some(1), Some(2), Some(1)], 2, Agreement::Disagree),
            (&[Some(1), None, Some(1)], 2, Agreement::Agreed(1)),
            (&[None, None], 1, Agreement::TooFew),
        ];
        for (given, quorum, expected) in cases {
            assert_eq!(agreement(&answers(given), quorum), expected, "{given:?} by {quorum}");
        }
    }

    #[test]
    fn a_second_endpoint_is_heard_wherever_one_is_left() {
        for (quorum, asked, endpoints, expected) in [
            (1, 1, 1, 1),
            (1, 1, 2, 2),
            (1, 2, 2, 1),
            (1, 2, 3, 2),
            (1, 3, 3, 1),
            (3, 3, 4, 3),
            (3, 4, 4, 3),
        ] {
            let why = format!("{quorum} of {endpoints}, {asked} asked");
            assert_eq!(enough(quorum, asked, endpoints), expected, "{why}");
        }
    }

    proptest! {
        /// Whatever the widest page is that endpoints show in time, the scan comes to read pages, and soon.
        #[test]
        fn a_scan_comes_to_pages_that_can_be_read(
            start in 1_u64..200_000, readable in 1_u64..200_000, max in 1_u64..200_000,
        ) {
            let mut width = start.min(max);
            let (mut read, mut failed) = (0_u32, 0_u32);
            for _ in 0..100 {
                prop_assert!((1..=max).contains(&width));
                // The time a page takes grows with its width.
                let share = width as f64 / readable as f64;
                let end = match share <= 1.0 {
                    true => PageEnd::Read { transfers: 0, share },
                    false => PageEnd::Failed,
                };
                read += u32::from(share <= 1.0);
                failed += u32::from(share > 1.0);
                width = next_width(width, width, end, max);
            }
            prop_assert!(failed <= 18, "{} failed", failed);
            prop_assert!(read >= 82);
            prop_assert!(width.saturating_mul(8) > readable.min(max), "{} is too narrow", width);
        }
    }

    #[test]
    fn a_page_grows_only_when_it_was_quick_holds_little_and_was_shown_by_all() {
        let read = |transfers, share| PageEnd::Read { transfers, share };
        for (blocks, end, expected) in [
            (100, read(0, 0.3), 200),
            (100, read(0, 0.5), 100),
            (100, read(5_000, 0.1), 100),
            (40, read(0, 0.1), 100),
            (100, PageEnd::ReadByOthers, 100),
            (100, PageEnd::Failed, 50),
            (40, PageEnd::Failed, 20),
            (1, PageEnd::Failed, 1),
        ] {
            assert_eq!(next_width(100, blocks, end, 1_000), expected, "{blocks} {end:?}");
        }
    }
}
