"""An OpenID Connect provider with one client and a few users; runs in a separate environment.

Arguments: the port, the client's id and secret, and where it sends browsers back. Prints `ready`.
"""

import datetime
import secrets
import sys
from collections.abc import Callable
from typing import Any

from canaille import create_app
from canaille.app import models
from canaille.backends import Backend
from canaille.backends.memory.backend import MemoryBackend
from werkzeug.serving import make_server

PASSWORD = "correct horse battery"
USERS = {"ada": "relay-owners", "grace": "relay-operators", "alan": "relay-viewers", "eve": "strangers"}


def main() -> None:
    port, client_id, client_secret, redirect_uri = sys.argv[1:]
    MemoryBackend.do_query = exact(MemoryBackend.do_query)
    app = create_app(
        {
            "SECRET_KEY": secrets.token_hex(),
            "SERVER_NAME": f"127.0.0.1:{port}",
            "PREFERRED_URL_SCHEME": "http",
            "CANAILLE": {"DATABASE": "memory", "ENABLE_INTRUDER_LOCKOUT": False},
            "CANAILLE_OIDC": {"ENABLE_OIDC": True, "REQUIRE_NONCE": True},
        }
    )
    with app.app_context(), Backend.instance.session():
        fill(client_id, client_secret, redirect_uri)
    server = make_server("127.0.0.1", int(port), app, threaded=True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve_forever()


def exact(query: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return a query for what has all the values that are asked for.

    That of the memory backend returns what has any of them. It would take any code that a client has left over.
    """

    def do_query(backend: MemoryBackend, model: Any, *conditions: Any, **values: Any) -> list[Any]:
        first, *others = [query(backend, model, *conditions, **{name: values[name]}) for name in values] or [
            query(backend, model, *conditions)
        ]
        ids = {each.id for each in first}.intersection(*({each.id for each in some} for some in others))
        return [each for each in first if each.id in ids]

    return do_query


def fill(client_id: str, client_secret: str, redirect_uri: str) -> None:
    backend = Backend.instance
    for name, group in USERS.items():
        user = models.User(
            user_name=name, formatted_name=name.title(), family_name=name.title(), emails=[f"{name}@example.org"],
            display_name=name, password=PASSWORD,
        )  # fmt: skip
        backend.save(user)
        backend.save(models.Group(display_name=group, members=[user]))
    client = models.Client(
        client_id=client_id,
        client_id_issued_at=datetime.datetime.now(datetime.UTC),
        client_name="console",
        client_uri="http://127.0.0.1",
        client_secret=client_secret,
        contacts=["ops@example.org"],
        redirect_uris=[redirect_uri],
        grant_types=["authorization_code"],
        response_types=["code"],
        scope=["openid", "profile", "email", "groups"],
        token_endpoint_auth_method="client_secret_basic",
    )
    backend.save(client)
    client.audience = [client]
    backend.save(client)


if __name__ == "__main__":
    main()
