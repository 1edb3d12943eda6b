"""What is written about the keys is what the program takes."""

import re
import tomllib
from pathlib import Path

from relay.config.keys import all_keys, table_keys
from relay.config.loading import load
from relay.config.settings import Settings
from relay.config.topology import Queue
from relay.operate.reference import COMMON, EXAMPLES, SAID_BY_COMMON, UNFIXED_EXAMPLES, example, markdown

ROOT = Path(__file__).parents[2]
RENEW = "renew it from relay.operate.reference"


def uncommented(text: str) -> str:
    return "\n".join(line[1:] if line.startswith("#") and line[1:2].strip() else line for line in text.splitlines())


def test_the_example_file_is_the_one_of_this_release() -> None:
    assert (ROOT / "config" / "relay.toml").read_text() == example(), RENEW


def test_the_documented_keys_are_those_of_this_release() -> None:
    assert markdown() in (ROOT / "docs" / "configuration.md").read_text(), RENEW


def test_each_key_is_listed_with_its_default_and_with_what_it_takes() -> None:
    listed = markdown().splitlines()

    assert "- **`declare`** (`true`): " + about("broker.declare") in listed
    assert f"- **`max_attempts`** (`8`): {about('relay.max_attempts')}; takes a whole number from 1 to 1000" in listed
    assert f"- **`name`** (required): {table_keys(Queue)[0].about}" in listed


def test_what_the_page_says_once_is_true_of_every_key() -> None:
    settings = load(environ=dict([re.findall(r"`(RELAY_ROUTES)='(.+?)'`", COMMON)[0]])).settings
    single = [key for key in all_keys() if not key.is_list]
    every = single + [each for key in all_keys() if key.table for each in table_keys(key.table)]

    assert [route.exchange for route in settings.routes] == ["billing"]
    assert {key.name: key.variable for key in single} == {
        key.name: "_".join(["RELAY", *(part for part in key.path if part != "relay")]).upper() for key in single
    }
    assert SAID_BY_COMMON - {key.takes for key in every} == set()


def about(name: str) -> str:
    (key,) = (each for each in all_keys() if each.name == name)
    return key.about


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
        text = text.replace(f"{name.rpartition('.')[2]} = {value}", "")
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
