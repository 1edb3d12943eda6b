"""A publication of all tables, as others on the server may make one."""


def publish_all(version: int, *, by_root: bool = False) -> bytes:
    """Return the statement for a server of this version (180000).

    From PostgreSQL 18 on, the column `lane` must be published: it is generated, and part of an identity.
    """
    options = [f"publish_via_partition_root = {str(by_root).lower()}"]
    options += ["publish_generated_columns = stored"] if version >= 180000 else []
    return f"CREATE PUBLICATION everything FOR ALL TABLES WITH ({', '.join(options)})".encode()
