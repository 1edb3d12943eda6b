"""For each alert: series under which it is quiet, fires and is over, as `promtool test rules` writes them.

`stale` is what Prometheus writes when a target does not answer.
"""

from dataclasses import dataclass, field

RELAY = 'instance="one"'
CONSUMER = 'consumer="projection", queue="billing"'
OF_CONSUMER = {"consumer": "projection", "queue": "billing"}
PENDING = "outbox_oldest_pending_age_seconds"
LATENCY = "outbox_end_to_end_latency_seconds"

# A relay in order, where the case does not say otherwise.
HEALTHY = {f"outbox_ready{{{RELAY}}}": "1x5000", f"outbox_lanes_held{{{RELAY}}}": "16x5000"}


@dataclass(frozen=True, slots=True)
class Case:
    """One alert with one history, a sample a minute unless `interval` says otherwise."""

    alert: str
    series: dict[str, str]
    quiet: str  # a moment after the fault has begun, or without one, at which the alert does not fire
    fires: str
    over: str
    value: str = ""  # as the annotations show it
    labels: dict[str, str] = field(default_factory=dict)
    severity: str = "warning"
    interval: str = "1m"
    wanted: int = 1  # relays
    also: list[str] = field(default_factory=list)  # alerts that may fire with it


CASES = [
    Case(
        "OutboxFewerRelays",
        {
            'outbox_lanes_held{instance="one"}': "8x9 16x20 8x20",
            'outbox_lanes_held{instance="two"}': "8x9 stale _x20 8x20",
            'outbox_lanes_held{instance="spare"}': "0x60",
        },
        quiet="12m",
        fires="16m",
        over="32m",
        value="2",
        wanted=3,
    ),
    Case(
        "OutboxFewerRelays",
        {f"outbox_lanes_held{{{RELAY}}}": "16x9 stale _x20 16x20"},
        quiet="12m",
        fires="16m",
        over="32m",
        value="0",
    ),
    Case("OutboxRelayDown", {f"outbox_ready{{{RELAY}}}": "1x4 0x5 1x9"}, "5m", "7m", "11m", severity="critical"),
    Case("OutboxRelayDown", {f"outbox_ready{{{RELAY}}}": "1x4 stale _x5 1x9"}, "5m", "7m", "12m", severity="critical"),
    Case(
        "OutboxLaneLost",
        {'outbox_lanes_held{instance="one"}': "8x40", 'outbox_lanes_held{instance="two"}': "8x4 7x9 8x20"},
        quiet="6m",
        fires="8m",
        over="16m",
        value="15",
        severity="critical",
    ),
    Case(
        "OutboxLaneLost",
        {"outbox_lanes_held": "16x4 15x9 14x5 15x9", "outbox_paused_lanes": "0x4 1x29"},
        quiet="12m",
        fires="17m",
        over="21m",
        value="15",
        severity="critical",
    ),
    Case(
        "OutboxStalled",
        {f"outbox_stalled{{{RELAY}}}": "0x4 1x5 0x9", f"outbox_ready{{{RELAY}}}": "1x4 0x5 1x9"},
        "5m",
        "7m",
        "11m",
        severity="critical",
    ),
    Case("OutboxOldestPendingAge", {PENDING: "0x60 60 90x6 0x9"}, "1h3m", "1h5m", "1h10m", value="1m 30s"),
    Case(
        "OutboxParked",
        {"outbox_parked_messages": "0x4 2x5 0x9", "outbox_parked_held_messages": "0x30"},
        "4m",
        "6m",
        "12m",
        "2",
    ),
    Case(
        "OutboxKeyStuck",
        {"outbox_parked_messages": "1x4 4x5 0x9", "outbox_parked_held_messages": "0x4 3x5 0x9"},
        quiet="4m",
        fires="6m",
        over="12m",
        value="3",
    ),
    Case("OutboxRouteQuarantined", {"outbox_quarantined_routes": "0x4 1x9 0x9"}, "8m", "11m", "16m", "1"),
    Case(
        "OutboxBrokerBlocked",
        {
            f"outbox_broker_blocked_seconds_total{{{RELAY}}}": "0x5 0+60x15 900x20",
            f"outbox_stalled{{{RELAY}}}": "0x7 1x13 0x20",
            f"outbox_ready{{{RELAY}}}": "1x7 0x13 1x20",
        },
        quiet="10m",
        fires="14m",
        over="28m",
        severity="critical",
    ),
    Case(
        "OutboxConnectionRefused",
        {
            f'outbox_connection_refused_seconds{{{RELAY}, end="broker"}}': "0x4 30 90 150 0x9",
            f"outbox_stalled{{{RELAY}}}": "0x4 1x2 0x9",
            f"outbox_ready{{{RELAY}}}": "1x4 0x2 1x9",
        },
        quiet="5m",
        fires="7m",
        over="9m",
        labels={"end": "broker"},
        severity="critical",
    ),
    Case(
        "OutboxConnectionRefused",
        {
            f'outbox_consumer_connection_refused_seconds{{{CONSUMER}, end="database"}}': "0x4 30 90 150 0x9",
            f"outbox_consumer_ready{{{CONSUMER}}}": "1x4 0x2 1x9",
        },
        quiet="5m",
        fires="7m",
        over="9m",
        labels={"end": "database"},
        severity="critical",
    ),
    Case(
        "OutboxDatabaseLost",
        {
            f'outbox_reconnects_total{{{RELAY}, end="database", reason="lost"}}': "0x60",
            f'outbox_reconnects_total{{{RELAY}, end="database", reason="admin_shutdown"}}': "_x9 1x50",
            f'outbox_reconnects_total{{{RELAY}, end="broker", reason="lost"}}': "0x5 7x50",
        },
        quiet="8m",
        fires="12m",
        over="25m",
    ),
    Case(
        "OutboxRetentionBehind",
        {'outbox_retention_overdue_days{table="message_sent"}': "0x20 2x60 0x20"},
        quiet="4h",
        fires="5h",
        over="7h30m",
        value="2",
        labels={"table": "message_sent"},
        interval="5m",
    ),
    Case("OutboxArchiveBehind", {"outbox_unarchived_days": "1x20 2x60 0x20"}, "2h", "4h", "7h30m", "2", interval="5m"),
    Case(
        "OutboxBatchUnfinished",
        {"outbox_unfinished_batch_idle_seconds": "0x10 3300 3600 3900 4200 0x9"},
        quiet="55m",
        fires="1h5m",
        over="1h15m",
        value="1h 5m 0s",
        interval="5m",
    ),
    Case(
        "OutboxConsumerDown",
        {f"outbox_consumer_ready{{{CONSUMER}}}": "1x4 0x9 1x9"},
        quiet="6m",
        fires="9m",
        over="15m",
        labels=OF_CONSUMER,
        severity="critical",
    ),
    Case(
        "OutboxConsumerStalled",
        {
            f"outbox_consumer_stalled{{{CONSUMER}}}": "0x4 1x9 0x9",
            f"outbox_consumer_ready{{{CONSUMER}}}": "1x4 0x9 1x9",
        },
        quiet="6m",
        fires="9m",
        over="15m",
        labels=OF_CONSUMER,
        severity="critical",
    ),
    Case(
        "OutboxConsumerPaused",
        {
            f"outbox_consumer_paused{{{CONSUMER}}}": "0x4 1x19 0x9",
            f"outbox_consumer_stalled{{{CONSUMER}}}": "0x4 1x19 0x9",
            f"outbox_consumer_ready{{{CONSUMER}}}": "1x4 0x19 1x9",
        },
        quiet="14m",
        fires="16m",
        over="26m",
        labels=OF_CONSUMER,
    ),
    *(
        Case(
            alert,
            {
                f'outbox_consumer_dead_letters_total{{{CONSUMER}, reason="{reason}"}}': "0x4 1x40",
                f'outbox_consumer_dead_letters_total{{{CONSUMER}, reason="{other}"}}': "0x40",
            },
            quiet="4m",
            fires="6m",
            over="25m",
            labels={**OF_CONSUMER, **labels},
            severity=severity,
        )
        for alert, reason, other, labels, severity in (
            ("OutboxConsumerDeadLetters", "permanent", "exhausted", {"reason": "permanent"}, "warning"),
            ("OutboxConsumerRetriesExhausted", "exhausted", "poisoned", {}, "warning"),
            ("OutboxConsumerPoisoned", "poisoned", "permanent", {}, "critical"),
        )
    ),
    Case(
        "OutboxRowsOvertaken",
        {f"outbox_sweep_finds_total{{{RELAY}}}": "0x9 3x40"},
        quiet="8m",
        fires="12m",
        over="40m",
    ),
    Case(
        "OutboxConsumerDuplicates",
        {
            f"outbox_consumer_acknowledged_total{{{CONSUMER}}}": "0+100x90",
            f"outbox_consumer_duplicates_total{{{CONSUMER}}}": "0+10x10 100+60x29 1840x50",
        },
        quiet="20m",
        fires="30m",
        over="60m",
        labels=OF_CONSUMER,
    ),
    Case(
        "OutboxConsumerLag",
        {
            f"outbox_consumer_last_applied_age_seconds{{{CONSUMER}}}": "600x40",
            f"outbox_consumer_queue_ready_messages{{{CONSUMER}}}": "0x4 9x19 0x9",
        },
        quiet="14m",
        fires="16m",
        over="26m",
        value="10m 0s",
        labels=OF_CONSUMER,
    ),
    Case(
        "OutboxConsumerHeldGrows",
        {f"outbox_consumer_held_messages{{{CONSUMER}}}": "0x10 100+2x70 240x50"},
        quiet="30m",
        fires="60m",
        over="118m",
        value="198",
        labels=OF_CONSUMER,
    ),
    Case(
        "OutboxAgeBudget",
        {PENDING: "0x60 70x14 0x360"},
        also=["OutboxOldestPendingAge"],
        quiet="1h5m",
        fires="1h14m",
        over="1h50m",
        value="22.95%",
        severity="critical",
    ),
    # The fault comes again and again, too short for the first.
    Case("OutboxAgeBudget", {PENDING: "0x40 " + "70 0x19 " * 60 + "0x200"}, "7m", "10h", "2d", "4.493%"),
    Case(
        "OutboxLatencyBudget",
        {
            f'{LATENCY}_bucket{{{RELAY}, le="5"}}': "0+100x60 6000+50x20 7000+100x60",
            f"{LATENCY}_count{{{RELAY}}}": "0+100x140",
        },
        quiet="1h9m",
        fires="1h20m",
        over="1h55m",
        value="17.5%",
        severity="critical",
    ),
    Case(
        "OutboxLatencyBudget",
        {
            f'{LATENCY}_bucket{{{RELAY}, le="5"}}': "0+98x600 58800x600",
            f"{LATENCY}_count{{{RELAY}}}": "0+100x600 60000x600",
        },
        quiet="30m",
        fires="8h",
        over="18h",
        value="2%",
    ),
]
