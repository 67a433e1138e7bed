-- What made a table a member of the publication when we last looked: other catalog rows
-- mean that it may have been out in between (P21).
CREATE TABLE members (
    oid INTEGER PRIMARY KEY,
    key TEXT NOT NULL
) STRICT;
