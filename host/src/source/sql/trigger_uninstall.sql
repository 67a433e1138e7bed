-- Removes all that trigger_install.sql made, and nothing else: a schema `tidegate`
-- that holds more than that is an error. Run by the superuser who installed it.
BEGIN;
DROP EVENT TRIGGER IF EXISTS tidegate_ddl;
DROP EVENT TRIGGER IF EXISTS tidegate_drop;
DROP EVENT TRIGGER IF EXISTS tidegate_rewrite;
DO $uninstall$
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'tidegate') THEN
        DROP FUNCTION IF EXISTS tidegate.capture_ddl();
        DROP FUNCTION IF EXISTS tidegate.capture_drop();
        DROP FUNCTION IF EXISTS tidegate.capture_rewrite();
        DROP FUNCTION IF EXISTS tidegate.tell_failure(text, text, text[]);
        DROP FUNCTION IF EXISTS tidegate.tell_publication(oid, text);
        DROP FUNCTION IF EXISTS tidegate.tell(oid, text, boolean, boolean);
        DROP FUNCTION IF EXISTS tidegate.timed_out();
        DROP FUNCTION IF EXISTS tidegate.emit(text);
        DROP FUNCTION IF EXISTS tidegate.picture(oid);
        DROP MATERIALIZED VIEW IF EXISTS tidegate.ddl_key;
        DROP SCHEMA tidegate;
    END IF;
END
$uninstall$;
COMMIT;
