-- Schema changes that a destination does not apply by itself, one a table: the rows behind
-- it wait.
CREATE TABLE barriers (
    destination   TEXT NOT NULL,
    oid           INTEGER NOT NULL,
    -- The version at the destination, and the one to come, as commit:message in decimal.
    from_version  TEXT NOT NULL,
    to_version    TEXT NOT NULL,
    -- JSON: what has to open.
    gates         TEXT NOT NULL,
    code          TEXT NOT NULL,
    message       TEXT NOT NULL,
    next          TEXT,
    -- Microseconds since 1970-01-01 UTC.
    since         INTEGER NOT NULL,
    -- What the operator said of exactly this change.
    verdict       TEXT CHECK (verdict IN ('approved', 'refused', 'accepted-from', 'accepted-to')),
    PRIMARY KEY (destination, oid)
) STRICT, WITHOUT ROWID;
