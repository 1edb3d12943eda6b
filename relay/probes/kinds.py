"""The kind of a reason: what a stranger may know of it.

A reason is in the words of a server, the kernel or a handler, and names hosts, ports, users and queues. Whatever it
says, what `kind_of` returns is one of the texts below, with at most a number of seconds in it.
"""

import re

OTHER = "it does not work: see the log"

# What the reason says -> its kind; the first that fits. Without a kind: as the reason says it.
KINDS = tuple(
    (re.compile(words, re.IGNORECASE | re.ASCII), kind)
    for words, kind in (
        # Our own words.
        (r"refused for \d{1,9} s", ""),
        (r"not connected yet|none held|other nodes hold them(?:; standing by| still)?|no member yet", ""),
        (r"another relay has the name", "another relay has its name"),
        (r"draining: it was told to stop|paused for \d{1,9} s", ""),
        (r"nothing has (?:settled|come from it) for [\d.]{1,9} s|nothing heard for \d{1,9} s", ""),
        (r"it has not answered for (?:more than )?[\d.]{1,9} s", ""),
        (r"no answer within [\d.]{1,9} s|the database answers no check-in", ""),
        (r"broker blocked(?: \((?:memory|disk|memory & disk)\))?", ""),
        (r"is not consumed yet|on_assigned fails", ""),
        (r"has locked message(?:_sent)?\b|parks or releases rows", ""),
        (r"no partition takes the rows sent today|a statement fails until an operator acts", ""),
        (r"queue .* was deleted or lost its leader", "its queue was deleted or lost its leader"),
        (r"queue .* does not exist", "its queue does not exist"),
        (r"the name is not resolved", "the name is not resolved"),
        # The kernel's and the resolver's.
        (r"connection refused|connect call failed", "connection refused"),
        (r"connection (?:was )?reset|reset by peer|broken pipe", "connection reset"),
        (r"no route to host|network is unreachable|no space left on device", ""),
        (r"connection timed out|timeout expired", "connection timed out"),
        (r"not known|name resolution|could not translate host name|no address associated", "the name is not resolved"),
        (r"certificate|ssl|tls", "TLS failed"),
        # The servers'.
        (r"authentication failed|no pg_hba\.conf entry|ACCESS_REFUSED|NOT_ALLOWED|permission denied", "access refused"),
        (r"too many clients|remaining connection slots|too many connections", "too many connections"),
        (r"CONNECTION_FORCED|terminating connection", "the server ended the connection"),
        (r"the database system is (?:starting up|shutting down|in recovery mode)", ""),
        (r"server closed the connection unexpectedly", ""),
        (r"read[- ]only", "read only"),
        (r"(?:lock|statement) timeout", ""),
        (r"session lost|connection lost|the connection is lost", "connection lost"),
    )
)


def kind_of(reason: str) -> str:
    """Return the kind of a reason."""
    for words, kind in KINDS:
        if found := words.search(reason):
            return kind or found[0]
    return OTHER
