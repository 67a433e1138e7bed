-- Copies that a restart does not begin again go by stretches of pages (P19). One that an
-- earlier version had begun by ranges of the key begins again, and so does one whose
-- ranges had floors of their own, if the table is not known to be beyond them.
DELETE FROM barriers WHERE (destination, oid) IN
    (SELECT c.destination, c.oid FROM copies c JOIN tables t USING (destination, oid) WHERE t.state <> 'errored');
DELETE FROM quarantine WHERE (destination, oid) IN
    (SELECT c.destination, c.oid FROM copies c JOIN tables t USING (destination, oid) WHERE t.state <> 'errored');
UPDATE tables SET state = 'init', floor = NULL, run = NULL,
    position_epoch = NULL, position_commit = NULL, position_ordinal = NULL,
    applied = NULL, applying_from = NULL, applying_to = NULL, applying_step = NULL,
    needs_resync = 0, rows_copied = 0, rows_total = NULL
WHERE state <> 'errored' AND (destination, oid) IN (SELECT destination, oid FROM copies);
DROP TABLE copy_ranges;
DROP TABLE copies;

CREATE TABLE copies (
    destination  TEXT NOT NULL,
    oid          INTEGER NOT NULL,
    -- As the plugin knows it.
    run          TEXT NOT NULL,
    -- The version of the schema that its rows have, as commit:message in decimal.
    snapshot     TEXT NOT NULL,
    -- What the table was, and in which history: see the host's `Wave::origin`.
    origin       TEXT NOT NULL,
    -- What went from the table before this LSN is not at the destination.
    cleaned      TEXT NOT NULL CHECK (length(cleaned) = 16),
    PRIMARY KEY (destination, oid)
) STRICT, WITHOUT ROWID;

CREATE TABLE copy_stretches (
    destination  TEXT NOT NULL,
    oid          INTEGER NOT NULL,
    number       INTEGER NOT NULL,
    -- Of the table that has the pages: itself or a partition.
    leaf         INTEGER NOT NULL,
    page_from    INTEGER NOT NULL,
    -- Not of the stretch any more; none: it has no end.
    page_to      INTEGER,
    -- The snapshot as of which all its rows are durable: its LSN, and its xmin with epoch.
    base_floor   TEXT CHECK (length(base_floor) = 16),
    base_xmin    INTEGER,
    rows_copied  INTEGER NOT NULL,
    bytes_copied INTEGER NOT NULL,
    PRIMARY KEY (destination, oid, number)
) STRICT, WITHOUT ROWID;
