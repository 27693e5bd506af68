-- Our own tables. Times are Unix milliseconds; block_time is Unix seconds; hashes are lower-case 0x-hex;
-- amounts are base units in decimal.

CREATE TABLE reconciled_watches (
    payment_id TEXT NOT NULL PRIMARY KEY,
    phase TEXT NOT NULL CHECK (phase IN ('targeted', 'reconcile', 'late', 'finality', 'closed')),
    opened_at INTEGER NOT NULL,
    next_check_at INTEGER,
    checks_done INTEGER NOT NULL DEFAULT 0,
    consecutive_inconclusive INTEGER NOT NULL DEFAULT 0,
    schedule_id INTEGER,
    last_verdict TEXT,
    last_block INTEGER,
    lease_token TEXT,
    lease_expires_at INTEGER
);
CREATE INDEX reconciled_watches_due ON reconciled_watches (next_check_at) WHERE phase <> 'closed';
-- The pages of a full reconcile, however many watches are closed.
CREATE INDEX reconciled_watches_open ON reconciled_watches (payment_id) WHERE phase <> 'closed';

-- Append-only (I12).
CREATE TABLE reconciled_resolutions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    payment_id TEXT NOT NULL,
    order_id TEXT,
    outcome TEXT NOT NULL,
    verdict TEXT NOT NULL,
    evidence TEXT NOT NULL,
    tx_hash TEXT,
    log_index INTEGER,
    block_number INTEGER,
    block_hash TEXT,
    block_time INTEGER,
    resolved_at INTEGER NOT NULL,
    detection_delay_ms INTEGER
);
CREATE INDEX reconciled_resolutions_payment ON reconciled_resolutions (payment_id);

-- One row per check; pruned by age.
CREATE TABLE reconciled_checks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    payment_id TEXT NOT NULL,
    checked_at INTEGER NOT NULL,
    verdict TEXT NOT NULL,
    block_number INTEGER,
    detail TEXT
);
CREATE INDEX reconciled_checks_payment ON reconciled_checks (payment_id, id);
CREATE INDEX reconciled_checks_age ON reconciled_checks (checked_at);

-- Never deleted (I6).
CREATE TABLE reconciled_refunds_owed (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    payment_id TEXT NOT NULL UNIQUE,
    order_id TEXT NOT NULL,
    rail TEXT NOT NULL,
    chain_id INTEGER NOT NULL,
    token TEXT NOT NULL,
    payer TEXT NOT NULL,
    amount TEXT NOT NULL,
    reason TEXT NOT NULL CHECK (reason IN ('duplicate', 'late', 'undelivered')),
    tx_hash TEXT NOT NULL,
    log_index INTEGER NOT NULL,
    detected_at INTEGER NOT NULL,
    status TEXT NOT NULL
        CHECK (status IN ('owed', 'claimed', 'sent', 'paid', 'void', 'blocked')),
    refund_nonce TEXT NOT NULL,
    batch_id TEXT,
    claimed_by TEXT,
    claimed_at INTEGER,
    sent_tx TEXT,
    paid_tx TEXT,
    paid_at INTEGER,
    note TEXT
);
CREATE INDEX reconciled_refunds_owed_open ON reconciled_refunds_owed (status, id);

-- One row per kind and payment; a flag about no payment names its subject instead.
CREATE TABLE reconciled_flags (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    payment_id TEXT NOT NULL DEFAULT '',
    order_id TEXT,
    subject TEXT NOT NULL DEFAULT '',
    detail TEXT NOT NULL,
    opened_at INTEGER NOT NULL,
    closed_at INTEGER,
    closed_by TEXT,
    note TEXT,
    UNIQUE (kind, payment_id, subject)
);
CREATE INDEX reconciled_flags_payment ON reconciled_flags (payment_id);
CREATE INDEX reconciled_flags_open ON reconciled_flags (kind) WHERE closed_at IS NULL;

-- The outbox: consumers claim and acknowledge.
CREATE TABLE reconciled_events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    order_id TEXT NOT NULL,
    payment_id TEXT NOT NULL,
    dedupe_key TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,
    claimed_by TEXT,
    claimed_at INTEGER,
    acknowledged_at INTEGER
);
CREATE INDEX reconciled_events_acknowledged ON reconciled_events (acknowledged_at)
    WHERE acknowledged_at IS NOT NULL;
CREATE INDEX reconciled_events_payment ON reconciled_events (payment_id);

CREATE TABLE reconciled_settle_latencies (
    payment_id TEXT NOT NULL PRIMARY KEY,
    rail TEXT NOT NULL,
    chain_id INTEGER NOT NULL,
    broadcast_at INTEGER NOT NULL,
    block_time INTEGER NOT NULL,
    latency_ms INTEGER NOT NULL
);

CREATE TABLE reconciled_schedules (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    rail TEXT NOT NULL,
    chain_id INTEGER NOT NULL,
    offsets_ms TEXT NOT NULL,
    sample_size INTEGER NOT NULL,
    expected_reads REAL,
    expected_delay_ms REAL,
    created_at INTEGER NOT NULL
);

-- Every transfer seen into a pay_to. What a reorg took away keeps its row; when the transaction comes
-- back in another block, its log is another one: there its indexes may differ.
CREATE TABLE reconciled_transfers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chain_id INTEGER NOT NULL,
    tx_hash TEXT NOT NULL,
    log_index INTEGER NOT NULL,
    payment_id TEXT,
    token TEXT NOT NULL,
    payer TEXT NOT NULL,
    pay_to TEXT NOT NULL,
    amount TEXT NOT NULL,
    block_number INTEGER NOT NULL,
    block_hash TEXT NOT NULL,
    block_time INTEGER NOT NULL,
    finality TEXT NOT NULL CHECK (finality IN ('tentative', 'final')),
    seen_at INTEGER NOT NULL,
    orphaned_at INTEGER
);
CREATE UNIQUE INDEX reconciled_transfers_log
    ON reconciled_transfers (chain_id, block_hash, tx_hash, log_index)
    WHERE orphaned_at IS NULL;
-- I4: a payment has one transfer.
CREATE UNIQUE INDEX reconciled_transfers_payment ON reconciled_transfers (payment_id)
    WHERE orphaned_at IS NULL AND payment_id IS NOT NULL;
CREATE INDEX reconciled_transfers_tx ON reconciled_transfers (tx_hash);

CREATE TABLE reconciled_cursors (
    chain_id INTEGER NOT NULL,
    token TEXT NOT NULL,
    pay_to TEXT NOT NULL,
    block_number INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (chain_id, token, pay_to)
);

CREATE TABLE reconciled_reconcile_runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    started_at INTEGER NOT NULL,
    finished_at INTEGER,
    progress TEXT,
    report TEXT
);

-- What a buyer's retry is told once the gateway has dropped its own row.
CREATE TABLE reconciled_retry_outcomes (
    identifier_sha256 TEXT NOT NULL PRIMARY KEY,
    payment_id TEXT NOT NULL,
    order_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    tx_hash TEXT,
    response_sha256 TEXT,
    updated_at INTEGER NOT NULL
);
