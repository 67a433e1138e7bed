-- Which destination got which version of a table, how, and when: the last time counts.
CREATE TABLE applied_versions (
    destination TEXT NOT NULL,
    oid         INTEGER NOT NULL,
    -- As commit:message in decimal.
    snapshot    TEXT NOT NULL,
    how         TEXT NOT NULL,
    -- The plugin's instance that did it, as the contract numbers them.
    generation  INTEGER NOT NULL,
    -- Microseconds since 1970-01-01 UTC, by the host's clock.
    applied_at  INTEGER NOT NULL,
    PRIMARY KEY (destination, oid, snapshot)
) STRICT, WITHOUT ROWID;

-- Where tables ended.
CREATE TABLE tombstones (
    oid         INTEGER NOT NULL,
    commit_lsn  TEXT NOT NULL CHECK (length(commit_lsn) = 16),
    message_lsn TEXT NOT NULL CHECK (length(message_lsn) = 16),
    schema_name TEXT NOT NULL,
    table_name  TEXT NOT NULL,
    why         TEXT NOT NULL,
    -- Microseconds since 1970-01-01 UTC.
    ended_at    INTEGER,
    PRIMARY KEY (oid, commit_lsn, message_lsn)
) STRICT, WITHOUT ROWID;

-- How many versions of a table were removed: those that are left keep their numbers.
CREATE TABLE history_removed (
    oid      INTEGER PRIMARY KEY,
    versions INTEGER NOT NULL
) STRICT;
