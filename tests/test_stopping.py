"""A signal that was ignored when the process started is ignored again when nothing hears it any more."""

import signal

import pytest

from relay.runtime.stopping import at_signals


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
async def test_what_was_ignored_is_ignored_again(before: signal.Handlers) -> None:
    found = signal.signal(signal.SIGHUP, before)
    try:
        with at_signals(lambda _: None, reload=lambda: None):
            assert signal.getsignal(signal.SIGHUP) is not before
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, found)
