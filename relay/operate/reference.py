"""Write config/relay.toml and the lists of docs/configuration.md, from the models.

tests/operate/test_reference.py compares the files with what is written here; `relay config example` prints the first.
"""

import re
from collections.abc import Iterator

from relay.config.keys import Key, all_keys, table_keys

HEAD = """\
# Settings of the outbox relay: every key with its default. Take the # away from a line to change its value.
# A variable goes before this file, and a flag before a variable; docs/configuration.md has the names.
# `relay config show` shows each value in use and where it was found.
"""

SECTIONS = {
    "database": "Where the outbox is.",
    "broker": "Where the messages go.",
    "relay": "How rows are carried.",
    "routes": "Where rows that name no exchange go: the first table that matches decides, else broker.exchange.",
    "topology.exchanges": "Exchanges to declare at a deployment (docs/topology.md).",
    "topology.queues": "Queues to declare; what is left out is left to the policies of the broker.",
    "topology.bindings": "Bindings to make.",
    "http": "Where a running relay answers probes and Prometheus (docs/metrics.md).",
    "console": "The web console (docs/console.md).",
    "log": "What is said on stderr.",
}

# What docs/configuration.md says once for all keys, and which of the keys' words it stands for.
COMMON = """\
In brackets is the default. The variable is `RELAY_<SECTION>_<KEY>`, in `[relay]` only `RELAY_<KEY>`. A list of tables
is JSON there: `RELAY_ROUTES='[{"exchange": "billing"}]'`. Unless a key says more:

- a time is a number of seconds above 0, or as in `"30s"`;
- a text has at most 255 bytes, a whole number is at least 1;
- names of exchanges and queues are letters, digits, spaces and `-_.:@#,/+`: up to 127 for an exchange, 255 for a queue;
- arguments are a table of AMQP arguments: texts, whole numbers, true or false, lists and tables of them.
"""
SAID_BY_COMMON = {
    "true or false",
    'seconds, above 0, or as in "30s"',
    "text of at most 255 bytes",
    "a whole number, at least 1",
    "a name of 1 to 127 letters, digits, spaces and - _ . : @ # , / +",
    "a name of 1 to 255 letters, digits, spaces and - _ . : @ # , / +",
    "a table of AMQP arguments: text, whole numbers, true or false, lists and tables of them",
}

# The words of docs/glossary.md that the page links where it first uses them.
LINKED = ("lane", "parked")

PAGE = re.compile(r"docs/([\w-]+\.md)")

UNFIXED_EXAMPLES = {
    "database.url": '"postgresql://relay:secret@db.example.com/shop"',
    "broker.url": '"amqp://relay:secret@rabbit.example.com/"',
    "relay.node": '"relay-1"',
    "relay.max_window_bytes": "67108864",
}
EXAMPLES = {
    "routes": """\
# event_type and aggregate_type are shell patterns; exchange = "" is the default exchange, which takes the name
# of a queue as routing_key. routing_key may contain {aggregate_type}, {aggregate_id} and {event_type}.
# Rows of these types for which no queue is bound wait ("quarantine"), or are "sent", or go to "discard".
# Their messages can be CloudEvents ("binary" or "structured").
#[[routes]]
#event_type = "Invoice*"
#aggregate_type = "*"
#exchange = "billing"
#routing_key = "{aggregate_type}.{event_type}"
#unroutable = "quarantine"
#cloudevents = "off"
""",
    "topology.exchanges": """\
#[[topology.exchanges]]
#name = "billing"
#type = "topic"
#durable = true
""",
    "topology.queues": """\
# arguments = { x-queue-leader-locator = "balanced" } takes what has no key here, by its AMQP name.
#[[topology.queues]]
#name = "billing.invoices"
#type = "quorum"
#dead_letter_exchange = ""
#dead_letter_routing_key = "billing.invoices.dead"
#delivery_limit = 20
#max_length = 1000000
#overflow = "reject-publish"
""",
    "topology.bindings": """\
#[[topology.bindings]]
#exchange = "billing"
#queue = "billing.invoices"
#routing_key = "customer.*"
""",
}


def example() -> str:
    """Return the text of config/relay.toml; a line without a space after its # is a key with its default."""
    parts = [HEAD]
    for section, about in SECTIONS.items():
        if section in EXAMPLES:
            parts.append(f"# {about}\n{EXAMPLES[section]}")
        else:
            parts.append(f"# {about}\n[{section}]\n" + "".join(_commented(key) for key in _keys(section)))
    return "\n".join(parts)


def markdown() -> str:
    """Return the lists of docs/configuration.md."""
    parts = [COMMON]
    tables = {key.name: key.table for key in all_keys() if key.table is not None}
    for section, about in SECTIONS.items():
        table = tables.get(section)
        keys = table_keys(table) if table else _keys(section)
        parts.append(f"### `[[{section}]]`\n" if table else f"### `[{section}]`\n")
        parts.append(about + "\n")
        parts += [_item(key) for key in keys]
        parts.append("")
    return _linked("\n".join(parts))


def _linked(page: str) -> str:
    for word in LINKED:
        page = page.replace(f" {word}", f" [{word}](glossary.md#{word})", 1)
    return page


def _item(key: Key) -> str:
    text = f"{_default(key)}): {key.about}" + ("" if _goes_without(key) else f"; takes {key.takes}")
    return f"- **`{key.path[-1]}`** (" + PAGE.sub(r"[\1](\1)", text)


def _goes_without(key: Key) -> bool:
    """Whether COMMON or the description says what the key takes."""
    values = key.takes.removeprefix("one of ").split(", ") if key.takes.startswith("one of ") else [key.takes]
    return key.takes in SAID_BY_COMMON or all(value in key.about for value in values)


def _keys(section: str) -> Iterator[Key]:
    return (key for key in all_keys() if key.path[0] == section)


def _commented(key: Key) -> str:
    if _is_toml(key):
        return f"# {key.about} ({key.takes})\n#{key.path[-1]} = {key.default}\n"
    return f"# {key.about} ({key.takes}; default: {key.default})\n#{key.path[-1]} = {UNFIXED_EXAMPLES[key.name]}\n"


def _default(key: Key) -> str:
    return f"`{key.default}`" if _is_toml(key) else key.default


def _is_toml(key: Key) -> bool:
    is_literal = key.default[0] in '"[{' or key.default in ("true", "false") or key.default[0].isdigit()
    return is_literal and key.name not in UNFIXED_EXAMPLES
