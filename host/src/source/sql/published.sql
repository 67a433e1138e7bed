-- What the publication $1 publishes, as the server's pg_get_publication_tables would
-- say: roots alone where it publishes via the root, else leaves. From catalog rows, for
-- that function opens every table from PostgreSQL 16 on: it would wait for whoever holds
-- any of them, and show a later moment than the snapshot.
-- Nor row filters: whatever prints an expression opens its table (see row_filters.sql).
-- PostgreSQL 14 has neither column lists nor schemas in publications: their columns are
-- read through to_jsonb, and schemas come from pg_depend.
WITH RECURSIVE publication AS (
    SELECT p.*, to_jsonb(p) ->> 'pubgencols' = 's' AS generated FROM pg_publication p WHERE p.pubname = $1
),
schemas(oid) AS (
    SELECT s.refobjid
    FROM publication p
    JOIN pg_depend m ON m.refclassid = 'pg_publication'::regclass AND m.refobjid = p.oid
        AND m.classid = to_regclass('pg_catalog.pg_publication_namespace')
    JOIN pg_depend s ON s.classid = m.classid AND s.objid = m.objid AND s.refclassid = 'pg_namespace'::regclass
),
-- Tables that can be published: permanent, and not the server's own.
eligible AS (
    SELECT c.oid, c.relnamespace, c.relkind
    FROM pg_class c
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
),
direct(oid) AS (
    SELECT c.oid
    FROM publication p, eligible c
    WHERE p.puballtables OR c.relnamespace IN (SELECT oid FROM schemas)
          -- Without p in it: looked up once, not for each table.
          OR c.oid IN (SELECT r.prrelid FROM pg_publication_rel r WHERE r.prpubid IN (SELECT oid FROM publication))
),
-- Every partition with each that it is below.
above(oid, root) AS (
    SELECT i.inhrelid, i.inhparent
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
    UNION ALL
    SELECT a.oid, i.inhparent
    FROM above a
    JOIN pg_inherits i ON i.inhrelid = a.root
    JOIN pg_class c ON c.oid = a.root AND c.relispartition
),
under(oid) AS (
    SELECT a.oid FROM above a JOIN direct d ON d.oid = a.root
),
-- `columns`: null where all but generated ones are published; `listed` where the
-- publication names them.
published AS (
    SELECT c.oid,
        CASE WHEN jsonb_typeof(r.columns) = 'array' THEN r.columns
             WHEN p.generated THEN
                 (SELECT jsonb_agg(a.attnum ORDER BY a.attnum) FROM pg_attribute a
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated IN ('', 's'))
        END AS columns,
        coalesce(jsonb_typeof(r.columns) = 'array', false) AS listed
    FROM publication p
    CROSS JOIN eligible c
    LEFT JOIN LATERAL (
        SELECT to_jsonb(r) -> 'prattrs' AS columns
        FROM pg_publication_rel r
        WHERE r.prpubid = p.oid AND r.prrelid = c.oid
    ) r ON NOT p.puballtables AND c.relnamespace NOT IN (SELECT oid FROM schemas)
    WHERE CASE WHEN p.pubviaroot
        THEN c.oid IN (SELECT oid FROM direct) AND c.oid NOT IN (SELECT oid FROM under)
        ELSE c.relkind = 'r' AND (c.oid IN (SELECT oid FROM direct) OR c.oid IN (SELECT oid FROM under)) END
)
