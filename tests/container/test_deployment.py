"""config/deployment.yaml starts what is in the image, asks what the relay answers, and has settings that it takes."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from relay.cli.command import app
from relay.config.loading import FILE_SUFFIX, load
from relay.probes.server import LOOP_ANSWERS_WITHIN, PATHS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "config" / "deployment.yaml").read_text()
STAGE = (ROOT / "Dockerfile").read_text().partition("\nFROM ${BASE} AS relay\n")[2]
EXIT = 2.0  # seconds that the process may need behind relay.drain_timeout
URLS = {"RELAY_DATABASE_URL": "postgresql://relay@db/app", "RELAY_BROKER_URL": "amqp://relay@mq/"}


@pytest.fixture
def pod() -> dict[str, Any]:
    deployment = yaml.safe_load(TEXT)
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    template: dict[str, Any] = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    pod: dict[str, Any] = template["spec"]
    return pod


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    found: dict[str, Any] = container
    return found


def test_the_image_is_that_of_this_release_and_runs_what_it_starts(container: dict[str, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (migration,) = re.findall(r"`args: \[(.+?)\]`", TEXT)

    assert container["image"] == f"outbox-relay:{version}"
    assert not {"command", "args"} & container.keys()
    assert 'ENTRYPOINT ["tini", "--", "relay"]\nCMD ["run"]\n' in STAGE
    app().parse_args(shlex.split(migration), exit_on_error=False, print_error=False)


def test_the_probes_ask_what_the_relay_answers_on_the_port_of_the_image(container: dict[str, Any]) -> None:
    (port,) = container["ports"]
    probes = {name: container[name] for name in ("livenessProbe", "readinessProbe")}

    assert f"\nENV RELAY_HTTP_LISTEN=0.0.0.0:{port['containerPort']}\nEXPOSE {port['containerPort']}\n" in STAGE
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {port["name"]}
    assert min(probe["timeoutSeconds"] for probe in probes.values()) > LOOP_ANSWERS_WITHIN
    assert {name: probe["httpGet"]["path"].partition("?")[0] for name, probe in probes.items()} == {
        "livenessProbe": PATHS[0],
        "readinessProbe": PATHS[1],
    }
    assert (
        f'query == "{probes["readinessProbe"]["httpGet"]["path"].partition("?")[2]}"'
        in (ROOT / "relay" / "probes" / "node.py").read_text()
    )


def test_the_settings_are_secret_files_of_the_volume(
    pod: dict[str, Any], container: dict[str, Any], tmp_path: Path
) -> None:
    named = {each["name"]: Path(each["value"]) for each in container["env"]}
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    secret, *keys = re.findall(r"secret generic (\S+)|--from-file=(\S+)", TEXT)
    environ = {}
    for variable, file in named.items():
        (tmp_path / file.name).write_text(URLS[variable.removesuffix(FILE_SUFFIX)])
        environ[variable] = str(tmp_path / file.name)

    settings = load(environ=environ).settings

    assert (settings.database.url.get_secret_value(), settings.broker.url.get_secret_value()) == tuple(URLS.values())
    assert {file.parent for file in named.values()} == {Path(mount["mountPath"])}
    assert (mount["name"], volume["secret"]["secretName"]) == (volume["name"], secret[0])
    assert f"\nUSER 10001:{pod['securityContext']['fsGroup']}\n" in STAGE  # the files belong to root and this group
    assert volume["secret"]["defaultMode"] == 0o440
    assert {key for _, key in keys} == {file.name for file in named.values()}


def test_a_pod_may_stop_for_longer_than_the_relay_drains(pod: dict[str, Any]) -> None:
    assert pod["terminationGracePeriodSeconds"] > load(environ={}).settings.relay.drain_timeout + EXIT
