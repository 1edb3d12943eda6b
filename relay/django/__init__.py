"""The outbox in a Django project: `INSTALLED_APPS = ["relay.django", ...]`.

The app has system checks, and a page of the admin that shows messages. `Migrate` makes the tables in a migration of the
project. Two settings say where they are: `OUTBOX_RELAY_DATABASE` ("default") and `OUTBOX_RELAY_SCHEMA` ("outbox").
"""

from relay.errors import importing

with importing("django"):
    from relay.django.operations import Migrate

__all__ = ["Migrate"]
