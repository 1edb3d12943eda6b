"""Drop the days of the divided tables that are older than is to be kept: start at rounds.py."""
