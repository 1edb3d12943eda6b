"""Where the operator is: the environment, the database and the broker, without any login."""

from dataclasses import dataclass

from psycopg.conninfo import conninfo_to_dict

from relay.config.settings import Settings
from relay.servers.postgres.database import conninfo
from relay.servers.rabbitmq.hosts import broker_urls, place, vhost

USUAL_PORTS = (":5432", ":5671", ":5672")
MOST = 80  # characters of each; a list of hosts may be longer


@dataclass(frozen=True, slots=True)
class Location:
    """What a console operates.

    Attributes:
        environment: as the settings call it; empty where they do not.
        database: as in `shop on db1.example.org`.
        broker: as in `rabbit.example.org/orders`.
    """

    environment: str
    database: str
    broker: str

    @property
    def name(self) -> str:
        """What strangers may read, too."""
        return self.environment or "Outbox relay"

    @property
    def words(self) -> str:
        return f"{self.name} · {self.database} → {self.broker}"


def place_of(settings: Settings) -> Location:
    """Return where the settings lead.

    Raises:
        ConfigurationError: a server has no URL.
    """
    given = conninfo_to_dict(conninfo(settings.database))
    hosts = str(given.get("host") or given.get("hostaddr") or "localhost").split(",")
    ports = str(given.get("port") or "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    places = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
    schema = settings.database.schema_name
    name = str(given.get("dbname") or given.get("user") or "")
    database = f"{name}{'' if schema == 'outbox' else f' ({schema})'} on {_listed(places)}"
    urls = broker_urls(settings.broker)
    path = vhost(urls[0])
    broker = _listed([place(url) for url in urls]) + (path if path.startswith("/") else f"/{path}")
    return Location(settings.console.environment, _short(database), _short(broker))


def _listed(places: list[str]) -> str:
    shown = [place.removesuffix(":") for place in places]
    for port in USUAL_PORTS:
        shown = [place.removesuffix(port) for place in shown]
    return ", ".join(dict.fromkeys(shown))


def _short(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST - 1]}…"
