"""What failed for the same cause, in one group: start at groups.py."""
