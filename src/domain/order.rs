//! Orders, the stock they hold, and the client's idempotency keys, as the gateway keeps them.

use serde::{Deserialize, Serialize};

use super::{OrderId, PaymentId, Sku, Timestamp};

/// An enum stored as a flat code in a text column.
macro_rules! column_code {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $code:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash,
            serde::Serialize, serde::Deserialize,
        )]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $code)] $variant),+
        }

        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The code in the column.
            pub const fn code(self) -> &'static str {
                match self { $(Self::$variant => $code),+ }
            }

            /// The value with this code, if there is one.
            pub fn from_code(code: &str) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)+ _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.code())
            }
        }
    };
}
pub(crate) use column_code;

column_code! {
    /// What kind of thing an order buys.
    OrderKind {
        /// Goods; may hold stock.
        Order = "order",
        /// A paid tool call.
        Call = "call",
    }
}

column_code! {
    /// Where an order stands (the gateway contract, DESIGN section 5).
    OrderStatus {
        /// No payment yet.
        AwaitingPayment = "awaiting_payment",
        /// A payment is under way.
        Paying = "paying",
        /// The last payment failed; it may take another while the quote is open.
        PaymentFailed = "payment_failed",
        /// Paid.
        Paid = "paid",
        /// Money moved and the work failed for good.
        Undelivered = "undelivered",
        /// Failed for good.
        Failed = "failed",
        /// The quote ran out.
        Expired = "expired",
        /// Called off.
        Canceled = "canceled",
    }
}

impl OrderStatus {
    /// Whether a payment that settles now pays the order.
    pub const fn is_open(self) -> bool {
        matches!(self, Self::AwaitingPayment | Self::Paying | Self::PaymentFailed)
    }
}

column_code! {
    /// What became of a stock reservation.
    ReservationStatus {
        /// Set aside.
        Held = "held",
        /// Sold.
        Committed = "committed",
        /// Back on the shelf.
        Released = "released",
    }
}

column_code! {
    /// Where a client's idempotency key stands.
    IdentifierStatus {
        /// A retry is told to wait (HTTP 409).
        InFlight = "in_flight",
        /// The gateway answered and kept the response.
        Completed = "completed",
        /// The payment settled and its order is paid.
        Settled = "settled",
        /// The payment did not pay its order.
        Failed = "failed",
    }
}

/// An order, as far as reconciling needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The gateway's id.
    pub id: OrderId,
    /// What kind of thing it buys.
    pub kind: OrderKind,
    /// Where it stands.
    pub status: OrderStatus,
    /// The payment that pays it (I3: at most one).
    pub paid_by: Option<PaymentId>,
    /// When the gateway handed over the result.
    pub delivered_at: Option<Timestamp>,
}

/// Stock set aside for an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// The gateway's id of the reservation.
    pub id: String,
    /// The order it belongs to.
    pub order_id: OrderId,
    /// What is set aside.
    pub sku: Sku,
    /// How many, never negative.
    pub quantity: i64,
    /// What became of it.
    pub status: ReservationStatus,
}
