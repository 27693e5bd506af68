//! Names of things: opaque ids as the gateway wrote them, chains and amounts.

use std::fmt;
use std::str::FromStr;

use alloy_primitives::U256;
use serde::{Deserialize, Serialize};

macro_rules! opaque_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// Takes the text as it is.
            pub fn new(text: impl Into<String>) -> Self {
                Self(text.into())
            }

            /// The text as it was written.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }
    };
}

opaque_id! {
    /// The gateway's id of a payment: opaque text, compared byte for byte.
    PaymentId
}
opaque_id! {
    /// The gateway's id of an order: opaque text, compared byte for byte.
    OrderId
}
opaque_id! {
    /// What is kept in stock.
    Sku
}

/// An EIP-155 chain id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ChainId(u64);

impl ChainId {
    /// The chain with this id.
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ChainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An amount in a token's base units; text form is decimal, without a sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Amount(U256);

impl Amount {
    /// Nothing.
    pub const ZERO: Self = Self(U256::ZERO);

    /// This many base units.
    pub const fn new(units: U256) -> Self {
        Self(units)
    }

    /// The number of base units.
    pub const fn get(self) -> U256 {
        self.0
    }

    /// The sum; saturates at 2^256-1, which no token's supply can reach.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Amount {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "a whole number of base units in decimal, below 2^256";
        if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
            return Err(EXPECTED);
        }
        U256::from_str_radix(text, 10).map(Self).map_err(|_| EXPECTED)
    }
}

impl Serialize for Amount {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
