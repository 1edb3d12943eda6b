"""The admin shows messages in any state, page by page, and changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.testing.servers.postgres import PostgresServer
from tests.support.django_project import Project

CASES = Path(__file__).with_name("admin_cases.py")
SETTINGS = """
INSTALLED_APPS = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
                  "django.contrib.messages", "django.contrib.sessions", "relay.django", "shop"]
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware",
              "django.contrib.auth.middleware.AuthenticationMiddleware",
              "django.contrib.messages.middleware.MessageMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
              "OPTIONS": {"context_processors": ["django.template.context_processors.request",
                                                 "django.contrib.auth.context_processors.auth",
                                                 "django.contrib.messages.context_processors.messages"]}}]
ROOT_URLCONF = "urls"
STATIC_URL = "static/"
TIME_ZONE = "Pacific/Auckland"
"""
URLS = """
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""
MIGRATION = """
from django.db import migrations
from relay.django import Migrate

class Migration(migrations.Migration):
    operations = [Migrate()]
"""


@pytest.fixture
def project(postgres: PostgresServer, tmp_path: Path) -> Iterator[Project]:
    files = {
        "urls.py": URLS,
        "shop/migrations/__init__.py": "",
        "shop/migrations/0001_outbox.py": MIGRATION,
        "shop/tests.py": CASES.read_text(),
    }
    yield Project(tmp_path, postgres.create_database("admin_shop"), files, SETTINGS)
    postgres.drop_database("admin_shop")


def test_each_case_passes(project: Project) -> None:
    told = project.manage("test", "--noinput")

    assert "Ran 14 tests" in told
    assert "OK" in told


def test_a_dump_of_the_projects_data_reads_no_message(project: Project) -> None:
    project.manage("migrate")

    without = ("--exclude", "auth", "--exclude", "contenttypes")
    assert "outbox_relay.outboxrow" not in project.manage("dumpdata", *without)
    assert "outbox_relay.outboxrow" not in project.manage("dumpdata", "--all", *without)
    assert "No changes detected" in project.manage("makemigrations", "--check", "--dry-run")
