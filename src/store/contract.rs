//! Names of tables and columns: the gateway's, as far as they are read or written, and our own.

/// A table and the columns of it that are read or written.
pub(super) type Table = (&'static str, &'static [&'static str]);

/// The gateway's tables that must be there; views count.
pub(super) const REQUIRED: [Table; 2] = [
    ("orders", &["id", "kind", "status", "paid_by", "delivered_at", "updated_at"]),
    (
        "payments",
        &[
            "id",
            "order_id",
            "rail",
            "method",
            "chain_id",
            "token",
            "payer",
            "pay_to",
            "amount",
            "nonce",
            "valid_after",
            "valid_before",
            "tx_hash",
            "status",
            "created_at",
            "broadcast_at",
            "settled_at",
            "updated_at",
        ],
    ),
];

/// Optional, and of use only together.
pub(super) const STOCK: [Table; 2] = [
    ("stock_reservations", &["id", "order_id", "sku", "quantity", "status"]),
    ("stock", &["sku", "available"]),
];

/// Optional.
pub(super) const IDENTIFIERS: Table =
    ("payment_identifiers", &["id", "payment_id", "status", "response", "updated_at"]);

/// Our own tables, without the schema (PostgreSQL) or prefix (SQLite) that goes before the name. The
/// migrations create them whole, so the names are enough.
pub(crate) const OWN: [&str; 13] = [
    "watches",
    "resolutions",
    "checks",
    "refunds_owed",
    "flags",
    "events",
    "settle_latencies",
    "sampling",
    "schedules",
    "transfers",
    "cursors",
    "reconcile_runs",
    "retry_outcomes",
];
