-- What is copied for the tables $1: each itself, or its leaves as the snapshot shows them
-- (pg_partition_tree would show later ones, P18). $2: the names of the columns that are
-- published, a JSON array for each table. Sizes are of now: what came after the snapshot is read too,
-- and seen to be invisible.
WITH RECURSIVE
tables(root, place) AS (SELECT t.oid, t.place FROM unnest($1::oid[]) WITH ORDINALITY AS t(oid, place)),
below(root, oid) AS (
    SELECT root, root FROM tables
    UNION
    SELECT b.root, i.inhrelid FROM below b
    JOIN pg_inherits i ON i.inhparent = b.oid
    JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT b.root, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text, row_security_active(c.oid),
    w.generated,
    -- Only the heap's own access method is known to keep ctid in the order of its pages.
    coalesce(m.amhandler = 'heap_tableam_handler'::regproc, false),
    coalesce(pg_relation_size(c.oid), 0),
    coalesce(pg_table_size(c.oid), 0),
    c.relpages, c.reltuples::float8, w.width,
    current_setting('block_size')::int8,
    c.oid
FROM below b JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN tables t USING (root)
LEFT JOIN pg_am m ON m.oid = c.relam
CROSS JOIN LATERAL (
    SELECT coalesce(bool_or(a.attgenerated <> '' AND ($2::text::jsonb -> (t.place - 1)::int4) @> to_jsonb(a.attname)), false),
        -- As the planner guesses for a table that was never analysed.
        coalesce(sum(CASE WHEN a.attlen > 0 THEN a.attlen ELSE 32 END), 0)
    FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
) AS w(generated, width)
WHERE c.relkind IN ('r', 'f')
