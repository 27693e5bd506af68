//! The schedule is money's patience: what it promises is shown here against brute force, the textbook and
//! every schedule somebody might have written by hand.

mod fitting;
mod optimum;
mod repeats;
mod support;
