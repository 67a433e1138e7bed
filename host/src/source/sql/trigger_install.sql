-- Tidegate's DDL capture: an event trigger that writes what an ALTER TABLE made of a
-- published table into the write-ahead log, for the host that replicates it.
--
-- Scope     Schema `tidegate` of this database: a key, three functions; and the event
--           trigger `tidegate_ddl`. Run by a superuser, again for a newer version.
--           Only permanent tables in some publication are looked at; those of an
--           extension are not. Nothing takes a lock on a table of yours.
-- Security  The messages are authenticated with a key of this database's own. Only
--           the owner and the role named below may read it. The functions run as
--           their owner with a fixed search_path, and nobody else may call them.
--           The key lies in a materialized view because no publication, FOR ALL
--           TABLES included, publishes one; REFRESH makes a new key.
-- Opt-out   SET tidegate.skip_ddl = on; leaves out the session's commands. An error
--           of ours never fails your command: it becomes a warning.
-- Removal   tidegate trigger uninstall, or trigger_uninstall.sql.
BEGIN;

-- Whoever made the schema before us could replace what it holds.
DO $guard$
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_namespace
               WHERE nspname = 'tidegate' AND nspowner <> current_user::pg_catalog.regrole) THEN
        RAISE EXCEPTION 'schema tidegate belongs to another role'
            USING HINT = 'Install as its owner, or drop it first.', ERRCODE = 'insufficient_privilege';
    END IF;
END
$guard$;

CREATE SCHEMA IF NOT EXISTS tidegate;
REVOKE ALL ON SCHEMA tidegate FROM PUBLIC;
COMMENT ON SCHEMA tidegate IS 'DDL capture of Tidegate, version __VERSION__';

-- 366 random bits, hashed; and the key's two pads, so that a message costs two hashes.
CREATE MATERIALIZED VIEW IF NOT EXISTS tidegate.ddl_key AS
WITH k AS MATERIALIZED (
    SELECT pg_catalog.sha256(pg_catalog.uuid_send(pg_catalog.gen_random_uuid())
        OPERATOR(pg_catalog.||) pg_catalog.uuid_send(pg_catalog.gen_random_uuid())
        OPERATOR(pg_catalog.||) pg_catalog.uuid_send(pg_catalog.gen_random_uuid())) AS key
), bytes AS (
    SELECT i, CASE WHEN i < 32 THEN pg_catalog.get_byte(k.key, i) ELSE 0 END AS byte
    FROM k, pg_catalog.generate_series(0, 63) AS i
)
SELECT k.key,
       (SELECT pg_catalog.string_agg(pg_catalog.set_byte('\x00'::bytea, 0, byte OPERATOR(pg_catalog.#) 54), ''::bytea ORDER BY i) FROM bytes) AS ipad,
       (SELECT pg_catalog.string_agg(pg_catalog.set_byte('\x00'::bytea, 0, byte OPERATOR(pg_catalog.#) 92), ''::bytea ORDER BY i) FROM bytes) AS opad
FROM k;
REVOKE ALL ON tidegate.ddl_key FROM PUBLIC;

CREATE OR REPLACE FUNCTION tidegate.picture(oid) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $picture$
__PICTURE__
$picture$;

-- HMAC-SHA256 (RFC 2104) in hexadecimal, then the payload, as bytes: text would be
-- in the server's encoding.
CREATE OR REPLACE FUNCTION tidegate.emit(payload text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $emit$
DECLARE
    message bytea := convert_to(payload, 'UTF8');
    mac bytea;
BEGIN
    SELECT sha256(k.opad || sha256(k.ipad || message)) INTO STRICT mac FROM tidegate.ddl_key k;
    PERFORM pg_logical_emit_message(true, 'tidegate_ddl', convert_to(encode(mac, 'hex'), 'UTF8') || message);
END
$emit$;

CREATE OR REPLACE FUNCTION tidegate.capture_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $capture$
DECLARE
    target record;
    picture jsonb;
BEGIN
    IF current_setting('tidegate.skip_ddl', true) = 'on' THEN
        RETURN;
    END IF;
    -- One message per table and command; a parent's change is its children's.
    FOR target IN
        WITH RECURSIVE changed(oid, tag) AS (
            SELECT d.objid, d.command_tag FROM pg_event_trigger_ddl_commands() d
            WHERE d.classid = 'pg_class'::regclass AND d.objid IS NOT NULL
            UNION
            SELECT i.inhrelid, p.tag FROM pg_inherits i JOIN changed p ON i.inhparent = p.oid
        )
        SELECT c.oid, min(p.tag) AS tag
        FROM changed p JOIN pg_class c ON c.oid = p.oid
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
          AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass
                          AND e.objid = c.oid AND e.deptype = 'e')
        GROUP BY c.oid ORDER BY c.oid
    LOOP
        BEGIN
            picture := tidegate.picture(target.oid);
            CONTINUE WHEN picture IS NULL OR picture -> 'publications' = '[]';
            PERFORM tidegate.emit(jsonb_build_object(
                'version', 1, 'kind', 'table', 'command', target.tag, 'picture', picture)::text);
        EXCEPTION WHEN OTHERS THEN
            PERFORM tidegate.emit(jsonb_build_object(
                'version', 1, 'kind', 'capture-failed', 'oid', target.oid::int8, 'reason', SQLERRM)::text);
        END;
        -- Inside a subtransaction a message loses the tie against the row behind it;
        -- this one takes the tie in its place.
        PERFORM tidegate.emit('');
    END LOOP;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tidegate could not capture this command: %', SQLERRM;
END
$capture$;

REVOKE ALL ON FUNCTION tidegate.picture(oid), tidegate.emit(text), tidegate.capture_ddl() FROM PUBLIC;
GRANT USAGE ON SCHEMA tidegate TO __ROLE__;
GRANT SELECT (key) ON tidegate.ddl_key TO __ROLE__;

DROP EVENT TRIGGER IF EXISTS tidegate_ddl;
CREATE EVENT TRIGGER tidegate_ddl ON ddl_command_end WHEN TAG IN ('ALTER TABLE')
    EXECUTE FUNCTION tidegate.capture_ddl();
-- Also for sessions with session_replication_role = replica.
ALTER EVENT TRIGGER tidegate_ddl ENABLE ALWAYS;

COMMIT;
