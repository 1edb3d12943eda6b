"""Which listed bindings and queues take the messages for an address: whether declaring the list can mend a route."""

from collections.abc import Iterator
from functools import cache

from relay.config.topology import Binding, ExchangeType, TopologySettings
from relay.servers.rabbitmq.topology import kind_of, name_of

NOT_LISTED = "relay.toml lists nothing that takes its messages"
BUILT_IN = {
    "amq.direct": ExchangeType.DIRECT,
    "amq.fanout": ExchangeType.FANOUT,
    "amq.headers": ExchangeType.HEADERS,
    "amq.match": ExchangeType.HEADERS,
}


def listed_for(topology: TopologySettings, exchange: str, routing_key: str) -> list[str]:
    """Return what is listed that takes messages for an address, on their way to a queue: `binding a -> b (key)`.

    A headers exchange counts with all of its bindings, as the headers of a message decide.
    """
    if not exchange:
        return [f"queue {queue.name}" for queue in topology.queues if queue.name == routing_key]
    ways = _ways(topology, exchange, routing_key, frozenset())
    return [f"{kind_of(each)} {name_of(each)}" for each in ways]


def queues_for(topology: TopologySettings, exchange: str, routing_key: str) -> list[str]:
    """Return the names of the queues that the list gives messages for an address, sorted."""
    if not exchange:
        return [queue.name for queue in topology.queues if queue.name == routing_key]
    return sorted({each.queue for each in _ways(topology, exchange, routing_key, frozenset()) if each.queue})


def _ways(topology: TopologySettings, exchange: str, key: str, passed: frozenset[str]) -> Iterator[Binding]:
    kinds = BUILT_IN | {each.name: each.type for each in topology.exchanges}
    kind = kinds.get(exchange, ExchangeType.TOPIC)
    for binding in topology.bindings:
        if binding.exchange != exchange or not _takes(kind, binding.routing_key, key):
            continue
        if binding.to_exchange is None:
            yield binding
        elif binding.to_exchange not in passed:
            yield from _through(binding, _ways(topology, binding.to_exchange, key, passed | {exchange}))


def _through(binding: Binding, behind: Iterator[Binding]) -> Iterator[Binding]:
    """Yield a binding to another exchange, if that one leads to a queue."""
    if ways := list(behind):
        yield binding
        yield from ways


def _takes(kind: ExchangeType, pattern: str, key: str) -> bool:
    match kind:
        case ExchangeType.FANOUT | ExchangeType.HEADERS:
            return True
        case ExchangeType.DIRECT:
            return pattern == key
        case ExchangeType.TOPIC:
            return is_topic_match(pattern, key)


def is_topic_match(pattern: str, key: str) -> bool:
    """Whether a topic exchange sends a routing key to a binding: `*` is one word, `#` any number of them."""
    wanted, words = pattern.split("."), key.split(".") if key else []
    if not pattern:
        wanted = []

    @cache
    def rest(at: int, word: int) -> bool:
        if at == len(wanted):
            return word == len(words)
        if wanted[at] == "#":
            return rest(at + 1, word) or (word < len(words) and rest(at, word + 1))
        return word < len(words) and wanted[at] in ("*", words[word]) and rest(at + 1, word + 1)

    return rest(0, 0)
