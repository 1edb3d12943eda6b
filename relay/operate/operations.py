"""All operations, by the part of the HTTP API that they stand in."""

from typing import Any

from relay.operate import batches, held, lanes
from relay.operate.operation import Operation

OPERATIONS: dict[str, tuple[Operation[Any, Any], ...]] = {
    "lanes": (lanes.list_, lanes.pause, lanes.resume),
    "held": (held.retry,),
    "batches": (batches.list_, batches.show, batches.give_up),
}
