-- Tidegate's DDL capture: event triggers that write what a command made of a published
-- table into the write-ahead log, for the host that replicates it.
--
-- Scope     Schema `tidegate` of this database: a key and its functions; and the event
--           triggers `tidegate_ddl`, `tidegate_drop` and `tidegate_rewrite`. Run by a superuser, again for a newer
--           version. Only permanent tables in some publication are looked at; those of an
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
-- Planned once in a session: that is most of what it costs.
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
-- Defaults print as the host's own sessions print them, whatever yours has set.
__SETTINGS__
AS $picture$
BEGIN
RETURN (
__PICTURE__
);
END
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

-- A statement_timeout that ends while we look is ours to swallow: the command is done. A
-- cancellation that somebody asked for is not.
CREATE OR REPLACE FUNCTION tidegate.timed_out() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $timed_out$
    SELECT current_setting('statement_timeout') <> '0'
       AND clock_timestamp() - statement_timestamp() >= current_setting('statement_timeout')::interval
$timed_out$;

-- One message about one table, and behind it the empty one: inside a subtransaction a message
-- loses the tie against the row behind it, and that one takes the tie in its place.
CREATE OR REPLACE FUNCTION tidegate.tell(target oid, command text, rewritten boolean, may_have_left boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tell$
DECLARE
    picture jsonb;
    reason text;
BEGIN
    BEGIN
        picture := tidegate.picture(target);
    EXCEPTION
        WHEN query_canceled THEN
            IF NOT tidegate.timed_out() THEN
                RAISE;
            END IF;
            reason := SQLERRM;
        WHEN OTHERS THEN
            reason := SQLERRM;
    END;
    IF reason IS NOT NULL THEN
        PERFORM tidegate.emit(jsonb_build_object('version', 3, 'kind', 'capture-failed', 'oid', target::int8,
                                                 'command', command, 'reason', reason, 'rewritten', rewritten)::text);
    ELSIF picture -> 'publications' <> '[]' THEN
        PERFORM tidegate.emit(jsonb_build_object('version', 3, 'kind', 'table', 'command', command,
                                                 'picture', picture, 'rewritten', rewritten)::text);
    ELSIF may_have_left AND picture IS NOT NULL THEN
        PERFORM tidegate.emit(jsonb_build_object('version', 3, 'kind', 'left', 'command', command,
                                                 'oid', target::int8)::text);
    ELSE
        RETURN;
    END IF;
    PERFORM tidegate.emit('');
END
$tell$;

-- What a publication is now; without a row of it, that it is gone.
CREATE OR REPLACE FUNCTION tidegate.tell_publication(publication oid, name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tell$
BEGIN
    PERFORM tidegate.emit(jsonb_build_object(
        'version', 3, 'kind', 'publication', 'oid', publication::int8, 'name', coalesce(p.pubname, name),
        'publish', concat(CASE WHEN p.pubinsert THEN 'i' END, CASE WHEN p.pubupdate THEN 'u' END,
                          CASE WHEN p.pubdelete THEN 'd' END, CASE WHEN p.pubtruncate THEN 't' END))::text)
    FROM (SELECT) one LEFT JOIN pg_publication p ON p.oid = publication;
END
$tell$;

-- Something could not be captured, and not even of which table is known, but for those with
-- other values.
CREATE OR REPLACE FUNCTION tidegate.tell_failure(command text, reason text, rewritten text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tell$
BEGIN
    RAISE WARNING 'tidegate could not capture this command: %', reason;
    PERFORM tidegate.emit(jsonb_build_object('version', 3, 'kind', 'capture-failed', 'oid', r.oid::int8, 'command', command,
                                             'reason', reason, 'rewritten', r.oid IS NOT NULL)::text)
    FROM (SELECT NULL UNION SELECT unnest(rewritten)) r(oid);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tidegate could not say so: %', SQLERRM;
END
$tell$;

-- Notes a table whose rows may have got other values without a change of them: any rewrite
-- for a column's type (4) but that of a statement that is one ALTER TABLE without USING,
-- which converts values and no more. Kept until the command ends.
CREATE OR REPLACE FUNCTION tidegate.capture_rewrite() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $rewrite$
DECLARE
    query text := current_query();
BEGIN
    IF pg_event_trigger_table_rewrite_reason() & 4 = 0
       OR (query ~* '^\s*ALTER\s+TABLE\s' AND query !~ ';\s*\S' AND query !~* '\musing\M') THEN
        RETURN;
    END IF;
    PERFORM set_config('tidegate.rewritten', concat_ws(' ', nullif(current_setting('tidegate.rewritten', true), ''),
                                                       pg_event_trigger_table_rewrite_oid()), true);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tidegate could not capture this rewrite: %', SQLERRM;
END
$rewrite$;

-- What a command made and changed.
CREATE OR REPLACE FUNCTION tidegate.capture_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $capture$
DECLARE
    target record;
    rewritten text[] := string_to_array(current_setting('tidegate.rewritten', true), ' ');
    -- Beyond it the host is told which tables it has to look at by itself.
    until timestamptz := clock_timestamp() + interval '2 s';
BEGIN
    IF rewritten <> '{}' THEN
        PERFORM set_config('tidegate.rewritten', '', true);
    END IF;
    IF current_setting('tidegate.skip_ddl', true) = 'on' OR NOT EXISTS (SELECT FROM pg_publication) THEN
        RETURN;
    END IF;
    -- Rows of a partition are rows of its root.
    WITH RECURSIVE up(oid) AS (
        SELECT oid::oid FROM unnest(rewritten) r(oid)
        UNION
        SELECT i.inhparent FROM up u JOIN pg_inherits i ON i.inhrelid = u.oid)
    SELECT array_agg(u.oid::text) INTO rewritten FROM up u;
    FOR target IN
        SELECT DISTINCT coalesce(r.prpubid, d.objid) AS oid
        FROM pg_event_trigger_ddl_commands() d
        LEFT JOIN pg_publication_rel r ON d.classid = 'pg_publication_rel'::regclass AND r.oid = d.objid
        WHERE d.classid = 'pg_publication'::regclass OR r.oid IS NOT NULL
        UNION
        SELECT m.refobjid FROM pg_event_trigger_ddl_commands() d
        JOIN pg_depend m ON m.classid = d.classid AND m.objid = d.objid AND m.refclassid = 'pg_publication'::regclass
        WHERE d.classid = to_regclass('pg_catalog.pg_publication_namespace')
    LOOP
        PERFORM tidegate.tell_publication(target.oid, NULL);
    END LOOP;
    -- One message per table and command; a parent's change is its children's, and a type's
    -- that of the tables that have columns of it.
    FOR target IN
        WITH RECURSIVE command AS MATERIALIZED (
            SELECT d.classid, d.objid, d.command_tag AS tag FROM pg_event_trigger_ddl_commands() d WHERE d.objid IS NOT NULL
        ),
        -- A row type is what its type is, not its own row of pg_class.
        types(classid, objid, tag) AS (
            SELECT CASE WHEN k.oid IS NULL THEN c.classid ELSE 'pg_type'::regclass END, coalesce(k.reltype, c.objid), c.tag
            FROM command c LEFT JOIN pg_class k ON c.classid = 'pg_class'::regclass AND k.oid = c.objid AND k.relkind IN ('r', 'p', 'c')
            WHERE c.classid = 'pg_type'::regclass OR k.oid IS NOT NULL
            UNION
            SELECT CASE k.relkind WHEN 'c' THEN 'pg_type'::regclass ELSE d.classid END,
                   CASE k.relkind WHEN 'c' THEN k.reltype ELSE d.objid END, t.tag
            FROM types t JOIN pg_depend d ON d.refclassid = t.classid AND d.refobjid = t.objid
            LEFT JOIN pg_class k ON d.classid = 'pg_class'::regclass AND k.oid = d.objid AND k.relkind IN ('r', 'p', 'c')
            WHERE t.classid = 'pg_type'::regclass AND (d.classid = 'pg_type'::regclass OR k.oid IS NOT NULL)
        ),
        changed(oid, tag) AS (
            SELECT coalesce(i.indrelid, r.prrelid, n.oid, c.objid), c.tag
            FROM command c
            LEFT JOIN pg_index i ON c.classid = 'pg_class'::regclass AND i.indexrelid = c.objid
            LEFT JOIN pg_publication_rel r ON c.classid = 'pg_publication_rel'::regclass AND r.oid = c.objid
            LEFT JOIN pg_class n ON c.classid = 'pg_namespace'::regclass AND n.relnamespace = c.objid AND n.relkind IN ('r', 'p')
            WHERE c.classid = 'pg_class'::regclass OR r.oid IS NOT NULL OR n.oid IS NOT NULL
            UNION
            SELECT t.objid, t.tag FROM types t WHERE t.classid = 'pg_class'::regclass
            UNION
            -- publish_generated_columns says it of all tables at once.
            SELECT a.attrelid, c.tag
            FROM command c
            JOIN pg_publication p ON c.classid = 'pg_publication'::regclass AND p.oid = c.objid AND to_jsonb(p) ? 'pubgencols'
            CROSS JOIN pg_attrdef d
            JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum AND a.attgenerated = 's'
            UNION
            SELECT i.inhrelid, p.tag FROM pg_inherits i JOIN changed p ON i.inhparent = p.oid
        )
        SELECT c.oid, min(p.tag) AS tag, coalesce(c.oid::text = ANY (rewritten), false) AS rewritten,
               -- Who is in a publication by name leaves it by name.
               bool_and(p.tag NOT LIKE 'CREATE%') AND (c.relpersistence = 'u' OR schemas.published) AS may_have_left
        FROM changed p JOIN pg_class c ON c.oid = p.oid
        CROSS JOIN (SELECT EXISTS (SELECT FROM pg_depend m WHERE m.classid = to_regclass('pg_catalog.pg_publication_namespace')
                                   AND m.refclassid = 'pg_publication'::regclass) AS published) schemas
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
          AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass
                          AND e.objid = c.oid AND e.deptype = 'e')
        GROUP BY c.oid, c.relpersistence, schemas.published ORDER BY c.oid
    LOOP
        IF clock_timestamp() < until THEN
            PERFORM tidegate.tell(target.oid, target.tag, target.rewritten, target.may_have_left);
        ELSE
            PERFORM tidegate.emit(jsonb_build_object('version', 3, 'kind', 'capture-failed', 'oid', target.oid::int8, 'command',
                target.tag, 'reason', 'too many tables for one command', 'rewritten', target.rewritten)::text);
        END IF;
    END LOOP;
EXCEPTION
    WHEN query_canceled THEN
        IF NOT tidegate.timed_out() THEN
            RAISE;
        END IF;
        PERFORM tidegate.tell_failure(tg_tag, SQLERRM, rewritten);
    WHEN OTHERS THEN
        PERFORM tidegate.tell_failure(tg_tag, SQLERRM, rewritten);
END
$capture$;

-- What a command dropped: tables, what tables lost by CASCADE, members of publications. What
-- an ALTER TABLE drops, its own end shows.
CREATE OR REPLACE FUNCTION tidegate.capture_drop() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $capture$
DECLARE
    target record;
    gone jsonb;
BEGIN
    IF current_setting('tidegate.skip_ddl', true) = 'on'
       OR NOT EXISTS (SELECT FROM pg_publication)
          AND NOT EXISTS (SELECT FROM pg_event_trigger_dropped_objects() d WHERE d.object_type = 'publication') THEN
        RETURN;
    END IF;
    SELECT jsonb_agg(d.objid::int8) INTO gone FROM pg_event_trigger_dropped_objects() d
    WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0 AND d.object_type = 'table' AND NOT d.is_temporary;
    IF gone IS NOT NULL THEN
        PERFORM tidegate.emit(jsonb_build_object('version', 3, 'kind', 'dropped', 'command', tg_tag, 'oids', gone)::text);
    END IF;
    FOR target IN
        SELECT DISTINCT CASE d.object_type WHEN 'publication' THEN d.objid ELSE p.oid END AS oid,
               coalesce(d.address_args[1], d.object_name) AS name
        FROM pg_event_trigger_dropped_objects() d
        LEFT JOIN pg_publication p ON p.pubname = coalesce(d.address_args[1], d.object_name)
        WHERE d.object_type IN ('publication', 'publication relation', 'publication namespace')
    LOOP
        PERFORM tidegate.tell_publication(target.oid, target.name);
    END LOOP;
    IF tg_tag = 'ALTER TABLE' THEN
        RETURN;
    END IF;
    FOR target IN
        WITH lost AS (
            SELECT CASE WHEN d.object_type = 'table column' THEN d.objid
                        ELSE to_regclass(format('%I.%I', d.address_names[1], d.address_names[2])) END AS oid
            FROM pg_event_trigger_dropped_objects() d
            WHERE d.object_type IN ('table column', 'default value', 'table constraint', 'publication relation')
            UNION
            -- Of an index that is gone nobody knows the table: the identity that it may have
            -- been is missing there.
            SELECT c.oid FROM pg_class c
            WHERE c.relreplident = 'i' AND c.relkind IN ('r', 'p')
              AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident)
              AND EXISTS (SELECT FROM pg_event_trigger_dropped_objects() d WHERE d.object_type = 'index')
        )
        SELECT c.oid FROM lost l JOIN pg_class c ON c.oid = l.oid
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
          AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass
                          AND e.objid = c.oid AND e.deptype = 'e')
        ORDER BY c.oid
    LOOP
        PERFORM tidegate.tell(target.oid, tg_tag, false, true);
    END LOOP;
EXCEPTION
    WHEN query_canceled THEN
        IF NOT tidegate.timed_out() THEN
            RAISE;
        END IF;
        PERFORM tidegate.tell_failure(tg_tag, SQLERRM, '{}');
    WHEN OTHERS THEN
        PERFORM tidegate.tell_failure(tg_tag, SQLERRM, '{}');
END
$capture$;

REVOKE ALL ON FUNCTION tidegate.picture(oid), tidegate.emit(text), tidegate.timed_out(),
    tidegate.tell(oid, text, boolean, boolean), tidegate.tell_publication(oid, text), tidegate.tell_failure(text, text, text[]),
    tidegate.capture_ddl(), tidegate.capture_drop(), tidegate.capture_rewrite() FROM PUBLIC;
GRANT USAGE ON SCHEMA tidegate TO __ROLE__;
GRANT SELECT (key) ON tidegate.ddl_key TO __ROLE__;

DROP EVENT TRIGGER IF EXISTS tidegate_rewrite;
CREATE EVENT TRIGGER tidegate_rewrite ON table_rewrite EXECUTE FUNCTION tidegate.capture_rewrite();
DROP EVENT TRIGGER IF EXISTS tidegate_drop;
CREATE EVENT TRIGGER tidegate_drop ON sql_drop EXECUTE FUNCTION tidegate.capture_drop();
DROP EVENT TRIGGER IF EXISTS tidegate_ddl;
CREATE EVENT TRIGGER tidegate_ddl ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'ALTER INDEX', 'ALTER SCHEMA', 'ALTER TYPE', 'ALTER DOMAIN', 'ALTER PUBLICATION',
                 'ALTER EXTENSION', 'CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO', 'CREATE SCHEMA', 'CREATE EXTENSION',
                 'CREATE PUBLICATION')
    EXECUTE FUNCTION tidegate.capture_ddl();
-- Also for sessions with session_replication_role = replica.
ALTER EVENT TRIGGER tidegate_rewrite ENABLE ALWAYS;
ALTER EVENT TRIGGER tidegate_drop ENABLE ALWAYS;
ALTER EVENT TRIGGER tidegate_ddl ENABLE ALWAYS;

COMMIT;
