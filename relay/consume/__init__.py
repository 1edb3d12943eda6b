"""The consumer side: apply each message once."""

from relay.consume.consumer import Consumer
from relay.consume.handlers import on
from relay.consume.inbox import Inbox
from relay.consume.message import Message
from relay.consume.worker import Backoff, Counters

__all__ = ["Backoff", "Consumer", "Counters", "Inbox", "Message", "on"]
