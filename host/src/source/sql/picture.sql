-- The picture of one table ($1: its oid) as jsonb, payload version 1; no row if it
-- does not exist. One text for the host's catalog look-ups and the DDL trigger.
-- Wants search_path = pg_catalog, so that types and defaults print the same in both.
-- Columns that PostgreSQL 14 lacks are read through to_jsonb, or resolve to `older`.
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
named(attnum, element, oid, delimiter, name) AS (
    SELECT s.attnum, s.element, s.oid, t.typdelim,
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
-- The enums and row types that a column's type is or has in it: what they are made of is in
-- the text of its values, and can change without a change of the table.
inner_types(attnum, oid) AS (
    SELECT b.attnum, b.oid FROM bases b WHERE b.oid >= 16384
    UNION
    SELECT i.attnum, o.oid
    FROM inner_types i JOIN pg_type t ON t.oid = i.oid
    CROSS JOIN LATERAL (
        SELECT t.typelem UNION ALL
        SELECT t.typbasetype UNION ALL
        SELECT g.rngsubtype FROM pg_range g WHERE g.rngtypid = t.oid OR g.rngmultitypid = t.oid UNION ALL
        SELECT a.atttypid FROM pg_attribute a
        WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) o(oid)
    WHERE o.oid >= 16384
),
within AS (
    SELECT i.attnum, jsonb_object_agg(t.typtype::text || i.oid, CASE t.typtype
        WHEN 'e' THEN (SELECT coalesce(jsonb_agg(l.enumlabel ORDER BY l.enumsortorder), '[]') FROM pg_enum l WHERE l.enumtypid = t.oid)
        ELSE (SELECT coalesce(jsonb_agg(a.attnum || ' ' || a.atttypid ORDER BY a.attnum), '[]') FROM pg_attribute a
              WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) END) AS types
    FROM inner_types i JOIN pg_type t ON t.oid = i.oid
    WHERE t.typtype IN ('e', 'c')
    GROUP BY i.attnum
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
        -- Between the elements of the array, where it is not the comma.
        'delimiter', nullif(e.delimiter, ','),
        'type_oid', a.atttypid::int8,
        'typmod', a.atttypmod,
        'base_typmod', coalesce((SELECT max(x.typmod) FROM elements x WHERE x.attnum = a.attnum), b.typmod),
        -- From PostgreSQL 18 on NOT NULL may be NOT VALID: rows that were there may break it.
        'not_null', b.not_null OR a.attnotnull AND NOT EXISTS (
            SELECT FROM pg_constraint k WHERE k.conrelid = a.attrelid AND k.contype = 'n'
            AND NOT k.convalidated AND k.conkey = ARRAY[a.attnum]),
        'key_position', (SELECT k.place FROM keys k WHERE k.indisprimary AND k.attnum = a.attnum),
        'identity_column', CASE c.relreplident
            WHEN 'f' THEN true
            WHEN 'd' THEN EXISTS (SELECT FROM keys k WHERE k.indisprimary AND k.attnum = a.attnum)
            WHEN 'i' THEN EXISTS (SELECT FROM keys k WHERE k.indisreplident AND k.attnum = a.attnum)
            ELSE false END,
        -- Of a generated column, what it is generated from.
        'default', pg_get_expr(d.adbin, d.adrelid),
        'generated', a.attgenerated,
        'identity', a.attidentity,
        'enum_labels', CASE WHEN n.name = 'enum' THEN
            (SELECT jsonb_agg(l.enumlabel ORDER BY l.enumsortorder) FROM pg_enum l WHERE l.enumtypid = b.oid) END,
        'within', coalesce((SELECT w.types FROM within w WHERE w.attnum = a.attnum), '{}')
        ) ORDER BY a.attnum) AS list
    FROM pg_attribute a
    JOIN pg_class c ON c.oid = a.attrelid
    JOIN bases b ON b.attnum = a.attnum
    JOIN named n ON n.attnum = a.attnum AND NOT n.element
    LEFT JOIN named e ON e.attnum = a.attnum AND e.element
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
),
-- The table, and the partitioned tables that it is a partition below.
lineage(oid, itself) AS (
    SELECT $1::oid, true
    UNION ALL
    SELECT i.inhparent, false
    FROM lineage l
    JOIN pg_class c ON c.oid = l.oid AND c.relispartition
    JOIN pg_inherits i ON i.inhrelid = l.oid
),
-- Which publications name them, alone or with their schema (see published.sql).
named_by AS (
    SELECT p.oid, l.itself, s.by_schema,
           p.puballtables OR s.by_schema
           OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = l.oid) AS named
    FROM pg_publication p
    CROSS JOIN lineage l
    JOIN pg_class c ON c.oid = l.oid AND c.relpersistence = 'p' AND c.oid >= 16384 AND c.relkind IN ('r', 'p')
    CROSS JOIN LATERAL (
        SELECT EXISTS (
            SELECT FROM pg_depend m JOIN pg_depend n ON n.classid = m.classid AND n.objid = m.objid
            WHERE m.refclassid = 'pg_publication'::regclass AND m.refobjid = p.oid
                AND m.classid = to_regclass('pg_catalog.pg_publication_namespace')
                AND n.refclassid = 'pg_namespace'::regclass AND n.refobjid = c.relnamespace) AS by_schema
    ) s
),
-- What publishes it, with the columns that are published (null: all but generated ones)
-- and the row filter. Not from pg_get_publication_tables: from PostgreSQL 16 on that
-- opens every table, and the user's command would wait for whoever holds one.
publications AS (
    SELECT jsonb_agg(jsonb_build_object(
        'name', p.pubname,
        'oid', p.oid::int8,
        'listed', coalesce(jsonb_typeof(r.columns) = 'array', false),
        'columns', CASE
            WHEN jsonb_typeof(r.columns) = 'array' THEN r.columns
            WHEN to_jsonb(p) ->> 'pubgencols' = 's' THEN
                (SELECT jsonb_agg(a.attnum ORDER BY a.attnum) FROM pg_attribute a
                 WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated IN ('', 's'))
            END,
        'row_filter', r.row_filter
        ) ORDER BY p.pubname) AS list
    FROM pg_class c
    CROSS JOIN pg_publication p
    CROSS JOIN (SELECT NULL::pg_node_tree AS prqual) older
    JOIN (SELECT n.oid, bool_or(n.named) FILTER (WHERE n.itself) AS itself,
                 coalesce(bool_or(n.named) FILTER (WHERE NOT n.itself), false) AS above,
                 bool_or(n.by_schema) FILTER (WHERE n.itself) AS by_schema
          FROM named_by n GROUP BY n.oid) m ON m.oid = p.oid
    LEFT JOIN LATERAL (
        SELECT to_jsonb(r) -> 'prattrs' AS columns, pg_get_expr(prqual, r.prrelid) AS row_filter
        FROM pg_publication_rel r
        WHERE r.prpubid = p.oid AND r.prrelid = c.oid
    ) r ON NOT p.puballtables AND NOT m.by_schema
    WHERE c.oid = $1 AND CASE WHEN p.pubviaroot THEN m.itself AND NOT m.above
                              ELSE c.relkind = 'r' AND (m.itself OR m.above) END
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
