// Orders from Node: each line of the input is an order, which is written with its event in one transaction.
//
//     echo '{"order": "6f1c...", "customer": 17, "amount": "9.90"}' | node writer.mjs

import { createInterface } from "node:readline";
import pg from "pg";

const TABLE = `
  CREATE TABLE IF NOT EXISTS "order" (
    id uuid PRIMARY KEY, customer bigint NOT NULL, amount numeric NOT NULL CHECK (amount > 0)
  )`;
// An order that comes again is there already: then it has its event, too.
const ORDER = `INSERT INTO "order" (id, customer, amount) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING`;
const EVENT = `
  INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
  VALUES ('customer', $1, 'OrderPlaced', $2)`;

// Both statements are of one client: each query of a pool may take another one, and so another transaction.
async function placeOrder(client, { order, customer, amount }) {
  await client.query("BEGIN");
  try {
    const { rowCount } = await client.query(ORDER, [order, customer, amount]);
    if (rowCount === 1) {
      await client.query(EVENT, [String(customer), JSON.stringify({ order, customer, amount })]);
    }
    await client.query("COMMIT");
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  }
}

const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
await client.query(TABLE);
for await (const line of createInterface({ input: process.stdin })) {
  await placeOrder(client, JSON.parse(line));
}
await client.end();
