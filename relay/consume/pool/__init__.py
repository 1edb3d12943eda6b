"""Consumers that share the partitions of a queue: each key's messages go to one member, in order, and fail over."""

from relay.consume.pool.member import PartitionedConsumer
from relay.consume.pool.policy import Partition, PoolPolicy

__all__ = ["Partition", "PartitionedConsumer", "PoolPolicy"]
