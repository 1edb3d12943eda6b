"""All operations, by the part of the HTTP API that they stand in."""

from typing import Any

from relay.operate import audit, batches, failures, held, jobs, lanes, pool, replay, status
from relay.operate.doctor import run as doctor
from relay.operate.letters import asked as letters
from relay.operate.operation import Operation
from relay.operate.parked import asked as parked
from relay.operate.routes import asked as quarantine
from relay.operate.routes import declare as topology

OPERATIONS: dict[str, tuple[Operation[Any, Any], ...]] = {
    "state": (status.status, status.nodes, pool.pools, doctor.doctor),
    "lanes": (lanes.list_, lanes.pause, lanes.resume),
    "failures": (failures.list_, failures.look),
    "parked": (
        parked.list_,
        parked.preview,
        parked.reveal,
        parked.retry,
        parked.discard,
        parked.archive,
        parked.restore,
        parked.edit,
    ),
    "quarantine": (
        quarantine.list_,
        quarantine.preview,
        quarantine.released,
        quarantine.show,  # behind the paths that it would take, too
        quarantine.reroute,
        quarantine.discard,
        quarantine.probe,
        quarantine.pause,
        quarantine.resume,
    ),
    "topology": (topology.compare, topology.apply),
    "dead-letters": (letters.look, letters.preview, letters.reveal, letters.retry, letters.discard),
    "held": (held.retry,),
    "jobs": (jobs.list_, jobs.show, jobs.pause, jobs.resume, jobs.cancel),
    "replay": (replay.preview, replay.order),
    "batches": (batches.list_, batches.show, batches.give_up),
    "audit": (audit.list_,),
}
