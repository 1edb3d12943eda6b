"""Private servers for tests: a folder and ports that nobody else has, on loopback, gone with the process. For Linux."""
