-- Which destination got which version of a table, how, and when: the last time counts.
CREATE TABLE applied_versions (
    destination text COLLATE "C" NOT NULL,
    oid         oid NOT NULL,
    -- As commit:message in decimal.
    snapshot    text COLLATE "C" NOT NULL,
    how         text NOT NULL,
    -- The plugin's instance that did it, as the contract numbers them.
    generation  bigint NOT NULL,
    -- Microseconds since 1970-01-01 UTC, by the host's clock.
    applied_at  bigint NOT NULL,
    PRIMARY KEY (destination, oid, snapshot)
);

-- Where tables ended.
CREATE TABLE tombstones (
    oid         oid NOT NULL,
    commit_lsn  pg_lsn NOT NULL,
    message_lsn pg_lsn NOT NULL,
    schema_name text NOT NULL,
    table_name  text NOT NULL,
    why         text NOT NULL,
    -- Microseconds since 1970-01-01 UTC.
    ended_at    bigint,
    PRIMARY KEY (oid, commit_lsn, message_lsn)
);

-- How many versions of a table were removed: those that are left keep their numbers.
CREATE TABLE history_removed (
    oid      oid PRIMARY KEY,
    versions bigint NOT NULL
);
