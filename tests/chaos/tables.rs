//! What stands at the ends: the tables of the source, and the mirror's own record of what
//! was done to it.

/// A table, and how it may be treated.
pub struct Table {
    pub name: &'static str,
    /// Behind `CREATE TABLE name`.
    pub definition: &'static str,
    /// Statements behind that.
    pub more: &'static str,
    /// Taken by the mirror; what has no key is not.
    pub mirrored: bool,
    /// Taken by the log of files.
    pub logged: bool,
    /// Columns come and go.
    pub altered: bool,
}

const PLAIN: Table = Table { name: "", definition: "", more: "", mirrored: true, logged: true, altered: false };

/// Every kind of key, identity and large value. `change` is set by a trigger, and no two
/// changes of the source have the same.
pub const TABLES: &[Table] = &[
    Table {
        name: "accounts",
        definition: "(id bigint PRIMARY KEY, change bigint, name text, n int DEFAULT 0)",
        altered: true,
        ..PLAIN
    },
    Table { name: "pairs", definition: "(a bigint, b text, change bigint, v text, PRIMARY KEY (b, a))", ..PLAIN },
    Table {
        name: "docs",
        definition: "(id bigint PRIMARY KEY, change bigint, big text, n int)",
        more: "ALTER TABLE docs ALTER big SET STORAGE EXTERNAL",
        altered: true,
        ..PLAIN
    },
    Table {
        name: "full_docs",
        definition: "(id bigint PRIMARY KEY, change bigint, big text, n int)",
        more: "ALTER TABLE full_docs ALTER big SET STORAGE EXTERNAL, REPLICA IDENTITY FULL",
        altered: true,
        ..PLAIN
    },
    Table {
        name: "by_index",
        definition: "(id bigint PRIMARY KEY, code text NOT NULL UNIQUE, change bigint, v text)",
        more: "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code_key",
        altered: true,
        ..PLAIN
    },
    Table { name: "parent", definition: "(id bigint PRIMARY KEY, change bigint, n int)", ..PLAIN },
    Table {
        name: "child",
        definition: "(id bigint PRIMARY KEY, change bigint, parent bigint NOT NULL REFERENCES parent ON UPDATE CASCADE ON DELETE CASCADE, n int)",
        ..PLAIN
    },
    // Without a key: only the log takes them.
    Table {
        name: "heap",
        definition: "(change bigint, big text, v text, n int)",
        more: "ALTER TABLE heap ALTER big SET STORAGE EXTERNAL, REPLICA IDENTITY FULL",
        mirrored: false,
        ..PLAIN
    },
    Table { name: "events", definition: "(change bigint, v text)", mirrored: false, ..PLAIN },
    // What fills queues, spools and disks.
    Table { name: "bulk", definition: "(id bigint PRIMARY KEY, change bigint, body text)", logged: false, ..PLAIN },
];

/// Names that satisfy a condition.
pub fn names(wanted: impl Fn(&Table) -> bool) -> Vec<&'static str> {
    TABLES.iter().filter(|table| wanted(table)).map(|table| table.name).collect()
}

/// Tables, publication, and a number for each change that is noted beside it, in the same
/// transaction: what is rolled back is not noted.
pub fn source_schema() -> String {
    let mut sql = "CREATE SCHEMA chaos;
        CREATE SEQUENCE chaos.change;
        CREATE TABLE chaos.log (tab text, change bigint);
        CREATE FUNCTION chaos.note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            NEW.change := nextval('chaos.change');
            INSERT INTO chaos.log VALUES (TG_TABLE_NAME, NEW.change);
            RETURN NEW;
        END $$;"
        .to_owned();
    for Table { name, definition, more, .. } in TABLES {
        sql.push_str(&format!(
            "CREATE TABLE {name} {definition}; {more};
             CREATE TRIGGER note BEFORE INSERT OR UPDATE ON {name} FOR EACH ROW EXECUTE FUNCTION chaos.note();"
        ));
    }
    sql.push_str(&format!("CREATE PUBLICATION pub FOR TABLE {};", names(|_| true).join(", ")));
    sql
}

/// Notes every row that is written at the mirror, every beginning of a copy and every
/// position, from the moment the table is made.
pub const MIRROR_AUDIT: &str = "CREATE SCHEMA chaos;
    CREATE TABLE chaos.applied (n bigint GENERATED ALWAYS AS IDENTITY, tab text, op text, key text, change bigint,
        commit pg_lsn, ordinal numeric);
    CREATE FUNCTION chaos.note() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE image jsonb;
    BEGIN
        IF TG_OP = 'TRUNCATE' THEN
            INSERT INTO chaos.applied (tab, op) VALUES (TG_TABLE_NAME, 'T');
            RETURN NULL;
        END IF;
        IF TG_OP = 'DELETE' THEN image := to_jsonb(OLD); ELSE image := to_jsonb(NEW); END IF;
        INSERT INTO chaos.applied (tab, op, key, change) VALUES (TG_TABLE_NAME, left(TG_OP, 1),
            (SELECT string_agg(image ->> name, ' ' ORDER BY place) FROM unnest(TG_ARGV) WITH ORDINALITY k(name, place)),
            (image ->> 'change')::bigint);
        RETURN NULL;
    END $$;
    CREATE FUNCTION chaos.note_position() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'INSERT' OR NEW.run IS DISTINCT FROM OLD.run THEN
            INSERT INTO chaos.applied (tab, op) VALUES (NEW.target_name, 'R');
        ELSIF NEW.commit_lsn IS NOT NULL
            AND (NEW.commit_lsn, NEW.ordinal) IS DISTINCT FROM (OLD.commit_lsn, OLD.ordinal) THEN
            INSERT INTO chaos.applied (tab, op, commit, ordinal)
            VALUES (NEW.target_name, 'P', NEW.commit_lsn, NEW.ordinal);
        END IF;
        RETURN NULL;
    END $$;
    CREATE FUNCTION chaos.watch() RETURNS event_trigger LANGUAGE plpgsql AS $$
    DECLARE made record; keys text;
    BEGIN
        FOR made IN SELECT * FROM pg_event_trigger_ddl_commands() WHERE object_type = 'table' LOOP
            IF made.schema_name = 'public' THEN
                SELECT string_agg(quote_literal(a.attname), ', ' ORDER BY a.attnum) INTO keys FROM pg_index i
                    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
                    WHERE i.indrelid = made.objid AND i.indisprimary;
                EXECUTE format('CREATE TRIGGER chaos AFTER INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION chaos.note(%s)',
                    made.object_identity, keys);
                EXECUTE format('CREATE TRIGGER chaos_all AFTER TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION chaos.note()',
                    made.object_identity);
                EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER chaos, ENABLE ALWAYS TRIGGER chaos_all', made.object_identity);
            ELSIF made.object_identity = 'tidegate.\"position\"' OR made.object_identity = 'tidegate.position' THEN
                EXECUTE format('CREATE TRIGGER chaos AFTER INSERT OR UPDATE ON %s FOR EACH ROW EXECUTE FUNCTION chaos.note_position()',
                    made.object_identity);
                EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER chaos', made.object_identity);
            END IF;
        END LOOP;
    END $$;
    CREATE EVENT TRIGGER chaos ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION chaos.watch();
    ALTER EVENT TRIGGER chaos ENABLE ALWAYS";

/// What was applied twice, or after something later: within a table's copy and what follows
/// it, a key's changes only grow, and so do its positions. Until the copy is finished, which
/// gives the table its first position, a range of it may come again. `{watermark}`: every
/// change up to it was there before the first line.
pub const APPLIED_TWICE: &str = "WITH numbered AS (
        SELECT *, count(*) FILTER (WHERE op = 'R') OVER (PARTITION BY tab ORDER BY n) AS run FROM chaos.applied),
    phased AS (
        SELECT *, run = 0 OR count(*) FILTER (WHERE op = 'P') OVER (PARTITION BY tab, run ORDER BY n) > 0 AS follows FROM numbered),
    written AS (
        SELECT tab, run, follows, n, op, key, change, max(change) OVER (PARTITION BY tab, run, key ORDER BY n
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM phased WHERE op IN ('I', 'U')),
    placed AS (
        SELECT tab, run, n, commit, ordinal, lag(commit) OVER w AS commit_before, lag(ordinal) OVER w AS ordinal_before
        FROM numbered WHERE op = 'P' WINDOW w AS (PARTITION BY tab, run ORDER BY n))
    SELECT tab, n, format('%s of key %s by change %s came after change %s (run %s)', op, key, change, coalesce(before, {watermark}), run) FROM written
        WHERE change < before OR (follows AND change = before) OR (run = 0 AND change <= {watermark})
    UNION ALL
    SELECT tab, n, format('position %s/%s came after %s/%s', commit, ordinal, commit_before, ordinal_before) FROM placed
        WHERE (commit, ordinal) <= (commit_before, ordinal_before)
    ORDER BY 2 LIMIT 20";
