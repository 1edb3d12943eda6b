"""What the admin shows."""

from typing import ClassVar

from django.db import models


class NoRows(models.Manager):
    """Finds nothing: `dumpdata`, or a query, would read every sent row. The admin reads its pages otherwise."""

    def get_queryset(self) -> models.QuerySet:
        return super().get_queryset().none()


class OutboxRow(models.Model):
    """A row of the outbox, without what it says. It has a permission, `view_outboxrow`, and no table of Django."""

    id = models.BigIntegerField("id", primary_key=True)
    message_id = models.UUIDField("message id")
    aggregate_type = models.TextField("aggregate type")
    aggregate_id = models.TextField("aggregate id", null=True)
    event_type = models.TextField("event type")
    state = models.TextField("state")
    created_at = models.DateTimeField("written at")
    available_at = models.DateTimeField("not sent before", null=True)
    sent_at = models.DateTimeField("sent at", null=True)
    parked_at = models.DateTimeField("parked at", null=True)
    attempts = models.SmallIntegerField("refused tries")
    last_error = models.TextField("refused because", null=True)
    held_behind = models.BigIntegerField("waits behind id", null=True)
    exchange = models.TextField("exchange", null=True)
    routing_key = models.TextField("routing key", null=True)
    content_type = models.TextField("content type", null=True)
    writer = models.TextField("writer", null=True)

    shown_by_the_admin = NoRows()

    class Meta:
        managed = False
        base_manager_name = "shown_by_the_admin"
        default_permissions: ClassVar = ("view",)
        verbose_name = "message"

    def __str__(self) -> str:
        return f"{self.event_type} {self.message_id}"

    @property
    def key(self) -> str:
        """Its ordering key."""
        return self.aggregate_type if self.aggregate_id is None else f"{self.aggregate_type} {self.aggregate_id}"
