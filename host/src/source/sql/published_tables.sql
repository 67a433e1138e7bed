-- Behind published.sql.
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       g.columns::text,
       CASE WHEN c.relkind = 'p' THEN coalesce(l.reltuples, 0) ELSE greatest(c.reltuples, 0) END::float8,
       CASE WHEN c.relkind = 'p' THEN coalesce(l.pages, 0) ELSE c.relpages END::int8,
       coalesce(l.oids, '{}'), g.listed
FROM published g
JOIN pg_class c ON c.oid = g.oid
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
WHERE n.nspname <> 'tidegate'
ORDER BY n.nspname, c.relname
