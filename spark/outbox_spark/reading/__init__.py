"""Read the outbox as DataFrames: start at reader.py."""
