-- The state of one pipeline.
--
-- LSNs and ordinals are unsigned 64-bit numbers, which SQLite's INTEGER does not hold.
-- They are TEXT of exactly 16 upper-case hexadecimal digits, so that comparing the
-- texts compares the numbers, and a person can read them (16/B374D848 is
-- 00000016B374D848).

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- One row at most.
CREATE TABLE source (
    id              INTEGER PRIMARY KEY CHECK (id = 1),
    system          TEXT NOT NULL,
    timeline        INTEGER NOT NULL,
    slot            TEXT NOT NULL,
    publication     TEXT NOT NULL,
    publication_oid INTEGER NOT NULL,
    plugin          TEXT NOT NULL,
    epoch           INTEGER NOT NULL,
    -- NULL: the slot is intended, and may or may not exist (P8).
    slot_created_at TEXT CHECK (length(slot_created_at) = 16)
) STRICT;

CREATE TABLE destinations (
    name          TEXT PRIMARY KEY,
    plugin        TEXT NOT NULL,
    -- Never goes back (P6).
    checkpoint    TEXT NOT NULL CHECK (length(checkpoint) = 16),
    error_code    TEXT,
    error_message TEXT,
    error_next    TEXT
) STRICT, WITHOUT ROWID;

CREATE TABLE tables (
    destination         TEXT NOT NULL REFERENCES destinations (name),
    oid                 INTEGER NOT NULL,
    schema_name         TEXT NOT NULL,
    table_name          TEXT NOT NULL,
    state               TEXT NOT NULL,
    floor               TEXT CHECK (length(floor) = 16),
    run                 TEXT,
    -- The position: all three or none. Never goes back (P7).
    position_epoch      INTEGER,
    position_commit     TEXT CHECK (length(position_commit) = 16),
    position_ordinal    TEXT CHECK (length(position_ordinal) = 16),
    -- Snapshot ids as commit:message in decimal.
    applied             TEXT,
    applying_from       TEXT,
    applying_to         TEXT,
    applying_step       INTEGER,
    needs_resync        INTEGER NOT NULL,
    rows_copied         INTEGER NOT NULL,
    rows_total          INTEGER,
    error_code          TEXT,
    error_message       TEXT,
    error_next          TEXT,
    PRIMARY KEY (destination, oid),
    CHECK ((position_epoch IS NULL) = (position_commit IS NULL)
       AND (position_epoch IS NULL) = (position_ordinal IS NULL)),
    CHECK ((applying_from IS NULL) = (applying_to IS NULL)
       AND (applying_from IS NULL) = (applying_step IS NULL))
) STRICT, WITHOUT ROWID;

-- Append-only: the versions of every table's schema (P5).
CREATE TABLE history (
    oid            INTEGER NOT NULL,
    commit_lsn     TEXT NOT NULL CHECK (length(commit_lsn) = 16),
    message_lsn    TEXT NOT NULL CHECK (length(message_lsn) = 16),
    origin         TEXT NOT NULL,
    shape          TEXT NOT NULL,
    -- JSON of the whole version.
    table_schema   TEXT NOT NULL,
    PRIMARY KEY (oid, commit_lsn, message_lsn)
) STRICT, WITHOUT ROWID;

-- Not tied to `destinations`: a destination that is removed and comes back must not
-- be given a generation that an earlier instance had.
CREATE TABLE generations (
    destination TEXT NOT NULL,
    lane        INTEGER NOT NULL,
    generation  INTEGER NOT NULL,
    PRIMARY KEY (destination, lane)
) STRICT, WITHOUT ROWID;

-- What plugins keep for themselves; a plugin may write before its destination is
-- stored.
CREATE TABLE plugin_state (
    destination TEXT NOT NULL,
    key         TEXT NOT NULL,
    value       BLOB NOT NULL,
    PRIMARY KEY (destination, key)
) STRICT;
