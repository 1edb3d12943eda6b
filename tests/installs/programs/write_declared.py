"""Write an event that is declared by each kind of class."""

import sys
from dataclasses import dataclass
from decimal import Decimal

import psycopg
from pydantic import BaseModel
from typing_extensions import TypedDict

from relay.outbox import PayloadError, add, event

KEY = ("customer", "customer_id")


@event("InvoiceIssued", version=2, key=KEY)
class Model(BaseModel):
    customer_id: int
    amount: Decimal


@event("InvoicePaid", key=KEY)
@dataclass
class Data:
    customer_id: int
    amount: Decimal


@event("InvoiceSeen", key=KEY)
class Typed(TypedDict):
    customer_id: int
    amount: Decimal


AMOUNT = Decimal("9.90")

with psycopg.connect(sys.argv[1]) as connection:
    add(connection, Model(customer_id=17, amount=AMOUNT), Data(17, AMOUNT), Typed(customer_id=17, amount=AMOUNT))
    payloads = connection.execute("SELECT payload::text FROM outbox.message").fetchall()
    assert payloads == 3 * [('{"customer_id":17,"amount":"9.90"}',)], payloads
    refusal = ""
    try:
        add(connection, Data(17, "ten"))  # type: ignore[arg-type]
    except PayloadError as error:
        refusal = str(error)
    assert "payload.amount does not fit its declaration: decimal_parsing" in refusal
