"""The committed exports of the events in `shop.py`; `python -m tests.operate.events.renew` writes them."""

from pathlib import Path

from relay.config.loading import load
from relay.operate.events.asyncapi import asyncapi
from relay.operate.events.contract import as_text, contract_of, document
from relay.operate.events.modules import declared_in
from tests.operate.events import shop

HERE = Path(__file__).parent


def exports() -> dict[str, str]:
    """The text of each export of the shop's events, by the name of the committed file."""
    classes = declared_in([shop.__name__])
    settings = load(config=HERE / "relay.toml", environ={}).settings
    return {
        "shop.json": as_text(document(contract_of(each.declaration) for each in classes)),
        "shop.asyncapi.json": as_text(asyncapi(classes, ["shop"], settings)),
    }


if __name__ == "__main__":
    for name, text in exports().items():
        (HERE / name).write_text(text)
