"""How often a message is tried, and when."""

import random
from dataclasses import dataclass

from relay.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Retries:
    """The tries of a message and the waits between them.

    Args:
        attempts: tries in all, the first one included; after the last it is a dead letter.
        initial: seconds before the second try, at most; each wait is `multiplier` times as long as the one before.
        maximum: no wait is longer.
        jitter: the part of a wait that chance may take away, so that many do not come at once.
    """

    attempts: int = 5
    initial: float = 1.0
    multiplier: float = 2.0
    maximum: float = 300.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 < self.initial <= self.maximum or self.multiplier < 1 or not 0 <= self.jitter < 1:
            raise ConfigurationError(
                f"{self}: attempts and multiplier are at least 1, initial is above 0 and at most maximum,"
                " jitter is at least 0 and below 1"
            )

    def step(self, attempts: int) -> float:
        """Give the longest wait after the `attempts`-th failed try, in seconds."""
        step = self.initial
        for _ in range(attempts - 1):
            if step >= self.maximum:
                break
            step *= self.multiplier
        return min(step, self.maximum)

    def steps(self) -> list[float]:
        """Give the longest waits after each of the tries but the last."""
        return [self.step(attempts) for attempts in range(1, self.attempts)]

    def wait(self, attempts: int) -> float:
        """Give the seconds to wait after the `attempts`-th failed try."""
        return self.step(attempts) * (1.0 - self.jitter * random.random())  # noqa: S311  (nothing to do with secrets)
