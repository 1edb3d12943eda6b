"""`/livez`, `/readyz` and `/metrics`, on one port: of `relay run` when `http.listen` is set, or of a consumer."""
