"""Whether a database's tables are of this release."""

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import current_revision
from relay.servers.postgres.compatibility import head_revision


def is_at_head(database: DatabaseSettings) -> bool:
    return current_revision(database) == head_revision()
