"""The page of a failure group."""

import re

import httpx

GROUP = re.compile(r'href="(/failures/[0-9a-f]{12})"')


async def group_page(client: httpx.AsyncClient) -> tuple[str, httpx.Response]:
    """Return the address of the only group, and its page."""
    (path,) = set(GROUP.findall((await client.get("/failures")).text))
    return path, await client.get(path)
