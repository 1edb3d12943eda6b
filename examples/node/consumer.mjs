// Totals in Node: each message has its effect once, in order per key.
//
//     node consumer.mjs

import { setTimeout } from "node:timers/promises";
import amqp from "amqplib";
import pg from "pg";

const QUEUE = "billing.totals";
const RETRY_AFTER = 1000; // milliseconds
const TABLES = `
  CREATE TABLE IF NOT EXISTS seen (message_id uuid PRIMARY KEY);
  CREATE TABLE IF NOT EXISTS total (customer text PRIMARY KEY, amount numeric NOT NULL CHECK (amount >= 0))`;
const NOTE = "INSERT INTO seen (message_id) VALUES ($1) ON CONFLICT DO NOTHING";
const ADD = `
  INSERT INTO total (customer, amount) VALUES ($1, $2)
  ON CONFLICT (customer) DO UPDATE SET amount = total.amount + EXCLUDED.amount`;

// Write the message's id and its effect in one transaction.
async function apply({ properties, content }) {
  const client = await pool.connect();
  try {
    await client.query("BEGIN");
    const { rowCount } = await client.query(NOTE, [properties.messageId]);
    if (rowCount === 1 && properties.type === "InvoiceIssued") {
      const { amount } = JSON.parse(content);
      await client.query(ADD, [properties.headers["x-aggregate-id"], amount]);
    }
    await client.query("COMMIT");
    client.release();
  } catch (error) {
    client.release(error); // closes the connection, which rolls back
    throw error;
  }
}

// Whether the message itself is the cause: its JSON, or values that PostgreSQL refuses (SQLSTATE 22 and 23).
function isOfMessage(error) {
  return error instanceof SyntaxError || error instanceof TypeError || /^2[23]/.test(error.code);
}

// Acknowledge a message after its commit. While the database is away, the later messages wait in the queue.
async function work(message) {
  for (;;) {
    try {
      await apply(message);
      return channel.ack(message);
    } catch (error) {
      console.error(`${message.properties.messageId}: ${error}`);
      if (isOfMessage(error)) return channel.nack(message, false, false); // to the dead letters
      await setTimeout(RETRY_AFTER);
    }
  }
}

// A supervisor starts it again. What was under way comes again, too.
function end(code) {
  process.exit(code);
}

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });
pool.on("error", (error) => console.error(`an idle connection is lost: ${error}`));
await pool.query(TABLES);
const connection = await amqp.connect(process.env.BROKER_URL);
const channel = await connection.createChannel();
for (const each of [connection, channel]) {
  each.on("error", (error) => console.error(`${error}`));
  each.on("close", () => end(1));
}
process.on("SIGTERM", () => end(0));
await channel.prefetch(1);
await channel.consume(QUEUE, (message) => (message === null ? end(1) : work(message))); // null: the queue is gone
