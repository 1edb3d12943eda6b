"""Send again what was sent: start at work.py."""
