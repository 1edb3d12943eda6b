"""A client of `/livez`, `/readyz` and `/metrics`."""

import asyncio
import urllib.request
from dataclasses import dataclass
from urllib.error import HTTPError

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: str


@dataclass(frozen=True, slots=True)
class Site:
    """Where a relay answers."""

    address: str

    def ask(self, path: str, **headers: str) -> Answer:
        request = urllib.request.Request(f"http://{self.address}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return Answer(answer.status, answer.headers["Content-Type"], answer.read().decode())
        except HTTPError as refused:
            with refused:
                return Answer(refused.code, refused.headers["Content-Type"], refused.read().decode())

    async def get(self, path: str, **headers: str) -> Answer:
        """Ask from a thread: the relay's event loop may be ours."""
        return await asyncio.to_thread(lambda: self.ask(path, **headers))

    async def is_ready(self) -> bool:
        return (await self.get("/readyz")).status == 200

    async def is_unready(self, words: str) -> bool:
        """Whether it answers that it is not ready, with these words."""
        answer = await self.get("/readyz")
        return answer.status == 503 and words in answer.body

    async def metrics(self) -> dict[Sample, float]:
        """Scrape, and give each sample's value by its name and labels."""
        answer = await self.get("/metrics")
        assert answer.status == 200, answer.body
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.body)
            for sample in family.samples
        }

    async def value(self, name: str, **labels: str) -> float | None:
        return (await self.metrics()).get((name, tuple(sorted(labels.items()))))
