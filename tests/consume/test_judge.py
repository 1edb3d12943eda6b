"""What errors mean, and when the next try is."""

import psycopg
import pytest

from relay.consume import FailurePolicy, Overload, Permanent, Retries, Transient
from relay.consume.classify import History, Judge, Reason, first_line, is_outage
from relay.consume.policies import FailureClass
from relay.errors import ConfigurationError


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
    "error", [psycopg.errors.DiskFull(), psycopg.errors.ReadOnlySqlTransaction(), psycopg.errors.AdminShutdown()]
)
def test_a_database_that_cannot_is_no_messages_fault(error: psycopg.Error) -> None:
    assert is_outage(error)


@pytest.mark.parametrize("error", [psycopg.errors.UniqueViolation(), psycopg.errors.UndefinedTable(), OSError("gone")])
def test_what_the_handler_did_is_no_outage(error: Exception) -> None:
    assert not is_outage(error)


def test_of_an_error_only_the_first_line_is_told() -> None:
    assert first_line(ValueError("duplicate key\nDETAIL:  Key (iban)=(DE00 1234) already exists.")) == "duplicate key"
    assert len(first_line(ValueError("x" * 10_000))) == 300
    assert not first_line(ValueError())


class MuteError(Exception):
    def __str__(self) -> str:
        return str(self.args[1])


def test_an_error_without_words_is_told_too() -> None:
    assert first_line(MuteError("one")) == "its words cannot be had: IndexError"
