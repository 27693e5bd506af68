//! Which blocks to ask for next: as many as the endpoint answers, and none twice.

/// So many answers in a row, and a wider range is tried again: a refusal may have been about the moment.
const ANSWERS_BEFORE_WIDER: u32 = 16;

/// How wide a log range an endpoint answers, as far as is known.
#[derive(Debug)]
pub(in crate::chain) struct Width {
    blocks: u64,
    max: u64,
    answers: u32,
}

impl Width {
    /// Starts as wide as is allowed.
    pub(in crate::chain) const fn new(max: u64) -> Self {
        Self { blocks: max, max, answers: 0 }
    }

    /// How many blocks to ask for.
    pub(in crate::chain) const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Asks for this many again: what was refused meanwhile is no longer asked for.
    pub(in crate::chain) fn restore(&mut self, blocks: u64) {
        self.answers = 0;
        self.blocks = blocks.clamp(self.blocks, self.max);
    }

    /// A range of `asked` blocks was refused; `false` when there is none smaller.
    pub(super) fn refused(&mut self, asked: u64) -> bool {
        self.answers = 0;
        if asked <= 1 {
            return false;
        }
        self.blocks = self.blocks.min(asked / 2);
        true
    }

    /// A range of `asked` blocks was answered.
    pub(super) fn answered(&mut self, asked: u64) {
        if asked < self.blocks || self.blocks == self.max {
            return;
        }
        self.answers += 1;
        if self.answers >= ANSWERS_BEFORE_WIDER {
            self.answers = 0;
            self.blocks = self.blocks.saturating_mul(2).min(self.max);
        }
    }
}

/// What a log search is for. An endpoint may limit one kind by its range and another by its results: each
/// learns a width of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::chain) enum LogsOf {
    /// Uses and cancellations of named authorizations.
    Uses,
    /// Transfers of the payers of such uses.
    Transfers,
    /// Transfers of the owners of permits, and what they invalidated.
    Permits,
    /// Uses of the nonces of refunds.
    Refunds,
    /// Transfers into the shop's receivers.
    Receivers,
    /// Uses by whoever paid the receivers.
    Authorizations,
}

/// How wide a log range an endpoint answers, for each kind of search.
#[derive(Debug)]
pub(in crate::chain) struct Widths([Width; 6]);

impl Widths {
    /// Each starts as wide as is allowed.
    pub(in crate::chain) fn new(max: u64) -> Self {
        Self(std::array::from_fn(|_| Width::new(max)))
    }

    /// That of this kind.
    pub(in crate::chain) fn of(&mut self, kind: LogsOf) -> &mut Width {
        &mut self.0[match kind {
            LogsOf::Uses => 0,
            LogsOf::Transfers => 1,
            LogsOf::Permits => 2,
            LogsOf::Refunds => 3,
            LogsOf::Receivers => 4,
            LogsOf::Authorizations => 5,
        }]
    }
}

/// What is left to search: the blocks from `next` to `last`.
#[derive(Debug)]
pub(super) struct Ranges {
    pub(super) next: Option<u64>,
    last: u64,
}

impl Ranges {
    pub(super) fn new(first: u64, last: u64) -> Self {
        Self { next: Some(first).filter(|first| *first <= last), last }
    }

    /// The next range of at most `width` blocks, both ends included.
    pub(super) fn peek(&self, width: u64) -> Option<(u64, u64)> {
        let first = self.next?;
        Some((first, first.saturating_add(width.max(1) - 1).min(self.last)))
    }

    /// The range up to `last` was answered.
    pub(super) fn advance(&mut self, last: u64) {
        self.next = last.checked_add(1).filter(|next| *next <= self.last);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// However ranges are refused, those answered cover first..=last once, in order.
        #[test]
        fn ranges_have_no_gap_and_no_overlap(
            first in 0u64..1_000,
            span in 0u64..5_000,
            max in 1u64..3_000,
            limits in proptest::collection::vec(1u64..2_000, 1..20),
        ) {
            let last = first + span;
            let mut width = Width::new(max);
            let mut ranges = Ranges::new(first, last);
            let mut next = first;
            let mut turn = 0;
            while let Some((from, to)) = ranges.peek(width.blocks()) {
                let blocks = to - from + 1;
                prop_assert!(from == next && to >= from && to <= last && blocks <= max);
                turn += 1;
                if blocks > limits[turn % limits.len()] {
                    prop_assert!(width.refused(blocks), "a range of one block is never refused here");
                    prop_assert!(width.blocks() < blocks);
                } else {
                    width.answered(blocks);
                    ranges.advance(to);
                    next = to + 1;
                }
            }
            prop_assert_eq!(next, last + 1);
        }
    }

    #[test]
    fn the_last_block_there_can_be_ends_the_search() {
        let mut ranges = Ranges::new(u64::MAX - 1, u64::MAX);
        assert_eq!(ranges.peek(10), Some((u64::MAX - 1, u64::MAX)));
        ranges.advance(u64::MAX);
        assert_eq!(ranges.peek(10), None);
        assert_eq!(Ranges::new(5, 4).peek(10), None);
    }

    #[test]
    fn what_worked_is_remembered_and_a_wider_range_is_tried_after_a_while() {
        let mut width = Width::new(1_000);
        assert!(width.refused(1_000));
        assert!(width.refused(500));
        assert_eq!(width.blocks(), 250);
        for _ in 0..ANSWERS_BEFORE_WIDER - 1 {
            width.answered(250);
        }
        width.answered(10);
        assert_eq!(width.blocks(), 250, "a short last range says nothing about a wide one");
        width.answered(250);
        assert_eq!(width.blocks(), 500);
        assert!(width.refused(500));
        assert!(!width.refused(1), "there is nothing smaller");
    }
}
