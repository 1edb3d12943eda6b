"""The JSON Schema of a declared class: of what is written of it, and of what it reads.

The two differ, as pydantic reads more than it writes: of a Decimal it writes text, and it also reads a number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from relay.errors import ConfigurationError
from relay.operate.events.shape import CHECKS, Schema
from relay.outbox.declared import Declaration, declaration_of

Mode = Literal["serialization", "validation"]

TIME_LIMITS = ("ge", "gt", "le", "lt", "now_op", "tz_constraint")
DIGITS = ("max_digits", "decimal_places")
DECIMAL_LIMITS = ("ge", "gt", "le", "lt", "multiple_of", *DIGITS)
SIMPLE = ("string", "integer", "number", "boolean")
SERIALIZERS = ("function-plain", "function-wrap")
URL_LIMITS = ("allowed_schemes", "host_required")


def schema_of(declaration: Declaration, mode: Mode) -> Schema:
    """Return the schema of one class, with its definitions.

    Raises:
        ConfigurationError: JSON Schema has nothing for one of its types.
    """
    adapter = declaration.adapter
    return _made(declaration, lambda: adapter.json_schema(mode=mode, schema_generator=ExactSchema))


def shared_schemas(declarations: Sequence[Declaration], ref_template: str) -> tuple[list[Schema], dict[str, Schema]]:
    """Return the schemas of what is written of some classes, and the definitions that they share, by name.

    Raises:
        ConfigurationError: JSON Schema has nothing for one of their types.
    """
    for each in declarations:  # an error names the event
        schema_of(each, "serialization")
    inputs: list[tuple[int, Mode, TypeAdapter[Any]]] = [
        (position, "serialization", each.adapter) for position, each in enumerate(declarations)
    ]
    found, shared = TypeAdapter.json_schemas(inputs, ref_template=ref_template, schema_generator=ExactSchema)
    schemas = [dict(found[position, "serialization"]) for position in range(len(declarations))]
    return schemas, shared.get("$defs", {})


def _made(declaration: Declaration, make: Callable[[], Schema]) -> Schema:
    try:
        return make()
    except PydanticUserError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"@event({declaration.event_type!r}) has no JSON Schema: {reason}") from None


class ExactSchema(GenerateJsonSchema):
    """Pydantic's schemas, with what it leaves out and a comparison must know.

    `x-reader-checks` lists what no keyword says: validators, the limits of dates and decimals. The writer has checked
    the same, as `Declaration.encode` reads what it writes.
    """

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_is_required(self, field: Any, total: bool) -> bool:
        """Whether the field is always there: what is written has also the fields that have a default."""
        if self.mode == "serialization" and field["type"] != "typed-dict-field":
            return field.get("serialization_exclude_if") is None
        return super().field_is_required(field, total)

    def generate_inner(self, schema: Any) -> Schema:
        """Return the schema of a part; of a simple value that a function writes, as far as the class reads it.

        The writer has read it again, so a date that is written as `str` is text of a date.
        """
        serializer = schema.get("serialization", {})
        if self.mode != "serialization" or serializer.get("type") not in SERIALIZERS:
            return super().generate_inner(schema)
        self._mode = "validation"
        read = super().generate_inner({name: value for name, value in schema.items() if name != "serialization"})
        self._mode = "serialization"
        return _checked(_narrowed(super().generate_inner(schema), read), read.get(CHECKS, ()))

    def ser_schema(self, schema: Any) -> Schema | None:
        """Return what a serializer writes: anything, unless the function says what it returns, or is pydantic's own."""
        if schema["type"] in SERIALIZERS and schema.get("return_schema") is None:
            return None if _is_of_pydantic(schema["function"]) else {}
        return super().ser_schema(schema)

    def decimal_schema(self, schema: Any) -> Schema:
        text = _checked({"type": "string", "format": "decimal"}, _limits(schema, DECIMAL_LIMITS))
        if self.mode == "serialization":
            return text
        number = next(each for each in super().decimal_schema(schema)["anyOf"] if each.get("type") == "number")
        return {"anyOf": [_checked(number, _limits(schema, DIGITS)), text]}

    def date_schema(self, schema: Any) -> Schema:
        return _checked(super().date_schema(schema), _limits(schema, TIME_LIMITS))

    def time_schema(self, schema: Any) -> Schema:
        return _checked(super().time_schema(schema), _limits(schema, TIME_LIMITS))

    def datetime_schema(self, schema: Any) -> Schema:
        return _checked(super().datetime_schema(schema), _limits(schema, TIME_LIMITS))

    def timedelta_schema(self, schema: Any) -> Schema:
        return _checked(super().timedelta_schema(schema), _limits(schema, TIME_LIMITS))

    def url_schema(self, schema: Any) -> Schema:
        return _checked(super().url_schema(schema), _limits(schema, URL_LIMITS))

    def function_before_schema(self, schema: Any) -> Schema:
        return _checked(super().function_before_schema(schema), _validators(schema))

    def function_after_schema(self, schema: Any) -> Schema:
        return _checked(super().function_after_schema(schema), _validators(schema))

    def function_wrap_schema(self, schema: Any) -> Schema:
        return _checked(super().function_wrap_schema(schema), _validators(schema))

    def function_plain_schema(self, schema: Any) -> Schema:
        return _checked(super().function_plain_schema(schema), _validators(schema))

    def tagged_union_schema(self, schema: Any) -> Schema:
        chooser = schema["discriminator"]
        checks = [f"discriminator {_name(chooser)}"] if callable(chooser) else []
        return _checked(super().tagged_union_schema(schema), checks)


def _narrowed(written: Schema, read: Schema) -> Schema:
    """Return what is written, with each simple type in place of which something sharper is read."""
    parts = []
    for part in written.get("anyOf", [written]):
        is_simple = set(part) <= {"type", "title"} and part.get("type") in SIMPLE
        sharper = [each for each in read.get("anyOf", [read]) if is_simple and each.get("type") == part["type"]]
        parts += sharper or [part]
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _is_of_pydantic(function: object) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "pydantic"


def _limits(schema: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{name} {schema[name]}" for name in names if schema.get(name) is not None]


def _validators(schema: Mapping[str, Any]) -> list[str]:
    """Return the name of a validator; the class that stands for a TypedDict is no validator."""
    function = schema["function"]["function"]
    return [] if declaration_of(function) else [f"validator {_name(function)}"]


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _checked(schema: Schema, checks: Sequence[str]) -> Schema:
    return {**schema, CHECKS: sorted({*schema.get(CHECKS, ()), *checks})} if checks else schema
