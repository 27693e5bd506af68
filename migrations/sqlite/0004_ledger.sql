-- Chain to ledger and back: what the scan of the chain saw, how far it came, and the runs.

-- A transfer is known from its payment's own check, from the scan, or from both: one row per log.
-- The nonce of the authorization that moved it; none: no authorization, or not scanned.
ALTER TABLE reconciled_transfers ADD COLUMN nonce TEXT;
-- When the scan saw it; none: only its payment's check did.
ALTER TABLE reconciled_transfers ADD COLUMN scanned_at INTEGER;
-- Since when its books do not balance.
ALTER TABLE reconciled_transfers ADD COLUMN unaccounted_since INTEGER;
CREATE INDEX reconciled_transfers_in_time ON reconciled_transfers (chain_id, block_time, id)
    WHERE orphaned_at IS NULL;
CREATE INDEX reconciled_transfers_scanned ON reconciled_transfers (chain_id, block_number)
    WHERE orphaned_at IS NULL AND scanned_at IS NOT NULL;
CREATE INDEX reconciled_transfers_nonce ON reconciled_transfers (nonce)
    WHERE orphaned_at IS NULL AND nonce IS NOT NULL;
CREATE INDEX reconciled_transfers_unaccounted ON reconciled_transfers (chain_id, block_time)
    WHERE orphaned_at IS NULL AND unaccounted_since IS NOT NULL;

-- Nothing was ever written to these two.
DROP TABLE reconciled_cursors;
DROP TABLE reconciled_reconcile_runs;

-- How far the scan has come, per receiver: everything from first_block up to block_number was read.
CREATE TABLE reconciled_cursors (
    chain_id INTEGER NOT NULL,
    token TEXT NOT NULL,
    pay_to TEXT NOT NULL,
    first_block INTEGER NOT NULL,
    block_number INTEGER NOT NULL,
    block_hash TEXT NOT NULL,
    block_time INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (chain_id, token, pay_to)
);

-- Full reconciles. One that is not finished is under way, or waits for somebody to take it up.
CREATE TABLE reconciled_reconcile_runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    requested_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER,
    lease_token TEXT,
    lease_expires_at INTEGER,
    progress TEXT,
    report TEXT
);
-- No two runs at once.
CREATE UNIQUE INDEX reconciled_reconcile_runs_unfinished
    ON reconciled_reconcile_runs (finished_at IS NULL) WHERE finished_at IS NULL;
CREATE INDEX reconciled_reconcile_runs_finished ON reconciled_reconcile_runs (finished_at)
    WHERE finished_at IS NOT NULL;
