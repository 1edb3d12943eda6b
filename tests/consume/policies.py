"""Retries and backoffs of the tests' consumers, and both orders of a message that failed."""

import pytest

from relay.consume import Backoff, Retries

QUICK = Backoff(initial=0.02, maximum=0.2)
SOON = Retries(attempts=4, initial=0.02, maximum=0.1)
TWICE = Retries(attempts=2, initial=0.02, maximum=0.1)
SEVERAL_MINUTES = Retries(initial=600.0, maximum=600.0)

ORDERS = [pytest.param({"order": "hold"}, id="hold"), pytest.param({"order": "skip"}, id="skip")]
