"""A reader opens few files on each way.

`pytest tests/ways -rP` prints them.
"""

import pytest

from relay.config.settings import Settings
from tests.ways.trace import tracing
from tests.ways.walks import WAYS, Way


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_a_way_opens_few_files(way: Way, settings: Settings) -> None:
    with tracing() as tracer:
        opened = await way.walk(tracer, settings)

    print(f"{way.name}: {len(opened)} files", *opened, sep="\n  ")
    assert 0 < len(opened) <= way.most
