//! The cases, and what is expected of each.

use super::{Case, Group};

const T: &str = "CREATE TABLE {t} (id int PRIMARY KEY, a text, b int, c text);
    INSERT INTO {t} SELECT n, 'a ' || n, n, 'c' FROM generate_series(1, 20) n";
const ROOT: &str = "CREATE TABLE {t} (id int, kind text, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind);
    CREATE TABLE {t}_a PARTITION OF {t} FOR VALUES IN ('a'); CREATE TABLE {t}_b PARTITION OF {t} FOR VALUES IN ('b');
    CREATE TABLE {t}_c (LIKE {t} INCLUDING ALL); INSERT INTO {t}_c SELECT n, 'c', 'apart' FROM generate_series(1, 5) n;
    INSERT INTO {t} SELECT n, CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END, 'v' FROM generate_series(1, 20) n";

const MESSAGE: &str = "equal, live, by a message";
const RELATION: &str = "equal, live, by a relation";
const UNCHANGED: &str = "equal, live, unchanged";
const COPIED: &str = "equal, copied";
const HELD: &str = "schema.held, then equal";
/// Rows that were there have values in the new column, which no change brings.
const NEEDS_COPY: &str = "schema.needs-copy, then equal";
/// A key or a name: the plugin may not be able to, and is not asked to by default.
const REVIEWED: &str = "schema.unsupported, then equal or schema.held, then equal";
const KEYLESS: &str = "schema.unsupported or schema.held";
const REWRITTEN: &str = "schema.rewritten, then equal";

fn case(name: &'static str, setup: &'static str, ddl: &[&'static str], expect: &'static str) -> Case {
    Case { name, since: 0, setup, ddl: ddl.to_vec(), table: "{t}", columns: None, filter: "", expect }
}

impl Case {
    fn since(self, since: u32) -> Case {
        Case { since, ..self }
    }

    fn table(self, table: &'static str) -> Case {
        Case { table, ..self }
    }

    fn columns(self, columns: &'static str) -> Case {
        Case { columns: Some(columns), ..self }
    }

    fn rows(self, filter: &'static str) -> Case {
        Case { filter, ..self }
    }
}

fn group(name: &'static str, publication: &'static str, cases: Vec<Case>) -> Group {
    Group { name, cases, publication, trigger: true, tables: "\"*.*\"", since: 0 }
}

/// All of them; the last are begun first.
pub fn groups() -> Vec<Group> {
    let all = "CREATE PUBLICATION pub FOR ALL TABLES";
    let mut groups = publications();
    groups.push(Group { trigger: false, ..group("plain", all, without_trigger()) });
    groups.push(Group { tables: "\"public.keep_*\", \"public.goes_away\"", ..group("names", all, names()) });
    groups.push(group(
        "roots",
        "CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)",
        roots(),
    ));
    groups.push(group("objects", all, objects()));
    groups.push(group("tables", all, tables()));
    groups
}

/// ALTER TABLE of columns, and how it is wrapped.
fn tables() -> Vec<Case> {
    vec![
        case("add-column", T, &["ALTER TABLE {t} ADD COLUMN d int"], MESSAGE),
        case(
            "add-column-literal",
            T,
            &["ALTER TABLE {t} ADD COLUMN d int DEFAULT 5", "INSERT INTO {t} (id) VALUES (100)"],
            MESSAGE,
        ),
        case("add-column-expression", T, &["ALTER TABLE {t} ADD COLUMN d uuid DEFAULT gen_random_uuid()"], NEEDS_COPY),
        case("add-column-identity", T, &["ALTER TABLE {t} ADD COLUMN d int GENERATED ALWAYS AS IDENTITY"], NEEDS_COPY),
        case(
            "add-column-generated",
            T,
            &[
                "ALTER TABLE {t} ADD COLUMN d int GENERATED ALWAYS AS (b * 2) STORED",
                "UPDATE {t} SET b = 7 WHERE id = 1",
            ],
            MESSAGE,
        ),
        case(
            "add-column-virtual",
            T,
            &[
                "ALTER TABLE {t} ADD COLUMN d int GENERATED ALWAYS AS (b * 2) VIRTUAL",
                "UPDATE {t} SET b = 7 WHERE id = 1",
            ],
            MESSAGE,
        )
        .since(18),
        case("drop-column", T, &["ALTER TABLE {t} DROP COLUMN b"], MESSAGE),
        case(
            "rename-column",
            T,
            &["ALTER TABLE {t} RENAME COLUMN a TO renamed", "UPDATE {t} SET renamed = 'x' WHERE id < 5"],
            MESSAGE,
        ),
        case(
            "rename-columns-swapped",
            T,
            &[
                "BEGIN",
                "ALTER TABLE {t} RENAME a TO z",
                "ALTER TABLE {t} RENAME c TO a",
                "ALTER TABLE {t} RENAME z TO c",
                "UPDATE {t} SET a = 'x' WHERE id < 5",
                "COMMIT",
            ],
            MESSAGE,
        ),
        case(
            "drop-and-add-same-name",
            T,
            &[
                "ALTER TABLE {t} DROP COLUMN a",
                "ALTER TABLE {t} ADD COLUMN a text",
                "UPDATE {t} SET a = 'new' WHERE id < 5",
            ],
            MESSAGE,
        ),
        case(
            "type-widened",
            T,
            &["ALTER TABLE {t} ALTER b TYPE bigint", "UPDATE {t} SET b = 5000000000 WHERE id = 1"],
            MESSAGE,
        ),
        case(
            "type-lengthened",
            "CREATE TABLE {t} (id int PRIMARY KEY, a varchar(10)); INSERT INTO {t} VALUES (1, 'x')",
            &["ALTER TABLE {t} ALTER a TYPE varchar(20)", "INSERT INTO {t} VALUES (2, 'twelve chars')"],
            MESSAGE,
        ),
        case(
            "type-narrowed",
            "CREATE TABLE {t} (id int PRIMARY KEY, a bigint); INSERT INTO {t} VALUES (1, 1)",
            &["ALTER TABLE {t} ALTER a TYPE int"],
            HELD,
        ),
        case("type-using", T, &["ALTER TABLE {t} ALTER b TYPE int USING b * 100"], REWRITTEN),
        case(
            "type-in-a-block",
            T,
            &["DO $$ BEGIN EXECUTE 'ALTER TABLE {t} ALTER b TYPE bigint USING b * 100'; END $$"],
            REWRITTEN,
        ),
        case(
            "default-set",
            T,
            &["ALTER TABLE {t} ALTER b SET DEFAULT 9", "INSERT INTO {t} (id) VALUES (100)"],
            MESSAGE,
        ),
        case(
            "default-dropped",
            "CREATE TABLE {t} (id int PRIMARY KEY, b int DEFAULT 9); INSERT INTO {t} VALUES (1)",
            &["ALTER TABLE {t} ALTER b DROP DEFAULT", "INSERT INTO {t} (id) VALUES (100)"],
            MESSAGE,
        ),
        case("not-null-set", T, &["ALTER TABLE {t} ALTER b SET NOT NULL"], MESSAGE),
        case(
            "not-null-dropped",
            "CREATE TABLE {t} (id int PRIMARY KEY, b int NOT NULL); INSERT INTO {t} VALUES (1, 1)",
            &["ALTER TABLE {t} ALTER b DROP NOT NULL", "INSERT INTO {t} (id) VALUES (100)"],
            MESSAGE,
        ),
        case(
            "not-null-not-valid",
            T,
            &["ALTER TABLE {t} ADD CONSTRAINT {t}_nn NOT NULL b NOT VALID", "UPDATE {t} SET a = 'x' WHERE id = 1"],
            UNCHANGED,
        )
        .since(18),
        case(
            "several-subcommands",
            T,
            &[
                "ALTER TABLE {t} ADD d int, DROP a, ALTER b SET DEFAULT 7, ALTER c SET NOT NULL",
                "INSERT INTO {t} (id, c) VALUES (100, 'c')",
            ],
            MESSAGE,
        ),
        case(
            "identity-column",
            T,
            &[
                "ALTER TABLE {t} ALTER b SET NOT NULL, ALTER b ADD GENERATED ALWAYS AS IDENTITY",
                "INSERT INTO {t} (id) VALUES (100)",
            ],
            MESSAGE,
        ),
        case(
            "generated-no-more",
            "CREATE TABLE {t} (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED); INSERT INTO {t} VALUES (1, 1)",
            &["ALTER TABLE {t} ALTER twice DROP EXPRESSION"],
            NEEDS_COPY,
        ),
        case("primary-key-changed", T, &["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (b)"], REVIEWED),
        case("primary-key-dropped", T, &["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey"], KEYLESS),
        case(
            "identity-full",
            T,
            &["ALTER TABLE {t} REPLICA IDENTITY FULL", "UPDATE {t} SET a = 'x' WHERE id < 5"],
            MESSAGE,
        ),
        case(
            "identity-index",
            T,
            &[
                "ALTER TABLE {t} ALTER b SET NOT NULL",
                "CREATE UNIQUE INDEX {t}_b ON {t} (b)",
                "ALTER TABLE {t} REPLICA IDENTITY USING INDEX {t}_b",
                "UPDATE {t} SET a = 'x' WHERE id < 5",
            ],
            REVIEWED,
        ),
        case("identity-nothing", T, &["ALTER TABLE {t} REPLICA IDENTITY NOTHING"], KEYLESS),
        case(
            "no-op-commands",
            T,
            &[
                "ALTER TABLE {t} OWNER TO matrix_owner",
                "ALTER TABLE {t} ALTER a SET STATISTICS 50",
                "ALTER TABLE {t} ALTER a DROP NOT NULL",
                "ALTER TABLE {t} ALTER a DROP NOT NULL",
                "COMMENT ON TABLE {t} IS 'x'",
                "ALTER TABLE {t} SET (fillfactor = 90)",
                "CREATE INDEX ON {t} (a)",
                "UPDATE {t} SET a = 'x' WHERE id < 5",
            ],
            UNCHANGED,
        ),
        case(
            "rows-before-and-after",
            T,
            &[
                "BEGIN",
                "UPDATE {t} SET a = 'before' WHERE id < 10",
                "ALTER TABLE {t} ADD d int DEFAULT 3",
                "UPDATE {t} SET d = 4 WHERE id < 5",
                "ALTER TABLE {t} DROP c",
                "INSERT INTO {t} (id, d) VALUES (100, 1)",
                "COMMIT",
            ],
            MESSAGE,
        ),
        case(
            "rolled-back",
            T,
            &[
                "BEGIN",
                "ALTER TABLE {t} ADD d int",
                "INSERT INTO {t} (id, d) VALUES (100, 1)",
                "ROLLBACK",
                "INSERT INTO {t} (id) VALUES (101)",
            ],
            UNCHANGED,
        ),
        case(
            "in-a-savepoint",
            T,
            &[
                "BEGIN",
                "INSERT INTO {t} (id) VALUES (100)",
                "SAVEPOINT s",
                "ALTER TABLE {t} ADD d int",
                "INSERT INTO {t} (id, d) VALUES (101, 1)",
                "ROLLBACK TO s",
                "INSERT INTO {t} (id) VALUES (102)",
                "SAVEPOINT s",
                "ALTER TABLE {t} ADD e int",
                "INSERT INTO {t} (id, e) VALUES (103, 1)",
                "RELEASE s",
                "ALTER TABLE {t} DROP a",
                "INSERT INTO {t} (id, e) VALUES (104, 1)",
                "COMMIT",
            ],
            MESSAGE,
        ),
        case(
            "in-an-exception-block",
            T,
            &[
                "DO $$ BEGIN BEGIN ALTER TABLE {t} ADD d int; INSERT INTO {t} (id, d) VALUES (100, 1); EXCEPTION WHEN OTHERS THEN NULL; END; INSERT INTO {t} (id, d) VALUES (101, 2); END $$",
            ],
            MESSAGE,
        ),
        case(
            "interleaved",
            "CREATE TABLE {t} (id int PRIMARY KEY, a text); CREATE TABLE {t}_o (id int PRIMARY KEY, a text); INSERT INTO {t} VALUES (1, 'x'); INSERT INTO {t}_o VALUES (1, 'x')",
            &[
                "BEGIN",
                "INSERT INTO {t} VALUES (2, 'x')",
                "ALTER TABLE {t} ADD d int",
                "2: BEGIN",
                "2: ALTER TABLE {t}_o DROP a",
                "INSERT INTO {t} VALUES (3, 'x', 3)",
                "2: INSERT INTO {t}_o VALUES (2)",
                "2: COMMIT",
                "INSERT INTO {t} VALUES (4, 'x', 4)",
                "COMMIT",
            ],
            MESSAGE,
        ),
        case(
            "interleaved-first",
            "CREATE TABLE {t}_o (id int PRIMARY KEY, a text); CREATE TABLE {t} (id int PRIMARY KEY, a text); INSERT INTO {t} VALUES (1, 'x')",
            &[
                "BEGIN",
                "ALTER TABLE {t}_o ADD d int",
                "2: BEGIN",
                "2: ALTER TABLE {t} DROP a",
                "INSERT INTO {t}_o VALUES (3, 'x', 3)",
                "2: INSERT INTO {t} VALUES (2)",
                "2: COMMIT",
                "COMMIT",
            ],
            MESSAGE,
        ),
        case("replica-role", T, &["SET session_replication_role = replica", "ALTER TABLE {t} ADD d int"], MESSAGE),
        case(
            "opted-out",
            T,
            &[
                "SET tidegate.skip_ddl = on",
                "ALTER TABLE {t} ADD d int",
                "ALTER TABLE {t} RENAME a TO z",
                "INSERT INTO {t} (id, d) VALUES (100, 1)",
            ],
            RELATION,
        ),
        case(
            "opted-out-no-row",
            T,
            &["SET tidegate.skip_ddl = on", "ALTER TABLE {t} ADD d int"],
            "pending: no row yet",
        ),
        case(
            "opted-out-same-name",
            T,
            &["SET tidegate.skip_ddl = on", "ALTER TABLE {t} DROP c", "ALTER TABLE {t} ADD c text"],
            "schema.unseen, then equal",
        ),
        case(
            "not-a-superuser",
            "CREATE TABLE {t} (id int PRIMARY KEY); ALTER TABLE {t} OWNER TO matrix_owner",
            &["SET SESSION AUTHORIZATION matrix_owner", "ALTER TABLE {t} ADD d int"],
            MESSAGE,
        ),
        case(
            "awkward-session",
            T,
            &[
                "SET default_transaction_read_only = on",
                "SET lock_timeout = '10ms'",
                "SET quote_all_identifiers = on",
                "SET DateStyle = 'German'",
                "SET search_path = a, b, c, d, e, f, g, public, pg_catalog",
                "SET row_security = off",
                "BEGIN READ WRITE",
                "ALTER TABLE {t} ADD d date DEFAULT '2026-01-31'",
                "COMMIT",
            ],
            MESSAGE,
        ),
        case(
            "unlogged-and-back",
            T,
            &["ALTER TABLE {t} SET UNLOGGED", "UPDATE {t} SET a = 'nobody saw it'", "ALTER TABLE {t} SET LOGGED"],
            COPIED,
        ),
    ]
}

/// Names, types, indexes, schemas; tables that come and go; leaves that are published.
fn objects() -> Vec<Case> {
    let mood = "CREATE TYPE {t}_mood AS ENUM ('low', 'high'); CREATE TABLE {t} (id int PRIMARY KEY, m {t}_mood, ms {t}_mood[]);
        INSERT INTO {t} VALUES (1, 'low', '{low,high}'), (2, 'high', NULL)";
    let pair = "CREATE TYPE {t}_pair AS (x int, y text); CREATE TABLE {t} (id int PRIMARY KEY, p {t}_pair); INSERT INTO {t} VALUES (1, (1, 'y'))";
    let domain =
        "CREATE DOMAIN {t}_d AS text; CREATE TABLE {t} (id int PRIMARY KEY, d {t}_d); INSERT INTO {t} VALUES (1, 'x')";
    let index = "CREATE TABLE {t} (id int PRIMARY KEY, b int NOT NULL); CREATE UNIQUE INDEX {t}_b ON {t} (b);
        ALTER TABLE {t} REPLICA IDENTITY USING INDEX {t}_b; INSERT INTO {t} VALUES (1, 1)";
    vec![
        case(
            "rename-table",
            T,
            &["ALTER TABLE {t} RENAME TO {t}_new", "INSERT INTO {t}_new (id) VALUES (100)"],
            REVIEWED,
        )
        .table("{t}_new"),
        case("rename-table-as-index", T, &["ALTER INDEX {t} RENAME TO {t}_new"], REVIEWED).table("{t}_new"),
        case(
            "set-schema",
            "CREATE SCHEMA {t}_s; CREATE TABLE {t} (id int PRIMARY KEY); INSERT INTO {t} VALUES (1)",
            &["ALTER TABLE {t} SET SCHEMA {t}_s"],
            REVIEWED,
        )
        .table("{t}_s.{t}"),
        case(
            "rename-schema",
            "CREATE SCHEMA {t}_s; CREATE TABLE {t}_s.{t} (id int PRIMARY KEY); INSERT INTO {t}_s.{t} VALUES (1)",
            &["ALTER SCHEMA {t}_s RENAME TO {t}_new"],
            REVIEWED,
        )
        .table("{t}_new.{t}"),
        case("identity-index-dropped", index, &["DROP INDEX {t}_b"], KEYLESS),
        case("identity-index-dropped-concurrently", index, &["DROP INDEX CONCURRENTLY {t}_b"], KEYLESS),
        case("identity-index-rebuilt", index, &["REINDEX TABLE CONCURRENTLY {t}", "UPDATE {t} SET id = 5"], UNCHANGED),
        case("lost-to-drop-type", mood, &["DROP TYPE {t}_mood CASCADE"], MESSAGE),
        case("lost-to-drop-domain", domain, &["DROP DOMAIN {t}_d CASCADE"], MESSAGE),
        case(
            "lost-to-drop-extension",
            "CREATE SCHEMA {t}_e; CREATE EXTENSION hstore SCHEMA {t}_e; CREATE TABLE {t} (id int PRIMARY KEY, h {t}_e.hstore); INSERT INTO {t} VALUES (1, 'a=>1')",
            &["DROP EXTENSION hstore CASCADE"],
            MESSAGE,
        ),
        case(
            "lost-to-drop-schema",
            "CREATE SCHEMA {t}_s; CREATE TYPE {t}_s.e AS ENUM ('x'); CREATE TABLE {t} (id int PRIMARY KEY, e {t}_s.e); INSERT INTO {t} VALUES (1, 'x')",
            &["DROP SCHEMA {t}_s CASCADE"],
            MESSAGE,
        ),
        case(
            "default-lost-to-drop-function",
            "CREATE FUNCTION {t}_f() RETURNS int LANGUAGE sql AS 'SELECT 1'; CREATE TABLE {t} (id int PRIMARY KEY, n int DEFAULT {t}_f()); INSERT INTO {t} VALUES (1)",
            &["DROP FUNCTION {t}_f() CASCADE", "INSERT INTO {t} (id) VALUES (2)"],
            MESSAGE,
        ),
        case(
            "enum-value-added",
            mood,
            &["ALTER TYPE {t}_mood ADD VALUE 'mid' BEFORE 'high'", "INSERT INTO {t} VALUES (3, 'mid', '{mid}')"],
            MESSAGE,
        ),
        case("enum-value-renamed", mood, &["ALTER TYPE {t}_mood RENAME VALUE 'low' TO 'lowest'"], REWRITTEN),
        case(
            "enum-renamed",
            mood,
            &["ALTER TYPE {t}_mood RENAME TO {t}_feeling", "INSERT INTO {t} VALUES (3, 'low', NULL)"],
            MESSAGE,
        ),
        case("attribute-added", pair, &["ALTER TYPE {t}_pair ADD ATTRIBUTE z int"], REWRITTEN),
        case(
            "attribute-renamed",
            pair,
            &["ALTER TYPE {t}_pair RENAME ATTRIBUTE x TO x2", "INSERT INTO {t} VALUES (2, (2, 'z'))"],
            UNCHANGED,
        ),
        case(
            "type-of-table-altered",
            "CREATE TYPE {t}_row AS (id int, a text); CREATE TABLE {t} OF {t}_row (PRIMARY KEY (id)); INSERT INTO {t} VALUES (1, 'x')",
            &["ALTER TYPE {t}_row ADD ATTRIBUTE d int CASCADE", "INSERT INTO {t} VALUES (2, 'x', 2)"],
            MESSAGE,
        ),
        case("domain-not-null", domain, &["ALTER DOMAIN {t}_d SET NOT NULL"], MESSAGE),
        case(
            "domain-renamed",
            domain,
            &["ALTER DOMAIN {t}_d RENAME TO {t}_d2", "INSERT INTO {t} VALUES (2, 'y')"],
            MESSAGE,
        ),
        case("create-table", "", &["CREATE TABLE {t} (id int PRIMARY KEY)", "INSERT INTO {t} VALUES (1)"], COPIED),
        case(
            "create-table-as",
            "",
            &["BEGIN", "CREATE TABLE {t} AS SELECT 1 AS id", "ALTER TABLE {t} ADD PRIMARY KEY (id)", "COMMIT"],
            COPIED,
        ),
        case(
            "create-schema-with-table",
            "",
            &["CREATE SCHEMA {t}_s CREATE TABLE {t} (id int PRIMARY KEY)", "INSERT INTO {t}_s.{t} VALUES (1)"],
            COPIED,
        )
        .table("{t}_s.{t}"),
        case("drop-table", T, &["DROP TABLE {t}"], "table.unpublished"),
        case(
            "drop-and-create-table",
            T,
            &["DROP TABLE {t}", "CREATE TABLE {t} (id int PRIMARY KEY, z text)", "INSERT INTO {t} VALUES (1, 'new')"],
            COPIED,
        ),
        case(
            "leaf-add-column",
            ROOT,
            &["ALTER TABLE {t} ADD d int DEFAULT 3", "INSERT INTO {t} (id, kind) VALUES (100, 'a')"],
            MESSAGE,
        )
        .table("{t}_a"),
        case(
            "leaf-drop-and-rename",
            ROOT,
            &["ALTER TABLE {t} RENAME v TO w", "ALTER TABLE {t} ADD d int", "UPDATE {t} SET w = 'x' WHERE id < 10"],
            MESSAGE,
        )
        .table("{t}_b"),
        case(
            "leaf-attached",
            ROOT,
            &["ALTER TABLE {t} ATTACH PARTITION {t}_c FOR VALUES IN ('c')", "UPDATE {t} SET v = 'x' WHERE kind = 'c'"],
            UNCHANGED,
        )
        .table("{t}_c"),
        case("leaf-detached", ROOT, &["ALTER TABLE {t} DETACH PARTITION {t}_a", "UPDATE {t}_a SET v = 'x'"], UNCHANGED)
            .table("{t}_a"),
    ]
}

/// Roots that are published as themselves.
fn roots() -> Vec<Case> {
    vec![
        case(
            "root-add-column",
            ROOT,
            &["ALTER TABLE {t} ADD d int DEFAULT 3", "INSERT INTO {t} (id, kind) VALUES (100, 'a')"],
            MESSAGE,
        ),
        case("root-drop-column", ROOT, &["ALTER TABLE {t} DROP v"], MESSAGE),
        case(
            "root-rename-column",
            ROOT,
            &["ALTER TABLE {t} RENAME v TO w", "UPDATE {t} SET w = 'x' WHERE id < 10"],
            MESSAGE,
        ),
        case(
            "root-type-widened",
            ROOT,
            &["ALTER TABLE {t} ADD n int", "ALTER TABLE {t} ALTER n TYPE bigint", "UPDATE {t} SET n = 5000000000"],
            // Partitions have other files then, as after a TRUNCATE of their own.
            COPIED,
        ),
        case("root-type-using", ROOT, &["ALTER TABLE {t} ALTER v TYPE text USING v || '!'"], REWRITTEN),
        case("root-attach", ROOT, &["ALTER TABLE {t} ATTACH PARTITION {t}_c FOR VALUES IN ('c')"], COPIED),
        case("root-detach", ROOT, &["ALTER TABLE {t} DETACH PARTITION {t}_a"], COPIED),
        case("root-drop-leaf", ROOT, &["DROP TABLE {t}_b"], COPIED),
        case(
            "root-new-leaf",
            ROOT,
            &["CREATE TABLE {t}_d PARTITION OF {t} FOR VALUES IN ('d')", "INSERT INTO {t} VALUES (7, 'd', 'new')"],
            UNCHANGED,
        ),
    ]
}

/// Tables that get names which the destination takes, or loses them.
fn names() -> Vec<Case> {
    vec![
        case(
            "goes-away",
            T,
            &["INSERT INTO {t} (id) VALUES (100)", "ALTER TABLE {t} RENAME TO {t}_now"],
            "table.renamed",
        ),
        case(
            "comes-by-name",
            T,
            &["ALTER TABLE {t} RENAME TO keep_{t}", "INSERT INTO keep_{t} (id) VALUES (100)"],
            COPIED,
        )
        .table("keep_{t}"),
        case("keep-in-step", T, &["ALTER TABLE {t} ADD d int"], MESSAGE),
    ]
}

/// The difference of relations alone.
fn without_trigger() -> Vec<Case> {
    vec![
        case(
            "plain-add-column",
            T,
            &["ALTER TABLE {t} ADD d int", "INSERT INTO {t} (id, d) VALUES (100, 1)"],
            RELATION,
        ),
        case("plain-drop-column", T, &["ALTER TABLE {t} DROP b", "INSERT INTO {t} (id) VALUES (100)"], RELATION),
        case(
            "plain-rename-column",
            T,
            &["ALTER TABLE {t} RENAME a TO z", "UPDATE {t} SET z = 'x' WHERE id < 5"],
            RELATION,
        ),
        case(
            "plain-rename-and-add",
            T,
            &[
                "ALTER TABLE {t} RENAME a TO z",
                "ALTER TABLE {t} ADD a text",
                "ALTER TABLE {t} DROP c",
                "INSERT INTO {t} (id, a, z) VALUES (100, 'a', 'z')",
            ],
            RELATION,
        ),
        case("plain-no-row", T, &["ALTER TABLE {t} ADD d int"], "pending: no row yet"),
        case("plain-default", T, &["ALTER TABLE {t} ALTER b SET DEFAULT 5"], "pending: no row tells it"),
        case("plain-type", T, &["ALTER TABLE {t} ALTER b TYPE bigint", "INSERT INTO {t} (id) VALUES (100)"], HELD),
        case(
            "plain-same-name",
            T,
            &["ALTER TABLE {t} DROP c", "ALTER TABLE {t} ADD c text", "INSERT INTO {t} (id, c) VALUES (100, 'new')"],
            "schema.unseen, then equal",
        ),
        case(
            "plain-rename-table",
            T,
            &["ALTER TABLE {t} RENAME TO {t}_new", "INSERT INTO {t}_new (id) VALUES (100)"],
            REVIEWED,
        )
        .table("{t}_new"),
        case(
            "plain-identity-full",
            T,
            &["ALTER TABLE {t} REPLICA IDENTITY FULL", "UPDATE {t} SET a = 'x' WHERE id < 5"],
            RELATION,
        ),
        case(
            "plain-key-changed",
            T,
            &["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (b)", "UPDATE {t} SET a = 'x' WHERE id < 5"],
            REVIEWED,
        ),
        case(
            "plain-enum-renamed",
            "CREATE TYPE {t}_mood AS ENUM ('low'); CREATE TABLE {t} (id int PRIMARY KEY, m {t}_mood); INSERT INTO {t} VALUES (1, 'low')",
            &["ALTER TYPE {t}_mood RENAME VALUE 'low' TO 'lowest'"],
            "schema.unseen, then equal",
        ),
        case("plain-drop-table", T, &["DROP TABLE {t}"], "table.unpublished"),
    ]
}

/// What is done to a publication, each in one of its own.
fn publications() -> Vec<Group> {
    let other = "CREATE TABLE {t} (id int PRIMARY KEY, a text, b int, c text); INSERT INTO {t} SELECT n, 'a', n, 'c' FROM generate_series(1, 20) n;
        CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)";
    let schema = "CREATE SCHEMA s; CREATE TABLE s.{t} (id int PRIMARY KEY, a text); INSERT INTO s.{t} VALUES (1, 'x');
        CREATE TABLE other (id int PRIMARY KEY)";
    let one = |name, publication, case| group(name, publication, vec![case]);
    let lists = |group: Group| Group { since: 15, ..group };
    vec![
        one("pub_add", "CREATE PUBLICATION pub FOR TABLE other", case("publication-add", other, &["ALTER PUBLICATION pub ADD TABLE {t}", "UPDATE {t} SET a = 'x' WHERE id < 5"], COPIED)),
        one("pub_drop", "CREATE PUBLICATION pub FOR TABLE other, publication_drop", case("publication-drop", other, &["ALTER PUBLICATION pub DROP TABLE {t}"], "table.unpublished")),
        one("pub_out", "CREATE PUBLICATION pub FOR TABLE other, publication_out_and_in", case("publication-out-and-in", other, &["ALTER PUBLICATION pub DROP TABLE {t}", "UPDATE {t} SET a = 'nobody saw it'", "ALTER PUBLICATION pub ADD TABLE {t}"], COPIED)),
        one("pub_set", "CREATE PUBLICATION pub FOR TABLE other, publication_set", case("publication-set", other, &["ALTER PUBLICATION pub SET TABLE {t}", "UPDATE {t} SET a = 'x' WHERE id < 5"], UNCHANGED)),
        one("pub_set_out", "CREATE PUBLICATION pub FOR TABLE other, publication_set_without", case("publication-set-without", other, &["ALTER PUBLICATION pub SET TABLE other"], "table.unpublished")),
        one("pub_all", "CREATE PUBLICATION pub FOR TABLE other, publication_made_again", case("publication-made-again", other, &["BEGIN", "DROP PUBLICATION pub", "CREATE PUBLICATION pub FOR TABLE {t}, other", "COMMIT", "UPDATE {t} SET a = 'x' WHERE id < 5"], COPIED)),
        one("pub_narrow", "CREATE PUBLICATION pub FOR TABLE other, publication_publishes_less", case("publication-publishes-less", other, &["ALTER PUBLICATION pub SET (publish = 'insert')", "UPDATE {t} SET a = 'nobody saw it'"], "publication.publish")),
        one("pub_wide", "CREATE PUBLICATION pub FOR TABLE other, publication_publishes_again", case("publication-publishes-again", other, &["ALTER PUBLICATION pub SET (publish = 'insert')", "UPDATE {t} SET a = 'nobody saw it'", "ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate')", "UPDATE {t} SET b = 1 WHERE id = 1"], COPIED)),
        one("pub_rename", "CREATE PUBLICATION pub FOR TABLE other, publication_renamed_and_back", case("publication-renamed-and-back", other, &["ALTER PUBLICATION pub RENAME TO away", "ALTER TABLE {t} ADD d int", "ALTER PUBLICATION away RENAME TO pub", "INSERT INTO {t} (id, d) VALUES (100, 1)"], MESSAGE)),
        one("pub_root", "CREATE PUBLICATION pub FOR TABLE publication_via_root", case("publication-via-root", ROOT, &["ALTER PUBLICATION pub SET (publish_via_partition_root = true)", "UPDATE {t} SET v = 'x' WHERE id < 10"], COPIED)),
        one("pub_leaf", "CREATE PUBLICATION pub FOR TABLE publication_leaf_detached", case("publication-leaf-detached", ROOT, &["ALTER TABLE {t} DETACH PARTITION {t}_a"], "table.unpublished").table("{t}_a")),
        one("pub_leaf_in", "CREATE PUBLICATION pub FOR TABLE publication_leaf_attached", case("publication-leaf-attached", ROOT, &["ALTER TABLE {t} ATTACH PARTITION {t}_c FOR VALUES IN ('c')", "UPDATE {t} SET v = 'x' WHERE kind = 'c'"], COPIED).table("{t}_c")),
        lists(one("pub_wider", "CREATE PUBLICATION pub FOR TABLE other, publication_list_wider (id, a)", case("publication-list-wider", other, &["ALTER PUBLICATION pub SET TABLE other, {t} (id, a, b)", "UPDATE {t} SET a = 'x' WHERE id < 5"], COPIED).columns("a,b,id"))),
        lists(one("pub_narrower", "CREATE PUBLICATION pub FOR TABLE other, publication_list_narrower", case("publication-list-narrower", other, &["BEGIN", "UPDATE {t} SET c = 'x' WHERE id = 1", "2: ALTER PUBLICATION pub SET TABLE other, {t} (id, a)", "UPDATE {t} SET a = 'x' WHERE id < 5", "COMMIT", "UPDATE {t} SET a = 'y' WHERE id < 3"], COPIED).columns("a,id"))),
        lists(one("pub_filter", "CREATE PUBLICATION pub FOR TABLE other, publication_filter", case("publication-filter", other, &["ALTER PUBLICATION pub SET TABLE other, {t} WHERE (id > 10)", "UPDATE {t} SET a = 'x'"], COPIED).rows("WHERE id > 10"))),
        lists(one("pub_schema", "CREATE PUBLICATION pub FOR TABLE other", case("publication-schema-added", schema, &["ALTER PUBLICATION pub ADD TABLES IN SCHEMA s", "UPDATE s.{t} SET a = 'y'"], COPIED).table("s.{t}"))),
        lists(one("pub_no_schema", "CREATE PUBLICATION pub FOR TABLE other, TABLES IN SCHEMA s", case("publication-schema-dropped", schema, &["ALTER PUBLICATION pub DROP TABLES IN SCHEMA s"], "table.unpublished").table("s.{t}"))),
        lists(one("pub_schema_away", "CREATE PUBLICATION pub FOR TABLE other, TABLES IN SCHEMA s", case("publication-schema-left-and-back", schema, &["ALTER TABLE s.{t} SET SCHEMA public", "UPDATE {t} SET a = 'nobody saw it'", "ALTER TABLE {t} SET SCHEMA s"], COPIED).table("s.{t}"))),
        Group { since: 18, ..one("pub_generated", "CREATE PUBLICATION pub FOR TABLE publication_generated", case("publication-generated", "CREATE TABLE {t} (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED); INSERT INTO {t} VALUES (1, 1)", &["ALTER PUBLICATION pub SET (publish_generated_columns = stored)"], NEEDS_COPY).columns("id,n,twice")) },
    ]
}
