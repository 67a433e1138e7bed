-- The picture of one table ($1: its oid) as jsonb, payload version 1; no row if it
-- does not exist. One text for the host's catalog look-ups and the DDL trigger.
-- Wants search_path = pg_catalog, so that types and defaults print the same in both.
-- Version-dependent columns are read through to_jsonb: PostgreSQL 14 lacks some.
WITH RECURSIVE
-- Each column's type and, under a domain, the type below it, down to the base.
types(attnum, oid, typmod, not_null, depth) AS (
    SELECT a.attnum, a.atttypid, a.atttypmod, false, 0
    FROM pg_attribute a
    WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT u.attnum, t.typbasetype, t.typtypmod, u.not_null OR t.typnotnull, u.depth + 1
    FROM types u JOIN pg_type t ON t.oid = u.oid
    WHERE t.typtype = 'd'
),
bases AS (
    SELECT DISTINCT ON (attnum) attnum, oid, not_null,
           coalesce(max(nullif(typmod, -1)) OVER (PARTITION BY attnum), -1) AS typmod
    FROM types ORDER BY attnum, depth DESC
),
-- The element of an array, and below its domains.
elements(attnum, oid, typmod, depth) AS (
    SELECT b.attnum, t.typelem, b.typmod, 0
    FROM bases b JOIN pg_type t ON t.oid = b.oid
    WHERE t.typinput = 'array_in'::regproc
    UNION ALL
    SELECT e.attnum, t.typbasetype, greatest(e.typmod, t.typtypmod), e.depth + 1
    FROM elements e JOIN pg_type t ON t.oid = e.oid
    WHERE t.typtype = 'd'
),
named(attnum, element, oid, name) AS (
    SELECT s.attnum, s.element, s.oid,
           CASE WHEN t.typinput = 'array_in'::regproc THEN 'array'
                WHEN t.typtype = 'e' THEN 'enum'
                WHEN t.typtype = 'c' THEN 'composite'
                -- A type that only is called like a built-in one must not be read like it.
                WHEN t.typnamespace <> 'pg_catalog'::regnamespace
                     AND (t.typname IN ('array', 'enum', 'composite')
                          OR EXISTS (SELECT FROM pg_type k
                                     WHERE k.typname = t.typname AND k.typnamespace = 'pg_catalog'::regnamespace))
                THEN n.nspname || '.' || t.typname
                ELSE t.typname::text END
    FROM (SELECT attnum, false AS element, oid FROM bases
          UNION ALL
          (SELECT DISTINCT ON (attnum) attnum, true, oid FROM elements ORDER BY attnum, depth DESC)) s
    JOIN pg_type t ON t.oid = s.oid
    JOIN pg_namespace n ON n.oid = t.typnamespace
),
-- A deferrable key is no key to follow rows by.
keys AS (
    SELECT i.indisprimary, i.indisreplident, k.attnum, k.place
    FROM pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
    WHERE i.indrelid = $1 AND i.indisvalid AND i.indimmediate AND (i.indisprimary OR i.indisreplident)
          AND k.place <= i.indnkeyatts
),
columns AS (
    SELECT jsonb_agg(jsonb_build_object(
        'ordinal', a.attnum,
        'name', a.attname,
        'declared', format_type(a.atttypid, a.atttypmod),
        'base', n.name,
        'element', e.name,
        'type_oid', a.atttypid::int8,
        'typmod', a.atttypmod,
        'base_typmod', coalesce((SELECT max(x.typmod) FROM elements x WHERE x.attnum = a.attnum), b.typmod),
        'not_null', a.attnotnull OR b.not_null,
        'key_position', (SELECT k.place FROM keys k WHERE k.indisprimary AND k.attnum = a.attnum),
        'identity_column', CASE c.relreplident
            WHEN 'f' THEN true
            WHEN 'd' THEN EXISTS (SELECT FROM keys k WHERE k.indisprimary AND k.attnum = a.attnum)
            WHEN 'i' THEN EXISTS (SELECT FROM keys k WHERE k.indisreplident AND k.attnum = a.attnum)
            ELSE false END,
        'default', CASE WHEN a.attgenerated = '' THEN pg_get_expr(d.adbin, d.adrelid) END,
        'generated', a.attgenerated,
        'identity', a.attidentity,
        'enum_labels', CASE WHEN n.name = 'enum' THEN
            (SELECT jsonb_agg(l.enumlabel ORDER BY l.enumsortorder) FROM pg_enum l WHERE l.enumtypid = b.oid) END
        ) ORDER BY a.attnum) AS list
    FROM pg_attribute a
    JOIN pg_class c ON c.oid = a.attrelid
    JOIN bases b ON b.attnum = a.attnum
    JOIN named n ON n.attnum = a.attnum AND NOT n.element
    LEFT JOIN named e ON e.attnum = a.attnum AND e.element
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
),
-- What publishes it, with the columns that are published (null: the server has no
-- column lists) and the row filter.
publications AS (
    SELECT jsonb_agg(jsonb_build_object(
        'name', p.pubname,
        'oid', p.oid::int8,
        'columns', to_jsonb(g) -> 'attrs',
        'row_filter', CASE WHEN to_jsonb(g) ->> 'qual' IS NOT NULL THEN
            (SELECT to_jsonb(v) ->> 'rowfilter' FROM pg_publication_tables v
             WHERE v.pubname = p.pubname AND v.schemaname = s.nspname AND v.tablename = c.relname) END
        ) ORDER BY p.pubname) AS list
    FROM pg_class c
    JOIN pg_namespace s ON s.oid = c.relnamespace
    CROSS JOIN pg_publication p
    CROSS JOIN LATERAL pg_get_publication_tables(p.pubname::text) g
    WHERE c.oid = $1 AND g.relid = c.oid AND c.relpersistence = 'p' AND c.relkind IN ('r', 'p')
)
SELECT jsonb_build_object(
    'version', 1,
    'oid', c.oid::int8,
    'schema', s.nspname,
    'name', c.relname,
    'kind', c.relkind,
    'persistence', c.relpersistence,
    'replica_identity', c.relreplident,
    'columns', coalesce((SELECT list FROM columns), '[]'),
    'publications', coalesce((SELECT list FROM publications), '[]'))
FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace
WHERE c.oid = $1
