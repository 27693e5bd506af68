//! Chance that can be repeated: every random test takes its seed from here, and prints it.

/// splitmix64: small, and the same everywhere.
#[derive(Debug, Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    /// Dice that always fall the same way for one seed.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number of the range.
    pub(crate) fn roll(&mut self, range: std::ops::Range<u64>) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        range.start + (z ^ (z >> 31)) % (range.end - range.start)
    }

    /// One of them, all equally likely.
    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.roll(0..from.len() as u64) as usize]
    }
}

/// A number from the environment.
pub(crate) fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// The seed that `RECONCILED_TEST_SEED` sets, else a new one. Print it.
pub(crate) fn seed() -> u64 {
    from_environment("RECONCILED_TEST_SEED")
        .unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0 >> 32)
}
