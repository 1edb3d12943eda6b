-- The logins of config/compose.yaml. Harmless when they are there.
\getenv owner_password OWNER_PASSWORD
\getenv relay_password RELAY_PASSWORD
\getenv console_password CONSOLE_PASSWORD
SELECT format('CREATE ROLE %I LOGIN', name) FROM unnest(ARRAY['outbox_owner', 'relay', 'console']) AS name
WHERE to_regrole(name) IS NULL \gexec
ALTER ROLE outbox_owner PASSWORD :'owner_password';
ALTER ROLE relay PASSWORD :'relay_password';
ALTER ROLE console PASSWORD :'console_password';
GRANT CREATE ON DATABASE outbox TO outbox_owner;
