"""What the shop does: it takes orders, and adds them up when their events come."""

from decimal import Decimal

import psycopg
from django.db import connection, transaction
from pydantic import BaseModel

from relay.consume import Message, Permanent, on
from relay.outbox import add, event

from .models import Order, Total

BLOCKED = 13  # the number of a customer to whom nothing is sold
ADD_UP = """
    INSERT INTO shop_total AS total (customer, amount) VALUES (%s, %s)
    ON CONFLICT (customer) DO UPDATE SET amount = total.amount + EXCLUDED.amount
"""


@event("OrderPlaced", version=1, key=("customer", "customer"))
class OrderPlaced(BaseModel):
    order: int
    customer: int
    amount: Decimal


@transaction.atomic
def place_order(customer: int, amount: Decimal) -> Order:
    """Write an order and its event: both, or neither."""
    order = Order.objects.create(customer=customer, amount=amount)
    add(connection, OrderPlaced(order=order.pk, customer=customer, amount=amount))
    return order


# By the transaction of the inbox, which is not one of Django's ORM.
@on(OrderPlaced)
async def add_up(message: Message[OrderPlaced], inbox: psycopg.AsyncConnection) -> None:
    placed = message.payload
    await inbox.execute(ADD_UP, [placed.customer, placed.amount])
    if placed.customer == BLOCKED:
        raise Permanent("the customer is blocked")


def total_of(customer: int) -> Decimal:
    total = Total.objects.filter(customer=customer).first()
    return total.amount if total else Decimal(0)
