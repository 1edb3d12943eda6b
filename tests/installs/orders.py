"""Orders that take their time, so that a kill meets a transaction."""

LINGER = """
    CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_sleep(0.02);
            RETURN NULL;
        END
    $$;
    CREATE TRIGGER linger AFTER INSERT ON "order" FOR EACH ROW EXECUTE FUNCTION linger();
"""
