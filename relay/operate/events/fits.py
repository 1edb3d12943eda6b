"""Whether a reader takes all that a writer writes, by two JSON Schemas: of what is written, and of what is read.

What cannot be decided counts as not taken. The writer writes the properties that its schema names and no more, as
pydantic does. Only the reader takes others, too, where `additionalProperties` is missing.

Both schemas have passed `shape.check`. What pydantic makes is compared; of a keyword such as `not` only the same value
is taken.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from relay.operate.events import bounds
from relay.operate.events.shape import CHECKS, Schema, target
from relay.operate.events.values import (
    identity,
    in_words,
    is_of,
    is_type,
    listed,
    structure,
    text,
    type_of,
    types_of,
    values_of,
)

ANY: Schema = {}
NEVER: Schema = {"enum": []}

MOST_STEPS = 100_000  # pairs of schemas; those of real events are a few hundred
MOST_MISFITS = 100  # of one pair: each level of a schema could double them
MOST_DEPTH = 100  # schemas in each other; each takes a few of Python's 1,000 frames

UNIONS = ("anyOf", "oneOf")
COMBINED = ("$ref", "allOf", *UNIONS)
# The same value of these asks the same on both sides, whatever stands next to it.
COMPARED_AS_A_WHOLE = ("patternProperties", "not", "contentMediaType", "contentEncoding", "dependentRequired")
NOT_COMPARED = (
    "if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties",
    "dependentSchemas", "dependencies", "contentSchema", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
PLAIN = (
    "type", "enum", "const", "properties", "required", "additionalProperties", "propertyNames", "items", "prefixItems",
    "minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties", CHECKS,
)  # fmt: skip
ASKING = frozenset((*COMBINED, *COMPARED_AS_A_WHOLE, *NOT_COMPARED, *PLAIN))  # another keyword says nothing of values
HELD_BY_EACH_VALUE = (CHECKS, *COMPARED_AS_A_WHOLE)

Pair = tuple[int, int]  # ids of the writer's schema and of the reader's


class Misfit(NamedTuple):
    """What a writer may write and a reader does not take: where in the payload, as in `.lines[*].amount`, and why."""

    place: str
    words: str


class _UndecidedError(Exception):
    """The comparison ends here: the words say why."""


def misfits(written: Schema, read: Schema) -> tuple[Misfit, ...]:
    """Return why a reader does not take all that is written; empty when it does."""
    try:
        return _Comparison(written, read).compare(written, read)
    except _UndecidedError as error:
        return (_undecided(str(error)),)
    except RecursionError:
        return (_undecided("a value is nested too deep"),)


class _Comparison:
    """One comparison of two documents.

    A pair of schemas that is met again below itself, as in recursive models, fits there if it fits at all. What was
    found on that assumption is forgotten when the pair turns out not to fit.
    """

    def __init__(self, written: Schema, read: Schema) -> None:
        self._written, self._read = written, read
        self._found: dict[Pair, tuple[Misfit, ...]] = {}
        self._fitting: list[Pair] = []  # those of `_found` that fit, in the order in which they were found
        self._open: set[Pair] = set()  # being compared
        self._made: dict[tuple[int, int | str], Schema] = {}  # our own schemas: kept, so that no other gets their id
        self._listed: dict[int, frozenset[str]] = {}  # by the id of a reader's schema: the values that it lists
        self._steps = 0
        self._depth = 0

    def compare(self, written: Any, read: Any, above: frozenset[Pair] = frozenset()) -> tuple[Misfit, ...]:
        """Return the misfits of two subschemas.

        Args:
            above: the pairs that ask this of the same value. To meet one of them again says nothing.
        """
        written, read = _as_object(written), _as_object(read)
        pair = (id(written), id(read))
        if pair in self._found:
            return self._found[pair]
        if pair in self._open:
            return (_undecided("its schema refers to itself"),) if pair in above else ()
        self._count_step()
        if self._depth == MOST_DEPTH:
            raise _UndecidedError(f"it is nested more than {MOST_DEPTH} levels deep")
        before = len(self._fitting)
        self._open.add(pair)
        self._depth += 1
        found = tuple(islice(dict.fromkeys(self._misfits(written, read, above | {pair})), MOST_MISFITS))
        self._depth -= 1
        self._open.discard(pair)
        if found:
            for assumed in self._fitting[before:]:
                del self._found[assumed]
            del self._fitting[before:]
        else:
            self._fitting.append(pair)
        self._found[pair] = found
        return found

    def _count_step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise _UndecidedError(f"it takes more than {MOST_STEPS} steps")

    def _misfits(self, written: Schema, read: Schema, above: frozenset[Pair]) -> Iterator[Misfit]:
        if not ASKING & read.keys():
            return
        try:
            simpler = self._simpler(written, read)
        except _UndecidedError as error:
            yield _undecided(str(error))
            return
        if simpler is not None and not ASKING & written.keys():
            if any(self.compare(part, asked, above) for part, asked in simpler):
                yield Misfit("", "may be anything")
            return
        if simpler is not None:
            for part, asked in simpler:
                yield from self.compare(part, asked, above)
            return
        yield from _unlike_wholes(written, read)
        for keyword in UNIONS:
            if keyword in read:
                yield from self._of_union(written, read[keyword], above, is_exclusive=keyword == "oneOf")
                yield from self.compare(written, self._without(read, keyword), above)
                return
        yield from self._plain(written, read)

    def _simpler(self, written: Schema, read: Schema) -> Sequence[tuple[Any, Any]] | None:
        """Return pairs of simpler schemas which say the same together; None: only a union of the reader is left.

        Raises:
            _UndecidedError: what is written cannot be taken apart.
        """
        if "$ref" in written:
            return [(self._part(written, "$ref", target(self._written, written["$ref"])), read)]
        if "$ref" in read:
            return [(written, target(self._read, read["$ref"])), (written, self._without(read, "$ref"))]
        if "allOf" in read:
            return [*((written, each) for each in read["allOf"]), (written, self._without(read, "allOf"))]
        if len(written.get("allOf", ())) > 1:
            raise _UndecidedError("what is written is an allOf of several schemas")
        for keyword in (*UNIONS, "allOf"):
            if keyword in written:
                return [(self._part(written, keyword, each), read) for each in written[keyword]]
        atoms = self._atoms(written)
        is_atom = len(atoms) == 1 and atoms[0] is written
        return None if is_atom else [(atom, read) for atom in atoms]

    def _part(self, written: Schema, keyword: str, given: Any) -> Schema:
        """Return a part of what is written, such as one alternative of a union, with the checks of the whole.

        Raises:
            _UndecidedError: another keyword stands next to it: the properties of the part would not be all.
        """
        if more := sorted((ASKING & written.keys()) - {keyword, CHECKS, "type"}):
            raise _UndecidedError(f"what is written has {keyword} next to {', '.join(more)}")
        part: Schema = _as_object(given)
        if CHECKS not in written:
            return part
        return self._kept(written, id(part), {**part, CHECKS: sorted({*written[CHECKS], *part.get(CHECKS, ())})})

    def _without(self, schema: Schema, keyword: str) -> Schema:
        return self._kept(schema, keyword, {name: value for name, value in schema.items() if name != keyword})

    def _kept(self, schema: Schema, what: int | str, made: Schema) -> Schema:
        return self._made.setdefault((id(schema), what), made)

    def _atoms(self, written: Schema) -> Sequence[Schema]:
        """Return schemas of one type or value each that write the same; the schema alone when it is such a one."""
        types, values = types_of(written), values_of(written)
        if values is None:
            values = [False, True] * ("boolean" in types) + [None] * ("null" in types)
            types = [kind for kind in types if kind not in ("boolean", "null")]
            if len(types) == 1 and not values:
                return [written]
        else:
            values, types = [value for value in values if is_of(value, types)], []
            if "const" in written and "enum" not in written and values:
                return [written]
        held = {keyword: written[keyword] for keyword in HELD_BY_EACH_VALUE if keyword in written}
        of_values = [self._kept(written, f"value {text(value)}", {"const": value, **held}) for value in values]
        return of_values + [self._kept(written, f"type {kind}", {**written, "type": kind}) for kind in types]

    def _of_union(
        self, written: Schema, alternatives: Sequence[Any], above: frozenset[Pair], *, is_exclusive: bool
    ) -> Iterator[Misfit]:
        """Yield why no alternative takes what is written; with `is_exclusive` no other one may take it, too."""
        near = []
        for position, alternative in enumerate(alternatives):
            if not (found := self.compare(written, alternative, above)):
                others = [*alternatives[:position], *alternatives[position + 1 :]]
                if is_exclusive and not all(self._is_apart(written, each) for each in others):
                    yield _undecided("more than one alternative of oneOf may take it")
                return
            if not self._is_apart(written, alternative):
                near.append(found)
        if len(near) == 1:
            yield from near[0]
        else:
            yield Misfit("", f"{in_words(written)}, which no alternative takes")

    def _is_apart(self, written: Schema, read: Any, depth: int = 0) -> bool:
        """Whether the reader surely takes nothing of what is written: by type, or by the value of a property."""
        self._count_step()
        if depth == MOST_DEPTH:
            return False
        read = _as_object(read)
        if "$ref" in read:
            return self._is_apart(written, target(self._read, read["$ref"]), depth + 1)
        for keyword in UNIONS:
            if keyword in read:
                return all(self._is_apart(written, each, depth + 1) for each in read[keyword])
        own, taken, types = values_of(written), values_of(read), types_of(read)
        if own is not None:
            both = own if taken is None else self._common(own, read, taken)
            return not any(is_of(value, types) for value in both)
        if not any(is_type(kind, types) or is_type(other, [kind]) for kind in types_of(written) for other in types):
            return True
        named, asked = written.get("properties", {}), read.get("properties", {})
        return any(
            name in named and name in asked and self._have_other_values(named[name], asked[name])
            for name in written.get("required", ())
        )

    def _have_other_values(self, written: Any, read: Any) -> bool:
        read = _referred(self._read, read)
        own, taken = values_of(_referred(self._written, written)), values_of(read)
        return own is not None and taken is not None and not self._common(own, read, taken)

    def _common(self, own: Sequence[Any], read: Schema, taken: Sequence[Any]) -> list[Any]:
        """Return the writer's values that the reader's schema lists."""
        self._count_step(len(own))
        return [value for value in own if self._lists(read, taken, value)]

    def _plain(self, written: Schema, read: Schema) -> Iterator[Misfit]:
        """Compare a schema of one type or value with one that combines no others."""
        taken = values_of(read)
        if taken is not None and not ("const" in written and self._lists(read, taken, written["const"])):
            yield Misfit("", f"{in_words(written)}, not {'one of ' * (len(taken) > 1)}{listed(taken)}")
            return
        kind = type_of(written["const"]) if "const" in written else types_of(written)[0]
        if not is_type(kind, types := types_of(read)):
            yield Misfit("", f"{in_words(written)}, not {' or '.join(types)}")
            return
        if "const" in written:
            written = self._kept(written, "structure", structure(written["const"]))
        if kind in bounds.COUNTED:
            yield from (Misfit("", words) for words in bounds.of_counts(written, read, kind))
        match kind:
            case "string":
                yield from (Misfit("", words) for words in bounds.of_text(written, read))
            case "integer" | "number":
                yield from (Misfit("", words) for words in bounds.of_numbers(written, read, kind))
            case "array":
                yield from self._of_items(written, read)
            case "object":
                yield from self._of_properties(written, read)

    def _lists(self, read: Schema, taken: Sequence[Any], value: Any) -> bool:
        if id(read) not in self._listed:
            self._listed[id(read)] = frozenset(map(identity, taken))
        return identity(value) in self._listed[id(read)]

    def _of_items(self, written: Schema, read: Schema) -> Iterator[Misfit]:
        most, named, asked = written.get("maxItems"), written.get("prefixItems", []), read.get("prefixItems", [])
        count = max(len(named), len(asked))
        for position in range(count if most is None else min(count, most)):
            yield from self._below(f"[{position}]", _at(written, named, position), _at(read, asked, position))
        if most is None or most > count:
            yield from self._below("[*]", written.get("items", ANY), read.get("items", ANY))
        if read.get("uniqueItems") and not written.get("uniqueItems") and (most is None or most > 1):
            yield Misfit("", "may have an item twice, and each must differ")

    def _of_properties(self, written: Schema, read: Schema) -> Iterator[Misfit]:
        named, asked = written.get("properties", {}), read.get("properties", {})
        for name in read.get("required", ()):
            if name not in written.get("required", ()):
                yield Misfit(f".{name}", "is required, and may be missing")
        for name, schema in named.items():
            taken = asked[name] if name in asked else read.get("additionalProperties", ANY)
            if taken is False:
                yield Misfit(f".{name}", "is written, and not taken")
            else:
                yield from self._below(f".{name}", schema, taken)
        others = bounds.others(written)
        for name in sorted(asked.keys() - named.keys()):
            yield from self._below(f".{name}", ANY if "patternProperties" in written else others, asked[name])
        yield from self._below(".*", others, read.get("additionalProperties", ANY))
        if "propertyNames" in read:
            for names in self._names(written):
                found = self.compare(names, read["propertyNames"])
                yield from (Misfit("", f"has a key that {words}") for _, words in found)

    def _below(self, step: str, written: Any, read: Any) -> Iterator[Misfit]:
        return (Misfit(f"{step}{place}", words) for place, words in self.compare(written, read))

    def _names(self, written: Schema) -> Iterator[Schema]:
        """Yield schemas of the names of the properties that are written."""
        for name in written.get("properties", {}):
            yield self._kept(written, f"name {name}", {"const": name})
        if bounds.closed_to(written) is None:
            names = _as_object(written.get("propertyNames", ANY))
            is_typed = any(keyword in names for keyword in (*COMBINED, "type", "const", "enum"))
            yield names if is_typed else self._kept(written, "names", {**names, "type": "string"})


def _as_object(schema: Any) -> Schema:
    """Return a schema as an object; `true` takes anything, `false` nothing."""
    if isinstance(schema, bool):
        return ANY if schema else NEVER
    return schema  # type: ignore[no-any-return]


def _referred(root: Schema, schema: Any) -> Schema:
    schema = _as_object(schema)
    return _as_object(target(root, schema["$ref"])) if "$ref" in schema else schema


def _at(schema: Schema, named: Sequence[Any], position: int) -> Any:
    return named[position] if position < len(named) else schema.get("items", ANY)


def _unlike_wholes(written: Schema, read: Schema) -> Iterator[Misfit]:
    """Yield what the reader asks by keywords that are not taken apart, unless the writer's schema says the same."""
    for check in read.get(CHECKS, ()):
        if check not in written.get(CHECKS, ()):
            yield _undecided(f"the reader also checks {check!r}")
    for keyword in NOT_COMPARED:
        if keyword in read:
            yield _undecided(f"{keyword} is not compared")
    for keyword in COMPARED_AS_A_WHOLE:
        if keyword in read:
            whole = text(read[keyword])
            if keyword not in written or text(written[keyword]) != whole or '"$ref"' in whole:
                yield _undecided(f"the reader's {keyword} is another one")


def _undecided(why: str) -> Misfit:
    return Misfit("", f"cannot be decided: {why}")
