-- Schema changes that a destination does not apply by itself, one a table: the rows behind
-- it wait.
CREATE TABLE barriers (
    destination  text COLLATE "C" NOT NULL,
    oid          oid NOT NULL,
    -- The version at the destination, and the one to come, as commit:message in decimal.
    from_version text NOT NULL,
    to_version   text NOT NULL,
    -- JSON: what has to open.
    gates        text NOT NULL,
    code         bytea NOT NULL,
    message      bytea NOT NULL,
    next         bytea,
    -- Microseconds since 1970-01-01 UTC.
    since        bigint NOT NULL,
    -- What the operator said of exactly this change.
    verdict      text CHECK (verdict IN ('approved', 'refused', 'accepted-from', 'accepted-to')),
    PRIMARY KEY (destination, oid)
);
