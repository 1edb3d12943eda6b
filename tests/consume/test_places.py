"""The annotation of what a handler gets besides the message is compared with what the inbox gives it."""

import functools
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Protocol, TypeVar

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, on
from relay.errors import ConfigurationError

URL = "postgresql://nobody@127.0.0.1:1/nowhere"
ASYNC_SESSION = "which is a sqlalchemy.ext.asyncio.session.AsyncSession"
ENGINE = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere", pool_size=40)
ASYNC_ENGINE = create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere", pool_size=40)
Any_ = TypeVar("Any_", bound=psycopg.AsyncConnection)


class OwnSession(Session):
    """A session as an application makes its own; SQLModel has one."""


class Executes(Protocol):
    def execute(self, query: Any, /) -> Any: ...


def plain(annotation: Any) -> Callable[..., Any]:
    def handle(message: Any, place: Any) -> None: ...

    handle.__annotations__ = {"place": annotation}
    return on("Counted")(handle)


def coroutine(annotation: Any) -> Callable[..., Any]:
    async def handle(message: Any, place: Any) -> None: ...

    handle.__annotations__ = {"place": annotation}
    return on("Counted")(handle)


def wrapped(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives its handler another thing than it gets."""

    @functools.wraps(handler)
    def wrapper(message: Any, place: Any) -> Any:
        return handler(message, str(place))

    return wrapper


def consumer(handler: Callable[..., Any], target: Any) -> Consumer:
    return Consumer("places", [handler], inbox=Inbox(target, "places"), broker=BrokerSettings())


@pytest.mark.parametrize(
    ("handler", "target", "words"),
    [
        (coroutine(psycopg.Connection), URL, "which is a psycopg.AsyncConnection"),
        (coroutine("psycopg.Connection[Any]"), URL, "which is a psycopg.AsyncConnection"),
        (coroutine(AsyncSession), URL, "which is a psycopg.AsyncConnection"),
        (coroutine(str), URL, "which is a psycopg.AsyncConnection"),
        (plain(psycopg.AsyncConnection), URL, "which is a psycopg.Connection"),
        (plain(Session), URL, "which is a psycopg.Connection"),
        (plain(psycopg.Connection), ENGINE, "which is a sqlalchemy.engine.base.Connection"),
        (plain(sa.Connection), sessionmaker(ENGINE), "which is a sqlalchemy.orm.session.Session"),
        (coroutine(AsyncSession), ASYNC_ENGINE, "which is a sqlalchemy.ext.asyncio.engine.AsyncConnection"),
        (
            coroutine(Session),
            async_sessionmaker(ASYNC_ENGINE),
            "which is a sqlalchemy.ext.asyncio.session.AsyncSession",
        ),
    ],
)
def test_a_class_that_it_cannot_be_is_refused(handler: Callable[..., Any], target: Any, words: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"handler \w+\.<locals>\.handle: place: .* not what it gets, {words}"
    ):
        consumer(handler, target)


@pytest.mark.parametrize(
    ("handler", "target"),
    [
        *((coroutine(each), URL) for each in (psycopg.AsyncConnection, psycopg.AsyncConnection[Any], object, Any)),
        *((coroutine(each), URL) for each in (psycopg.AsyncConnection | str, Executes, Any_, "Fraction", "no name")),
        (coroutine(Annotated[psycopg.Connection, "of a framework"]), URL),
        (wrapped(coroutine(str)), URL),
        (functools.partial(wrapped(coroutine(str))), URL),
        (plain("psycopg.Connection"), URL),
        (plain(sa.Connection), ENGINE),
        (plain(Session), sessionmaker(ENGINE)),
        (plain(OwnSession), sessionmaker(ENGINE)),
        (plain(OwnSession), sessionmaker(ENGINE, class_=OwnSession)),
        (plain(Session), sessionmaker(ENGINE, class_=OwnSession)),
        (coroutine(AsyncConnection), ASYNC_ENGINE),
        (coroutine(AsyncSession), async_sessionmaker(ASYNC_ENGINE)),
    ],
)
def test_what_it_may_be_is_taken(handler: Callable[..., Any], target: Any) -> None:
    if isinstance(handler, functools.partial):
        on("Counted")(handler)

    assert consumer(handler, target).queue == "places"


def test_other_parameters_say_nothing() -> None:
    @on("Counted")
    async def every(*given: Any) -> None: ...

    @on("Counted")
    async def third(message: Any, place: Any, other: AsyncIterator[str] | None = None) -> None: ...

    assert [consumer(each, URL).queue for each in (every, third)] == ["places", "places"]
