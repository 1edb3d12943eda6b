"""Is something on every host of the list, and the same on each?

A node of RabbitMQ 3.x that has parted from the others without a word keeps its own exchanges and queues.
"""

from collections.abc import Sequence

from relay.operate.doctor.broker_hosts import OpenHost
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.question import Answer, Question, Reply

PARTED = (
    "the hosts do not know the same: a node that was frozen or cut off may have parted from the others. Restart it,"
    " and declare while the cluster is whole"
)

Replies = Sequence[tuple[str, Reply]]  # with the place of each host, in the order of the list


async def ask_each(hosts: Sequence[OpenHost], question: Question) -> Replies:
    return [(host.place, await host.ask(question)) for host in hosts]


async def absence(
    check: str, thing: str, hosts: Sequence[OpenHost], question: Question, *, declaration: Question | None
) -> Finding | None:
    """Return where something is missing; None when every host has it.

    Args:
        declaration: what `relay run` would declare at its start, asked so that nothing is; None when it does not.
    """
    replies = await ask_each(hosts, question)
    lines = [f"{place}: {reply.words}" for place, reply in replies if reply.answer is not Answer.YES]
    there = [place for place, reply in replies if reply.answer is Answer.YES]
    missing = sum(reply.answer is Answer.MISSING for _, reply in replies)
    if not lines:
        return None
    if not missing:
        return Finding(check, Verdict.SKIPPED, f"{thing}: {'; '.join(lines)}")
    if there:
        return Finding(check, Verdict.FAILED, f"{thing} is on {', '.join(there)}; {'; '.join(lines)}", PARTED)
    if declaration is None or missing < len(replies):
        remedy = "declare it, or list it in relay.toml and run `relay topology apply`"
        return Finding(check, Verdict.FAILED, f"{thing}: {'; '.join(lines)}", remedy)
    reply = await hosts[0].ask(declaration)
    if reply.answer is Answer.FORBIDDEN:
        remedy = "run `relay topology apply` as a user who may, or let this one configure it (docs/topology.md)"
        return Finding(
            check, Verdict.FAILED, f"{thing} is missing, and `relay run` may not declare it: {reply.words}", remedy
        )
    return Finding(check, Verdict.OK, f"{thing} is missing; `relay run` declares it at its start")


def odd_one(check: str, thing: str, replies: Replies) -> Finding | None:
    """Return how something is not the same on every host; None when it is."""
    if len({(reply.answer, reply.difference) for _, reply in replies}) == 1:
        return None
    words = "; ".join(f"{place}: {reply.words or 'as asked for'}" for place, reply in replies)
    return Finding(check, Verdict.FAILED, f"{thing} is not the same on every host: {words}", PARTED)


def on_every(hosts: Sequence[OpenHost]) -> str:
    return "on every host" if len(hosts) > 1 else f"on {hosts[0].place}"
