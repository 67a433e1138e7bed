-- What the copies of tables $1 for publication $2 rest on, as one SHA-256 for each:
-- storage, columns and place of the table and of its partitions, its identity, and the
-- rows that publish it. Catalog rows alone, read with the statement's snapshot; a function
-- that looks into the system caches would show a later moment.
-- The mark at the end stands for digest_schemas.sql, where the server publishes schemas.
WITH RECURSIVE
below(root, oid) AS (
    SELECT t.oid, t.oid FROM unnest($1::oid[]) AS t(oid)
    UNION
    SELECT b.root, i.inhrelid FROM below b
    JOIN pg_inherits i ON i.inhparent = b.oid
    JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
),
above(root, oid) AS (
    SELECT t.oid, t.oid FROM unnest($1::oid[]) AS t(oid)
    UNION
    SELECT a.root, i.inhparent FROM above a JOIN pg_inherits i ON i.inhrelid = a.oid
),
facts(root, fact) AS (
    SELECT b.root, jsonb_build_array('table', c.oid::int8, n.nspname, c.relname, c.relkind, c.relpersistence,
        c.relfilenode::int8, c.relreplident, c.relrowsecurity, c.relforcerowsecurity)
    FROM below b JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
    UNION ALL
    SELECT b.root, jsonb_build_array('column', a.attrelid::int8, a.attnum, a.attname, a.atttypid::int8, a.atttypmod,
        a.attnotnull, a.attisdropped, a.attgenerated)
    FROM below b JOIN pg_attribute a ON a.attrelid = b.oid AND a.attnum > 0
    UNION ALL
    SELECT b.root, jsonb_build_array('partition', to_jsonb(i))
    FROM below b JOIN pg_inherits i ON i.inhparent = b.oid
    UNION ALL
    SELECT i.indrelid, jsonb_build_array('key', i.indexrelid::int8, i.indkey::text, i.indisprimary, i.indisreplident,
        i.indisvalid, i.indimmediate)
    FROM pg_index i WHERE i.indrelid = ANY($1) AND (i.indisprimary OR i.indisreplident)
    UNION ALL
    SELECT t.oid, jsonb_build_array('publication', p.oid::int8, p.xmin::text)
    FROM unnest($1::oid[]) AS t(oid), pg_publication p WHERE p.pubname = $2
    UNION ALL
    -- By any way from the member to the root, or from the root to it: once.
    SELECT DISTINCT m.root, jsonb_build_array('member', r.oid::int8, r.xmin::text)
    FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
    JOIN (SELECT root, oid FROM below UNION SELECT root, oid FROM above) m ON m.oid = r.prrelid
    WHERE p.pubname = $2
    {schemas}
)
SELECT root, encode(sha256(convert_to(string_agg(fact::text, ' ' ORDER BY fact::text COLLATE "C"), 'UTF8')), 'hex')
FROM facts GROUP BY root
