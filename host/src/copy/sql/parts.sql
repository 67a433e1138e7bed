-- What is copied for table $1: itself, or its leaves as the snapshot shows them
-- (pg_partition_tree would show later ones, P18). Biggest first. $2: the ordinals that
-- are published.
WITH RECURSIVE below(oid) AS (
    SELECT $1::oid
    UNION
    SELECT i.inhrelid FROM below b
    JOIN pg_inherits i ON i.inhparent = b.oid
    JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT n.nspname::text, c.relname::text, row_security_active(c.oid),
    EXISTS (SELECT FROM pg_attribute a
            WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND a.attnum = ANY($2))
FROM below JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r'
ORDER BY c.relpages DESC, c.oid
