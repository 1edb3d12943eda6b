"""Send again what was sent: start at run.py."""
