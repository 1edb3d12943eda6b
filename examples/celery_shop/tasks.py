"""Orders that a task of Celery writes. A task may run twice; its order and its event are written once.

celery --app examples.celery_shop.tasks worker
"""

import os
from decimal import Decimal
from uuid import UUID

from celery import Celery
from celery.signals import worker_init, worker_process_init
from pydantic import BaseModel
from sqlalchemy import CheckConstraint, Engine, create_engine
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from relay.outbox import add, event

app = Celery("shop", broker=os.environ.get("RELAY_BROKER_URL"))
app.conf.update(
    task_acks_late=True,  # a worker that dies gives back its task, which is then repeated
    task_reject_on_worker_lost=True,  # also if only one process of its pool dies
    worker_prefetch_multiplier=1,
)
sessions: sessionmaker[Session] = sessionmaker()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "order"
    __table_args__ = (CheckConstraint("amount > 0"),)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[int]
    amount: Mapped[Decimal]


@event("OrderPlaced", version=1, key=("customer", "customer"))
class OrderPlaced(BaseModel):
    order: UUID
    customer: int
    amount: Decimal


def new_engine() -> Engine:
    return create_engine(os.environ["RELAY_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://"))


@worker_init.connect
def make_tables(**_: object) -> None:
    engine = new_engine()
    Base.metadata.create_all(engine)
    engine.dispose()  # the processes of the pool are forked next, and share no connection


@worker_process_init.connect
def connect(**_: object) -> None:
    """Make an engine in each process of the pool."""
    sessions.configure(bind=new_engine())


@app.task(autoretry_for=(OperationalError,), retry_backoff=True, max_retries=10, ignore_result=True)
def place_order(order: str, customer: int, amount: str) -> None:
    """Write an order and its event in one transaction, unless this task has done so before."""
    placed = OrderPlaced(order=UUID(order), customer=customer, amount=Decimal(amount))
    new = insert(Order).values(id=placed.order, customer=placed.customer, amount=placed.amount)
    with sessions.begin() as session:
        # Another run of this task may be under way: then the INSERT waits until that one has committed or failed.
        is_new = session.scalar(new.on_conflict_do_nothing().returning(Order.id)) is not None
        if is_new:
            add(session, placed)
