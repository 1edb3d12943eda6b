"""Why a bench cannot measure."""


class BenchmarkError(Exception):
    """The measurement would be wrong, or cannot be made; the message says why."""
