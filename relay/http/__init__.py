"""`/livez`, `/readyz` and `/metrics` of a running relay, on one port: `relay run` answers when `http.listen` is set."""
