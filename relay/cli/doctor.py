"""`relay doctor`."""

import sys
from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteOptions
from relay.cli.options import Output
from relay.cli.printing import print_json, print_lines, say
from relay.observe.log import keep_libraries_quiet
from relay.observe.printable import printable
from relay.operate.asked import Nothing
from relay.operate.doctor.finding import Finding, Verdict, summary

MARKS = {
    Verdict.OK: ("ok", "green"),
    Verdict.WARNING: ("warn", "yellow"),
    Verdict.FAILED: ("FAIL", "bold red"),
    Verdict.SKIPPED: ("skip", "dim"),
}


def doctor(*, options: RemoteOptions = RemoteOptions(), output: Output = "text") -> ExitCode:
    """Look for what would not work before a message is sent, and print the checklist.

    Exits with 0 when nothing failed, warnings or not, else with 1. Changes nothing.
    """
    keep_libraries_quiet()
    from relay.operate.doctor import run  # noqa: PLC0415  (few commands need the broker's library)

    found = options.operations().do(run.doctor, Nothing())
    verdict, findings = found.verdict, found.findings
    if output == "json":
        print_json({"verdict": verdict, "findings": findings})
    elif sys.stdout.isatty():
        draw_checklist(findings)
        say(summary(findings))
    else:
        print_lines((each.verdict, each.check, each.words, each.remedy) for each in findings)
        print_lines([(verdict, "summary", summary(findings), "")])
    return ExitCode.FAILED if verdict is Verdict.FAILED else ExitCode.DONE


def draw_checklist(findings: Iterable[Finding]) -> None:
    """Print each part's title, and below it for each finding its mark, its name, what was seen and what to do."""
    console = Console()
    for part, found in groupby(findings, key=lambda each: each.part):
        drawn = Table.grid(padding=(0, 2))
        for fold in (False, False, True):
            drawn.add_column(overflow="fold" if fold else "ellipsis", no_wrap=not fold)
        for each in found:
            mark, colour = MARKS[each.verdict]
            drawn.add_row(Text(f"  {mark}", style=colour), Text(each.name), Text(printable(each.words)))
            if each.remedy:
                drawn.add_row("", "", Text(printable(each.remedy), style="bold"))
        console.print(Text(part, style="bold"), drawn)
