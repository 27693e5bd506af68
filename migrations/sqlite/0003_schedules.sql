-- What repeat schedules are fitted to, and the versions that were fitted.
--
-- Both tables were there before and nothing has ever written to them, so they are made anew.
DROP TABLE reconciled_settle_latencies;
DROP TABLE reconciled_schedules;

-- Settle latencies, counted into bins: rows grow with the window and the grid, never with the payments.
-- The grid is part of the key, so that counts of two grids are never mixed.
CREATE TABLE reconciled_settle_latencies (
    rail TEXT NOT NULL,
    chain_id INTEGER NOT NULL,
    step_ms INTEGER NOT NULL CHECK (step_ms > 0),
    grid_bins INTEGER NOT NULL CHECK (grid_bins > 0),
    -- Hours since the Unix epoch, of the block's time.
    epoch INTEGER NOT NULL,
    part TEXT NOT NULL CHECK (part IN ('fit', 'held_out')),
    -- `grid_bins` itself: at or past the horizon.
    bin INTEGER NOT NULL CHECK (bin BETWEEN 0 AND grid_bins),
    settled INTEGER NOT NULL,
    latency_sum_ms INTEGER NOT NULL,
    -- Samples whose block is older than their broadcast, and the largest such difference.
    clamped INTEGER NOT NULL,
    skew_max_ms INTEGER NOT NULL,
    PRIMARY KEY (rail, chain_id, step_ms, grid_bins, epoch, part, bin)
) WITHOUT ROWID;

-- How far the search for samples has come: one row, moved on together with the counts. `at` is Unix
-- microseconds, as fine as any database keeps a time.
CREATE TABLE reconciled_sampling (
    name TEXT NOT NULL PRIMARY KEY,
    at INTEGER NOT NULL,
    payment_id TEXT NOT NULL,
    updated_at INTEGER NOT NULL
);

-- Fitted repeat schedules, one row per version, never changed. Each follows one before it (0: it is the
-- first), and no two follow the same one.
CREATE TABLE reconciled_schedules (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    rail TEXT NOT NULL,
    chain_id INTEGER NOT NULL,
    previous_id INTEGER NOT NULL DEFAULT 0,
    policy TEXT NOT NULL,
    sample_size INTEGER NOT NULL,
    window_ms INTEGER NOT NULL,
    expected_reads REAL NOT NULL,
    expected_delay_ms REAL NOT NULL,
    never_share REAL NOT NULL,
    created_at INTEGER NOT NULL,
    -- Null: it was not adopted.
    adopted_at INTEGER,
    -- Why it was adopted, or why not.
    reason TEXT NOT NULL,
    UNIQUE (rail, chain_id, previous_id)
);

-- Whether this resolution made the payment settled; not, say, a confirmation of what the gateway wrote.
ALTER TABLE reconciled_resolutions ADD COLUMN settles INTEGER NOT NULL DEFAULT 0;
UPDATE reconciled_resolutions SET settles = 1 WHERE outcome IN ('paid', 'reinstated');
CREATE INDEX reconciled_resolutions_time ON reconciled_resolutions (resolved_at, payment_id);
-- Settlements in the order in which we found them.
CREATE INDEX reconciled_resolutions_settling ON reconciled_resolutions (resolved_at, payment_id)
    WHERE settles;
