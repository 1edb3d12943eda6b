"""The table of drained backlogs: rates, their ratios to a reference of the same round, CPU time, what was lost."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from bench.drain_case import Measured
from bench.frame import report
from bench.frame.report import Spread

PARTS = ("sender_cpu", "postgres_cpu", "rabbitmq_cpu")


def print_drains(
    console: Console, title: str, measured: Sequence[Measured], names: Sequence[str], *, reference: str, of: str
) -> dict[str, Any]:
    """Print a line for each case; give the figures in it by the case's name.

    Args:
        reference: the case to divide by; where it was not measured, there is no ratio.
        of: what it is called above the column of ratios.
    """
    of_round = {one.round: one.rate for one in measured if one.case == reference}
    lines, summary = [], {}
    for name in names:
        rounds = [one for one in measured if one.case == name]
        rate = report.spread([one.rate for one in rounds])
        ratio = report.spread([one.rate / of_round[one.round] for one in rounds]) if of_round else None
        cpu = {part: report.spread([getattr(one, part) for one in rounds]) for part in PARTS}
        lost = sum(one.lost for one in rounds)
        lines.append([name, *_shown(rate), *_shown(ratio, 2), *(part.shown(1) for part in cpu.values()), str(lost)])
        summary[name] = {
            "rate": asdict(rate),
            "ratio": asdict(ratio) if ratio else None,
            "cpu": {part: asdict(used) for part, used in cpu.items()},
            "lost": lost,
        }
    columns = ["", "msg/s", "lowest-highest", of, "lowest-highest", "sender", "PostgreSQL", "RabbitMQ", "lost"]
    report.print_table(console, title, columns, lines)
    return summary


def _shown(spread: Spread | None, digits: int = 0) -> tuple[str, str]:
    return (spread.shown(digits), spread.range_shown(digits)) if spread else ("-", "-")
