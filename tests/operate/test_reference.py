"""What is written about the keys is what the program takes."""

import tomllib
from pathlib import Path

from relay.config.keys import all_keys
from relay.config.loading import load
from relay.config.settings import Settings
from relay.operate.reference import EXAMPLES, UNFIXED_EXAMPLES, example, markdown

ROOT = Path(__file__).parents[2]
RENEW = "renew it from relay.operate.reference"


def uncommented(text: str) -> str:
    return "\n".join(line[1:] if line.startswith("#") and line[1:2].strip() else line for line in text.splitlines())


def test_the_example_file_is_the_one_of_this_release() -> None:
    assert (ROOT / "config" / "relay.toml").read_text() == example(), RENEW


def test_the_documented_tables_are_those_of_this_release() -> None:
    assert markdown() in (ROOT / "docs" / "configuration.md").read_text(), RENEW


def test_the_example_as_it_stands_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(example())

    loaded = load(config=file, environ={})

    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}


def test_the_example_without_comment_signs_says_every_default(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    text = example()
    for tables in EXAMPLES.values():
        text = text.replace(tables, "")
    text = uncommented(text)
    for name, value in UNFIXED_EXAMPLES.items():
        text = text.replace(f"{name.removeprefix('relay.')} = {value}", "")
    file.write_text(text)

    loaded = load(config=file, environ={})

    assert loaded.settings == Settings()
    assert {name for name, origin in loaded.origins.items() if origin == "default"} == {*UNFIXED_EXAMPLES, *EXAMPLES}


def test_the_example_route_is_one(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(uncommented(EXAMPLES["routes"]))

    (route,) = load(config=file, environ={}).settings.routes

    assert route.exchange == "billing"
    assert tomllib.loads(file.read_text())["routes"] == [route.model_dump()]


def test_the_example_topology_is_one(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(uncommented("".join(EXAMPLES.values())))

    topology = load(config=file, environ={}).settings.topology

    assert tomllib.loads(file.read_text())["topology"] == topology.model_dump(mode="json", exclude_unset=True)


def test_every_key_says_what_it_takes_and_is_for() -> None:
    assert [key.name for key in all_keys() if not key.takes or not key.about] == []
