-- The state of one pipeline, in a schema of its own that is first in the search_path.
--
-- Scope: nothing outside that schema. Rights: the role of `pipeline.store` owns it all.
--
-- LSNs are pg_lsn: unsigned, and compared as numbers. Ordinals are unsigned 64-bit numbers
-- that are no LSNs: text of exactly 16 upper-case hexadecimal digits, so that comparing the
-- texts under the collation "C" compares the numbers.
--
-- What plugins say or choose (messages, keys, idents) is bytea, in UTF-8: text holds no NUL.

CREATE TABLE meta (
    key   text COLLATE "C" PRIMARY KEY,
    value text NOT NULL
);

-- Who may write. Each transaction that writes holds this row and finds its own number in
-- it; whoever takes over raises the number.
CREATE TABLE writer (
    id           integer PRIMARY KEY CHECK (id = 1),
    fence        bigint NOT NULL,
    host         text NOT NULL,
    pid          bigint NOT NULL,
    backend      integer NOT NULL,
    taken_at     timestamptz NOT NULL,
    -- The directory whose spool the checkpoints rely on: its id, and where it was seen.
    directory_id text,
    directory    text
);
INSERT INTO writer (id, fence, host, pid, backend, taken_at) VALUES (1, 0, '', 0, 0, now());

-- One row at most.
CREATE TABLE source (
    id              integer PRIMARY KEY CHECK (id = 1),
    system          text NOT NULL,
    timeline        bigint NOT NULL,
    slot            text NOT NULL,
    publication     text NOT NULL,
    publication_oid oid NOT NULL,
    plugin          text NOT NULL,
    epoch           bigint NOT NULL,
    -- NULL: the slot is intended, and may or may not exist (P8).
    slot_created_at pg_lsn
);

CREATE TABLE destinations (
    name          text COLLATE "C" PRIMARY KEY,
    plugin        text NOT NULL,
    -- Never goes back (P6).
    checkpoint    pg_lsn NOT NULL,
    error_code    bytea,
    error_message bytea,
    error_next    bytea
);

CREATE TABLE tables (
    destination      text COLLATE "C" NOT NULL REFERENCES destinations (name),
    oid              oid NOT NULL,
    schema_name      text NOT NULL,
    table_name       text NOT NULL,
    state            text NOT NULL,
    floor            pg_lsn,
    run              bytea,
    -- The position: all three or none. Never goes back (P7).
    position_epoch   bigint,
    position_commit  pg_lsn,
    position_ordinal text COLLATE "C" CHECK (length(position_ordinal) = 16),
    -- Snapshot ids as commit:message in decimal.
    applied          text,
    applying_from    text,
    applying_to      text,
    applying_step    bigint,
    needs_resync     boolean NOT NULL,
    rows_copied      bigint NOT NULL,
    rows_total       bigint,
    error_code       bytea,
    error_message    bytea,
    error_next       bytea,
    PRIMARY KEY (destination, oid),
    CHECK ((position_epoch IS NULL) = (position_commit IS NULL)
       AND (position_epoch IS NULL) = (position_ordinal IS NULL)),
    CHECK ((applying_from IS NULL) = (applying_to IS NULL)
       AND (applying_from IS NULL) = (applying_step IS NULL))
);

-- Append-only: the versions of every table's schema (P5).
CREATE TABLE history (
    oid          oid NOT NULL,
    commit_lsn   pg_lsn NOT NULL,
    message_lsn  pg_lsn NOT NULL,
    origin       text NOT NULL,
    shape        text NOT NULL,
    -- JSON of the whole version; not jsonb, which cannot hold all that JSON can.
    table_schema text NOT NULL,
    PRIMARY KEY (oid, commit_lsn, message_lsn)
);

-- Not tied to `destinations`: a destination that is removed and comes back must not
-- be given a generation that an earlier instance had.
CREATE TABLE generations (
    destination text COLLATE "C" NOT NULL,
    lane        bigint NOT NULL,
    generation  bigint NOT NULL,
    PRIMARY KEY (destination, lane)
);

-- What plugins keep for themselves; a plugin may write before its destination is
-- stored.
CREATE TABLE plugin_state (
    destination text COLLATE "C" NOT NULL,
    key         bytea NOT NULL,
    value       bytea NOT NULL,
    PRIMARY KEY (destination, key)
);

-- Rows that a destination refused for good, each as the text of its cells.
CREATE TABLE quarantine (
    -- What a person names a row by; never used again.
    id               bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    destination      text COLLATE "C" NOT NULL REFERENCES destinations (name),
    oid              oid NOT NULL,
    schema_name      text NOT NULL,
    table_name       text NOT NULL,
    -- Under `merge` the key, of which there is one; under `changes` the place in the
    -- history.
    ident            bytea NOT NULL,
    op               text NOT NULL,
    -- The version of the table's schema that the cells are of, as commit:message.
    snapshot         text NOT NULL,
    -- Of the last change that is in it.
    position_epoch   bigint NOT NULL,
    position_commit  pg_lsn NOT NULL,
    position_ordinal text COLLATE "C" NOT NULL CHECK (length(position_ordinal) = 16),
    committed_at     bigint NOT NULL,
    xid              bigint NOT NULL,
    -- JSON objects, from ordinal to text.
    new_row          text NOT NULL,
    old_row          text,
    -- The ident of the row that has the rest of the cells.
    needs            bytea,
    code             bytea NOT NULL,
    message          bytea NOT NULL,
    column_ordinal   integer,
    -- Changes that are folded into it, and when the first came, in microseconds.
    changes          bigint NOT NULL,
    quarantined_at   bigint NOT NULL,
    -- What is to be done with it: retry, drop.
    mark             text CHECK (mark IN ('retry', 'drop'))
);
-- A key may be longer than what an index can hold.
CREATE UNIQUE INDEX quarantine_ident ON quarantine (destination, oid, sha256(ident));

-- What made a table a member of the publication when we last looked: other catalog rows
-- mean that it may have been out in between (P21).
CREATE TABLE members (
    oid oid PRIMARY KEY,
    key text NOT NULL
);

-- Copies by ranges of the key, which a restart does not begin again (P19), and the floors
-- of those that were resumed, until the table is beyond them.
CREATE TABLE copies (
    destination text COLLATE "C" NOT NULL,
    oid         oid NOT NULL,
    -- As the plugin knows it.
    run         text NOT NULL,
    -- The version of the schema that its rows have, as commit:message in decimal.
    snapshot    text NOT NULL,
    -- What the table was, and in which history: see the host's `Wave::origin`.
    origin      text NOT NULL,
    column_name text NOT NULL,
    key_type    text NOT NULL,
    -- JSON: the last value of each range but the last.
    bounds      text NOT NULL,
    PRIMARY KEY (destination, oid)
);

-- Ranges of which rows were sent.
CREATE TABLE copy_ranges (
    destination  text COLLATE "C" NOT NULL,
    oid          oid NOT NULL,
    number       bigint NOT NULL,
    -- Floor of the wave that was the first to send rows of it.
    since        pg_lsn NOT NULL,
    -- Floor of the wave whose rows of it are all durable.
    floor        pg_lsn,
    rows_copied  bigint NOT NULL,
    bytes_copied bigint NOT NULL,
    PRIMARY KEY (destination, oid, number)
);
