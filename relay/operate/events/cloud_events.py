"""How an AsyncAPI document describes a message that its route makes a CloudEvent (docs/cloudevents.md)."""

from typing import Any

from relay.config.settings import CloudEvents, Settings
from relay.engine.send.cloudevents import ENVELOPE
from relay.engine.send.message import WRAPPED, MessageIdentity
from relay.operate.events.shape import Schema
from relay.outbox.declared import Declaration


def as_cloud_event(
    message: dict[str, Any], declaration: Declaration, form: CloudEvents, settings: Settings
) -> dict[str, Any]:
    """Return the description of the message as its route sends it; unchanged where that makes no CloudEvent."""
    identity = MessageIdentity.of(settings)
    attributes = _attributes(declaration, identity.events_source)
    match form:
        case CloudEvents.OFF:
            return message
        case CloudEvents.BINARY:
            named = {identity.events_prefix + name: schema for name, schema in attributes.items()}
            return {**message, "headers": _with(message["headers"], named)}
        case CloudEvents.STRUCTURED:
            content = {"datacontenttype": {"type": "string", "const": message["contentType"]}}
            envelope = {**attributes, **content, "data": message["payload"]}
            return {
                **message,
                "contentType": ENVELOPE.decode(),
                "headers": _with(message["headers"], {WRAPPED: {"type": "string", "const": form.value}}),
                "payload": _with({"type": "object", "properties": {}, "required": []}, envelope),
            }


def _attributes(declaration: Declaration, source: str) -> dict[str, Schema]:
    """Return the schema of each attribute but `datacontenttype`."""
    found: dict[str, Schema] = {
        "specversion": {"type": "string", "const": "1.0"},
        "id": {"type": "string", "format": "uuid", "description": "The message id, the same for each repeat."},
        "source": {"type": "string", "const": source},
        "type": {"type": "string", "const": declaration.event_type},
        "time": {"type": "string", "format": "date-time", "description": "When it was written."},
    }
    if declaration.key_field is not None:
        key: Schema = {"type": "string", "description": f"{declaration.aggregate_type}/<{declaration.key_field}>"}
        found |= {"subject": key, "partitionkey": key}
    if declaration.version is not None:
        found["eventversion"] = {"type": "string", "const": declaration.version}
    return found


def _with(schema: Schema, more: dict[str, Schema]) -> Schema:
    """Return an object's schema with more properties, which are always there."""
    return {**schema, "properties": schema["properties"] | more, "required": [*schema["required"], *more]}
