// Whether the official parser takes a document without an error or a warning: `node asyncapi.mjs FILE`.

import { readFileSync } from "node:fs";
import { Parser } from "@asyncapi/parser";

const WARNING = 1; // severities: 0 error, 1 warning, 2 information

const { document, diagnostics } = await new Parser().parse(readFileSync(process.argv[2], "utf8"));
const found = diagnostics.filter((each) => each.severity <= WARNING);
for (const each of found) {
  console.error(each.path.join("/"), each.message);
}
if (document) {
  console.log(document.allMessages().length, document.allChannels().length);
}
process.exit(found.length === 0 && document ? 0 : 1);
