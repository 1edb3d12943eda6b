"""The consumer side: apply each message once."""

from relay.errors import importing

with importing("consume"):
    from relay.consume.apply.handlers import on
    from relay.consume.apply.inbox import Inbox
    from relay.consume.classify import Overload, Permanent, Transient
    from relay.consume.consumer import Consumer
    from relay.consume.counters import Counters
    from relay.consume.lifecycle import run_all
    from relay.consume.message import Message
    from relay.consume.policies import FailurePolicy, Retries, WorkPolicy
    from relay.runtime.backoff import Backoff

__all__ = [
    "Backoff",
    "Consumer",
    "Counters",
    "FailurePolicy",
    "Inbox",
    "Message",
    "Overload",
    "Permanent",
    "Retries",
    "Transient",
    "WorkPolicy",
    "on",
    "run_all",
]
