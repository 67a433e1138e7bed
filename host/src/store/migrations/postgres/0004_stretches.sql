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
    needs_resync = false, rows_copied = 0, rows_total = NULL
WHERE state <> 'errored' AND (destination, oid) IN (SELECT destination, oid FROM copies);
DROP TABLE copy_ranges;
DROP TABLE copies;

CREATE TABLE copies (
    destination text COLLATE "C" NOT NULL,
    oid         oid NOT NULL,
    -- As the plugin knows it.
    run         text NOT NULL,
    -- The version of the schema that its rows have, as commit:message in decimal.
    snapshot    text NOT NULL,
    -- What the table was, and in which history: see the host's `Wave::origin`.
    origin      text NOT NULL,
    -- What went from the table before this LSN is not at the destination.
    cleaned     pg_lsn NOT NULL,
    PRIMARY KEY (destination, oid)
);

CREATE TABLE copy_stretches (
    destination  text COLLATE "C" NOT NULL,
    oid          oid NOT NULL,
    number       bigint NOT NULL,
    -- Of the table that has the pages: itself or a partition.
    leaf         oid NOT NULL,
    page_from    bigint NOT NULL,
    -- Not of the stretch any more; none: it has no end.
    page_to      bigint,
    -- The snapshot as of which all its rows are durable: its LSN, and its xmin with epoch.
    base_floor   pg_lsn,
    base_xmin    bigint,
    rows_copied  bigint NOT NULL,
    bytes_copied bigint NOT NULL,
    PRIMARY KEY (destination, oid, number)
);
