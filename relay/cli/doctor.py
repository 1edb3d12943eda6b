"""`relay doctor`."""

import sys
from collections.abc import Iterable
from itertools import groupby

from relay.cli.options import Options, Output
from relay.cli.printing import print_json, print_lines, say
from relay.doctor.finding import Finding, Verdict, summary, worst
from relay.doctor.run import examine
from relay.observe.log import keep_libraries_quiet


def doctor(*, options: Options | None = None, output: Output = "text") -> int:
    """Look for what would not work before a message is sent, and print the checklist.

    Exits with 0 when nothing failed, warnings or not, else with 1. Changes nothing.
    """
    keep_libraries_quiet()
    loaded = (options or Options()).load()
    findings = examine(loaded.settings, loaded.file)
    verdict = worst(findings)
    if output == "json":
        print_json({"verdict": verdict, "findings": findings})
    elif sys.stdout.isatty():
        _draw(findings)
        say(summary(findings))
    else:
        print_lines((each.verdict, each.check, each.words, each.remedy) for each in findings)
        print_lines([(verdict, "summary", summary(findings), "")])
    return 1 if verdict is Verdict.FAILED else 0


def _draw(findings: Iterable[Finding]) -> None:
    from relay.cli.drawing import draw_checklist  # noqa: PLC0415

    for part, found in groupby(findings, key=lambda each: each.part):
        draw_checklist(part, [(each.verdict, each.name, each.words, each.remedy) for each in found])
