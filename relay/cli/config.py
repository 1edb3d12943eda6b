"""`relay config`."""

import sys

from cyclopts import App

from relay.cli.options import Options, Output
from relay.cli.printing import print_json, print_table
from relay.keys import all_keys, as_json, as_toml, value_of
from relay.operate.reference import example

app = App(name="config", help="The settings in use.")


@app.command
def show(*, options: Options | None = None, output: Output = "text") -> int:
    """Print every setting with the place where it was found; passwords are hidden."""
    loaded = (options or Options()).load()
    found = [(key.name, value_of(loaded.settings, key), loaded.origins[key.name]) for key in all_keys()]
    if output == "json":
        print_json({name: {"value": as_json(value), "origin": origin} for name, value, origin in found})
    else:
        print_table(("key", "value", "origin"), [(name, as_toml(value), origin) for name, value, origin in found])
    return 0


@app.command(name="example")
def example_() -> int:
    """Print a relay.toml with every key and its default, as comments."""
    sys.stdout.write(example())
    return 0
