"""Each link of the console leads to a page of it."""

import re
from html import unescape
from pathlib import Path

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.filled import fill
from tests.console.site import browser, log_in, running, users

LINK = re.compile(r'<(?:a|link|script|img)\b[^>]*\b(?:href|src)="([^"]*)"')
MOST = 300  # pages; each has a link to the others


async def test_each_link_leads_to_a_page(settings: Settings, tmp_path: Path, database_url: str) -> None:
    seen = ["/", "/reconcile?since=1d", *fill(database_url)]
    from_ = dict.fromkeys(seen, "the test")
    dead = {}
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OWNER)
        for path in seen:  # it grows
            answer = await client.get(path, follow_redirects=True)
            if not answer.is_success or "No message matches" in answer.text:
                dead[path] = (answer.status_code, from_[path])
            for link in map(unescape, LINK.findall(answer.text)):
                if link not in from_ and not link.startswith("#"):
                    assert link.startswith("/"), (path, link)
                    seen.append(link)
                    from_[link] = path

    assert dead == {}
    assert 50 < len(seen) < MOST
