UNION ALL
SELECT DISTINCT a.root, jsonb_build_array('schema', s.oid::int8, s.xmin::text)
FROM pg_publication p JOIN pg_publication_namespace s ON s.pnpubid = p.oid
JOIN pg_class c ON c.relnamespace = s.pnnspid
JOIN above a ON a.oid = c.oid
WHERE p.pubname = $2
