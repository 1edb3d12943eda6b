"""Compare business rows, their events and what a consumer applied: start at compare.py."""
