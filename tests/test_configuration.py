"""Where a setting comes from, and what is said when it cannot be used."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.config.keys import Key, all_keys
from relay.config.loading import FILE_SUFFIX, KUBERNETES, OTHER_VARIABLES, load
from relay.config.settings import Ordering, Settings
from relay.errors import ConfigurationError
from relay.operate.reference import UNFIXED_EXAMPLES
from relay.runtime.scrub import redacted
from tests.support.pipes import piped

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def toml(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return path

    return write


def secret(tmp_path: Path, text: str) -> str:
    path = tmp_path / "secret"
    path.write_text(text)
    return str(path)


def test_without_any_source_every_key_has_its_default() -> None:
    loaded = load(environ={})

    assert loaded.settings == Settings()
    assert set(loaded.origins) == {key.name for key in all_keys()}
    assert set(loaded.origins.values()) == {"default"}


def test_each_source_goes_before_the_next(toml: Write, tmp_path: Path) -> None:
    file = toml('[database]\nurl = "postgresql://file/db"')
    environ = {"RELAY_DATABASE_URL_FILE": secret(tmp_path, "postgresql://secret/db\n")}

    def found(**more: object) -> tuple[str, str]:
        loaded = load(environ=environ, **more)  # type: ignore[arg-type]
        return loaded.settings.database.url.get_secret_value(), loaded.origins["database.url"]

    assert found(config=None)[0] == "postgresql://secret/db"
    from_secret = found(config=file)
    environ["RELAY_DATABASE_URL"] = "postgresql://variable/db"
    from_variable = found(config=file)
    from_flag = found(config=file, flags={"database.url": "postgresql://flag/db"})
    environ.clear()
    from_file = found(config=file)

    assert from_flag == ("postgresql://flag/db", "flag --database-url")
    assert from_variable == ("postgresql://variable/db", "variable RELAY_DATABASE_URL")
    assert from_secret == ("postgresql://secret/db", f"file {tmp_path / 'secret'} of RELAY_DATABASE_URL_FILE")
    assert from_file == ("postgresql://file/db", f"file {file}")


def test_a_pipe_is_read_once_and_no_default_takes_its_place() -> None:
    pipe = piped('[broker]\nurl = "amqp://u:first@h/"')

    settings = load(config=pipe, environ={}).settings

    assert settings.broker.url.get_secret_value() == "amqp://u:first@h/"
    with pytest.raises(ConfigurationError, match="a pipe that is empty, or was read before"):
        load(config=pipe, environ={})


def test_a_file_nested_beyond_reason_is_refused(toml: Write) -> None:
    with pytest.raises(ConfigurationError, match="its values are nested too deep"):
        load(config=toml("relay.node = " + "[" * 50_000), environ={})


def test_keys_of_one_section_may_come_from_different_sources(toml: Write) -> None:
    file = toml('[relay]\nordering = "key"\nmax_attempts = 3')

    loaded = load(config=file, environ={"RELAY_ORDERING": "pipelined", "RELAY_DATABASE_SCHEMA": "billing"})

    assert loaded.settings.relay.ordering is Ordering.PIPELINED
    assert loaded.settings.relay.max_attempts == 3
    assert loaded.settings.database.schema_name == "billing"


@pytest.mark.parametrize("key", [key for key in all_keys() if not key.is_list], ids=lambda key: key.name)
def test_every_key_can_be_a_variable(key: Key, tmp_path: Path) -> None:
    variable, name = key.variable, key.name
    default = UNFIXED_EXAMPLES.get(name, key.default).strip('"')

    as_variable = load(environ={variable: default})
    as_file = load(environ={f"{variable}_FILE": secret(tmp_path, default)})

    assert as_variable.origins[name] == f"variable {variable}"
    assert as_file.origins[name].endswith(f"of {variable}_FILE")


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("relay.node", "RELAY_NODE"),
        ("relay.max_window_rows", "RELAY_MAX_WINDOW_ROWS"),
        ("http.listen", "RELAY_HTTP_LISTEN"),
        ("database.url", "RELAY_DATABASE_URL"),
        ("database.connect_timeout", "RELAY_DATABASE_CONNECT_TIMEOUT"),
        ("topology.queues", "RELAY_TOPOLOGY_QUEUES"),
        ("routes", "RELAY_ROUTES"),
    ],
)
def test_a_variable_names_section_and_key_and_leaves_out_the_section_relay(name: str, variable: str) -> None:
    assert [key.variable for key in all_keys() if key.name == name] == [variable]


def test_no_variable_means_two_things() -> None:
    of_keys = [variable for key in all_keys() for variable in key.variables]
    every = [*of_keys, *(variable + FILE_SUFFIX for variable in of_keys), *OTHER_VARIABLES]

    assert [variable for variable, meanings in Counter(every).items() if meanings > 1] == []
    assert [variable for variable in every if KUBERNETES.fullmatch(variable)] == []


DOUBLED = [key for key in all_keys() if len(key.path) > 1 and not key.is_secret]


@pytest.mark.parametrize("key", DOUBLED, ids=lambda key: key.name)
def test_two_underscores_behind_the_section_are_accepted(key: Key, tmp_path: Path) -> None:
    variable = "RELAY_" + "__".join(key.path).upper()
    value = UNFIXED_EXAMPLES.get(key.name, key.default).strip('"')

    as_variable = load(environ={variable: value})
    as_file = load(environ={f"{variable}_FILE": secret(tmp_path, value)})

    assert as_variable.settings == as_file.settings == load(environ={key.variable: value}).settings
    assert as_variable.origins[key.name] == f"variable {variable}"
    assert as_file.origins[key.name].endswith(f"of {variable}_FILE")


@pytest.mark.parametrize(
    ("one", "other"), [("RELAY_NODE", "RELAY_RELAY__NODE"), ("RELAY_NODE_FILE", "RELAY_RELAY__NODE_FILE")]
)
def test_two_variables_of_a_key_must_agree(one: str, other: str, tmp_path: Path) -> None:
    value = secret(tmp_path, "hunter2")

    agreed = load(environ={one: value, other: value})
    with pytest.raises(ConfigurationError) as refused:
        load(environ={one: value, other: value + "2"})

    assert agreed.origins["relay.node"].endswith(one)
    assert str(refused.value) == f"variables {one} and {other} have different values; keep {one} alone"


def test_the_file_is_named_by_the_flag_then_the_variable_then_the_folder(toml: Write, tmp_path: Path) -> None:
    flag = toml('[log]\nlevel = "error"')
    (tmp_path / "variable.toml").write_text('[log]\nlevel = "warning"')
    (tmp_path / "relay.toml").write_text('[log]\nlevel = "debug"')
    environ = {"RELAY_CONFIG": "variable.toml"}

    assert load(config=flag, environ=environ).settings.log.level == "error"
    assert load(environ=environ).settings.log.level == "warning"
    assert load(environ={}).settings.log.level == "debug"


def test_routes_are_tables_in_the_file_and_json_in_a_variable(toml: Write) -> None:
    file = toml('[[routes]]\nevent_type = "Invoice*"\nexchange = "billing"')

    from_file = load(config=file, environ={}).settings.routes
    from_variable = load(
        environ={"RELAY_ROUTES": '[{"event_type": "Invoice*", "exchange": "billing"}]'}
    ).settings.routes

    assert from_file == from_variable
    assert from_file[0].routing_key == "{aggregate_type}.{event_type}"


SOURCES = ["", "/shop", "shop", "https://example.org/shop?a=1#b", "urn:uuid:6e8bc430-9c3a-11d9-9669-080020", "a@b"]
NO_SOURCES = ["a b", "1a:b", ":b", "é", "%zz", "a\n", "/" * 256, "https://me:hunter2@example.org/", "//me@example.org"]


@pytest.mark.parametrize("source", SOURCES)
def test_the_source_of_events_is_a_uri_or_a_path(source: str) -> None:
    settings = load(environ={"RELAY_BROKER_CLOUDEVENTS_SOURCE": source}).settings

    assert settings.broker.cloudevents_source == source


@pytest.mark.parametrize("source", NO_SOURCES)
def test_another_source_is_refused_and_a_password_is_not_repeated(source: str) -> None:
    with pytest.raises(ConfigurationError, match="it takes a URI or a path, without a login") as refused:
        load(environ={"RELAY_BROKER_CLOUDEVENTS_SOURCE": source})

    assert str(refused.value).startswith("broker.cloudevents_source = ")
    assert "hunter2" not in str(refused.value)


def test_all_that_is_wrong_is_told_at_once_with_key_source_and_what_it_takes(toml: Write) -> None:
    file = toml(
        """
        databse = {}
        relay = 5
        routes = [{event_type = "X"}, {exchnge = "a", exchange = "b"}, {exchange = 4}]
        [broker]
        exchnge = "x"
        ordering = "key"
        heartbeat = 99
        """
    )
    environ = {
        "RELAY_DATABSE_URL": "x",
        "RELAY_ORDERING": "keyy",
        "RELAY_DATABASE_SCHEMA": "Robert'); DROP",
        "RELAY_DATABASE_URL": "",
        "RELAY_BROKER_URL_FILE": "/does/not/exist",
        "RELAY_NODE": "ü" * 128,
    }

    with pytest.raises(ConfigurationError) as refused:
        load(config=file, environ=environ)

    assert sorted(str(refused.value).splitlines()) == sorted(
        [
            "unknown variable RELAY_DATABSE_URL; did you mean RELAY_DATABASE_URL?",
            "file /does/not/exist (variable RELAY_BROKER_URL_FILE) cannot be read: No such file or directory",
            f"unknown key databse (file {file}); did you mean database?",
            f"relay (file {file}) is no table; it takes [relay] with keys below",
            f"unknown key broker.exchnge (file {file}); did you mean broker.exchange?",
            f"unknown key broker.ordering (file {file}); did you mean relay.ordering?",
            f'broker.heartbeat = 99 (file {file}): it takes whole seconds from 1 to 60, or as in "30s"',
            "relay.ordering = 'keyy' (variable RELAY_ORDERING): it takes one of key, pipelined",
            f"relay.node = '{'ü' * 128}' (variable RELAY_NODE): it takes text of 1 to 255 bytes",
            (
                'database.schema = "Robert\'); DROP" (variable RELAY_DATABASE_SCHEMA): it takes at most 40 lower-case'
                " letters, digits and _, no digit first"
            ),
            (
                "database.url (variable RELAY_DATABASE_URL): it takes a libpq URL,"
                " postgresql://user:password@host:5432/database"
            ),
            f"routes[0].exchange (file {file}) is missing; it takes text of at most 255 bytes",
            f"unknown key routes[1].exchnge (file {file}); did you mean exchange?",
            f"routes[2].exchange = 4 (file {file}): it takes text of at most 255 bytes",
        ]
    )


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RELAY_BROKER_URL": "http://me:hunter2@h/"}, "broker.url (variable RELAY_BROKER_URL): it takes amqp://"),
        ({"RELAY_DATABASE_URL": "me:hunter2@h"}, "database.url (variable RELAY_DATABASE_URL): it takes a libpq URL"),
        ({"RELAY_ROUTES": "hunter2"}, "routes (variable RELAY_ROUTES) is not JSON"),
        ({"RELAY_ROUTES": "[" * 50_000}, "routes (variable RELAY_ROUTES) is not JSON"),
        ({"RELAY_ROUTES": '"hunter2"'}, "routes (variable RELAY_ROUTES): it takes tables"),
        ({"RELAY_ROUTES": '["hunter2"]'}, "routes (variable RELAY_ROUTES): it takes tables"),
        ({"RELAY_CONFIG": "/none.toml"}, "file /none.toml (variable RELAY_CONFIG) cannot be read: No such file"),
        ({"RELAY_DATABASE__URL": "x"}, "unknown variable RELAY_DATABASE__URL; did you mean RELAY_DATABASE_URL?"),
        ({"RELAY_XYZ": "x"}, "unknown variable RELAY_XYZ"),
        ({"RELAY_LOG_LEVEL": "loud"}, "log.level = 'loud' (variable RELAY_LOG_LEVEL): it takes one of debug, info"),
        ({"RELAY_BACKOFF_MAX": "inf"}, "relay.backoff_max = 'inf'"),
        ({"RELAY_DATABASE_URL_FILE": ""}, "variable RELAY_DATABASE_URL_FILE is empty; it takes the path of a file"),
        ({"RELAY_DATABASE_SCHEMA": "amqp://me:hunter2@h/"}, "database.schema = 'amqp://me:***@h/' (variable"),
        (
            {"RELAY_ROUTES": '[{"exchange": "%s amqp://me:hunter2@h/"}]' % ("x" * 255)},
            f"routes[0].exchange = '{'x' * 255} amqp://me:***@h/' (variable RELAY_ROUTES): it takes",
        ),
    ],
)
def test_a_refusal_names_the_source_and_repeats_no_secret(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(environ=environ)

    assert str(refused.value).startswith(words)
    assert "hunter2" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("RELAY_NODE_NAME", "RELAY_NODE"),
        ("RELAY_RELAY_NODE", "RELAY_NODE"),
        ("RELAY_RELAY__NODENAME", "RELAY_NODE"),
        ("RELAY_NODE_NAME_FILE", "RELAY_NODE_FILE"),
        ("RELAY_THE_NAME_OF_THIS_NODE", "RELAY_NODE"),
        ("RELAY_HTTP__LISTENN", "RELAY_HTTP_LISTEN"),
        ("RELAY_LISTEN_ADDRESS", "RELAY_HTTP_LISTEN or RELAY_CONSOLE_LISTEN"),
        ("RELAY_DATABASE__SCHEMA_NAME", "RELAY_DATABASE_SCHEMA"),
        ("RELAY_DB_SCHEME", "RELAY_DATABASE_SCHEMA"),
        ("RELAY_LOGLEVEL", "RELAY_LOG_LEVEL"),
        ("RELAY_CONFIG_FILE", "RELAY_CONFIG"),
        ("RELAY_OPERATOR_NAME", "RELAY_OPERATOR"),
        ("RELAY_node", "RELAY_NODE"),
        ("RELAY_URL", "RELAY_BROKER_URL or RELAY_DATABASE_URL"),
        ("RELAY_CONNECT_TIMEOUT", "RELAY_BROKER_CONNECT_TIMEOUT or RELAY_DATABASE_CONNECT_TIMEOUT"),
        ("RELAY_BACKOFF", "RELAY_BACKOFF_MAX or RELAY_BACKOFF_INITIAL"),
    ],
)
def test_an_unknown_variable_names_the_nearest_known_ones(variable: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(environ={variable: "hunter2"})

    assert str(refused.value) == f"unknown variable {variable}; did you mean {nearest}?"


@pytest.mark.parametrize("variable", ["RELAY_", "RELAY_XYZ", "RELAY__", "RELAY_ÄÖ", "RELAY_" + "PASSWORD_" * 20])
def test_a_variable_like_no_other_names_a_known_one_all_the_same(variable: str) -> None:
    known = {each for key in all_keys() for each in (key.variable, key.variable + FILE_SUFFIX)} | {*OTHER_VARIABLES}

    with pytest.raises(ConfigurationError) as refused:
        load(environ={variable: "x"})

    told = str(refused.value).removeprefix(f"unknown variable {variable}; did you mean ").removesuffix("?")
    assert known.issuperset(told.split(" or "))


@pytest.mark.parametrize("key", all_keys(), ids=lambda key: key.name)
def test_a_slip_in_any_variable_names_the_right_one(key: Key) -> None:
    variable = key.variable
    section = key.path[0].upper()
    slips = {f"{variable}X", f"RELAY_X_{variable.removeprefix('RELAY_')}", f"RELAY_{variable}", f"{variable}_OF_MINE"}
    slips |= {f"RELAY_{section}__{key.path[-1].upper()}X", f"RELAY_{section}_{key.path[-1].upper()}__"}

    for slip in slips:
        with pytest.raises(ConfigurationError) as refused:
            load(environ={slip: "x"})
        assert str(refused.value) == f"unknown variable {slip}; did you mean {variable}?"


def test_a_secret_file_given_to_another_key_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")

    with pytest.raises(ConfigurationError) as refused:
        load(environ={"RELAY_ORDERING_FILE": str(file)})

    assert str(refused.value) == (
        f"relay.ordering (file {file} of RELAY_ORDERING_FILE): it takes one of key, pipelined"
    )


@pytest.mark.parametrize("content", [b"[relay\n", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)

    with pytest.raises(ConfigurationError, match=r"broken\.toml \(flag --config\)"):
        load(config=file, environ={})


def test_variables_of_a_kubernetes_service_named_relay_are_passed_over() -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8080_TCP", "PORT_8080_TCP_ADDR"]

    loaded = load(environ={f"RELAY_{name}": "tcp://10.0.0.1:8080" for name in names})

    assert loaded.settings == Settings()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "postgresql://u:p@h1:1,h2/db?password=x&sslmode=off",
            "postgresql://u:***@h1:1,h2/db?password=***&sslmode=off",
        ),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("host=h password='a b' user=u", "host=h password=*** user=u"),
        ("amqp://u:p@a/,amqps://u:q/w@x@b/v", "amqp://u:***@a/,amqps://u:***@b/v"),
        ("amqp://u:p,q@a/", "amqp://u:***@a/"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redacted(url) == shown
