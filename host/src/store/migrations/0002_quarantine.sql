-- Rows that a destination refused for good, each as the text of its cells.

CREATE TABLE quarantine (
    -- What a person names a row by; never used again.
    id               INTEGER PRIMARY KEY AUTOINCREMENT,
    destination      TEXT NOT NULL REFERENCES destinations (name),
    oid              INTEGER NOT NULL,
    schema_name      TEXT NOT NULL,
    table_name       TEXT NOT NULL,
    -- Under `merge` the key, of which there is one; under `changes` the place in the
    -- history.
    ident            TEXT NOT NULL,
    op               TEXT NOT NULL,
    -- The version of the table's schema that the cells are of, as commit:message.
    snapshot         TEXT NOT NULL,
    -- Of the last change that is in it.
    position_epoch   INTEGER NOT NULL,
    position_commit  TEXT NOT NULL CHECK (length(position_commit) = 16),
    position_ordinal TEXT NOT NULL CHECK (length(position_ordinal) = 16),
    committed_at     INTEGER NOT NULL,
    xid              INTEGER NOT NULL,
    -- JSON objects, from ordinal to text.
    new_row          TEXT NOT NULL,
    old_row          TEXT,
    -- The ident of the row that has the rest of the cells.
    needs            TEXT,
    code             TEXT NOT NULL,
    message          TEXT NOT NULL,
    column_ordinal   INTEGER,
    -- Changes that are folded into it, and when the first came, in microseconds.
    changes          INTEGER NOT NULL,
    quarantined_at   INTEGER NOT NULL,
    -- What is to be done with it: retry, drop.
    mark             TEXT CHECK (mark IN ('retry', 'drop')),
    UNIQUE (destination, oid, ident)
) STRICT;
