"""The app of Django."""

from django.apps import AppConfig
from django.core.checks import Tags, register

from relay.django.checks import check_settings, check_tables


class OutboxRelay(AppConfig):
    """Registers the system checks; Django itself finds the models and the admin."""

    name = "relay.django"
    label = "outbox_relay"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        register(check_settings, "outbox_relay")
        register(check_tables, Tags.database)
