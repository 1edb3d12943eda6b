"""What an operator can do, each thing one function for the command line and for the HTTP API. Start at operations.py."""
