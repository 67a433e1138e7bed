UNION ALL
SELECT jsonb_build_array('schema', s.oid::int8, s.xmin::text)
FROM pg_publication p JOIN pg_publication_namespace s ON s.pnpubid = p.oid
WHERE p.pubname = $2 AND s.pnnspid IN (SELECT c.relnamespace FROM above JOIN pg_class c USING (oid))
