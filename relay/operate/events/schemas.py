"""The JSON Schema of a declared class: of what is written of it, and of what it reads.

The two differ, as pydantic reads more than it writes: of a Decimal it writes text, and it also reads a number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticOmit

from relay.errors import ConfigurationError
from relay.operate.events.functions import name_of
from relay.operate.events.shape import CHECKS, Schema
from relay.operate.events.values import text
from relay.outbox.declared import Declaration, declaration_of

Mode = Literal["serialization", "validation"]

TIME_LIMITS = ("ge", "gt", "le", "lt", "now_op", "tz_constraint")
DIGITS = ("max_digits", "decimal_places")
LIMITS = ("ge", "gt", "le", "lt", "multiple_of")
DECIMAL_LIMITS = (*LIMITS, *DIGITS)
SIMPLE = ("string", "integer", "number", "boolean")
SERIALIZERS = ("function-plain", "function-wrap")
URL_LIMITS = ("allowed_schemes", "host_required")
PRIVATE = "init_private_attributes"  # what pydantic calls where a model has private attributes alone
INFINITE = ["NaN", "Infinity", "-Infinity"]  # the texts of numbers that JSON does not have


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

    @property
    def mode(self) -> Mode:
        """What the schema is of, whatever a class says with `json_schema_mode_override`."""
        return self._mode

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
            try:
                return super().generate_inner(schema)
            except PydanticOmit:  # by SkipJsonSchema: it is written and read all the same
                return {CHECKS: ["what SkipJsonSchema hides"]}
        read = self._read({name: value for name, value in schema.items() if name != "serialization"})
        return _checked(_narrowed(super().generate_inner(schema), read), read.get(CHECKS, ()))

    def _read(self, schema: Any) -> Schema:
        """Return the schema of what a part reads, also within the schema of what is written."""
        before, self._mode = self._mode, "validation"
        read: Schema = super().generate_inner(schema)
        self._mode = before
        return read

    def ser_schema(self, schema: Any) -> Schema | None:
        """Return what a serializer writes: anything, unless the function says what it returns, or is pydantic's own."""
        if schema["type"] in SERIALIZERS and schema.get("return_schema") is None:
            return None if _is_of_pydantic(schema["function"]) else {}
        if schema["type"] == "any":  # by SerializeAsAny: also what a subclass adds
            return {}
        return super().ser_schema(schema)

    def decimal_schema(self, schema: Any) -> Schema:
        words = _checked({"type": "string", "format": "decimal"}, _limits(schema, DECIMAL_LIMITS))
        texts = [words, {"enum": INFINITE}] if schema.get("allow_inf_nan") else [words]
        if self.mode == "serialization":
            return _any_of(texts)
        read = [part for each in super().decimal_schema(schema)["anyOf"] for part in each.get("anyOf", [each])]
        number = next(part for part in read if part.get("type") == "number")
        return _any_of([_checked(number, _limits(schema, DIGITS)), *texts])

    def float_schema(self, schema: Any) -> Schema:
        number = super().float_schema(schema)
        has_texts = self._config.ser_json_inf_nan == "strings" and schema.get("allow_inf_nan") is not False
        return _any_of([number, {"enum": INFINITE}] if has_texts else [number])

    def str_schema(self, schema: Any) -> Schema:
        changes = ("strip_whitespace", "to_lower", "to_upper")
        checks = [each for each in changes if schema.get(each, getattr(self._config, f"str_{each}"))]
        if "pattern" in schema and (engine := self._config.regex_engine) != "rust-regex":
            checks.append(f"regex_engine {engine}")
        return _checked(super().str_schema(schema), checks)

    def bytes_schema(self, schema: Any) -> Schema:
        encoding = self._config.val_json_bytes
        return _checked(super().bytes_schema(schema), [f"val_json_bytes {encoding}"] if encoding != "utf8" else [])

    def fraction_schema(self, schema: Any) -> Schema:
        return _checked(super().fraction_schema(schema), _limits(schema, LIMITS))

    def complex_schema(self, schema: Any) -> Schema:
        return _checked(super().complex_schema(schema), ["complex"])

    def dict_schema(self, schema: Any) -> Schema:
        """Return the schema of a dict; its keys are texts in JSON, whatever they are in Python."""
        made = super().dict_schema(schema)
        if "keys_schema" not in schema:
            return made
        keys = self._read(schema["keys_schema"])
        are_texts = all(part.get("type") == "string" or "$ref" in part for part in keys.get("anyOf", [keys]))
        return made if are_texts or not keys else _checked(made, [f"keys {text(keys)}"])

    def model_schema(self, schema: Any) -> Schema:
        return _checked(super().model_schema(schema), _after_init(schema["cls"], "model_post_init"))

    def dataclass_schema(self, schema: Any) -> Schema:
        return _checked(super().dataclass_schema(schema), _after_init(schema["cls"], "__post_init__"))

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
        if callable(chooser):
            return _checked(super().tagged_union_schema(schema), [f"discriminator {name_of(chooser)}"])
        made = super().tagged_union_schema(schema)
        if self.mode == "validation" and "discriminator" in made:  # also where the tag has a default
            made["required"] = [made["discriminator"]["propertyName"]]
        return made


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
    return [] if declaration_of(function) else [f"validator {name_of(function)}"]


def _after_init(kind: type, name: str) -> list[str]:
    """Return the method that runs at the end of the class's `__init__`, and may refuse the values."""
    method = getattr(kind, name, None)
    is_own = method not in (None, BaseModel.model_post_init) and name_of(method) != PRIVATE
    return [f"{kind.__qualname__}.{name}"] if is_own else []


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _checked(schema: Schema, checks: Sequence[str]) -> Schema:
    return {**schema, CHECKS: sorted({*schema.get(CHECKS, ()), *checks})} if checks else schema
