//! What becomes of payments: some hundred of them, written and played over most of a day.

use std::collections::BTreeMap;

use alloy_primitives::{Address, keccak256};

use crate::support::anvil::{Authorization, RICH_PAYERS, payer_key};
use crate::support::dice::Dice;

/// The merchant.
pub(super) const PAY_TO: Address = Address::repeat_byte(0xa1);

/// Somebody else.
pub(super) const ELSEWHERE: Address = Address::repeat_byte(0xe1);

/// What every payment is for.
pub(super) const AMOUNT: u64 = 1_000_000;

/// From one tick of the story to the next, in seconds.
pub(super) const TICK_SECS: u64 = 20 * 60;

/// The deadline, in ticks after the broadcast.
pub(super) const DEADLINE_TICKS: u64 = 72;

/// Payments are written in the first so many ticks.
const WRITING_TICKS: u64 = 66;

/// One payment, as it will go.
#[derive(Debug, Clone)]
pub(super) struct Play {
    pub(super) id: String,
    pub(super) order: String,
    pub(super) status: &'static str,
    /// What its row claims.
    pub(super) claimed: Authorization,
    /// What the payer signed.
    pub(super) signed: Authorization,
    /// The tick at which its row is written.
    pub(super) written: u64,
}

/// Something to do on the chain or in the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The authorization of this play is used, as it was signed.
    Use(usize),
    /// It is canceled.
    Cancel(usize),
    /// A transaction with it fails.
    Fail(usize),
    /// The gateway gives up its order.
    GiveUp(usize),
    /// Money comes that no payment tells of.
    Stray(usize),
}

/// Money that nobody claims.
#[derive(Debug, Clone, Copy)]
pub(super) enum Stray {
    /// An authorization that no row tells of.
    Authorized(Authorization),
    /// No authorization at all: from whom, and how much.
    Bare(Address, u64),
}

/// The whole script.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) plays: Vec<Play>,
    pub(super) strays: Vec<Stray>,
    pub(super) steps: BTreeMap<u64, Vec<Step>>,
}

/// How payments end. What a reorg makes of it comes on top.
const FATES: u64 = 16;

impl Script {
    /// `count` payments, of every fate about as many, when `start` is the time of tick 0.
    pub(super) fn write(count: usize, start: u64, dice: &mut Dice) -> Self {
        let mut script = Self::default();
        let mut n = 0;
        while script.plays.len() < count {
            script.write_one(n, start, dice);
            n += 1;
        }
        script
    }

    /// The tick after which nothing can change any more: every window and deadline is past, and final.
    pub(super) fn ends_at(&self, start: u64) -> u64 {
        let over = |play: &Play| {
            let window = (play.claimed.valid_before - start) / TICK_SECS;
            window.max(play.written + DEADLINE_TICKS)
        };
        self.plays.iter().map(over).max().unwrap_or(0) + 5
    }

    fn write_one(&mut self, n: u64, start: u64, dice: &mut Dice) {
        let at = 1 + dice.roll(0..WRITING_TICKS);
        if n % FATES >= FATES - 2 {
            return self.stray(n, at, start, dice);
        }
        let order = format!("o{n:03}");
        let status = *dice.pick(&["unknown", "unknown", "settle_failed", "settling"]);
        let short = 1 + dice.roll(1..12);
        let one = self.play(n, "", &order, status, at, short, start);
        let soon = at + dice.roll(0..short - 1);
        match n % FATES {
            0 | 1 => self.step(at, Step::Use(one)),
            2 => self.step(soon, Step::Use(one)),
            3 => {}
            4 => self.step(soon, Step::Cancel(one)),
            5 => {
                self.plays[one].signed.to = ELSEWHERE;
                self.step(soon, Step::Use(one));
            }
            6 => {
                self.plays[one].signed.value = AMOUNT - dice.roll(1..AMOUNT);
                self.step(soon, Step::Use(one));
            }
            7 => {
                // The buyer paid twice.
                let two = self.play(n, "-again", &order, "unknown", at, short, start);
                self.step(soon, Step::Use(one));
                self.step(soon.max(at + dice.roll(0..short - 1)), Step::Use(two));
            }
            8 => {
                // The buyer tried twice, and one of them landed.
                let two = self.play(n, "-again", &order, "unknown", at, short, start);
                self.step(soon, Step::Use(*dice.pick(&[one, two])));
            }
            9 => {
                // Late: after the deadline at which the payment was failed.
                let late = DEADLINE_TICKS + 2 + dice.roll(0..6);
                self.plays[one].claimed.valid_before += (late + 2) * TICK_SECS;
                self.plays[one].signed = self.plays[one].claimed;
                self.step(at + late, Step::Use(one));
            }
            10 => {
                // Valid beyond the deadline, and never used.
                self.plays[one].claimed.valid_before += (DEADLINE_TICKS + 3) * TICK_SECS;
                self.plays[one].signed = self.plays[one].claimed;
            }
            11 => {
                // One authorization was taken for two orders.
                let other =
                    self.play(n, "-reused", &format!("{order}-b"), status, at, short, start);
                self.plays[other].claimed = self.plays[one].claimed;
                self.plays[other].signed = self.plays[one].claimed;
                self.step(soon, Step::Use(one));
            }
            12 => {
                self.step(at, Step::Fail(one));
                self.step(soon, Step::Use(one));
            }
            _ => {
                self.step(at, Step::GiveUp(one));
                self.step(soon, Step::Use(one));
            }
        }
    }

    fn stray(&mut self, n: u64, at: u64, start: u64, dice: &mut Dice) {
        let payer = payer_key(n % RICH_PAYERS).address();
        let value = *dice.pick(&[AMOUNT, 2 * AMOUNT, 1]);
        self.strays.push(match n % 2 {
            0 => Stray::Bare(payer, value),
            _ => Stray::Authorized(Authorization {
                payer,
                to: PAY_TO,
                value,
                valid_after: 0,
                valid_before: start + (at + DEADLINE_TICKS) * TICK_SECS,
                nonce: keccak256(format!("stray {n} at {start}")),
            }),
        });
        self.step(at, Step::Stray(self.strays.len() - 1));
    }

    fn step(&mut self, tick: u64, step: Step) {
        self.steps.entry(tick).or_default().push(step);
    }

    /// A payment that can be used until `valid_for` ticks after it is written.
    #[allow(clippy::too_many_arguments, reason = "a row has many columns")]
    fn play(
        &mut self,
        n: u64,
        suffix: &str,
        order: &str,
        status: &'static str,
        at: u64,
        valid_for: u64,
        start: u64,
    ) -> usize {
        let id = format!("p{n:03}{suffix}");
        let claimed = Authorization {
            payer: payer_key(self.plays.len() as u64 % RICH_PAYERS).address(),
            to: PAY_TO,
            value: AMOUNT,
            valid_after: 0,
            valid_before: start + (at + valid_for) * TICK_SECS,
            nonce: keccak256(format!("{id} at {start}")),
        };
        let order = order.to_owned();
        self.plays.push(Play { id, order, status, claimed, signed: claimed, written: at });
        self.plays.len() - 1
    }
}
