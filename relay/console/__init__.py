"""The web console: pages and an HTTP API for operators, in a separate process with a separate database login.

`app.py` puts it together; `serve.py` runs it for `relay console`.
"""
