"""Whether what the relay may hold at a time fits into the memory that it may have."""

from relay.config.settings import RelaySettings
from relay.operate.doctor.finding import Finding, Verdict
from relay.runtime.memory import LEAST_WINDOW, Limit, largest_within, memory_limit, mib, needed, window_within


def memory(relay: RelaySettings, limit: Limit | None = None) -> Finding:
    """Compare the settings with the memory limit of this process, or with `limit`."""
    limit = limit or memory_limit()
    window, largest = relay.max_window_bytes, relay.max_message_bytes
    words = (
        f"a window of {window:,} bytes and messages of up to {largest:,} take at most {mib(needed(window, largest))};"
        f" the limit is {mib(limit.size)} ({limit.source})"
    )
    least = needed(LEAST_WINDOW, largest)
    if least > limit.size:
        fits = largest_within(limit.size)
        lower = f", or lower relay.max_message_bytes to {fits}" if fits else ""
        return _short(f"{words}: one such message may end the relay", f"raise the limit to {mib(least)}{lower}")
    if needed(window, largest) > limit.size:
        return _short(words, f"unset relay.max_window_bytes, or lower it to {window_within(limit.size, largest)}")
    return Finding("settings.memory", Verdict.OK, words)


def _short(words: str, remedy: str) -> Finding:
    return Finding("settings.memory", Verdict.WARNING, words, remedy)
