"""Who may do what: each action is checked here, on the server."""
