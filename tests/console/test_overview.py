"""The first page says whether all is well."""

import httpx


async def test_an_outbox_without_a_relay_says_so_first(client: httpx.AsyncClient) -> None:
    page = await client.get("/")

    assert page.status_code == 200
    assert "no relay is alive: start <code>relay run</code>" in page.text
