"""Write config/relay.toml and the tables of docs/configuration.md, from the models.

tests/operate/test_reference.py compares the files with what is written here; `relay config example` prints the first.
"""

from relay.keys import Key, all_keys, route_keys

HEAD = """\
# Settings of the outbox relay: every key with its default. Take the # away from a line to change its value.
# A variable goes before this file, and a flag before a variable; docs/configuration.md has the names.
# `relay config show` tells each value in use and where it was found.
"""

SECTIONS = {
    "database": "Where the outbox is.",
    "broker": "Where the messages go.",
    "relay": "How rows are carried.",
    "routes": "Where rows that name no exchange go: the first table that matches decides, else broker.exchange.",
    "http": "Where a running relay answers probes and Prometheus (docs/metrics.md).",
    "log": "What is said on stderr.",
}

ROUTE_EXAMPLE = """\
# event_type and aggregate_type are shell patterns; exchange = "" is the default exchange, which takes the name
# of a queue as routing_key. routing_key may contain {aggregate_type}, {aggregate_id} and {event_type}.
#[[routes]]
#event_type = "Invoice*"
#aggregate_type = "*"
#exchange = "billing"
#routing_key = "{aggregate_type}.{event_type}"
"""


def example() -> str:
    """Give the text of config/relay.toml; a line without a space after its # is a key with its default."""
    parts = [HEAD]
    for section, about in SECTIONS.items():
        keys = [key for key in all_keys() if key.path[0] == section]
        if section == "routes":
            parts.append(f"# {about}\n{ROUTE_EXAMPLE}")
        else:
            parts.append(f"# {about}\n[{section}]\n" + "".join(_commented(key) for key in keys))
    return "\n".join(parts)


def markdown() -> str:
    """Give the tables of docs/configuration.md."""
    parts = []
    for section, about in SECTIONS.items():
        parts.append(f"### `[[{section}]]`\n" if section == "routes" else f"### `[{section}]`\n")
        parts.append(about + "\n")
        if section == "routes":
            parts.append("| Key | Takes | Default | |\n|---|---|---|---|")
            parts += [f"| `{key.name}` | {key.takes} | {_default(key)} | {key.about} |" for key in route_keys()]
        else:
            parts.append("| Key | Variable | Takes | Default | |\n|---|---|---|---|---|")
            parts += [
                f"| `{key.path[-1]}` | `{key.variable}` | {key.takes} | {_default(key)} | {key.about} |"
                for key in all_keys()
                if key.path[0] == section
            ]
        parts.append("")
    return "\n".join(parts)


def _commented(key: Key) -> str:
    if _is_toml(key):
        return f"# {key.about} ({key.takes})\n#{key.path[-1]} = {key.default}\n"
    return f'# {key.about} ({key.takes}; default: {key.default})\n#{key.path[-1]} = "relay-1"\n'


def _default(key: Key) -> str:
    return f"`{key.default}`" if _is_toml(key) else key.default


def _is_toml(key: Key) -> bool:
    return key.default[0] in '"[' or key.default in ("true", "false") or key.default[0].isdigit()
