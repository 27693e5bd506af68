//! The schedule is money's patience: what it promises is shown here against brute force, the textbook and
//! every schedule somebody might have written by hand.

mod adoption;
mod dominance;
mod fitting;
mod optimum;
mod pacing;
mod pictures;
mod repeats;
mod stored;
mod support;
mod survival;
