-- Behind published.sql: what tells cheaply whether a table is still what it was when its
-- picture was last read. Of types it knows only whether any was changed.
, user_types AS (
    SELECT md5(concat((SELECT string_agg(concat_ws(' ', l.oid, l.xmin), ',' ORDER BY l.oid) FROM pg_enum l WHERE l.oid >= 16384),
                      (SELECT string_agg(concat_ws(' ', a.attrelid, a.attnum, a.xmin), ',' ORDER BY a.attrelid, a.attnum)
                       FROM pg_class k JOIN pg_attribute a ON a.attrelid = k.oid WHERE k.relkind = 'c' AND k.oid >= 16384))) AS digest
)
SELECT c.oid, md5(concat_ws('|', n.nspname, c.relname, c.relreplident, g.columns, k.rows,
    (SELECT concat_ws('|', string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attnotnull, a.attgenerated, d.xmin),
                                      ',' ORDER BY a.attnum),
                      CASE WHEN bool_or(a.atttypid >= 16384) THEN (SELECT digest FROM user_types) END)
     FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)))
FROM published g
JOIN pg_class c ON c.oid = g.oid
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname <> 'tidegate'
LEFT JOIN LATERAL (
    SELECT string_agg(concat_ws(' ', i.indexrelid, i.indisprimary, i.indisreplident), ',' ORDER BY i.indexrelid) AS rows
    FROM pg_index i WHERE i.indrelid = c.oid AND (i.indisprimary OR i.indisreplident)
) k ON true
ORDER BY c.oid
