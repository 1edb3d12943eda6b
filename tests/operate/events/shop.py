"""Events of a shop: a pydantic model, a dataclass and a `TypedDict`, with most of what pydantic makes schemas of."""

from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal, NotRequired, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator
from typing_extensions import TypedDict

from relay.outbox import event


class State(StrEnum):
    """Where an order is."""

    OPEN = "open"
    PAID = "paid"


class Card(BaseModel):
    kind: Literal["card"] = "card"
    last_digits: Annotated[str, Field(pattern="^[0-9]{4}$")]


class Invoice(BaseModel):
    kind: Literal["invoice"] = "invoice"
    due: date


class Category(BaseModel):
    name: str
    parent: Self | None = None


class Line(BaseModel):
    price: Annotated[Decimal, Field(ge=0, max_digits=12, decimal_places=2)]
    quantity: Annotated[int, Field(ge=1)] = 1
    category: Category | None = None

    @computed_field
    def total(self) -> Decimal:
        return self.price * self.quantity


@event("OrderPlaced", version=2, key=("customer", "customer_id"))
class OrderPlaced(BaseModel):
    """A customer has ordered something."""

    model_config = ConfigDict(populate_by_name=True)
    customer_id: int = Field(alias="customerId")
    state: State = State.OPEN
    lines: list[Line]
    payment: Annotated[Card | Invoice, Field(discriminator="kind")]
    place: tuple[float, float] | None = None
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)

    @field_validator("lines")
    @classmethod
    def at_least_one(cls, lines: list[Line]) -> list[Line]:
        if not lines:
            raise ValueError("an order has a line")
        return lines


@event("OrderShipped", version=1, key=("customer", "customer_id"))
@dataclass(frozen=True)
class OrderShipped:
    customer_id: UUID
    parcels: set[str] = field(default_factory=set)
    weights: dict[str, float] = field(default_factory=dict)


@event("StockCounted", key=("stock", None))
class StockCounted(TypedDict):
    article: str
    count: NotRequired[int]
    extra: NotRequired[dict[str, Any]]
