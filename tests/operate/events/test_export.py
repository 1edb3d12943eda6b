"""An export of events: always the same text, which is what is committed here, and is read again as it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field

from relay.config.loading import load
from relay.config.settings import Route, Settings
from relay.engine.send.codec import Encoder
from relay.engine.send.message import MessageIdentity
from relay.engine.send.routes import Router
from relay.errors import ConfigurationError
from relay.operate.events.asyncapi import asyncapi
from relay.operate.events.contract import MOST_BYTES, as_text, contract_of, document, read_contracts
from relay.operate.events.modules import DeclaredClass, declared_in
from relay.operate.events.schemas import schema_of
from relay.outbox import event
from relay.outbox.declared import declaration_of
from tests.engine.encoders import decode
from tests.engine.rows import ROW
from tests.operate.events import shop
from tests.operate.events.renew import HERE, exports

RENEW = "renew it: python -m tests.operate.events.renew"


@pytest.mark.parametrize("name", ["shop.json", "shop.asyncapi.json"])
def test_an_export_is_the_one_that_is_committed(name: str) -> None:
    assert exports()[name] == (HERE / name).read_text(), RENEW


def test_an_export_is_read_as_it_was_written(tmp_path: Path) -> None:
    contracts = [contract_of(each.declaration) for each in declared_in([shop.__name__])]
    file = tmp_path / "main.json"
    file.write_text(as_text(document(reversed(contracts))))

    assert read_contracts(file) == contracts


def test_its_schemas_are_of_json_schema_and_the_others_of_draft_7() -> None:
    plain, described = (json.loads(text) for text in exports().values())

    for each in plain["events"]:
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **each["written"]})
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **each["read"]})
    for schema in described["components"]["schemas"].values():
        assert "$defs" not in schema
        jsonschema_rs.meta.validate({"$schema": "http://json-schema.org/draft-07/schema#", **schema})


def test_types_of_one_name_and_events_of_one_id_stay_apart() -> None:
    def declared(event_type: str, version: str | None, annotation: type) -> DeclaredClass:
        class Part(BaseModel):
            size: annotation  # type: ignore[valid-type]

        class Whole(BaseModel):
            part: Part

        declaration = declaration_of(event(event_type, version=version, key=("customer", None))(Whole))
        assert declaration is not None
        return DeclaredClass(declaration, event_type)

    classes = [declared("a/b", None, int), declared("a b", None, str), declared("{a}", None, bool)]

    by_id = Route(event_type="{a}", exchange="amq.topic", routing_key="{aggregate_id}.{event_type}")
    made = asyncapi(classes, ["app"], Settings(routes=(by_id,)))

    payloads = [message["payload"]["$ref"] for message in made["components"]["messages"].values()]
    assert list(made["components"]["messages"]) == ["a_b", "a_b_", "_a_"]
    assert len(set(payloads)) == 3
    assert [channel["address"] for channel in made["channels"].values()] == ["customer.a/b", "customer.a b", None]
    assert all("parameters" not in channel for channel in made["channels"].values())


def test_a_class_without_a_schema_is_refused_by_its_event() -> None:
    class Called(BaseModel):
        call: Callable[[], int]

    declaration = declaration_of(event("Called", key=("customer", None))(Called))
    assert declaration is not None

    with pytest.raises(ConfigurationError, match=r"@event\('Called'\) has no JSON Schema: Cannot generate"):
        schema_of(declaration, "validation")


def test_what_a_class_says_of_its_schema_must_be_json() -> None:
    class Said(BaseModel):
        size: int = Field(json_schema_extra={"maximum": float("nan")})

    declaration = declaration_of(event("Said", key=("customer", None))(Said))
    assert declaration is not None

    with pytest.raises(ConfigurationError, match=r"@event\('Said'\): its JSON Schema is not one: Out of range"):
        contract_of(declaration)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "Expecting value"), (b"{", "Expecting"), (b"\xff", "codec can't decode"),
        (b"[" * 100_000, "nested too deep"),
        (b"[]", "`relay events export`, without --format, writes one"), (b'{"asyncapi": "3.0.0"}', "without --format"),
        (b'{"relay_events": 2, "events": []}', "export it again"), (b'{"relay_events": 1, "events": {}}', "no list"),
        (b'{"relay_events": 1, "events": [5]}', "events[0] is no object"),
        (b'{"relay_events": 1, "events": [{"event_type": 5}]}', "events[0].event_type is no text"),
        (b'{"relay_events": NaN}', "NaN is no number of JSON"), (b'{"relay_events": 1e999}', "is no number of JSON"),
        (b'{"relay_events": ' + b"1" * 5000 + b"}", "limit"), (b" " * (MOST_BYTES + 1), "more than 16777216 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_export_is_refused_by_its_file(text: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "main.json"
    file.write_bytes(text)

    with pytest.raises(ConfigurationError) as refused:
        read_contracts(file)

    assert str(refused.value).startswith(f"file {file} ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"read": 5}, "events[0].read is no schema"),
        ({"written": {"items": 5}}, "events[0].written at /items is no schema"),
        ({"aggregate_type": None}, "events[0].aggregate_type is no text"),
    ],
)
def test_an_event_of_a_wrong_form_is_refused_with_its_place(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    export = json.loads((HERE / "shop.json").read_text())
    export["events"][0].update(change)
    file = tmp_path / "main.json"
    file.write_text(json.dumps(export))

    with pytest.raises(ConfigurationError, match="is no export of events") as refused:
        read_contracts(file)

    assert words in str(refused.value)


def test_an_event_that_stands_twice_is_refused(tmp_path: Path) -> None:
    export = json.loads((HERE / "shop.json").read_text())
    file = tmp_path / "main.json"
    file.write_text(json.dumps({**export, "events": export["events"] * 2}))

    with pytest.raises(ConfigurationError, match="it has OrderPlaced version 2 twice"):
        read_contracts(file)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("StockCounted", {"aggregate_type": b"stock", "aggregate_id": None, "payload": b'{"article":"a"}'}),
        ("OrderShipped_version_1", {"aggregate_id": b"17", "headers": b'{"x-event-version": "1"}'}),
    ],
)
def test_a_cloud_event_is_described_as_the_relay_sends_it(name: str, row: dict[str, Any]) -> None:
    described = json.loads(exports()["shop.asyncapi.json"])
    message = described["components"]["messages"][name]
    settings = load(config=HERE / "relay.toml", environ={}).settings
    sent = ROW._replace(event_type=name.partition("_")[0].encode(), **row)

    encoder = Encoder(7, 131_072, Router.of(settings), MessageIdentity.of(settings))
    _, header, *bodies = decode(encoder.encode([sent], set()).frames)

    properties, body = header.properties, b"".join(each.value for each in bodies)
    jsonschema_rs.validate({**message["headers"], "additionalProperties": False}, properties.headers)
    assert properties.content_type == message["contentType"]
    if message["contentType"] != "application/json":
        whole = {**message["payload"], "additionalProperties": False, "components": described["components"]}
        jsonschema_rs.validate(whole, json.loads(body))
