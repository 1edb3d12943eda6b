"""What errors mean, and when the next try is."""

import inspect
import re
from pathlib import Path

import psycopg
import pytest

from relay.consume import (
    Backoff,
    Consumer,
    FailurePolicy,
    Inbox,
    Overload,
    Permanent,
    Retries,
    Transient,
    WorkPolicy,
)
from relay.consume.classify import History, Judge, Reason, first_line
from relay.consume.database_faults import FAULTS, Fault, fault_of
from relay.consume.policies import FailureClass
from relay.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


class RefusedError(Exception): ...


class RefusedForEverError(RefusedError): ...


def test_the_nearest_class_that_is_known_decides() -> None:
    judge = Judge(
        FailurePolicy(
            retry_on=[RefusedError, psycopg.OperationalError],
            permanent_on=[RefusedForEverError],
            overload_on=[psycopg.errors.TooManyConnections],
        )
    )

    assert judge.class_of(RefusedError()) is FailureClass.TRANSIENT
    assert judge.class_of(RefusedForEverError()) is FailureClass.PERMANENT
    assert judge.class_of(psycopg.errors.LockNotAvailable()) is FailureClass.TRANSIENT
    assert judge.class_of(psycopg.errors.TooManyConnections()) is FailureClass.OVERLOAD
    assert judge.class_of(psycopg.DataError()) is FailureClass.UNCLASSIFIED
    assert [judge.class_of(error()) for error in (Permanent, Transient, Overload)] == [
        FailureClass.PERMANENT,
        FailureClass.TRANSIENT,
        FailureClass.OVERLOAD,
    ]


def test_classes_may_come_from_an_iterator() -> None:
    policy = FailurePolicy(permanent_on=iter([RefusedError]))  # type: ignore[arg-type]

    assert Judge(policy).class_of(RefusedError()) is FailureClass.PERMANENT


def test_a_class_has_one_meaning() -> None:
    with pytest.raises(ConfigurationError, match="RefusedError cannot be transient and permanent"):
        FailurePolicy(retry_on=[RefusedError], permanent_on=[RefusedError])


def test_a_message_fails_so_and_so_often_and_then_for_good() -> None:
    judge = Judge(FailurePolicy(retries=Retries(attempts=2), transient_retries=Retries(attempts=3)))

    assert judge.failure(ValueError(), History(0)).reason is None
    assert judge.failure(ValueError(), History(1)).reason is Reason.EXHAUSTED
    assert judge.failure(Transient(), History(1)).reason is None
    assert judge.failure(Transient(), History(2)).reason is Reason.EXHAUSTED
    assert judge.failure(Permanent(), History(0)).reason is Reason.PERMANENT


def test_waits_grow_to_the_maximum_and_chance_only_shortens_them() -> None:
    retries = Retries(attempts=6, initial=1.0, multiplier=3.0, maximum=10.0, jitter=0.2)

    assert retries.steps() == [1.0, 3.0, 9.0, 10.0, 10.0]
    assert all(7.2 <= retries.wait(3) <= 9.0 for _ in range(100))
    policy = FailurePolicy(retries=retries, transient_retries=Retries(attempts=3, initial=3.0))
    assert Judge(policy).steps == [1.0, 3.0, 6.0, 9.0, 10.0]


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"initial": 0.0}, {"initial": 9.0, "maximum": 1.0}, {"multiplier": 0.5}, {"jitter": 1.0}]
)
def test_retries_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="attempts and multiplier are at least 1"):
        Retries(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (psycopg.errors.DiskFull(), Fault.OUTAGE),
        (psycopg.errors.ReadOnlySqlTransaction(), Fault.OUTAGE),
        (psycopg.errors.AdminShutdown(), Fault.OUTAGE),
        (psycopg.errors.DeadlockDetected(), Fault.CONFLICT),
        (psycopg.errors.InvalidSqlStatementName(), Fault.SESSION),
        (psycopg.errors.TransactionTimeout(), Fault.DURATION),
        (psycopg.errors.FeatureNotSupported(), Fault.MESSAGE),
        (psycopg.errors.UniqueViolation(), Fault.MESSAGE),
        (psycopg.errors.UndefinedTable(), Fault.MESSAGE),
        (psycopg.errors.QueryCanceled(), Fault.MESSAGE),
        (OSError("gone"), Fault.MESSAGE),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else each.value,
)
def test_an_error_of_the_database_speaks_of_the_message_or_of_the_database(error: Exception, fault: Fault) -> None:
    assert fault_of(error) is fault


def test_a_conflict_that_the_policy_names_is_what_the_policy_says() -> None:
    deadlock = psycopg.errors.DeadlockDetected()

    assert Judge(FailurePolicy()).is_passing(deadlock)
    assert Judge(FailurePolicy(permanent_on=[psycopg.Error])).is_passing(deadlock)
    assert not Judge(FailurePolicy(permanent_on=[psycopg.errors.DeadlockDetected])).is_passing(deadlock)


def test_the_page_lists_what_the_database_says_of_itself() -> None:
    page = (ROOT / "docs" / "consumer.md").read_text()

    listed = dict(re.findall(r"^\| `(\w{2,5})` \| \w+ \| .+ \| `(\w+)` \|$", page, re.MULTILINE))

    assert listed == {prefix: fault.value for prefix, fault in FAULTS.items()}


def test_of_an_error_only_the_first_line_is_told() -> None:
    assert first_line(ValueError("duplicate key\nDETAIL:  Key (iban)=(DE00 1234) already exists.")) == "duplicate key"
    assert len(first_line(ValueError("x" * 10_000))) == 300
    assert not first_line(ValueError())


class MuteError(Exception):
    def __str__(self) -> str:
        return str(self.args[1])


def test_an_error_without_words_is_told_too() -> None:
    assert first_line(MuteError("one")) == "its message cannot be read: IndexError"


@pytest.mark.parametrize("options", [Consumer, Inbox, FailurePolicy, Retries, WorkPolicy, Backoff])
def test_the_page_lists_every_option(options: type) -> None:
    page = (ROOT / "docs" / "consumer.md").read_text()

    (section,) = re.findall(r"^## Options\n(.+?)^## ", page, re.MULTILINE | re.DOTALL)

    (item,) = [each for each in section.split("\n- ") if each.lstrip("- \n").startswith(f"`{options.__name__}")]
    assert [name for name in inspect.signature(options).parameters if name not in item] == []
