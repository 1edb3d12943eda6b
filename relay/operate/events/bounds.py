"""Lengths, numbers and texts: what a writer may write beyond the bounds of a reader."""

from collections.abc import Iterator
from typing import Any

from relay.operate.events.shape import Schema
from relay.operate.events.values import short, text

COUNTED = {
    "string": ("minLength", "maxLength", "characters"),
    "array": ("minItems", "maxItems", "items"),
    "object": ("minProperties", "maxProperties", "properties"),
}
UUID_FORMATS = {f"uuid{version}" for version in range(1, 9)}


def closed_to(written: Schema) -> int | None:
    """Return the number of the properties that a writer's schema names; None when it writes others, too."""
    if others(written) is not False or "patternProperties" in written:
        return None
    return len(written.get("properties", {}))


def others(written: Schema) -> Any:
    """Return the schema of properties that the writer's schema does not name; False: it writes no others."""
    if "additionalProperties" in written:
        return written["additionalProperties"]
    return not ("properties" in written and "patternProperties" not in written)


def of_counts(written: Schema, read: Schema, kind: str) -> Iterator[str]:
    """Yield what is wrong with the number of characters, items or properties."""
    least, most, noun = COUNTED[kind]
    fewest, highest = written.get(least, 0), written.get(most)
    if kind == "object":
        fewest = max(fewest, len(set(written.get("required", ()))))
        if (count := closed_to(written)) is not None:
            highest = count if highest is None else min(count, highest)
    if fewest < read.get(least, 0):
        yield f"may have fewer than {read[least]} {noun}"
    if most in read and (highest is None or highest > read[most]):
        yield f"may have more than {read[most]} {noun}"


def of_text(written: Schema, read: Schema) -> Iterator[str]:
    """Yield what is wrong with pattern and format; patterns are never run, as one of a file could take hours."""
    if "pattern" in read and written.get("pattern") != read["pattern"]:
        yield f"cannot be decided: whether it matches the pattern {short(read['pattern'])}"
    own, its = written.get("format"), read.get("format")
    if its is not None and own != its and not (its == "uuid" and own in UUID_FORMATS):
        yield f"is text {f'of format {own}' if own else 'of any format'}, not of format {its}"


def of_numbers(written: Schema, read: Schema, kind: str) -> Iterator[str]:
    """Yield what is wrong with a number of this type, integer or number."""
    least, own = _least(read, kind), _least(written, kind)
    if least is not None and (own is None or own < least):
        yield f"may be less than {text(least[0])}"
    most, own = _most(read, kind), _most(written, kind)
    if most is not None and (own is None or own > most):
        yield f"may be more than {text(most[0])}"
    if "multipleOf" in read and not _is_multiple(written, read["multipleOf"], kind):
        yield f"may be no multiple of {text(read['multipleOf'])}"


def _least(schema: Schema, kind: str) -> tuple[float, bool] | None:
    """Return the sharper lower bound, and whether it is beyond what may be; of whole numbers each bound may be."""
    bounds = [(schema["minimum"], False)] if "minimum" in schema else []
    if (bound := schema.get("exclusiveMinimum")) is not None:
        bounds.append((bound + 1, False) if kind == "integer" and isinstance(bound, int) else (bound, True))
    return max(bounds, default=None)


def _most(schema: Schema, kind: str) -> tuple[float, bool] | None:
    """Return the sharper upper bound, and whether it may be."""
    bounds = [(schema["maximum"], True)] if "maximum" in schema else []
    if (bound := schema.get("exclusiveMaximum")) is not None:
        bounds.append((bound - 1, True) if kind == "integer" and isinstance(bound, int) else (bound, False))
    return min(bounds, default=None)


def _is_multiple(written: Schema, step: float, kind: str) -> bool:
    own = written.get("multipleOf", 1 if kind == "integer" else None)
    if written.get("minimum") is not None and written.get("minimum") == written.get("maximum"):
        own = written["minimum"]
    if isinstance(own, int) and isinstance(step, int) and step > 0:
        return own % step == 0
    return own is not None and own == step
