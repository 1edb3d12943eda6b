"""`relay config`."""

import sys
from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.exit_code import ExitCode
from relay.cli.options import ConfigFile, Options, Output
from relay.cli.printing import print_json, print_table, say
from relay.config.keys import all_keys, as_json, as_toml, value_of
from relay.config.loading import load
from relay.operate import packaged

app = App(name="config", help="The settings in use, and files that come with this release.")


@app.command
def show(*, options: Options = Options(), output: Output = "text") -> ExitCode:
    """Print every setting with the place where it was found; passwords are hidden."""
    loaded = options.load()
    found = [(key.name, value_of(loaded.settings, key), loaded.origins[key.name]) for key in all_keys()]
    if output == "json":
        print_json({name: {"value": as_json(value), "origin": origin} for name, value, origin in found})
    else:
        print_table(("key", "value", "origin"), [(name, as_toml(value), origin) for name, value, origin in found])
    return ExitCode.DONE


@app.command
def example(
    name: Annotated[str, Parameter(help="One of those that `relay config examples` lists; by default relay.toml.")] = (
        "relay.toml"
    ),
    /,
) -> ExitCode:
    """Print an example; by default a relay.toml with every key and its default, as comments."""
    sys.stdout.write(packaged.example_file(name))
    return ExitCode.DONE


@app.command
def examples(
    *,
    folder: Annotated[
        bool, Parameter(help="Print the folder of the programs, for `cp -r` and `spark-submit`.")
    ] = False,
) -> ExitCode:
    """List the examples that `relay config example` prints."""
    if folder:
        say(str(packaged.EXAMPLES_FOLDER))
        return ExitCode.DONE
    print_table(("name", "what"), packaged.EXAMPLES.items())
    return ExitCode.DONE


@app.command
def alerts(
    *,
    console: Annotated[
        str | None, Parameter(help="Address of your console: the alerts then lead to its runbooks.")
    ] = None,
) -> ExitCode:
    """Print the rules for Prometheus, for its rule_files."""
    sys.stdout.write(packaged.alerts(console))
    return ExitCode.DONE


@app.command
def dashboards() -> ExitCode:
    """Print the folder of the dashboards for Grafana, for `cp "$(relay config dashboards)"/*.json ...`."""
    say(str(packaged.DASHBOARDS))
    return ExitCode.DONE


@app.command
def jobs() -> ExitCode:
    """Print the folder of the Spark jobs, for `spark-submit "$(relay config jobs)/archive.py"`.

    On this machine `outbox-spark archive` runs it; it comes with the extra `[spark]`.
    """
    say(str(packaged.JOBS))
    return ExitCode.DONE


@app.command
def roles(
    *,
    config: ConfigFile = None,
    schema: Annotated[
        str | None,
        Parameter(name=["--schema", "--database-schema"], help="Of the tables, in place of database.schema."),
    ] = None,
) -> ExitCode:
    """Print the SQL that makes the roles and grants their rights, for psql; to be run again after an upgrade.

    Run it as the owner of the tables, who may also create roles: `relay config roles | psql ...`
    """
    settings = load(config=config, flags={"database.schema": schema}).settings
    sys.stdout.write(packaged.roles(settings.database.schema_name))
    return ExitCode.DONE
