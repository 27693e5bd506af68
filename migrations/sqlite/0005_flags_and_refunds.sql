-- Flags that keep their history, and how far refunds were searched for on chain.

-- A row stands until its cause is gone; then it is history, and the same cause is a new row. What a person
-- closed still stands: the same cause does not ask again. SQLite drops no constraint: the table is made anew.
CREATE TABLE reconciled_flags_new (
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
    cause_gone_at INTEGER
);
INSERT INTO reconciled_flags_new
    SELECT id, kind, payment_id, order_id, subject, detail, opened_at, closed_at,
           CASE closed_by WHEN 'daemon' THEN 'reconciled' ELSE closed_by END, note,
           CASE closed_by WHEN 'daemon' THEN closed_at END
      FROM reconciled_flags;
DROP TABLE reconciled_flags;
ALTER TABLE reconciled_flags_new RENAME TO reconciled_flags;
CREATE UNIQUE INDEX reconciled_flags_standing ON reconciled_flags (payment_id, kind, subject)
    WHERE cause_gone_at IS NULL;
CREATE INDEX reconciled_flags_payment ON reconciled_flags (payment_id, id);
-- The page a person reads, oldest first.
CREATE INDEX reconciled_flags_open ON reconciled_flags (opened_at, id) WHERE closed_at IS NULL;

-- Where the search for a refund on chain stands: when it was last made or given up for now, and why; the last
-- block that it covered, which was final; when it began with the first block, and whether a use of the nonce
-- was seen since.
ALTER TABLE reconciled_refunds_owed ADD COLUMN searched_at INTEGER;
ALTER TABLE reconciled_refunds_owed ADD COLUMN searched_to INTEGER;
ALTER TABLE reconciled_refunds_owed ADD COLUMN search_begun_at INTEGER;
ALTER TABLE reconciled_refunds_owed ADD COLUMN search_use_seen INTEGER NOT NULL DEFAULT 0;
ALTER TABLE reconciled_refunds_owed ADD COLUMN search_problem TEXT;
CREATE INDEX reconciled_refunds_owed_search
    ON reconciled_refunds_owed (chain_id, searched_at, id)
    WHERE status IN ('owed', 'claimed', 'sent', 'blocked');
