"""A channel of the test's own on its virtual host."""

from tests.engine.conftest import channel

__all__ = ["channel"]
