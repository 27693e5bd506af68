-- What repeat schedules are fitted to, and the versions that were fitted.
--
-- Both tables were there before and nothing has ever written to them, so they are made anew.
DROP TABLE reconciled.settle_latencies;
DROP TABLE reconciled.schedules;

-- Settle latencies, counted into bins: rows grow with the window and the grid, never with the payments.
-- The grid is part of the key, so that counts of two grids are never mixed.
CREATE TABLE reconciled.settle_latencies (
    rail text NOT NULL,
    chain_id bigint NOT NULL,
    step_ms bigint NOT NULL CHECK (step_ms > 0),
    grid_bins bigint NOT NULL CHECK (grid_bins > 0),
    -- Hours since the Unix epoch, of the block's time.
    epoch bigint NOT NULL,
    part text NOT NULL CHECK (part IN ('fit', 'held_out')),
    -- `grid_bins` itself: at or past the horizon.
    bin bigint NOT NULL CHECK (bin BETWEEN 0 AND grid_bins),
    settled bigint NOT NULL,
    latency_sum_ms bigint NOT NULL,
    -- Samples whose block is older than their broadcast, and the largest such difference.
    clamped bigint NOT NULL,
    skew_max_ms bigint NOT NULL,
    PRIMARY KEY (rail, chain_id, step_ms, grid_bins, epoch, part, bin)
) WITH (fillfactor = 80);

-- How far the search for samples has come: one row, moved on together with the counts.
CREATE TABLE reconciled.sampling (
    name text PRIMARY KEY,
    at timestamptz NOT NULL,
    payment_id text NOT NULL,
    updated_at timestamptz NOT NULL
);

-- Fitted repeat schedules, one row per version, never changed. Each follows one before it (0: it is the
-- first), and no two follow the same one: of two replicas that fit at the same time one is refused.
CREATE TABLE reconciled.schedules (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rail text NOT NULL,
    chain_id bigint NOT NULL,
    previous_id bigint NOT NULL DEFAULT 0,
    policy jsonb NOT NULL,
    sample_size bigint NOT NULL,
    window_ms bigint NOT NULL,
    expected_reads double precision NOT NULL,
    expected_delay_ms double precision NOT NULL,
    never_share double precision NOT NULL,
    created_at timestamptz NOT NULL,
    -- Null: it was not adopted.
    adopted_at timestamptz,
    -- Why it was adopted, or why not.
    reason text NOT NULL,
    UNIQUE (rail, chain_id, previous_id)
);

-- Whether this resolution made the payment settled; not, say, a confirmation of what the gateway wrote.
ALTER TABLE reconciled.resolutions ADD COLUMN settles boolean NOT NULL DEFAULT false;
UPDATE reconciled.resolutions SET settles = true WHERE outcome IN ('paid', 'reinstated');
CREATE INDEX resolutions_time ON reconciled.resolutions (resolved_at, payment_id);
-- Settlements in the order in which we found them.
CREATE INDEX resolutions_settling ON reconciled.resolutions (resolved_at, payment_id) WHERE settles;

-- Settled payments in the order in which the gateway settled them. A view takes no index. On a large table
-- build it beforehand, under the same name, with CREATE INDEX CONCURRENTLY.
SET LOCAL statement_timeout = 0;

DO $$
BEGIN
    IF (SELECT relkind IN ('r', 'p') FROM pg_class WHERE oid = to_regclass('payments')) THEN
        EXECUTE format('CREATE INDEX IF NOT EXISTS reconciled_payments_settled ON %s '
                       '(settled_at, id) WHERE status = ''settled''',
                       to_regclass('payments'));
    END IF;
END
$$;
