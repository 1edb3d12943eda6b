-- The tables of the invoices job, made where they are missing. Run as often as you like.

CREATE SCHEMA IF NOT EXISTS billing;

-- An invoice for each purchase. The id is `<customer>-<day>-<number of the purchase on that day>`.
CREATE TABLE IF NOT EXISTS billing.invoice (
    invoice_id text PRIMARY KEY,
    customer_id text NOT NULL,
    issued_on date NOT NULL,
    quantity integer NOT NULL CHECK (quantity > 0),
    amount numeric(12, 2) NOT NULL CHECK (amount >= 0)
);

-- Lines that are no purchase. They stand for a batch once the ledger (outbox.batch) has its app_id and version.
CREATE TABLE IF NOT EXISTS billing.quarantine (
    app_id text NOT NULL,
    version bigint NOT NULL,
    file text NOT NULL,
    line_number bigint NOT NULL,
    reason text NOT NULL,
    line text NOT NULL,
    quarantined_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (app_id, version, file, line_number)
);

-- What a consumer of InvoiceIssued makes of the events: in the end the same rows as billing.invoice.
CREATE TABLE IF NOT EXISTS billing.invoice_projection (
    invoice_id text PRIMARY KEY,
    customer_id text NOT NULL,
    issued_on date NOT NULL,
    quantity integer NOT NULL,
    amount numeric(12, 2) NOT NULL
);
