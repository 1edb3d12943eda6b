"""The broker's alarms for memory and disk: while one is raised, the broker blocks publishers."""

import asyncio

from relay.testing.servers.rabbitmq import RabbitServer

ALARMS = {
    "memory": (["set_vm_memory_high_watermark", "absolute", "1MB"], ["set_vm_memory_high_watermark", "0.4"]),
    "disk": (["set_disk_free_limit", "900GB"], ["set_disk_free_limit", "50MB"]),
}


class Alarm:
    """An alarm that keeps the broker from accepting messages."""

    def __init__(self, rabbitmq: RabbitServer, name: str) -> None:
        self.reason = f"broker blocked ({name})"
        self._rabbitmq = rabbitmq
        self._raise, self._clear = ALARMS[name]

    async def raise_(self) -> None:
        await asyncio.to_thread(self._rabbitmq.ctl, *self._raise)

    async def clear(self) -> None:
        await asyncio.to_thread(self._rabbitmq.ctl, *self._clear)
