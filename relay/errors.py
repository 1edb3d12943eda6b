"""What can go wrong, as one tree; an expected result is a value (`Outcome`), not an error.

OutboxError
  ConfigurationError      the relay was told something that cannot be
  EventError              an event that the outbox would refuse (relay.outbox)
  DatabaseUnavailableError
  SchemaError             the database is reachable, but the tables are missing or behind
  BrokerUnavailableError
  LaneLostError           another node holds the lane
  DeadlineError           no answer in time
"""


class OutboxError(Exception):
    """Base of every error of this package."""


class ConfigurationError(OutboxError):
    """The configuration cannot be used; the message names each key, where it was set, and what it takes."""


class EventError(OutboxError, ValueError):
    """The outbox would refuse this event; nothing was sent to the database."""


class DatabaseUnavailableError(OutboxError):
    """No connection to PostgreSQL."""


class SchemaError(OutboxError):
    """The outbox tables are missing, or of another version than this relay."""


class BrokerUnavailableError(OutboxError):
    """No connection to RabbitMQ."""


class LaneLostError(OutboxError):
    """Another session holds the lane; its rows stay pending for that one."""

    def __init__(self, lane: int) -> None:
        super().__init__(f"lane {lane} is held by another node; its rows stay pending")
        self.lane = lane


class DeadlineError(OutboxError):
    """Something on the network did not answer in time."""

    def __init__(self, waited_for: str, seconds: float) -> None:
        super().__init__(f"{waited_for}: no answer within {seconds:g} s")
        self.waited_for = waited_for
        self.seconds = seconds
