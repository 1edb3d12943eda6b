"""An AsyncAPI 3.0 document of declared events: what the relay sends where, and what the listed queues hold.

Its schemas are those of what is written. AsyncAPI takes them in the form of draft 7 of JSON Schema, which has no
`prefixItems`. Its `discriminator` is the name of a property.
"""

import re
from collections.abc import Sequence
from typing import Any

from relay.config.settings import Settings
from relay.config.topology import Exchange, ExchangeType, Queue
from relay.engine.send.message import PERSISTENT
from relay.operate.events.addresses import EventAddress, address_of
from relay.operate.events.cloud_events import as_cloud_event
from relay.operate.events.modules import DeclaredClass
from relay.operate.events.schemas import shared_schemas
from relay.operate.events.shape import Schema
from relay.operate.routes.listed import BUILT_IN
from relay.outbox.declared import VERSION, Declaration

Document = dict[str, Any]

AMQP = "0.3.0"  # the version of AsyncAPI's bindings for AMQP
SCHEMAS = "#/components/schemas/{model}"
UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")
PARAMETER = "aggregate_id"
IN_PLACE = frozenset((
    "items", "additionalItems", "additionalProperties", "propertyNames", "not", "anyOf", "oneOf", "allOf",
))  # fmt: skip
BY_NAME = frozenset(("properties", "patternProperties"))


def asyncapi(classes: Sequence[DeclaredClass], modules: Sequence[str], settings: Settings) -> Document:
    """Return the document; the same classes and settings always give the same one.

    Raises:
        ConfigurationError: JSON Schema has nothing for a type of one of the classes.
    """
    declarations = [each.declaration for each in classes]
    payloads, schemas = shared_schemas(declarations, SCHEMAS)
    ids = _Ids()
    names = [ids.of(_title(each), each.event_type, each.version) for each in declarations]
    channels = _Channels(ids)
    messages: dict[str, Document] = {}
    for name, declaration, payload in zip(names, declarations, payloads, strict=True):
        address = address_of(declaration, settings)
        plain = _message(declaration, _as_draft_7(payload))
        messages[name] = as_cloud_event(plain, declaration, address.cloudevents, settings)
        channels.put("send", _exchange_channel(address, settings), name)
        for queue in settings.topology.queues:
            if queue.name in address.queues:
                channels.put("receive", _queue_channel(queue), name)
    return {
        "asyncapi": "3.0.0",
        "info": {"title": f"Events of {', '.join(modules)}", "version": "1"},
        "defaultContentType": "application/json",
        "channels": channels.channels,
        "operations": channels.operations,
        "components": {
            "messages": messages,
            "schemas": {name: _as_draft_7(schema) for name, schema in schemas.items()},
        },
    }


class _Ids:
    """Names as AsyncAPI takes them, with few characters; two things never have one name."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str | None, ...], str] = {}

    def of(self, name: str, *what: str | None) -> str:
        """Return the id of a thing, like `name`; `what` makes the thing out."""
        if what not in self._ids:
            made = UNUSUAL.sub("_", name)
            while made in self._ids.values():
                made += "_"
            self._ids[what] = made
        return self._ids[what]


class _Channels:
    """The channels, and an operation on each of them."""

    def __init__(self, ids: _Ids) -> None:
        self._ids = ids
        self.channels: dict[str, Document] = {}
        self.operations: dict[str, Document] = {}

    def put(self, action: str, channel: Document, message: str) -> None:
        """Add a message to a channel, and to the operation on it."""
        name = self._ids.of(channel["title"], action, channel["title"])
        self.channels.setdefault(name, channel)["messages"][message] = {"$ref": f"#/components/messages/{message}"}
        operation = {"action": action, "channel": {"$ref": f"#/channels/{name}"}, "messages": []}
        if action == "send":
            operation["bindings"] = {"amqp": {"deliveryMode": PERSISTENT, "mandatory": True, "bindingVersion": AMQP}}
        same = self.operations.setdefault(f"{action}.{name}", operation)
        same["messages"].append({"$ref": f"#/channels/{name}/messages/{message}"})


def _exchange_channel(address: EventAddress, settings: Settings) -> Document:
    exchange, key, own = address.exchange, address.routing_key, f"{{{PARAMETER}}}"
    channel: Document = {
        "address": key,
        "title": f"exchange {exchange or '(default)'} with {key}",
        "messages": {},
        "bindings": {"amqp": {"is": "routingKey", "exchange": _exchange(exchange, settings), "bindingVersion": AMQP}},
    }
    if {"{", "}"} & set(key.replace(own, "")):  # other braces would be parameters
        channel["address"] = None
    elif own in key:
        channel["parameters"] = {PARAMETER: {"description": "The aggregate id of the event."}}
    return channel


def _exchange(name: str, settings: Settings) -> Document:
    """Return what is known of an exchange: it is listed, RabbitMQ's own, or the one that the relay declares."""
    if not name:
        return {"name": "", "type": "default"}
    listed = {each.name: each for each in settings.topology.exchanges}
    if name in BUILT_IN:
        known = Exchange.model_construct(name=name, type=ExchangeType(BUILT_IN[name]))
    elif name in listed:
        known = listed[name]
    elif name == settings.broker.exchange and settings.broker.declare:
        known = Exchange.model_construct(name=name)
    else:
        return {"name": name}
    return {"name": name, "type": known.type.value, "durable": known.durable, "autoDelete": False}


def _queue_channel(queue: Queue) -> Document:
    about = {"name": queue.name, "durable": queue.durable, "exclusive": False, "autoDelete": False}
    return {
        "address": queue.name,
        "title": f"queue {queue.name}",
        "messages": {},
        "bindings": {"amqp": {"is": "queue", "queue": about, "bindingVersion": AMQP}},
    }


def _message(declaration: Declaration, payload: Schema) -> Document:
    return {
        "name": declaration.event_type,
        "title": _title(declaration),
        "contentType": "application/json",
        "headers": _headers(declaration),
        "payload": payload,
        "bindings": {"amqp": {"messageType": declaration.event_type, "bindingVersion": AMQP}},
    }


def _headers(declaration: Declaration) -> Schema:
    """Return the headers that docs/table-and-message.md lists for the first sending of a message."""
    always: dict[str, Schema] = {
        "x-outbox-id": {"type": "integer", "description": "The row's id; below zero without a row."},
        "x-outbox-lane": {"type": "integer", "minimum": 0, "maximum": 15, "description": "The lane of its key."},
        "x-aggregate-type": {"type": "string", "const": declaration.aggregate_type},
    }
    if declaration.key_field is not None:
        words = f"The field {declaration.key_field}. Messages with one aggregate type and id come in order."
        always["x-aggregate-id"] = {"type": "string", "description": words}
    if declaration.version is not None:
        always[VERSION] = {"type": "string", "const": declaration.version, "description": "The event's version."}
    sometimes: dict[str, Schema] = {
        "x-outbox-writer": {"type": "string", "description": "The role of the database that wrote the row."},
        "x-outbox-redelivered": {"type": "boolean", "description": "True: it may be a repeat."},
        "traceparent": {"type": "string", "description": "The trace in which it was written."},
        "tracestate": {"type": "string", "description": "The vendor's part of the trace."},
    }
    return {"type": "object", "properties": {**always, **sometimes}, "required": list(always)}


def _as_draft_7(schema: Any) -> Any:
    """Return a schema in AsyncAPI's own form, and all in it."""
    if isinstance(schema, list):
        return [_as_draft_7(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if isinstance(discriminator := schema.get("discriminator"), dict):
        made["discriminator"] = discriminator["propertyName"]
    if "prefixItems" in schema:
        made["items"] = made.pop("prefixItems")
        if "items" in schema:
            made["additionalItems"] = schema["items"]
    for keyword in IN_PLACE & made.keys():
        made[keyword] = _as_draft_7(made[keyword])
    for keyword in BY_NAME & made.keys():
        made[keyword] = {name: _as_draft_7(each) for name, each in made[keyword].items()}
    return made


def _title(declaration: Declaration) -> str:
    version = declaration.version
    return declaration.event_type if version is None else f"{declaration.event_type} version {version}"
