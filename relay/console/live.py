"""The parts of the overview that change, drawn once for all browsers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relay.console import charts, sampler
from relay.console.background import Background
from relay.console.charts import Chart, Value, chart
from relay.console.checkup import Checkup, CheckupReport
from relay.console.consumers import Consumers, SeenConsumers
from relay.console.formats import duration, short
from relay.console.sampler import Point, Sample, Sampler
from relay.console.templates import fragment
from relay.console.verdict import TheVerdict, verdict

PARTS = ("headline", "verdict", "figures", "relays")  # each has a template
COUNTS = ("failed", "paused")  # the menu's counts of failed messages and of paused jobs; each has a template
STATE = "state"  # the mood, for the icon
FRAME = (STATE, *COUNTS)  # what every page shows; all are events of the stream
SHORTEST = 300.0  # seconds that a chart spans at least
GAP = 3  # points: nobody looked for longer than that where the next value comes later


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its last hour."""

    title: str
    value: str
    about: str
    chart: Chart | None
    highest: str
    top: str  # of the axis; empty where all values are 0
    span: str  # of the chart
    span_s: float
    points: str  # for a script: how many seconds ago, and the value in words


@dataclass(frozen=True, slots=True)
class Seen:
    """What the looks have seen."""

    sample: Sample | None
    report: CheckupReport | None
    consumers: SeenConsumers | None
    failing: list[str]
    unsent: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """What every browser gets: the text of each part by its name."""

    seen: Seen
    verdict: TheVerdict
    parts: dict[str, str]


class Live:
    """Draws the parts again when one of the looks has seen something else."""

    def __init__(
        self,
        sampler: Sampler,
        checkup: Checkup,
        consumers: Consumers,
        background: Background,
        *,
        unsent: Callable[[], str],
        base: str,
    ) -> None:
        self._unsent = unsent
        self._base = base
        self._sampler = sampler
        self._checkup = checkup
        self._consumers = consumers
        self._background = background
        self._drawn: Drawn | None = None

    def parts(self) -> dict[str, str]:
        """Return the text of each part."""
        return self._now().parts

    def verdict(self) -> TheVerdict:
        """Return the verdict that the parts show."""
        return self._now().verdict

    def _now(self) -> Drawn:
        seen = Seen(
            self._sampler.latest,
            self._checkup.latest,
            self._consumers.latest,
            self._background.failing(),
            self._unsent(),
        )
        drawn = self._drawn
        if drawn is None or drawn.seen != seen:
            figures = _figures(seen.sample, self._consumers.in_queues())
            found = verdict(seen.sample, seen.report, seen.consumers, seen.failing, unsent=seen.unsent)
            values = {
                "base": self._base,
                "sample": seen.sample,
                "verdict": found,
                "figures": figures,
                "paused_jobs": self._sampler.paused_jobs,
                "failed_messages": failed_messages(seen.sample, seen.consumers),
            }
            parts = {name: fragment(f"{name}.html", **values) for name in (*PARTS, *COUNTS)}
            drawn = Drawn(seen, found, {**parts, STATE: found.mood})
            self._drawn = drawn
        return drawn


def failed_messages(sample: Sample | None, consumers: SeenConsumers | None) -> int:
    """Return how many messages have failed: rows that are parked or wait for a route, held messages, dead letters.

    A row that only waits behind another one of its key does not count, as on the page Failures.
    """
    failed = 0
    if sample and (status := sample.status):
        failed += status.parked - status.parked_held
        failed += sum(route.failed for route in status.quarantined_routes if route.paused_at is None)
    if consumers:
        failed += sum(consumers.letters.values()) + sum(each.keys for each in consumers.held)
    return failed


def _figures(sample: Sample | None, in_queues: int | None) -> list[Figure]:
    status, latency_s = (sample.status, sample.latency_s) if sample else (None, None)
    history = sample.history if sample else ()
    for_a_route = f", {short(status.quarantined)} for a route" if status and status.quarantined else ""
    rows: list[tuple[str, str, str, Callable[[Point], float | None], Callable[[float | None], str]]] = [
        ("Backlog", short(sample.backlog if sample else None), f"rows wait{for_a_route}", lambda each: each.backlog,
         short),
        ("Oldest", duration(sample.age_s if sample else None), "the longest wait of a row", lambda each: each.age_s,
         duration),
        ("Sent", short(sample.rate if sample else None), "messages a second", lambda each: each.rate, short),
        ("Latency", duration(latency_s), "p95, last minute", lambda each: each.latency_s,
         duration),
        ("In queues", short(in_queues), "messages wait for consumers", lambda each: each.in_queues, short),
        ("Parked", short(status.parked if status else None), "rows wait for a decision", lambda each: each.parked,
         short),
    ]  # fmt: skip
    return [
        figure(title, value, about, [(point.at, of(point)) for point in history], words=words)
        for title, value, about, of, words in rows
    ]


def figure(
    title: str, value: str, about: str, values: Sequence[Value], *, words: Callable[[float | None], str]
) -> Figure:
    """Return a figure with the curve of these values, the oldest first."""
    since, until = (values[0][0], values[-1][0]) if values else (0.0, 0.0)
    since = min(since, until - SHORTEST)  # a curve of a few seconds would look like a cliff
    steps = charts.SECONDS if words is duration else charts.COUNTS
    drawn = chart(values, since=since, until=until, steps=steps, longest=GAP * sampler.POINT)
    return Figure(
        title,
        value,
        about,
        drawn,
        highest=words(drawn.highest) if drawn else "",
        top=words(drawn.top) if drawn and drawn.top else "",
        span=duration(until - since),
        span_s=until - since,
        points="|".join(f"{ago:.0f}:{words(known)}" for ago, known in drawn.points) if drawn else "",
    )
