"""Find the settings: flags, then environment, then secret files, then relay.toml, then defaults.

`load` reads every source to its end before it complains, so that one run tells all that is wrong.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from relay.errors import ConfigurationError, importing
from relay.runtime.scrub import redacted

with importing("relay"):
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

    from relay.config.keys import Key, all_keys, table_keys
    from relay.config.secret import SecretFile, SecretSource, read_file, read_value
    from relay.config.settings import Settings

PREFIX = "RELAY_"
CONFIG_VARIABLE = "RELAY_CONFIG"
OPERATOR_VARIABLE = "RELAY_OPERATOR"  # who gives commands that are audited; no setting
TOKEN_VARIABLE = "RELAY_TOKEN"  # noqa: S105  (the name of the variable for a command that a console does)
TOKEN_FILE_VARIABLE = f"{TOKEN_VARIABLE}_FILE"
OTHER_VARIABLES = (CONFIG_VARIABLE, OPERATOR_VARIABLE, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)
FILE_SUFFIX = "_FILE"
USUAL_FILE = Path("relay.toml")
NEAREST = 3  # variables that are named for an unknown one

# Kubernetes gives every container such variables for each Service of its namespace; a Service named `relay`
# must not keep the relay from starting.
KUBERNETES = re.compile(r"RELAY_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and where the value of each key was found."""

    settings: Settings
    origins: Mapping[str, str]  # by the key's name: "variable RELAY_DATABASE_URL", "default"
    file: Path | None = None  # the relay.toml that was read


@dataclass(slots=True)
class SettingSource:
    """What one source says, before anything is checked but its keys."""

    values: dict[str, Any] = field(default_factory=dict)  # by the key's name
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, key: Key, value: object, origin: str) -> None:
        self.values[key.name] = value
        self.origins[key.name] = origin


def load(
    *,
    config: Path | None = None,
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Return the settings of this process.

    Args:
        config: path of relay.toml, from a flag; else RELAY_CONFIG; else ./relay.toml when there is one.
        flags: values given on the command line, by the key's name; None was not given.
        environ: in place of the process's environment.
    Raises:
        ConfigurationError: names every key that cannot be used, where it was set, and what it takes.
    """
    environment = os.environ if environ is None else environ
    sources = (
        _from_flags(flags or {}),
        _from_environment(environment),
        _from_secret_files(environment),
        _from_file(config, environment),
    )
    problems = [problem for source in sources for problem in source.problems]
    values, origins = _overlay(sources)
    try:
        settings = _validate(values)
    except ValidationError as error:
        # A default that depends on other keys is not made when one of them is refused: that one is told.
        found = (each for each in error.errors(include_url=False) if each["type"] != "default_factory_not_called")
        problems += [_explain(each, values, origins) for each in found]
    if problems:
        raise ConfigurationError("\n".join(dict.fromkeys(problems)))
    file, _ = _file_named(config, environment)
    return Loaded(settings, {key.name: origins.get(key.name, "default") for key in all_keys()}, file)


def _from_flags(flags: Mapping[str, str | None]) -> SettingSource:
    source = SettingSource()
    for key in all_keys():
        value = flags.get(key.name)
        if value is not None:
            source.put(key, value, f"flag {key.flag}")
    return source


def _from_environment(environ: Mapping[str, str]) -> SettingSource:
    source = SettingSource()
    known = {variable for key in all_keys() for variable in key.variables}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or KUBERNETES.fullmatch(variable):
            continue
        if variable.removesuffix(FILE_SUFFIX) not in known:
            nearest = " or ".join(_nearest_variables(variable))
            source.problems.append(f"unknown variable {variable}; did you mean {nearest}?")
    for key in all_keys():
        if given := _variable_given(source, key, environ):
            _put_text(source, key, environ[given], f"variable {given}")
    return source


def _from_secret_files(environ: Mapping[str, str]) -> SettingSource:
    source = SettingSource()
    for key in all_keys():
        variable = _variable_given(source, key, environ, FILE_SUFFIX)
        if variable is None:
            continue
        path = environ[variable]
        if not path:
            source.problems.append(f"variable {variable} is empty; it takes the path of a file")
            continue
        origin = f"file {path} of {variable}"
        try:
            if key.is_secret:
                source.put(key, SecretFile(path), origin)
            else:
                _put_text(source, key, read_value(path)[0], origin)
        except (OSError, UnicodeDecodeError) as error:
            source.problems.append(f"file {path} (variable {variable}) cannot be read: {_reason(error)}")
    return source


def _nearest_variables(unknown: str) -> list[str]:
    """Return the known variables that share most words with `unknown`, or else the one that is spelled most alike."""
    suffix = FILE_SUFFIX if unknown.endswith(FILE_SUFFIX) else ""
    known = {name: _words(name) for name in (*(key.variable + suffix for key in all_keys()), *OTHER_VARIABLES)}
    vocabulary = {word for words in known.values() for word in words}
    words = [near[0] if (near := get_close_matches(word, vocabulary, n=1)) else word for word in _words(unknown)]
    likeness = {name: SequenceMatcher(None, words, its_words).ratio() for name, its_words in known.items()}
    most = max(likeness.values())
    alike = sorted(known, key=lambda name: SequenceMatcher(None, unknown, name).ratio(), reverse=True)
    return [name for name in alike if likeness[name] == most][: NEAREST if most else 1]


def _words(variable: str) -> list[str]:
    return [word for word in variable.removeprefix(PREFIX).upper().split("_") if word]


def _variable_given(source: SettingSource, key: Key, environ: Mapping[str, str], suffix: str = "") -> str | None:
    """Return which of the key's variables is set; it is a problem of `source` when two are, to different values."""
    given = [variable + suffix for variable in key.variables if variable + suffix in environ]
    if len({environ[variable] for variable in given}) > 1:
        source.problems.append(f"variables {' and '.join(given)} have different values; keep {given[0]} alone")
    return given[0] if given else None


def _put_text(source: SettingSource, key: Key, text: str, origin: str) -> None:
    if not key.is_list:
        source.put(key, text, origin)
        return
    try:
        source.put(key, json.loads(text), origin)
    except (json.JSONDecodeError, RecursionError) as error:
        source.problems.append(f"{key.name} ({origin}) is not JSON: {error}; it takes a list of {key.takes}")


def _file_named(config: Path | None, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the path of relay.toml, and who named it."""
    if config is not None:
        return config, " (flag --config)"
    if (named := environ.get(CONFIG_VARIABLE)) is not None:
        return Path(named), f" (variable {CONFIG_VARIABLE})"
    return (USUAL_FILE, "") if USUAL_FILE.is_file() else (None, "")


def _from_file(config: Path | None, environ: Mapping[str, str]) -> SettingSource:
    path, named_by = _file_named(config, environ)
    if path is None:
        return SettingSource()
    try:
        text, is_regular = read_file(path)
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        return SettingSource(problems=[f"file {path}{named_by} cannot be read: {_reason(error)}"])
    except tomllib.TOMLDecodeError as error:
        return SettingSource(problems=[f"file {path}{named_by} is not TOML: {error}"])
    except RecursionError:
        return SettingSource(problems=[f"file {path}{named_by} is no configuration: its values are nested too deep"])
    source = _from_tables(tables, f"file {path}")
    for key in all_keys():
        if is_regular and key.is_secret and isinstance(source.values.get(key.name), str):
            source.values[key.name] = SecretSource(partial(_read_again, path, key), f"file {path}")
    return source


def _read_again(path: Path, key: Key) -> str:
    """Return the value that the file has for the key now."""
    value: Any = tomllib.loads(read_file(path)[0])
    for step in key.path:
        value = value[step]
    if not isinstance(value, str):
        raise TypeError
    return value


def _from_tables(tables: Mapping[str, Any], origin: str) -> SettingSource:
    source = SettingSource()
    known = {key.name: key for key in all_keys()}
    sections = {key.path[0] for key in all_keys() if len(key.path) > 1}
    for name, value in tables.items():
        if name in sections and not isinstance(value, dict):
            source.problems.append(f"{name} ({origin}) is no table; it takes [{name}] with keys below")
            continue
        pairs = {f"{name}.{inner}": each for inner, each in value.items()} if name in sections else {name: value}
        for full_name, each in pairs.items():
            if full_name in known:
                source.put(known[full_name], each, origin)
            else:
                near = _near(full_name, known) or _near_last_part(full_name, known) or _near(name, sections)
                source.problems.append(f"unknown key {full_name} ({origin}){near}")
    return source


def _overlay(sources: Iterable[SettingSource]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in reversed(tuple(sources)):
        values |= source.values
        origins |= source.origins
    return values, origins


def _validate(values: Mapping[str, Any]) -> Settings:
    tables: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        if key:
            tables.setdefault(section, {})[key] = value
        else:
            tables[section] = value
    return Settings.model_validate(tables)


def _explain(error: ErrorDetails, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return in one line what a validation error is about, without the words of pydantic and without a secret."""
    loc = error["loc"]
    key = next(key for key in all_keys() if key.path == loc[: len(key.path)])
    words = redacted(str(error["ctx"]["error"])) if error["type"] == "value_error" else ""
    origin = origins.get(key.name, "default")
    if not key.is_list:
        # What cannot be read as a URL cannot be redacted as one: a secret is not repeated here.
        shown = "" if key.is_secret else _shown(values[key.name], origin)
        return f"{key.name}{shown} ({origin}): {words or f'it takes {key.takes}'}"
    inner = loc[len(key.path) :]
    if key.table is None or len(inner) < 2:  # not a list, or an item that is no table or does not fit together
        place = f"[{inner[0]}]" if words and inner else ""
        return f"{key.name}{place} ({origin}): {words or f'it takes {key.takes}'}"
    index, name = inner[0], str(inner[1])
    known = {each.name: each for each in table_keys(key.table)}
    full_name = f"{key.name}[{index}].{name}"
    if name not in known:
        return f"unknown key {full_name} ({origin}){_near(name, known)}"
    given = values[key.name][index]
    if name not in given:
        return f"{full_name} ({origin}) is missing; it takes {known[name].takes}"
    return f"{full_name}{_shown(given[name], origin)} ({origin}): {words or f'it takes {known[name].takes}'}"


def _shown(value: object, origin: str) -> str:
    """Repeat a value that is refused, but no secret that was given to the wrong key."""
    if origin.endswith(FILE_SUFFIX):  # who keeps a value in such a file means it to stay there
        return ""
    return f" = {(redacted(value) if isinstance(value, str) else value)!r}"


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def _near_last_part(name: str, known: Iterable[str]) -> str:
    last_parts: dict[str, str] = {full.rpartition(".")[2]: full for full in known}
    near = get_close_matches(name.rpartition(".")[2], last_parts, n=1, cutoff=0.75)
    return f"; did you mean {last_parts[near[0]]}?" if near else ""


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "it is not UTF-8"
