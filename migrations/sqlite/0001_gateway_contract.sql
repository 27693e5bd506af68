-- The gateway's tables (DESIGN section 5), created only where the gateway has none of its own; a view of
-- the same name serves as well. Times are Unix milliseconds, valid_after and valid_before Unix seconds in
-- decimal, amounts base units in decimal, addresses and hashes 0x-hex in either case.
--
-- There are no checks here on purpose: a row that makes no sense must be able to exist, so that it is
-- flagged (I11) and the gateway's write does not fail.

CREATE TABLE IF NOT EXISTS orders (
    id TEXT PRIMARY KEY,
    kind TEXT,
    status TEXT,
    paid_by TEXT,
    quote_expires_at INTEGER,
    delivered_at INTEGER,
    created_at INTEGER,
    updated_at INTEGER
);

CREATE TABLE IF NOT EXISTS payments (
    id TEXT PRIMARY KEY,
    order_id TEXT,
    rail TEXT,
    method TEXT,
    chain_id INTEGER,
    token TEXT,
    payer TEXT,
    pay_to TEXT,
    amount TEXT,
    nonce TEXT,
    valid_after TEXT,
    valid_before TEXT,
    credential TEXT,
    tx_hash TEXT,
    status TEXT,
    settle_error TEXT,
    created_at INTEGER,
    broadcast_at INTEGER,
    settled_at INTEGER,
    updated_at INTEGER
);

CREATE TABLE IF NOT EXISTS stock_reservations (
    id TEXT PRIMARY KEY,
    order_id TEXT,
    sku TEXT,
    quantity INTEGER,
    status TEXT
);

CREATE TABLE IF NOT EXISTS stock (
    sku TEXT PRIMARY KEY,
    available INTEGER
);

CREATE TABLE IF NOT EXISTS payment_identifiers (
    id TEXT PRIMARY KEY,
    payment_id TEXT,
    request_hash TEXT,
    status TEXT,
    response TEXT,
    expires_at INTEGER,
    updated_at INTEGER
);
