-- Whether the copy of table $1 can go by ranges of its column $2: how its values are
-- spread, and whether an index finds them in the order in which the rows stand.
-- No row: it cannot.
SELECT s.histogram_bounds::text::text[]
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_stats s ON s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = $2 AND NOT s.inherited
WHERE c.oid = $1 AND c.relkind = 'r'
  AND s.histogram_bounds IS NOT NULL
  AND abs(s.correlation) >= 0.9
  AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid)
  AND EXISTS (
      SELECT FROM pg_index i
      JOIN pg_class x ON x.oid = i.indexrelid
      JOIN pg_am m ON m.oid = x.relam
      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = $2
      WHERE i.indrelid = c.oid AND i.indkey[0] = a.attnum AND i.indisvalid AND i.indpred IS NULL AND m.amname = 'btree')
