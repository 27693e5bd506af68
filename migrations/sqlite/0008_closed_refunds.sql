-- Closed refund records are watched for a while longer: money that goes back a second time.

-- When the search first saw the record closed, and where it stood then: a record that is owed again is searched
-- for from there on.
ALTER TABLE reconciled_refunds_owed ADD COLUMN closed_seen_at INTEGER;
ALTER TABLE reconciled_refunds_owed ADD COLUMN closed_from INTEGER;
-- What was closed long ago is not looked for now.
UPDATE reconciled_refunds_owed SET closed_seen_at = coalesce(paid_at, detected_at), closed_from = searched_to
 WHERE status IN ('paid', 'void');
CREATE INDEX reconciled_refunds_owed_closed ON reconciled_refunds_owed (chain_id, closed_seen_at)
    WHERE status IN ('paid', 'void');
