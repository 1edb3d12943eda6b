"""Two JSON Schemas: whether all that is written is taken, also where no class of pydantic makes them so."""

from itertools import pairwise
from typing import Any

import pytest

from relay.operate.events.fits import misfits
from relay.operate.events.shape import Schema, ShapeError, check

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
LONG = {"type": "string", "minLength": 3}
ONE_OF = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
EVEN = {"not": {"multipleOf": 2}}
NUMBERED = {"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False}


def fits(written: Any, read: Any) -> bool:
    check(written)
    check(read)
    return not misfits(written, read)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (A, {}), (A, {"title": "A", "x-mine": 5}), (False, A), (A, True), ({"enum": []}, A),
        ({"type": ["integer", "null"]}, {"anyOf": [{"type": "null"}, {"type": "number"}]}),
        ({"const": 1}, {"const": 1.0}), ({"enum": [1, "a"]}, {"enum": ["a", 1, 2]}),
        ({"const": 5.0}, {"type": "integer"}),
        ({"const": {"a": 1}}, A), ({"const": {"a": [1]}}, {"type": "object", "minProperties": 1, "maxProperties": 1}),
        ({"const": [1, 2]}, {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}),
        ({"const": "abc"}, LONG), ({"type": "boolean"}, {"enum": [True, False, None]}),
        ({"type": "object", "required": ["a"], "properties": {"a": {"const": "x"}}},
         {"oneOf": [{"properties": {"a": {"const": "x"}}}, {"properties": {"a": {"const": "y"}}}]}),
        ({"allOf": [A]}, A), (A, {"allOf": [A, {"type": "object"}]}), (EVEN, EVEN), (NUMBERED, NUMBERED),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/a~1b", "$defs": {"a/b": A}}),
        ({"type": "array", "maxItems": 0}, {"type": "array", "items": {"type": "string"}}),
        ({"type": "array", "prefixItems": [A], "items": False, "maxItems": 1}, {"type": "array", "items": A}),
        (A, {"propertyNames": {"maxLength": 1}}), ({"type": "integer", "minimum": 6}, {"exclusiveMinimum": 5}),
        ({"type": "string", "contentEncoding": "base64"}, {"contentEncoding": "base64"}),
    ],
)  # fmt: skip
def test_what_is_taken(written: Any, read: Any) -> None:
    assert fits(written, read)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({}, A), (True, A), (A, False), (A, B), (A, {"enum": [{"a": 1}]}), ({"type": "number"}, {"type": "integer"}),
        ({"const": True}, {"const": 1}), ({"const": 1}, {"enum": [True]}), ({"const": 5.5}, {"type": "integer"}),
        ({"const": {"a": 1, "b": 2}}, {"type": "object", "maxProperties": 1}), ({"const": {}}, A),
        ({"const": [1, 1]}, {"uniqueItems": True}), ({"const": "ab"}, LONG), ({"const": "ab"}, {"pattern": "b"}),
        ({"const": 5}, ONE_OF), ({"type": "integer"}, {"oneOf": [True, True]}),
        ({"allOf": [A, B]}, A), ({"$ref": "#/$defs/A", "required": ["b"], "$defs": {"A": A}}, A),
        ({"anyOf": [A], "properties": {"b": A}}, A), ({"const": 1}, {"enum": [1], "if": {}}),
        ({"type": "integer"}, EVEN), (EVEN, {"not": {"multipleOf": 3}}), ({"type": "integer"}, {"if": {}, "then": A}),
        ({"type": "array"}, {"contains": A}), ({"type": "array"}, {"type": "array", "unevaluatedItems": False}),
        ({"not": {"$ref": "#"}}, {"not": {"$ref": "#"}}), (A, NUMBERED),
        (NUMBERED, {**NUMBERED, "properties": {"n1": {"type": "string"}}}),
        (A, {"propertyNames": {"minLength": 2}}), ({"type": "object"}, {"propertyNames": {"enum": ["a"]}}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"properties": {"a": {"type": "string"}}}),
        ({"type": "number", "exclusiveMinimum": 5}, {"minimum": 6}),
        ({"type": "number", "minimum": 5}, {"exclusiveMinimum": 5}),
        ({"type": "number", "maximum": 5}, {"exclusiveMaximum": 5}), ({"type": "integer"}, {"multipleOf": 0}),
        ({"type": "array", "prefixItems": [A]}, {"type": "array", "prefixItems": [A], "items": False}),
        ({"type": "array", "items": A, "maxItems": 1}, {"type": "array", "prefixItems": [B]}),
    ],
)  # fmt: skip
def test_what_is_not_surely_taken(written: Any, read: Any) -> None:
    assert not fits(written, read)


def ring(*names: str, last: Schema) -> Schema:
    """Definitions of which each refers to the next, and the last one to the first in some way."""
    links = {name: {"$ref": f"#/$defs/{other}"} for name, other in pairwise(names)}
    return {"$ref": f"#/$defs/{names[0]}", "$defs": {**links, names[-1]: last}}


def test_a_reference_that_leads_only_to_itself_takes_nothing() -> None:
    alone = ring("a", "b", last={"$ref": "#/$defs/a"})
    union = ring("a", "b", last={"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]})

    assert misfits({"type": "integer"}, alone)[0].words == "cannot be decided: its schema refers to itself"
    assert not fits({"type": "integer"}, union)
    assert fits({"type": "string"}, union)


def test_what_rested_on_a_pair_that_does_not_fit_is_forgotten() -> None:
    """`u` fits if `t` does, which `t` asks first; then `t` turns out not to fit by its `z`."""

    def trees(z: str) -> Schema:
        t = {"type": "object", "properties": {"a": {"$ref": "#/$defs/u"}, "z": {"type": z}}}
        u = {"type": "object", "properties": {"up": {"$ref": "#/$defs/t"}}}
        both = {"t": {"$ref": "#/$defs/t"}, "u": {"$ref": "#/$defs/u"}}
        return {"type": "object", "properties": both, "$defs": {"t": t, "u": u}}

    found = [each.place for each in misfits(trees("string"), trees("integer"))]

    assert found == [".t.z", ".u.up.z"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("written", "read", "words"),
    [
        ({"type": "array"}, {"type": "array", "items": {"$ref": "#"}}, "may be anything"),
        (
            {"$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}, "type": "array"} for n in range(500)}
             | {"d500": {"type": "array"}}, "$ref": "#/$defs/d0"},
            {"$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(500)} | {"d500": {}},
             "$ref": "#/$defs/d0"},
            "cannot be decided: it is nested more than 100 levels deep",
        ),
        ({"enum": list(range(2000))}, {"anyOf": [{"const": -n} for n in range(2000)]}, "more than 100000 steps"),
        (
            {"type": "object"},
            {"$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
             | {"d60": {"type": "string"}}, "$ref": "#/$defs/d0"},
            "cannot be decided",
        ),
        ({"type": "string"}, {"pattern": "(a+)+$"}, "cannot be decided: whether it matches the pattern"),
        (
            {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}},
            {"$defs": {f"d{n}": {"properties": {side: {"$ref": f"#/$defs/d{n + 1}"} for side in "lr"}}
             for n in range(30)} | {"d30": {"type": "string"}}, "$ref": "#/$defs/d0"},
            "not string",
        ),
        (
            {"enum": [f"m{n}" for n in range(50)]},
            {"$defs": {"big": {"enum": list(range(20_000))}}, "anyOf": [{"$ref": "#/$defs/big"}] * 9},
            "no alternative takes",
        ),
    ],
)  # fmt: skip
def test_a_comparison_ends_on_hostile_schemas(written: Schema, read: Schema, words: str) -> None:
    check(written)
    check(read)

    found = misfits(written, read)

    assert any(words in each.words for each in found), found


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ([], "/ is no schema"), ({"properties": []}, "/properties is no object"), ({"anyOf": {}}, "/anyOf is no list"),
        ({"properties": {"a/b": {"type": "text"}}}, "/properties/a~1b/type is not a type, or a list of types"),
        ({"type": ["string", 5]}, "/type is not"), ({"required": "a"}, "/required is not a list of texts"),
        ({"allOf": []}, "/allOf is no list, or an empty one"),
        ({"items": 5}, "/items is no schema"), ({"maxLength": -1}, "/maxLength is not a whole number from 0"),
        ({"minimum": "1"}, "/minimum is not a number"), ({"minimum": True}, "/minimum is not a number"),
        ({"enum": 5}, "/enum is not a list"), ({"$ref": 5}, "/$ref is not text"),
        ({"pattern": 1}, "/pattern is not text"),
        ({"$ref": "#/$defs/x"}, "$ref '#/$defs/x' refers to nothing"), ({"$ref": "other.json"}, "leaves the document"),
        ({"items": {"$ref": "#/default"}, "default": {}}, "/items: $ref '#/default' refers to what is no schema"),
    ],
)  # fmt: skip
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(ShapeError) as refused:
        check(schema)

    assert words in str(refused.value)
