-- The tables of the daily job, made where they are missing. Run as often as you like.

CREATE SCHEMA IF NOT EXISTS sales;

-- Each transaction of the job. Its number is the version of its batch in the ledger (outbox.batch), too.
CREATE TABLE IF NOT EXISTS sales.run (
    run bigint PRIMARY KEY,
    day date NOT NULL,
    purchases bigint NOT NULL, -- lines of the input that are of the day, or of none
    quarantined bigint NOT NULL, -- of these
    invoices bigint NOT NULL, -- issued or corrected
    lines bigint NOT NULL, -- new or changed
    amount numeric(22, 2) NOT NULL, -- by which the customers' totals have changed
    written_at timestamptz NOT NULL DEFAULT now()
);

-- A customer's purchases of a day. The id is `<customer>-<day>`.
CREATE TABLE IF NOT EXISTS sales.invoice (
    invoice_id text PRIMARY KEY,
    customer_id text NOT NULL,
    issued_on date NOT NULL,
    revision integer NOT NULL CHECK (revision > 0), -- 1 as it was issued, one more with each correction
    quantity bigint NOT NULL CHECK (quantity >= 0),
    amount numeric(22, 2) NOT NULL CHECK (amount >= 0)
);
CREATE INDEX IF NOT EXISTS invoice_issued_on ON sales.invoice (issued_on);

-- Each purchase. One that the input does not have any more keeps its place, with nothing in it.
CREATE TABLE IF NOT EXISTS sales.invoice_line (
    invoice_id text NOT NULL,
    position integer NOT NULL CHECK (position > 0),
    customer_id text NOT NULL,
    issued_on date NOT NULL,
    quantity integer NOT NULL CHECK (quantity >= 0),
    amount numeric(12, 2) NOT NULL CHECK (amount >= 0),
    PRIMARY KEY (invoice_id, position)
);
CREATE INDEX IF NOT EXISTS invoice_line_issued_on ON sales.invoice_line (issued_on);

CREATE TABLE IF NOT EXISTS sales.customer (
    customer_id text PRIMARY KEY,
    total numeric(22, 2) NOT NULL,
    tiers_reached integer NOT NULL CHECK (tiers_reached >= 0) -- they are never lost again
);

-- Lines that were no purchase when a run looked, each once. Those whose day cannot be read are of no day.
CREATE TABLE IF NOT EXISTS sales.quarantine (
    run bigint NOT NULL,
    issued_on date,
    file text NOT NULL,
    line_number bigint NOT NULL,
    reason text NOT NULL,
    line text NOT NULL,
    PRIMARY KEY (run, file, line_number)
);
CREATE INDEX IF NOT EXISTS quarantine_issued_on ON sales.quarantine (issued_on);
