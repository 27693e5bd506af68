-- Chain to ledger and back: what the scan of the chain saw, how far it came, and the runs.

-- A transfer is known from its payment's own check, from the scan, or from both: one row per log.
ALTER TABLE reconciled.transfers
    -- The nonce of the authorization that moved it; none: no authorization, or not scanned.
    ADD COLUMN nonce text,
    -- When the scan saw it; none: only its payment's check did.
    ADD COLUMN scanned_at timestamptz,
    -- Since when its books do not balance.
    ADD COLUMN unaccounted_since timestamptz;
CREATE INDEX transfers_in_time ON reconciled.transfers (chain_id, block_time, id)
    WHERE orphaned_at IS NULL;
CREATE INDEX transfers_scanned ON reconciled.transfers (chain_id, block_number)
    WHERE orphaned_at IS NULL AND scanned_at IS NOT NULL;
CREATE INDEX transfers_nonce ON reconciled.transfers (nonce)
    WHERE orphaned_at IS NULL AND nonce IS NOT NULL;
CREATE INDEX transfers_unaccounted ON reconciled.transfers (chain_id, block_time)
    WHERE orphaned_at IS NULL AND unaccounted_since IS NOT NULL;
CREATE INDEX transfers_tx ON reconciled.transfers (tx_hash);

-- Nothing was ever written to these two.
DROP TABLE reconciled.cursors;
DROP TABLE reconciled.reconcile_runs;

-- How far the scan has come, per receiver: everything from first_block up to block_number was read.
CREATE TABLE reconciled.cursors (
    chain_id bigint NOT NULL,
    token text NOT NULL,
    pay_to text NOT NULL,
    first_block bigint NOT NULL,
    block_number bigint NOT NULL,
    block_hash text NOT NULL,
    block_time timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (chain_id, token, pay_to)
);

-- Full reconciles. One that is not finished is under way, or waits for somebody to take it up.
CREATE TABLE reconciled.reconcile_runs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    requested_at timestamptz NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    lease_token uuid,
    lease_expires_at timestamptz,
    progress jsonb,
    report jsonb
);
-- No two runs at once.
CREATE UNIQUE INDEX reconcile_runs_unfinished ON reconciled.reconcile_runs ((finished_at IS NULL))
    WHERE finished_at IS NULL;
CREATE INDEX reconcile_runs_finished ON reconciled.reconcile_runs (finished_at)
    WHERE finished_at IS NOT NULL;

-- The way to the payments a gateway calls settled, in the order they were written. Building it holds back
-- the gateway's writes meanwhile; where the table is large, build it beforehand, under the same name, with
-- CREATE INDEX CONCURRENTLY. A view takes no index: there, the table behind it needs one.
SET LOCAL statement_timeout = 0;

DO $$
BEGIN
    IF (SELECT relkind IN ('r', 'p') FROM pg_class WHERE oid = to_regclass('payments')) THEN
        EXECUTE format('CREATE INDEX IF NOT EXISTS reconciled_payments_written ON %s (created_at, id)
                        WHERE status = ''settled''', to_regclass('payments'));
    END IF;
END
$$;
