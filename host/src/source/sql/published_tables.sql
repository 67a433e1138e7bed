-- What the publication $1 publishes: roots alone where it publishes via the root.
-- to_jsonb: PostgreSQL 14 has neither column lists nor row filters.
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       CASE WHEN to_jsonb(g) ->> 'qual' IS NOT NULL THEN
           (SELECT to_jsonb(v) ->> 'rowfilter' FROM pg_publication_tables v
            WHERE v.pubname = p.pubname AND v.schemaname = n.nspname AND v.tablename = c.relname) END,
       (to_jsonb(g) -> 'attrs')::text,
       CASE WHEN c.relkind = 'p' THEN coalesce(l.reltuples, 0) ELSE greatest(c.reltuples, 0) END::float8,
       CASE WHEN c.relkind = 'p' THEN coalesce(l.pages, 0) ELSE c.relpages END::int8,
       coalesce(l.oids, '{}')
FROM pg_publication p
CROSS JOIN LATERAL pg_get_publication_tables(p.pubname::text) g
JOIN pg_class c ON c.oid = g.relid
JOIN pg_namespace n ON n.oid = c.relnamespace
-- Leaves from pg_inherits: pg_partition_tree looks past the snapshot (P18).
LEFT JOIN LATERAL (
    WITH RECURSIVE below(oid) AS (
        SELECT inhrelid FROM pg_inherits WHERE inhparent = c.oid
        UNION ALL
        SELECT i.inhrelid FROM pg_inherits i JOIN below b ON i.inhparent = b.oid)
    SELECT array_agg(k.oid ORDER BY k.oid) AS oids, sum(greatest(k.reltuples, 0)) AS reltuples, sum(k.relpages) AS pages
    FROM below b JOIN pg_class k ON k.oid = b.oid
    WHERE k.relkind <> 'p'
) l ON c.relkind = 'p'
-- The key of the DDL trigger never leaves the server.
WHERE p.pubname = $1 AND n.nspname <> 'tidegate'
ORDER BY n.nspname, c.relname
