"""Rows for the tests of jobs."""

from tests.operate.conftest import connection, rows

__all__ = ["connection", "rows"]  # fixtures
