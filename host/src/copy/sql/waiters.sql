-- Who has waited for a lock of backend $1 for more than $2 seconds (P17).
SELECT concat('pid ', l.pid, ' of ' || a.usename, ' (' || nullif(a.application_name, '') || ')')
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE NOT l.granted AND l.waitstart < clock_timestamp() - make_interval(secs => $2)
  AND $1 = ANY(pg_blocking_pids(l.pid))
LIMIT 1
