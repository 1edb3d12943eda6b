"""Whatever a handler is and however it ends: it has run to its end, or it has failed."""

import asyncio
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, WorkPolicy, on
from relay.consume.apply.handlers import call, call_async, call_in_thread, collect_handlers, in_own_task, is_async
from relay.errors import ConfigurationError, HandlerResultError
from tests.consume.effects import Queue, Table, apply, running
from tests.consume.policies import SEVERAL_MINUTES
from tests.support.eventually import eventually

Function = Callable[..., Any]
POOL = ThreadPoolExecutor(1)
PATIENCE = 60.0  # seconds; what is never told takes longer


class Body:
    """A handler's work, and whether it came to its end."""

    def __init__(self, ending: Any) -> None:
        self.ending = ending
        self.is_finished = False

    def run(self, *_: Any) -> Any:
        if isinstance(self.ending, BaseException):
            raise self.ending
        self.is_finished = True
        return self.ending

    async def run_async(self, *_: Any) -> Any:
        await asyncio.sleep(0)
        return self.run()

    async def cancel_itself(self, *_: Any) -> Any:
        if (task := asyncio.current_task()) is not None:
            task.cancel()
        return self.run()


class Callee:
    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    @staticmethod
    def static(function: Function) -> Function:
        return Callee(function).__call__


class AsyncCallee(Callee):
    async def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def passed_on(function: Function) -> Function:
    return lambda *arguments: function(*arguments)  # noqa: PLW0108  (else it would be the function itself)


def wrapped(function: Function) -> Function:
    """A decorator as many are: it passes on what comes back."""

    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


def generator(function: Function) -> Function:
    def lazy(*arguments: Any) -> Any:
        yield function(*arguments)

    return lazy


def async_generator(function: Function) -> Function:
    async def lazy(*arguments: Any) -> Any:
        yield function(*arguments)

    return lazy


def never_called(function: Function) -> type:
    """A class where its instance was meant."""

    class Handler:
        def __init__(self, *arguments: Any) -> None: ...

        def __call__(self, *arguments: Any) -> Any:
            return function(*arguments)

    return Handler


def in_thread(function: Function) -> Function:
    return lambda *arguments: asyncio.to_thread(function, *arguments)


LAYERS: list[Callable[[Function], Function]] = [
    passed_on,
    wrapped,
    functools.partial,
    functools.singledispatch,
    functools.lru_cache,
    Callee,
    Callee.static,
    AsyncCallee,
    generator,
    async_generator,
    lambda function: contextmanager(generator(function)),
    lambda function: asynccontextmanager(async_generator(function)),
    lambda function: lambda *arguments: map(function, arguments),
    lambda function: lambda *arguments: filter(function, arguments),
    lambda function: lambda *arguments: itertools.starmap(function, [arguments]),
    lambda function: lambda *arguments: zip(generator(function)(*arguments), strict=True),
    lambda function: lambda *arguments: [function(*arguments)],
    lambda function: lambda *arguments: {"one": function(*arguments)},
    lambda function: lambda *arguments: functools.partial(function, *arguments),
    lambda function: lambda *arguments: POOL.submit(function, *arguments),
    lambda function: lambda *arguments: asyncio.ensure_future(function(*arguments)),
    in_thread,
    never_called,
]
ENDINGS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: 42,
    lambda: [1, "two"],
    ValueError,
    StopIteration,
    StopAsyncIteration,
    MemoryError,
    RecursionError,
    TimeoutError,
    asyncio.CancelledError,
    CancelledError,
    GeneratorExit,
    lambda: ExceptionGroup("two", [ValueError()]),
    lambda: BaseExceptionGroup("two", [GeneratorExit()]),
    type("PanicError", (BaseException,), {}),
    KeyboardInterrupt,
    SystemExit,
]


async def called(function: Function) -> None:
    """Call it as the transactions do."""
    if is_async(function):
        await in_own_task(call_async(function, "message", "connection"))
    else:
        await asyncio.to_thread(call, function, "message", "connection")


@pytest.fixture
def lost() -> Iterator[None]:
    """Coroutines that a layer loses on the way are collected while their warning is expected."""
    yield
    gc.collect()


@pytest.mark.usefixtures("lost")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@settings(max_examples=200, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["run", "run_async", "cancel_itself"]),
    ending=st.sampled_from(ENDINGS),
    layers=st.lists(st.sampled_from(LAYERS), max_size=3),
    is_hook=st.booleans(),
)
@example(kind="run", ending=StopIteration, layers=[], is_hook=False)
@example(kind="run", ending=asyncio.CancelledError, layers=[], is_hook=False)
@example(kind="run_async", ending=ENDINGS[0], layers=[passed_on], is_hook=False)
@example(kind="run_async", ending=ENDINGS[0], layers=[functools.singledispatch], is_hook=False)
@example(
    kind="run_async",
    ending=ENDINGS[0],
    layers=[lambda function: lambda *arguments: [function(*arguments)]],
    is_hook=False,
)
@example(kind="cancel_itself", ending=ENDINGS[0], layers=[], is_hook=False)
def test_what_comes_back_has_run_to_its_end(
    kind: str, ending: Callable[[], Any], layers: list[Callable[[Function], Function]], is_hook: bool
) -> None:
    # Python's Futures take no StopIteration: the handler's own await of its thread would never end.
    assume(ending is not StopIteration or in_thread not in layers)
    body = Body(ending())
    function = functools.reduce(lambda inner, layer: layer(inner), layers, getattr(body, kind))
    work = in_own_task(call_in_thread(function, "partition")) if is_hook else called(function)

    try:
        asyncio.run(asyncio.wait_for(work, PATIENCE))
    except Exception as error:
        is_told = not isinstance(error, TimeoutError) or ending is TimeoutError
        assert is_told, "nobody hears of its end"
        assert isinstance(body.ending, BaseException) or layers or kind == "cancel_itself"
    except (KeyboardInterrupt, SystemExit):
        assert ending in (KeyboardInterrupt, SystemExit)
    else:
        assert body.is_finished


def test_a_decorator_leaves_an_async_handler_what_it_is() -> None:
    body = Body(None)
    for layer in (passed_on, wrapped, functools.partial, functools.singledispatch, functools.lru_cache, AsyncCallee):
        assert is_async(layer(body.run_async)) is (layer is not passed_on)
        assert is_async(layer(body.run)) is (layer is AsyncCallee)


def write(message: Message, connection: Any) -> Any:
    values = (message.message_id, message.json())
    return connection.execute("INSERT INTO effect (message_id, number) VALUES (%s, %s)", values)


async def write_async(message: Message, connection: Any) -> None:
    await write(message, connection)


async def write_in_tasks(message: Message, connection: Any) -> list[Any]:
    tasks = [asyncio.create_task(write_async(message, connection))]
    await asyncio.wait(tasks)
    return tasks


FINISHED: list[Function] = [
    write,
    write_in_tasks,
    passed_on(write),
    Callee(write),
    write_async,
    wrapped(write_async),
    AsyncCallee(write_async),
]
UNFINISHED: list[Function] = [
    passed_on(write_async),
    Callee(write_async),
    contextmanager(generator(write)),
    never_called(write),
    lambda *arguments: [write_async(*arguments)],
    lambda *arguments: (write_async(*arguments),),
    lambda *arguments: {"one": write_async(*arguments)},
    lambda *arguments: filter(functools.partial(write, arguments[0]), arguments[1:]),
    lambda *arguments: itertools.starmap(write, [arguments]),
    lambda *arguments: itertools.chain(generator(write)(*arguments)),
]


async def test_only_what_has_run_to_its_end_is_applied(table: Table, inbox: Inbox) -> None:
    for handler in FINISHED:
        assert (await apply(inbox, handler)).count == 1
    assert await table.numbers() == [1] * len(FINISHED)
    for handler in UNFINISHED:
        with pytest.raises(HandlerResultError, match="run it to its end"):
            await apply(inbox, handler)
    assert await table.inbox_count() == len(FINISHED)


@pytest.mark.parametrize("handler", [generator(write), async_generator(write), functools.partial(generator(write))])
def test_a_generator_is_refused(handler: Function) -> None:
    with pytest.raises(ConfigurationError, match="it holds a `yield`"):
        collect_handlers([on("Counted")(handler)])


def raising(error: type[BaseException]) -> Function:
    def handle(message: Message, connection: Any) -> None:
        if message.json() == 0:
            raise error
        write(message, connection)

    return handle


async def cancel_itself(message: Message, connection: Any) -> None:
    if message.json() == 0 and (task := asyncio.current_task()) is not None:
        task.cancel()
    await write(message, connection)


HARMFUL = [raising(StopIteration), raising(CancelledError), raising(GeneratorExit), cancel_itself]


@pytest.mark.parametrize("handler", HARMFUL, ids=["no value", "cancelled", "no exception", "cancels itself"])
async def test_a_handler_ends_no_worker(
    handler: Function, queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(0, key="a")
    await queue.send(1, key="b")

    consumer = Consumer(
        queue.name,
        [on("Counted")(handler)],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(retries=SEVERAL_MINUTES),
        work=WorkPolicy(concurrency=1),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "the one behind it is applied")

    assert (await table.numbers(), consumer.counters.failed) == ([1], 1)
