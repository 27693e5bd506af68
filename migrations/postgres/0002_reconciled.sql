-- Our own tables (DESIGN section 5). Nothing here references a gateway table, which may be a view.

CREATE SCHEMA IF NOT EXISTS reconciled;

-- One narrow row per followed payment. The lease columns change most often and are in no index, so
-- that leasing is a heap-only update; fillfactor leaves room for it. Vacuumed early: what was due
-- leaves dead entries at the very head of the index that is read next.
CREATE TABLE reconciled.watches (
    payment_id text PRIMARY KEY,
    phase text NOT NULL
        CHECK (phase IN ('targeted', 'reconcile', 'late', 'finality', 'closed')),
    opened_at timestamptz NOT NULL,
    next_check_at timestamptz,
    lease_expires_at timestamptz,
    lease_token uuid,
    schedule_id bigint,
    last_block bigint,
    checks_done integer NOT NULL DEFAULT 0,
    consecutive_inconclusive integer NOT NULL DEFAULT 0,
    last_verdict text
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX watches_due ON reconciled.watches (next_check_at, payment_id)
    WHERE phase <> 'closed' AND next_check_at IS NOT NULL;
-- The pages of a full reconcile, however many watches are closed.
CREATE INDEX watches_open ON reconciled.watches (payment_id) WHERE phase <> 'closed';

-- Append-only: every resolution that somebody else can see, with what it was based on (I12).
CREATE TABLE reconciled.resolutions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    payment_id text NOT NULL,
    order_id text,
    outcome text NOT NULL,
    verdict text NOT NULL,
    evidence jsonb NOT NULL,
    tx_hash text,
    log_index bigint,
    block_number bigint,
    block_hash text,
    block_time timestamptz,
    resolved_at timestamptz NOT NULL,
    detection_delay_ms bigint
);
CREATE INDEX resolutions_payment ON reconciled.resolutions (payment_id, id);

-- The attempt log, pruned by age.
CREATE TABLE reconciled.checks (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    payment_id text NOT NULL,
    checked_at timestamptz NOT NULL,
    verdict text NOT NULL,
    block_number bigint,
    detail text
);
CREATE INDEX checks_payment ON reconciled.checks (payment_id, id);
CREATE INDEX checks_age ON reconciled.checks (checked_at);

-- Money that moved and must go back (DESIGN section 10). Never deleted.
CREATE TABLE reconciled.refunds_owed (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    payment_id text NOT NULL UNIQUE,
    order_id text NOT NULL,
    rail text NOT NULL,
    chain_id bigint NOT NULL,
    token text NOT NULL,
    payer text NOT NULL,
    amount numeric(78, 0) NOT NULL CHECK (amount >= 0),
    reason text NOT NULL CHECK (reason IN ('duplicate', 'late', 'undelivered')),
    tx_hash text NOT NULL,
    log_index bigint NOT NULL,
    detected_at timestamptz NOT NULL,
    status text NOT NULL DEFAULT 'owed'
        CHECK (status IN ('owed', 'claimed', 'sent', 'paid', 'void', 'blocked')),
    refund_nonce text NOT NULL,
    batch_id text,
    claimed_by text,
    claimed_at timestamptz,
    sent_tx text,
    paid_tx text,
    paid_at timestamptz,
    note text
);
CREATE INDEX refunds_owed_open ON reconciled.refunds_owed (status, id)
    WHERE status IN ('owed', 'claimed', 'sent', 'blocked');

-- What only a person can decide. One row per kind and payment; a flag about no payment names its
-- subject instead.
CREATE TABLE reconciled.flags (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL,
    payment_id text NOT NULL DEFAULT '',
    order_id text,
    subject text NOT NULL DEFAULT '',
    detail jsonb NOT NULL,
    opened_at timestamptz NOT NULL,
    closed_at timestamptz,
    closed_by text,
    note text,
    UNIQUE (payment_id, kind, subject)
);
CREATE INDEX flags_open ON reconciled.flags (kind) WHERE closed_at IS NULL;

-- The outbox: consumers claim and acknowledge.
CREATE TABLE reconciled.events (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL,
    order_id text NOT NULL,
    payment_id text NOT NULL,
    dedupe_key text NOT NULL UNIQUE,
    created_at timestamptz NOT NULL,
    claimed_by text,
    claimed_at timestamptz,
    acknowledged_at timestamptz
);
CREATE INDEX events_unacknowledged ON reconciled.events (id) WHERE acknowledged_at IS NULL;
CREATE INDEX events_acknowledged ON reconciled.events (acknowledged_at)
    WHERE acknowledged_at IS NOT NULL;
CREATE INDEX events_payment ON reconciled.events (payment_id);

-- From broadcast to block, for every settlement seen: what repeat schedules are fitted to.
CREATE TABLE reconciled.settle_latencies (
    payment_id text PRIMARY KEY,
    rail text NOT NULL,
    chain_id bigint NOT NULL,
    broadcast_at timestamptz NOT NULL,
    block_time timestamptz NOT NULL,
    latency_ms bigint NOT NULL
);
CREATE INDEX settle_latencies_recent
    ON reconciled.settle_latencies (rail, chain_id, broadcast_at);

-- Fitted repeat schedules, one row per version.
CREATE TABLE reconciled.schedules (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rail text NOT NULL,
    chain_id bigint NOT NULL,
    offsets_ms bigint[] NOT NULL,
    sample_size bigint NOT NULL,
    expected_reads double precision NOT NULL,
    expected_delay_ms double precision NOT NULL,
    created_at timestamptz NOT NULL
);
CREATE INDEX schedules_newest ON reconciled.schedules (rail, chain_id, id);

-- Every transfer seen into a pay_to; a row without a payment is unmatched. What a reorg took away keeps
-- its row; when the transaction comes back in another block, its log is another one: there its indexes
-- may differ.
CREATE TABLE reconciled.transfers (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    chain_id bigint NOT NULL,
    tx_hash text NOT NULL,
    log_index bigint NOT NULL,
    payment_id text,
    token text NOT NULL,
    payer text NOT NULL,
    pay_to text NOT NULL,
    amount numeric(78, 0) NOT NULL CHECK (amount >= 0),
    block_number bigint NOT NULL,
    block_hash text NOT NULL,
    block_time timestamptz NOT NULL,
    finality text NOT NULL CHECK (finality IN ('tentative', 'final')),
    seen_at timestamptz NOT NULL,
    orphaned_at timestamptz
);
-- I4: one log is one payment's.
CREATE UNIQUE INDEX transfers_log
    ON reconciled.transfers (chain_id, block_hash, tx_hash, log_index)
    WHERE orphaned_at IS NULL;
-- I4: a payment has one transfer.
CREATE UNIQUE INDEX transfers_payment ON reconciled.transfers (payment_id)
    WHERE orphaned_at IS NULL AND payment_id IS NOT NULL;

-- How far the search for transfers has come.
CREATE TABLE reconciled.cursors (
    chain_id bigint NOT NULL,
    token text NOT NULL,
    pay_to text NOT NULL,
    block_number bigint NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (chain_id, token, pay_to)
);

-- Full reconciles: where they are and what they found.
CREATE TABLE reconciled.reconcile_runs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    started_at timestamptz NOT NULL,
    finished_at timestamptz,
    progress jsonb,
    report jsonb
);

-- The answer to a buyer who retries after the gateway dropped its own row: keyed by the hex SHA-256
-- of the payment identifier.
CREATE TABLE reconciled.retry_outcomes (
    identifier_sha256 text PRIMARY KEY,
    payment_id text NOT NULL,
    order_id text NOT NULL,
    outcome text NOT NULL,
    tx_hash text,
    response_sha256 text,
    updated_at timestamptz NOT NULL
);
