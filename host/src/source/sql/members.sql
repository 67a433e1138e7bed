-- Behind published.sql: who is in the publication, and by what, the catalog rows that make
-- it so by oid, because a DROP and an ADD between two looks leave the same table and other
-- rows (P21); a table's row is changed in place as well, so its xmin counts. The rows of
-- schemas are found through pg_depend, since PostgreSQL 14 has none. A partition may be one
-- by what it is below, and was out while it was detached: the rows that make it a partition
-- count. One row without a
-- table if it publishes none, none if it is not there.
-- Of a root also what is below it (P22): each partition's file, the row that makes it
-- one, and who changed its row of pg_class last.
SELECT p.oid, c.oid, n.nspname::text, c.relname::text,
       concat_ws(' ', CASE WHEN p.puballtables THEN 'all ' || p.oid END,
           k.rows,
           (SELECT string_agg('schema ' || s.objid || ' ' || i.xmin, ' ' ORDER BY s.objid)
            FROM pg_depend m JOIN pg_depend s ON s.classid = m.classid AND s.objid = m.objid
            -- The row by which the table is in its schema: another one is a SET SCHEMA.
            JOIN pg_depend i ON i.classid = 'pg_class'::regclass AND i.objid = c.oid AND i.objsubid = 0
                AND i.refclassid = 'pg_namespace'::regclass
            WHERE m.refclassid = 'pg_publication'::regclass AND m.refobjid = p.oid
              AND m.classid = to_regclass('pg_catalog.pg_publication_namespace')
              AND s.refclassid = 'pg_namespace'::regclass
              AND (s.refobjid = c.relnamespace
                   OR s.refobjid IN (SELECT k.relnamespace FROM above a JOIN pg_class k ON k.oid = a.root WHERE a.oid = c.oid))),
           CASE WHEN c.relispartition AND NOT p.puballtables THEN
               (SELECT string_agg('partition ' || i.inhrelid || ' ' || i.xmin, ' ' ORDER BY i.inhrelid) FROM pg_inherits i
                WHERE i.inhrelid = c.oid OR i.inhrelid IN (SELECT root FROM above WHERE oid = c.oid)) END),
       c.relkind = 'p', l.oids, l.files, l.links, l.changed,
       concat(CASE WHEN p.pubinsert THEN 'i' END, CASE WHEN p.pubupdate THEN 'u' END,
              CASE WHEN p.pubdelete THEN 'd' END, CASE WHEN p.pubtruncate THEN 't' END),
       (SELECT x.xmin::text FROM pg_publication x WHERE x.oid = p.oid)
FROM publication p
LEFT JOIN (published g
           JOIN pg_class c ON c.oid = g.oid
           JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname <> 'tidegate') ON true
-- Of the table and of what it is a partition below; for all tables at once.
LEFT JOIN (
    SELECT m.oid, m.prpubid, string_agg('table ' || m.row || ' ' || m.xmin, ' ' ORDER BY m.row) AS rows
    FROM (SELECT r.prrelid AS oid, r.oid AS row, r.xmin, r.prpubid FROM pg_publication_rel r
          UNION ALL
          SELECT a.oid, r.oid, r.xmin, r.prpubid FROM above a JOIN pg_publication_rel r ON r.prrelid = a.root) m
    GROUP BY m.oid, m.prpubid
) k ON k.oid = c.oid AND k.prpubid = p.oid
LEFT JOIN LATERAL (
    WITH RECURSIVE below(oid, link) AS (
        SELECT inhrelid, xmin::text::int8 FROM pg_inherits WHERE c.relkind = 'p' AND inhparent = c.oid
        UNION ALL
        SELECT i.inhrelid, i.xmin::text::int8 FROM pg_inherits i JOIN below b ON i.inhparent = b.oid)
    SELECT array_agg(k.oid ORDER BY k.oid) AS oids, array_agg(k.relfilenode ORDER BY k.oid) AS files,
           array_agg(b.link ORDER BY k.oid) AS links, array_agg(k.xmin::text::int8 ORDER BY k.oid) AS changed
    FROM below b JOIN pg_class k ON k.oid = b.oid
) l ON true
ORDER BY c.oid
