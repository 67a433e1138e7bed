-- What a table is that the publication does not show: unlogged and foreign tables are
-- told from those that left it.
SELECT relkind::text, relpersistence::text FROM pg_class WHERE oid = $1
