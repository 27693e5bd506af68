-- The gateway's tables: the contract of DESIGN section 5.
--
-- A relation that is already there, be it a table or an updatable view, is left as it is; so a gateway
-- that keeps its own schema exposes views of these names and nothing is created. Names are not
-- qualified on purpose: they are found and created by the search path of the connection.
--
-- There are no checks here on purpose, either: a row that makes no sense must be able to exist, so that
-- it is flagged (I11) and the gateway's write does not fail.

DO $$
BEGIN
    IF to_regclass('orders') IS NULL THEN
        CREATE TABLE IF NOT EXISTS orders (
            id text PRIMARY KEY,
            kind text,
            status text,
            paid_by text,
            quote_expires_at timestamptz,
            delivered_at timestamptz,
            created_at timestamptz,
            updated_at timestamptz
        );
    END IF;

    -- Amounts are base units; valid_after and valid_before are Unix seconds, as wide as a token takes
    -- them; addresses and hashes are 0x-hex in any case of letters.
    IF to_regclass('payments') IS NULL THEN
        CREATE TABLE IF NOT EXISTS payments (
            id text PRIMARY KEY,
            order_id text,
            rail text,
            method text,
            chain_id bigint,
            token text,
            payer text,
            pay_to text,
            amount numeric(78, 0),
            nonce text,
            valid_after numeric(78, 0),
            valid_before numeric(78, 0),
            credential text,
            tx_hash text,
            status text,
            settle_error text,
            created_at timestamptz,
            broadcast_at timestamptz,
            settled_at timestamptz,
            updated_at timestamptz
        );
    END IF;

    IF to_regclass('stock_reservations') IS NULL THEN
        CREATE TABLE IF NOT EXISTS stock_reservations (
            id text PRIMARY KEY,
            order_id text,
            sku text,
            quantity bigint,
            status text
        );
    END IF;

    IF to_regclass('stock') IS NULL THEN
        CREATE TABLE IF NOT EXISTS stock (
            sku text PRIMARY KEY,
            available bigint
        );
    END IF;

    IF to_regclass('payment_identifiers') IS NULL THEN
        CREATE TABLE IF NOT EXISTS payment_identifiers (
            id text PRIMARY KEY,
            payment_id text,
            request_hash text,
            status text,
            response text,
            expires_at timestamptz,
            updated_at timestamptz
        );
    END IF;
END
$$;

-- The daemon's ways into these tables. A view takes no index: there, the tables behind it need them.
-- Building one holds back the gateway's writes meanwhile; where a table is large, build them beforehand,
-- under the same names, with CREATE INDEX CONCURRENTLY.
SET LOCAL statement_timeout = 0;

DO $$
DECLARE
    wanted text[];
BEGIN
    FOREACH wanted SLICE 1 IN ARRAY ARRAY[
        -- Payments nobody knows the end of: what discovery scans, in step with the open watches.
        ['payments', 'reconciled_payments_open',
         '(id) INCLUDE (status, created_at) WHERE status IN (''settling'', ''unknown'', ''settle_failed'')'],
        -- The payments of an order.
        ['payments', 'reconciled_payments_order', '(order_id)'],
        -- Every payment that claims one authorization.
        ['payments', 'reconciled_payments_nonce', '(lower(nonce))'],
        -- Orders that owe their money back.
        ['orders', 'reconciled_orders_undelivered', '(id) WHERE status = ''undelivered'''],
        ['stock_reservations', 'reconciled_reservations_order', '(order_id)'],
        ['payment_identifiers', 'reconciled_identifiers_payment', '(payment_id)']
    ]
    LOOP
        IF (SELECT relkind IN ('r', 'p') FROM pg_class WHERE oid = to_regclass(wanted[1])) THEN
            EXECUTE format('CREATE INDEX IF NOT EXISTS %I ON %s %s', wanted[2],
                           to_regclass(wanted[1]), wanted[3]);
        END IF;
    END LOOP;
END
$$;
