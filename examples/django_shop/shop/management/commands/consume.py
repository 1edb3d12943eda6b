"""Add up the orders, until SIGTERM: `manage.py consume`."""

import asyncio
import os

from django.core.management.base import BaseCommand
from shop.orders import add_up

from relay.consume import Consumer, Inbox

QUEUE = "django_shop.totals"


class Command(BaseCommand):
    help = "Add up the orders, until SIGTERM."

    def handle(self, *_: object, **__: object) -> None:
        inbox = Inbox(os.environ["RELAY_DATABASE_URL"], "totals")
        consumer = Consumer(QUEUE, [add_up], inbox=inbox, broker=os.environ["RELAY_BROKER_URL"])
        asyncio.run(consumer.run())
