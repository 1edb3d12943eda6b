-- What the members keep: a running total of each customer, beside the partition that its messages come in.
CREATE SCHEMA IF NOT EXISTS billing;
CREATE TABLE IF NOT EXISTS billing.customer_total (
    customer_id text PRIMARY KEY,
    partition smallint NOT NULL,
    invoices bigint NOT NULL,
    amount numeric(14, 2) NOT NULL
);
CREATE INDEX IF NOT EXISTS customer_total_partition ON billing.customer_total (partition);
