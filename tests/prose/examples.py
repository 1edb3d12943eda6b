"""Sentences that the rules must object to, each with one that says the same and passes."""

EXAMPLES = [
    (
        "Give those of the rows that are remembered, which are not any more then, and the others.",
        "Split the rows into those already confirmed, which are forgotten, and the rest.",
    ),
    (
        "Give who has done so for long, as far as we may see his age; nobody where the views are closed to us.",
        "Return the sessions that have held a snapshot for long. Empty when pg_stat_activity is not readable.",
    ),
    (
        "When the day itself is missing, be it that the clock has stepped",
        "If the day's partition is missing (for example after a clock step)",
    ),
    (
        "publishes to the broker, and while that is away into the table or a file",
        "publishes to the broker; while the broker is unreachable, it writes to a table or a file",
    ),
    ("somebody else is at it", "another process is working on it"),
]
