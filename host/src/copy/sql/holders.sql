-- Who keeps ACCESS SHARE on table $1 and its partitions from us, by having or by
-- waiting for ACCESS EXCLUSIVE. Names no query text: it may hold secrets.
WITH RECURSIVE below(oid) AS (
    SELECT $1::oid
    UNION
    SELECT i.inhrelid FROM below b JOIN pg_inherits i ON i.inhparent = b.oid
)
SELECT DISTINCT CASE WHEN l.pid IS NULL
    THEN concat('prepared transaction ''', x.gid, ''' since ', x.prepared::timestamptz(0))
    ELSE concat('pid ', l.pid, ' of ' || a.usename, ' (', a.state, ' since ' || a.xact_start::timestamptz(0), ')',
                CASE WHEN NOT l.granted THEN ', itself waiting for it' END)
    END
FROM below
JOIN pg_locks l ON l.relation = below.oid AND l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock'
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_prepared_xacts x ON l.virtualtransaction = '-1/' || x.transaction::text
WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
LIMIT 10
