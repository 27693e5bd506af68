-- A refund batch by SQL, for PostgreSQL. Run the steps one by one, from a program or from psql:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -v batch=2026-01-31-a -v worker=alice -v chain_id=8453 \
--        -v token=0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913
--
-- The rule behind every step: a claim or a send whose outcome is unknown is unknown, not owed again.
-- Records are chosen by status, never by paging through ids: ids are not in order of commit.

-- 1. What is owed, by token. Changes nothing.
select chain_id, token, reason, count(*) as records, sum(amount) as base_units, min(detected_at) as oldest
  from reconciled.refunds_owed
 where status = 'owed'
 group by chain_id, token, reason
 order by chain_id, token, reason;

-- 2. Claim. Two batches at the same time never get the same record. Records younger than an hour wait,
--    so that the block that holds the buyer's transfer is finalized: use your chain's finality here.
with next as (
    select id
      from reconciled.refunds_owed
     where status = 'owed'
       and chain_id = :chain_id
       and lower(token) = lower(:'token')
       and detected_at < now() - interval '1 hour'
     order by detected_at, id
     limit 50
       for update skip locked)
update reconciled.refunds_owed r
   set status = 'claimed', batch_id = :'batch', claimed_by = :'worker', claimed_at = now()
  from next
 where r.id = next.id
returning r.id, r.payment_id, r.chain_id, r.token, r.payer, r.amount, r.refund_nonce;

-- 3. Sign, for every record of the batch, an EIP-3009 transferWithAuthorization from the refund wallet:
--    to = payer, value = amount, nonce = refund_nonce. Do not broadcast yet.
--    A payer whom the token has blacklisted cannot be paid:
--
--      update reconciled.refunds_owed set status = 'blocked', note = 'payer is blacklisted'
--       where id = :id and status = 'claimed' and batch_id = :'batch';

-- 4. Write down the transaction BEFORE it is broadcast. Its hash is known once it is signed.
--    The claim must still be this batch's: no row changed means stop, and do not broadcast.
--
--      update reconciled.refunds_owed set status = 'sent', sent_tx = :'tx'
--       where id = :id and status = 'claimed' and batch_id = :'batch'
--      returning id;
--
--    Then broadcast. No answer is no answer: the record stays `sent`. To try again, send the same
--    authorization, or a new one with the same refund_nonce: at most one can land.

-- 5. Paid: the daemon writes that by itself, once the transfer with the record's nonce is in a final block. By hand
--    only what was paid without the nonce, and only when the Transfer to the payer is in a finalized block.
--
--      update reconciled.refunds_owed set status = 'paid', paid_tx = :'tx', paid_at = now()
--       where id = :id and status = 'sent' and batch_id = :'batch'
--      returning id;

-- 6. Give back what was claimed and certainly never signed. Never do this to a record that is `sent`, or
--    whose authorization left your hands: it may still land.
--
--      update reconciled.refunds_owed
--         set status = 'owed', batch_id = null, claimed_by = null, claimed_at = null
--       where id = :id and status = 'claimed' and batch_id = :'batch' and sent_tx is null
--      returning id;

-- 7. Call a record off, because the money need not go back after all. It stays called off.
--
--      update reconciled.refunds_owed set status = 'void', note = 'why, and who decided it'
--       where id = :id and status in ('owed', 'blocked')
--      returning id;

-- 8. What a batch has not finished. Changes nothing.
select id, payment_id, status, sent_tx, claimed_by, claimed_at, now() - claimed_at as age
  from reconciled.refunds_owed
 where status in ('claimed', 'sent', 'blocked')
 order by claimed_at;
