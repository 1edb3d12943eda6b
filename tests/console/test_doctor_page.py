"""The doctor's page shows what needs a repair, and folds what is in order."""

from relay.config.settings import Settings
from tests.console.site import browser, running

MISSING = "no exchange &#39;outbox&#39;"


async def test_what_is_ok_is_folded_and_what_is_wrong_stands_above_it(settings: Settings) -> None:
    broker = settings.broker.model_copy(update={"declare": False})
    async with running(settings.model_copy(update={"broker": broker})) as app, browser(app) as client:
        page = (await client.get("/doctor?again=true")).text

    wrong, _, folded = page.partition('<details class="fold">')
    assert wrong.count(MISSING) == 1
    assert 'class="tag ok"' not in wrong
    assert folded.count('class="tag ok"') > 10
    assert 'class="tag failed"' not in folded
    assert 'class="tag warning"' not in folded
