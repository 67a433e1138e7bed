-- Copies by ranges of the key, which a restart does not begin again (P19), and the floors
-- of those that were resumed, until the table is beyond them.
CREATE TABLE copies (
    destination  TEXT NOT NULL,
    oid          INTEGER NOT NULL,
    -- As the plugin knows it.
    run          TEXT NOT NULL,
    -- The version of the schema that its rows have, as commit:message in decimal.
    snapshot     TEXT NOT NULL,
    -- What the table was, and in which history: see the host's `Wave::origin`.
    origin       TEXT NOT NULL,
    column_name  TEXT NOT NULL,
    key_type     TEXT NOT NULL,
    -- JSON: the last value of each range but the last.
    bounds       TEXT NOT NULL,
    PRIMARY KEY (destination, oid)
) STRICT, WITHOUT ROWID;

-- Ranges of which rows were sent.
CREATE TABLE copy_ranges (
    destination  TEXT NOT NULL,
    oid          INTEGER NOT NULL,
    number       INTEGER NOT NULL,
    -- Floor of the wave that was the first to send rows of it.
    since        TEXT NOT NULL CHECK (length(since) = 16),
    -- Floor of the wave whose rows of it are all durable.
    floor        TEXT CHECK (length(floor) = 16),
    rows_copied  INTEGER NOT NULL,
    bytes_copied INTEGER NOT NULL,
    PRIMARY KEY (destination, oid, number)
) STRICT, WITHOUT ROWID;
