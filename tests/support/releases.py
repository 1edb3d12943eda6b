"""The releases of PostgreSQL that the tests run on: the oldest that the relay supports, and the newest."""

NEWEST = 18
OLDEST = 15
