-- Which of the partitions $2 of root $1 may have rows that never were changes of the root
-- (P22): all but those that were made in their place (CREATE TABLE … PARTITION OF), those
-- that are empty, and partitioned ones, which have none of their own. Changes of unlogged
-- and foreign tables never come.
-- ATTACH writes every column of a table again, DETACH too: of one that was made in its
-- place there is a column that is as old as the columns the server gives each table.
WITH RECURSIVE path(leaf, oid) AS (
    SELECT l.oid, l.oid FROM unnest($2::oid[]) AS l(oid)
    UNION ALL
    SELECT p.leaf, i.inhparent FROM path p JOIN pg_inherits i ON i.inhrelid = p.oid WHERE i.inhparent <> $1
),
attached(leaf) AS (
    SELECT p.leaf FROM path p
    WHERE NOT EXISTS (
        SELECT FROM pg_attribute s JOIN pg_attribute a ON a.attrelid = s.attrelid
        WHERE s.attrelid = p.oid AND s.attnum < 0 AND s.attname = 'tableoid'
          AND a.attnum > 0 AND NOT a.attisdropped AND a.attinhcount = 1 AND NOT a.attislocal
          AND a.xmin = s.xmin AND a.cmin = s.cmin)
)
SELECT c.oid, c.relname::text
FROM pg_class c
WHERE c.oid = ANY($2) AND c.relkind <> 'p'
  AND CASE WHEN c.relkind <> 'r' OR c.relpersistence <> 'p' THEN true
           WHEN c.oid IN (SELECT leaf FROM attached) THEN coalesce(pg_relation_size(c.oid), 1) > 0
           ELSE false END
