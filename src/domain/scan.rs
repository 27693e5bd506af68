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

#[cfg(test)]
mod tests {
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
}
