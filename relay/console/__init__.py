"""The web console: pages and an HTTP API for operators, in a process and with a database login of its own.

`app.py` puts it together; `serve.py` runs it for `relay console`.
"""
