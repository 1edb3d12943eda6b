"""Drop the days of the divided tables that are older than retention allows: start at rounds.py."""
