"""What `[topology]` takes, and how it says what it does not take."""

from pathlib import Path

import pytest

from relay.config.keys import all_keys, as_toml
from relay.config.loading import load
from relay.config.topology import Binding, Queue, TopologySettings
from relay.errors import ConfigurationError

NAME_WORDS = "letters, digits, spaces and - _ . : @ # , / +"


def topology(tmp_path: Path, text: str) -> TopologySettings:
    file = tmp_path / "relay.toml"
    file.write_text(text)
    return load(config=file, environ={}).settings.topology


def test_a_queue_is_durable_and_quorum_and_leaves_the_rest_to_policy() -> None:
    queue = Queue(name="invoices")

    assert queue.durable
    assert queue.amqp_arguments() == {"x-queue-type": "quorum"}


def test_every_key_of_a_queue_is_an_argument(tmp_path: Path) -> None:
    text = """
        [[topology.queues]]
        name = "invoices"
        dead_letter_exchange = ""
        dead_letter_routing_key = "dead"
        delivery_limit = 20
        max_length = 1000
        max_length_bytes = 1000000
        overflow = "reject-publish"
        message_ttl = 1.5
        single_active_consumer = true
        arguments = { x-expires = 60000 }
    """

    (queue,) = topology(tmp_path, text).queues

    assert queue.amqp_arguments() == {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "dead",
        "x-delivery-limit": 20,
        "x-max-length": 1000,
        "x-max-length-bytes": 1_000_000,
        "x-overflow": "reject-publish",
        "x-message-ttl": 1500,
        "x-single-active-consumer": True,
        "x-expires": 60000,
    }


def test_the_lists_may_be_variables() -> None:
    loaded = load(environ={"RELAY_TOPOLOGY_BINDINGS": '[{"exchange": "a", "to_exchange": "b", "queue": null}]'})

    assert loaded.settings.topology.bindings == (Binding(exchange="a", to_exchange="b"),)
    assert loaded.origins["topology.bindings"] == "variable RELAY_TOPOLOGY_BINDINGS"


def test_what_is_shown_can_be_read_again(tmp_path: Path) -> None:
    given = topology(
        tmp_path,
        """
        [[topology.queues]]
        name = "invoices"
        arguments = { "odd name" = [1, { inner = true }] }
        """,
    )

    again = topology(tmp_path, f"[topology]\nqueues = {as_toml(given.queues)}")

    assert again == given


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[topology]\nqueue = []", "unknown key topology.queue (file FILE); did you mean topology.queues?"),
        ("topology = 5", "topology (file FILE) is no table; it takes [topology] with keys below"),
        (
            "[[topology.exchanges]]\ntype = 'topic'",
            f"topology.exchanges[0].name (file FILE) is missing; it takes a name of 1 to 127 {NAME_WORDS}",
        ),
        (
            "[[topology.exchanges]]\nname = 'e'\ntype = 'x-delayed-message'",
            (
                "topology.exchanges[0].type = 'x-delayed-message' (file FILE):"
                " it takes one of topic, direct, fanout, headers"
            ),
        ),
        (
            "[[topology.exchanges]]\nname = 'amq.mine'",
            (
                "topology.exchanges[0].name = 'amq.mine' (file FILE):"
                " RabbitMQ keeps the names that begin with amq. for itself"
            ),
        ),
        (
            "[[topology.exchanges]]\nname = ''",
            f"topology.exchanges[0].name = '' (file FILE): it takes a name of 1 to 127 {NAME_WORDS}",
        ),
        (
            f"[[topology.queues]]\nname = '{'q' * 256}'",
            f"topology.queues[0].name = '{'q' * 256}' (file FILE): it takes a name of 1 to 255 {NAME_WORDS}",
        ),
        (
            "[[topology.queues]]\nname = 'amq.gen-x'",
            (
                "topology.queues[0].name = 'amq.gen-x' (file FILE):"
                " RabbitMQ keeps the names that begin with amq. for itself"
            ),
        ),
        (
            "[[topology.queues]]\nname = 'q'\ndurable = false",
            "topology.queues[0].durable = False (file FILE): a quorum queue is always durable",
        ),
        (
            "[[topology.queues]]\nname = 'q'\ntype = 'classic'\ndelivery_limit = 5",
            'topology.queues[0].delivery_limit = 5 (file FILE): only a quorum queue has one: type = "quorum"',
        ),
        (
            "[[topology.queues]]\nname = 'q'\ntype = 'stream'\nmax_length = 5",
            "topology.queues[0].max_length = 5 (file FILE): a stream takes no such key",
        ),
        (
            "[[topology.queues]]\nname = 'q'\nmax_length = -1",
            "topology.queues[0].max_length = -1 (file FILE): it takes a whole number, at least 0",
        ),
        (
            "[[topology.queues]]\nname = 'q'\nmessage_ttl = 0",
            (
                "topology.queues[0].message_ttl = 0 (file FILE): it takes seconds, from 0.001 to 4294967.295, or as in "
                '"2h"'
            ),
        ),
        (
            "[[topology.queues]]\nname = 'q'\ndead_letter_routing_key = 'k'",
            ("topology.queues[0].dead_letter_routing_key = 'k' (file FILE): it needs a dead_letter_exchange, too"),
        ),
        (
            "[[topology.queues]]\nname = 'q'\narguments = { x-max-length = 1 }",
            (
                "topology.queues[0].arguments = {'x-max-length': 1} (file FILE):"
                " x-max-length has its own key, max_length"
            ),
        ),
        (
            "[[topology.queues]]\nname = 'q'\narguments = { x-part = 0.5 }",
            (
                "topology.queues[0].arguments = {'x-part': 0.5} (file FILE): it takes a table of AMQP arguments:"
                " text, whole numbers, true or false, lists and tables of them"
            ),
        ),
        (
            "[[topology.queues]]\nname = 'q'\n[[topology.queues]]\nname = 'q'",
            "topology.queues (file FILE): listed more than once: q",
        ),
        (
            "[[topology.bindings]]\nexchange = 'e'",
            "topology.bindings[0] (file FILE): it takes a queue or a to_exchange, one of the two",
        ),
        (
            "[[topology.bindings]]\nexchange = 'e'\nto_exchange = 'amq.topic'",
            (
                "topology.bindings[0].to_exchange = 'amq.topic' (file FILE):"
                " RabbitMQ keeps the names that begin with amq. for itself"
            ),
        ),
        (
            "[topology]\nbindings = [{exchange = 'e', queue = 'q'}, {exchange = 'e', queue = 'q', routing_key = ''}]",
            "topology.bindings (file FILE): listed more than once: e to q with ''",
        ),
    ],
)
def test_a_refusal_names_the_key_and_the_reason(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        topology(tmp_path, text)

    assert str(refused.value) == words.replace("FILE", str(tmp_path / "relay.toml"))


def test_each_list_is_a_key() -> None:
    lists = {key.name for key in all_keys() if key.is_list}

    assert lists >= {"topology.exchanges", "topology.queues", "topology.bindings"}
