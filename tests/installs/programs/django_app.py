"""Make the tables by Django, check them, write an event, and see it in the admin."""

import sys

import django
from django.conf import settings
from django.contrib import admin
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.state import ProjectState
from django.urls import path
from psycopg.conninfo import conninfo_to_dict

NAMES = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
GIVEN = {NAMES[key]: str(value) for key, value in conninfo_to_dict(sys.argv[1]).items() if key in NAMES}
CONTRIB = ("admin", "auth", "contenttypes", "messages", "sessions")
PROCESSORS = ("django.template.context_processors.request", "django.contrib.auth.context_processors.auth")
SHOWS = ("django.contrib.messages.context_processors.messages",)
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **GIVEN}},
    INSTALLED_APPS=[*(f"django.contrib.{name}" for name in CONTRIB), "relay.django"],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {"context_processors": [*PROCESSORS, *SHOWS]},
        }
    ],
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["testserver"],
    SECRET_KEY="only for this test",
    STATIC_URL="static/",
)
django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.test import Client  # noqa: E402

from relay.django import Migrate  # noqa: E402
from relay.outbox import Event, add  # noqa: E402

urlpatterns = [path("admin/", admin.site.urls)]

with connection.schema_editor() as editor:
    Migrate().database_forwards("shop", editor, ProjectState(), ProjectState())
assert run_checks(databases=["default"]) == []
call_command("migrate", verbosity=0)
with transaction.atomic():
    add(connection, Event("customer", "17", "InvoiceIssued", {"invoice": 42}))
client = Client()
client.force_login(User.objects.create_superuser("root"))
assert b"InvoiceIssued" in client.get("/admin/outbox_relay/outboxrow/?q=customer+17").content
