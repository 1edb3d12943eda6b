"""Run migrations on the connection that `relay migrate` hands over, or print them as SQL."""

from functools import partial

from alembic import context

from relay.operate.schema.migrate import VERSION_TABLE, note_oldest_release, settings_of

config = context.config
schema, connect = settings_of(config)


def run() -> None:
    with context.begin_transaction():
        if context.is_offline_mode():
            context.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        context.run_migrations(schema=schema)


if context.is_offline_mode():
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # with the driver's own, every % would be written twice
        literal_binds=True,
        version_table=VERSION_TABLE,
        version_table_schema=schema,
        on_version_apply=partial(note_oldest_release, context.script),
    )
    run()
else:
    with connect() as connection:
        context.configure(
            connection=connection,
            version_table=VERSION_TABLE,
            version_table_schema=schema,
            transaction_per_migration=True,
            on_version_apply=partial(note_oldest_release, context.script),
        )
        run()
