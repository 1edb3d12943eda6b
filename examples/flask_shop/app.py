"""A shop in Flask with SQLAlchemy: an order goes with its event; what a visitor looks at is an event alone.

gunicorn "examples.flask_shop.app:make_app()"
"""

import os
from decimal import Decimal
from uuid import UUID, uuid4

from flask import Flask, request
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from relay.outbox import add, event
from relay.publisher import BlockingPublisher, DurablePublisher


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "order"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[int]
    amount: Mapped[Decimal]


class NewOrder(BaseModel):
    customer: int
    amount: Decimal = Field(gt=0)


@event("OrderPlaced", version=1, key=("customer", "customer"))
class OrderPlaced(BaseModel):
    order: UUID
    customer: int
    amount: Decimal


@event("ProductSeen", version=1, key=("product", "product"))
class ProductSeen(BaseModel):
    product: int
    visit: UUID


def place_order(session: Session, order: UUID, new: NewOrder) -> None:
    """Write an order and its event; both are there when the caller commits, or neither is."""
    session.add(Order(id=order, customer=new.customer, amount=new.amount))
    add(session, OrderPlaced(order=order, customer=new.customer, amount=new.amount))


def make_app() -> Flask:
    """Return the application. Engine and publisher connect when they are first used, so also after a server's fork."""
    app = Flask(__name__)
    database, broker = os.environ["RELAY_DATABASE_URL"], os.environ["RELAY_BROKER_URL"]
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
    sessions = sessionmaker(engine)
    publisher = BlockingPublisher(DurablePublisher(database, broker=broker, name="shop"))
    app.extensions |= {"engine": engine, "publisher": publisher}  # for the tests, which close them

    @app.cli.command("create-tables")
    def create_tables() -> None:
        Base.metadata.create_all(engine)

    @app.put("/orders/<uuid:order>")
    def put_order(order: UUID) -> tuple[dict[str, str], int]:
        """Take an order under the number that the client gave it, so that the client may ask again."""
        try:
            with sessions.begin() as session:
                place_order(session, order, NewOrder.model_validate(request.get_json()))
        except ValidationError as error:
            return {"error": str(error)}, 422
        except IntegrityError:
            return {"error": "this order is placed already"}, 409
        return {"order": str(order)}, 201

    @app.get("/products/<int:product>")
    def show_product(product: int) -> dict[str, object]:
        seen = ProductSeen(product=product, visit=uuid4())
        publisher.publish(seen)
        return seen.model_dump(mode="json")

    return app
