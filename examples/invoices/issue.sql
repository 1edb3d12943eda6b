-- A hundred invoices of a hundred customers, and their events, in one transaction.
WITH issued AS (
    INSERT INTO billing.invoice (invoice_id, customer_id, issued_on, quantity, amount)
    SELECT gen_random_uuid()::text, 'customer-' || number, current_date, number, number * 9.99
    FROM generate_series(1, 100) AS number
    RETURNING *
)
INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
SELECT 'customer', customer_id, 'InvoiceIssued', row_to_json(issued) FROM issued;
