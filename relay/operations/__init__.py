"""What an operator can do, by the command line or the HTTP API. Start at operations.py."""
