-- Behind published.sql: the row filters of the tables $2. Printing one opens its table, and
-- waits for whoever holds that: ask for tables that are locked already. A table that is
-- published with its schema, or with all, has none.
-- PostgreSQL 14 has no row filters: their column resolves to `older`.
SELECT f.oid, f.row_filter
FROM publication p
CROSS JOIN (SELECT NULL::pg_node_tree AS prqual) older
CROSS JOIN LATERAL (
    SELECT r.prrelid AS oid, pg_get_expr(prqual, r.prrelid) AS row_filter
    FROM pg_publication_rel r JOIN pg_class c ON c.oid = r.prrelid
    WHERE r.prpubid = p.oid AND r.prrelid = ANY($2) AND c.relnamespace NOT IN (SELECT oid FROM schemas)
) f
WHERE NOT p.puballtables
