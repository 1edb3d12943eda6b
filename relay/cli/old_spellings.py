"""Flags of earlier releases: still taken, and in no help."""

from collections.abc import Iterator, Sequence

ID = ""  # the flag has gone: its value stands alone, as every id does
KEY = "key"  # customer/17, which is the type and the id of an aggregate

OLD_SPELLINGS = {
    "parked": {"--note": "--why", "--id": ID, "--message-id": ID},
    "dead-letters": {"--type": "--event-type", "--key": KEY, "--message-id": ID},
    "replay": {"--message-id": ID},
    "reconcile": {"--message-id": ID},
}


def in_new_words(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command in the spelling of this release."""
    command = arguments[0] if arguments else ""
    if (renamed := OLD_SPELLINGS.get(command)) is None:
        return list(arguments)
    return [command, *_renamed(arguments[1:], renamed)]


def _renamed(words: Sequence[str], renamed: dict[str, str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if (new := renamed.get(name)) is None:
            yield word
            continue
        if not equals:
            value = next(rest, "")
        if new == ID:
            yield value
        elif new == KEY:
            kind, _, key = value.partition("/")
            yield f"--aggregate-type={kind}"
            yield f"--aggregate-id={key}"
        else:
            yield f"{new}={value}"
