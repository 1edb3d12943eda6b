"""Whatever an AMQP client puts into the dead letters: they are listed, saved, sent back and thrown away."""

import base64
import struct
from io import BytesIO
from typing import Any

import orjson

from relay.operate.letters.export import export
from relay.operate.letters.queue import opened, returns_of
from tests.dead_letters.changes import AUDIT, DISCARD, RETRY, Audit, change
from tests.dead_letters.letters import DEAD, NO_FILTER, Letters
from tests.support.raw_client import RawClient, entry, long, nested, properties
from tests.support.undecodable import UNDECODABLE

FIRST_MOMENT = b"S" + long(b"0001-01-01T00:00:00+14:00")
DEATH = entry(b"time", b"T" + bytes(8)) + entry(b"queue", b"V")
HOSTILE: dict[str, dict[str, Any]] = {
    **{name: sent for name, sent in UNDECODABLE.items() if "routing_key" not in sent},
    "nul": {"message_type": b"a\0b", "message_id": b"\0", "headers": entry(b"x-aggregate-id", b"S" + long(b"\0"))},
    "bytes": {"headers": entry(b"x-dead-reason", b"x" + long(b"\xff"))},
    "numbers": {"headers": entry(b"a", b"d" + struct.pack(">d", 1.7e308)) + entry(b"b", b"D\xff\x7f\xff\xff\xff")},
    "depth": {"headers": entry(b"x-aggregate-id", nested(b"F", 99))},
    "moments": {"headers": b"".join(entry(b"x-%b-failure" % which, FIRST_MOMENT) for which in (b"first", b"last"))},
    "deaths": {"headers": entry(b"x-death", b"A" + long(b"F" + long(DEATH)))},
    "partition": {"headers": entry(b"x-partition", b"I" + struct.pack(">i", 77))},
    "returns": {"headers": entry(b"x-acquired-count", b"I" + struct.pack(">i", 99))},
    "folded": {"headers": entry(b"x-folded-header", b"I" + struct.pack(">i", 1))},
    "counts": {"headers": entry(b"x-dead-attempts", b"l" + struct.pack(">q", 2**62))},
}  # fmt: skip


async def test_letters_of_any_content_are_read_sent_back_and_thrown_away(
    letters: Letters, client: RawClient, audit: Audit
) -> None:
    await letters.queue.declare()
    raw = {name: properties(**sent) for name, sent in HOSTILE.items()}
    for name, each in raw.items():
        assert await client.publish(each, b"body", routing_key=DEAD.encode()), name

    assert len(await letters.read()) == len(raw)
    file = BytesIO()
    await export(letters.broker, DEAD, NO_FILTER, file)
    documents = [orjson.loads(line) for line in file.getvalue().splitlines()]
    for name in UNDECODABLE.keys() & raw.keys():
        # Without flags and sizes: the broker adds a header when it delivers a letter again.
        assert raw[name][6:] in base64.b64decode(documents[[*raw].index(name)]["headers"]["x-raw-header"])

    done = await change(letters, RETRY, audit)
    assert (done.done, done.refused) == (len(raw), [])
    assert len(await letters.consumed()) == len(raw)
    for each in raw.values():
        assert await client.publish(each, b"body", routing_key=DEAD.encode())
    assert (await change(letters, DISCARD, audit)).done == len(raw)
    assert len(audit.execute(AUDIT).fetchall()) == 2 * len(raw)


async def test_a_job_looks_among_its_notes_for_ids_that_postgresql_cannot_hold(
    letters: Letters, client: RawClient, audit: Audit
) -> None:
    """A job looks there from its second step on."""
    for message_id in (b"first", b"a\0b", b"\0", b"last"):
        assert await client.publish(properties(message_id=message_id), b"body", routing_key=DEAD.encode())

    done = await change(letters, DISCARD, audit, rate=2)

    assert (done.done, done.refused) == (4, [])
    assert [row["message_id"] for row in audit.execute(AUDIT)] == ["first", r"a\x00b", r"\x00", "last"]


async def test_a_letter_that_names_a_queue_that_is_not_there_stops_no_other(
    letters: Letters, client: RawClient, audit: Audit
) -> None:
    await letters.queue.declare()
    partition = entry(b"x-partition", b"I" + struct.pack(">i", 7))
    assert await client.publish(properties(headers=partition), b"body", routing_key=DEAD.encode())
    for number in range(3):
        await letters.put(number)

    done = await change(letters, RETRY, audit)

    assert done.done == 3
    assert [f"{letters.queue.name}.07" in reason for _, reason in done.refused] == [True]
    assert len(await letters.consumed()) == 3
    assert len(await letters.read()) == 1


async def test_a_count_of_returns_that_a_publisher_wrote_makes_no_look_write(
    letters: Letters, client: RawClient
) -> None:
    count = entry(b"x-acquired-count", b"I" + struct.pack(">i", 99))
    assert await client.publish(properties(headers=count), b"body", routing_key=DEAD.encode())

    async with opened(letters.broker, DEAD) as queue:
        (page,) = [page async for page in queue.pages()]

        assert [returns_of(each) for each in page] == [0]


async def test_fifty_looks_at_a_letter_that_cannot_be_decoded_do_not_lose_it(
    letters: Letters, client: RawClient
) -> None:
    """Its count of returns is among its headers."""
    assert await client.publish(properties(message_type=b"\xff", headers=b""), b"body", routing_key=DEAD.encode())

    for _ in range(25):
        (letter,) = await letters.read()
        assert letter.type == r"\xff"
