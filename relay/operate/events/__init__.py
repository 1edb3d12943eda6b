"""The events that an application declares: list them, export them, and compare them with an earlier export."""
