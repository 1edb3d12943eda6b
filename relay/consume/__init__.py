"""The consumer side: apply each message once."""

from relay.errors import importing

with importing("consume"):
    from relay.backoff import Backoff
    from relay.consume.consumer import Consumer
    from relay.consume.counters import Counters
    from relay.consume.failures import Overload, Permanent, Transient
    from relay.consume.handlers import on
    from relay.consume.inbox import Inbox
    from relay.consume.message import Message
    from relay.consume.retries import Retries

__all__ = [
    "Backoff",
    "Consumer",
    "Counters",
    "Inbox",
    "Message",
    "Overload",
    "Permanent",
    "Retries",
    "Transient",
    "on",
]
