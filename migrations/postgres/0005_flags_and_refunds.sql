-- Flags that keep their history, and how far refunds were searched for on chain.

-- A row stands until its cause is gone; then it is history, and the same cause is a new row. What a person
-- closed still stands: the same cause does not ask again.
ALTER TABLE reconciled.flags ADD COLUMN cause_gone_at timestamptz;
UPDATE reconciled.flags
   SET cause_gone_at = closed_at, closed_by = 'reconciled'
 WHERE closed_by = 'daemon' AND closed_at IS NOT NULL;
ALTER TABLE reconciled.flags DROP CONSTRAINT flags_payment_id_kind_subject_key;
CREATE UNIQUE INDEX flags_standing ON reconciled.flags (payment_id, kind, subject)
    WHERE cause_gone_at IS NULL;
CREATE INDEX flags_payment ON reconciled.flags (payment_id, id);
-- The page a person reads, oldest first.
DROP INDEX reconciled.flags_open;
CREATE INDEX flags_open ON reconciled.flags (opened_at, id) WHERE closed_at IS NULL;

-- Where the search for a refund on chain stands: when it was last made or given up for now, and why; the last
-- block that it covered, which was final; when it began with the first block, and whether a use of the nonce
-- was seen since.
ALTER TABLE reconciled.refunds_owed
    ADD COLUMN searched_at timestamptz,
    ADD COLUMN searched_to bigint,
    ADD COLUMN search_begun_at timestamptz,
    ADD COLUMN search_use_seen boolean NOT NULL DEFAULT false,
    ADD COLUMN search_problem text;
CREATE INDEX refunds_owed_search
    ON reconciled.refunds_owed (chain_id, searched_at NULLS FIRST, id)
    WHERE status IN ('owed', 'claimed', 'sent', 'blocked');
