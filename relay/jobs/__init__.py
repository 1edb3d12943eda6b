"""Bulk work as jobs: who, what, why, how far. Start at runner.py."""
