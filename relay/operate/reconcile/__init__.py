"""Compare what was sent with what consumers have applied: start at run.py."""
