//! The schema changes that the host and the plugin are killed at, one table each.

/// What every table is made as, but for its name.
pub const TABLE: &str = "id int PRIMARY KEY, a int, b text, c varchar(10), d numeric(10,2), e int DEFAULT 5, \
                         f int NOT NULL DEFAULT 0";

/// A change, and what follows from it.
pub struct Change {
    /// Of the table, too.
    pub name: &'static str,
    /// Each as `ALTER TABLE … <statement>`.
    pub statements: &'static [&'static str],
    /// All statements become one version: the trigger reports the last one alone, with what
    /// all of them made. Otherwise each is a version.
    pub compound: bool,
    /// Schema and name of the table in the end, if they are others.
    pub becomes: Option<&'static str>,
}

const fn change(name: &'static str, statements: &'static [&'static str]) -> Change {
    Change { name, statements, compound: false, becomes: None }
}

const fn compound(name: &'static str, statements: &'static [&'static str]) -> Change {
    Change { name, statements, compound: true, becomes: None }
}

const fn becomes(change: Change, name: &'static str) -> Change {
    Change { becomes: Some(name), ..change }
}

/// All of them. A short run takes some: see `apply`.
pub const CORPUS: &[Change] = &[
    change("add_nullable", &["ADD x int"]),
    change("add_text_default", &["ADD x text DEFAULT 'pending'"]),
    change("add_quoted_default", &["ADD x text DEFAULT 'don''t'"]),
    change("add_int_default", &["ADD x int DEFAULT 42"]),
    change("add_negative_default", &["ADD x int DEFAULT -1"]),
    change("add_numeric_default", &["ADD x numeric(10,2) DEFAULT 42.10"]),
    change("add_boolean_default", &["ADD x boolean DEFAULT true"]),
    change("add_date_default", &["ADD x date DEFAULT '2026-01-01'"]),
    change("add_time_default", &["ADD x time DEFAULT '12:30:00'"]),
    change("add_timestamp_default", &["ADD x timestamp DEFAULT '2026-01-01 12:30:00'"]),
    change("add_timestamptz_default", &["ADD x timestamptz DEFAULT '2026-01-01 12:30:00+00'"]),
    change("add_json_default", &["ADD x jsonb DEFAULT '{}'"]),
    change("add_uuid_default", &["ADD x uuid DEFAULT '6f1e0a7c-6f7b-4a4e-9d5c-0123456789ab'"]),
    change("add_null_default", &["ADD x int DEFAULT NULL"]),
    change("add_required_with_default", &["ADD x int NOT NULL DEFAULT 7"]),
    change("add_two", &["ADD x int, ADD y text DEFAULT 'q'"]),
    change("add_array", &["ADD x int[]"]),
    change("drop_one", &["DROP b"]),
    change("drop_two", &["DROP b, DROP c"]),
    change("drop_with_default", &["DROP e"]),
    change("drop_required", &["DROP f"]),
    change("rename_one", &["RENAME a TO z"]),
    change("rename_key", &["RENAME id TO ident"]),
    change("rename_case", &["RENAME a TO \"A\""]),
    change("rename_quoted", &["RENAME b TO \"q\"\"q é\""]),
    compound("rename_chain", &["RENAME d TO g", "RENAME c TO d", "RENAME b TO c", "RENAME a TO b"]),
    compound("rename_swap", &["RENAME a TO t", "RENAME e TO a", "RENAME t TO e"]),
    compound("rename_cycle", &["RENAME a TO t", "RENAME b TO a", "RENAME c TO b", "RENAME t TO c"]),
    compound(
        "rename_two_swaps",
        &["RENAME a TO t", "RENAME b TO a", "RENAME t TO b", "RENAME c TO t", "RENAME d TO c", "RENAME t TO d"],
    ),
    compound("drop_and_add_again", &["DROP b", "ADD b text DEFAULT 'new'"]),
    compound("rename_onto_dropped", &["DROP b", "RENAME a TO b"]),
    compound("rename_and_add_again", &["RENAME a TO z", "ADD a text"]),
    change("there_and_back", &["RENAME a TO z", "RENAME z TO a"]),
    change("add_and_drop", &["ADD x int DEFAULT 1", "DROP x"]),
    change("set_default", &["ALTER a SET DEFAULT 9"]),
    change("change_default", &["ALTER e SET DEFAULT 6"]),
    change("drop_default", &["ALTER e DROP DEFAULT"]),
    change("default_that_is_no_literal", &["ALTER e SET DEFAULT (random() * 10)::int"]),
    change("set_not_null", &["ALTER a SET NOT NULL"]),
    change("drop_not_null", &["ALTER f DROP NOT NULL"]),
    change("int_to_bigint", &["ALTER a TYPE bigint"]),
    change("longer_varchar", &["ALTER c TYPE varchar(20)"]),
    change("unlimited_varchar", &["ALTER c TYPE varchar"]),
    change("varchar_to_text", &["ALTER c TYPE text"]),
    change("more_digits", &["ALTER d TYPE numeric(12,2)"]),
    change("widen_with_default", &["ALTER a TYPE bigint, ALTER a SET DEFAULT 3"]),
    change("default_and_not_null", &["ALTER a SET DEFAULT 1, ALTER a SET NOT NULL"]),
    change("two_types", &["ALTER a TYPE bigint, ALTER c TYPE text"]),
    compound("add_drop_rename", &["ADD x int DEFAULT 1", "DROP b", "RENAME a TO z"]),
    compound(
        "many",
        &[
            "ADD x text DEFAULT 'n'",
            "ADD y int",
            "DROP c",
            "RENAME b TO c",
            "ALTER e DROP DEFAULT",
            "ALTER f DROP NOT NULL",
        ],
    ),
    compound("swap_and_widen", &["RENAME a TO t", "RENAME b TO a", "RENAME t TO b", "ALTER b TYPE bigint"]),
    compound(
        "all_at_once",
        &[
            "DROP d",
            "RENAME a TO t",
            "RENAME e TO a",
            "RENAME t TO e",
            "ADD x boolean NOT NULL DEFAULT false",
            "ADD d date",
            "ALTER c TYPE varchar(30)",
            "ALTER f SET DEFAULT 8",
        ],
    ),
    becomes(change("rename_table", &["RENAME TO s_renamed"]), "public.s_renamed"),
    becomes(change("move_table", &["SET SCHEMA moved"]), "moved.s_move_table"),
    change("longer_key", &["DROP CONSTRAINT s_longer_key_pkey, ADD PRIMARY KEY (f, id)"]),
    change(
        "key_by_index",
        &["ADD CONSTRAINT s_key_by_index_k UNIQUE (f, id), REPLICA IDENTITY USING INDEX s_key_by_index_k"],
    ),
    becomes(
        compound(
            "all_of_a_table",
            &[
                "RENAME a TO z",
                "ADD x int DEFAULT 3",
                "DROP CONSTRAINT s_all_of_a_table_pkey, ADD PRIMARY KEY (f, id)",
                "RENAME TO s_all_renamed",
            ],
        ),
        "public.s_all_renamed",
    ),
];

/// A name that no column of any of them has: in a change's own table alone.
pub fn table(change: &Change) -> String {
    format!("s_{}", change.name)
}

/// Schema and name of its table in the end.
pub fn last_name(change: &Change) -> String {
    change.becomes.map_or_else(|| format!("public.{}", table(change)), str::to_owned)
}

/// The statements as a script for psql, which sends each by itself.
pub fn script(change: &Change) -> String {
    let table = table(change);
    let alter = |statement: &&str| format!("ALTER TABLE {table} {statement};\n");
    match (change.compound, change.statements.split_last()) {
        (true, Some((last, first))) => format!(
            "BEGIN;\nSET LOCAL tidegate.skip_ddl = on;\n{}SET LOCAL tidegate.skip_ddl = off;\n{}COMMIT;\n",
            first.iter().map(alter).collect::<String>(),
            alter(last)
        ),
        _ => change.statements.iter().map(alter).collect(),
    }
}

/// Rows of before a change, which the copy has.
pub fn rows(change: &Change) -> String {
    format!(
        "INSERT INTO {} (id, a, b, c, d, e) SELECT i, i, 'b' || i, 'c' || i, i * 1.25, CASE WHEN i = 2 THEN NULL ELSE i END \
         FROM generate_series(1, 5) i;\n",
        table(change)
    )
}

/// Changes of rows before a change, and after it: whatever its columns are then.
pub fn work(change: &Change, round: u32) -> String {
    let table = if round == 0 { table(change) } else { last_name(change) };
    let key = if change.name == "rename_key" && round > 0 { "ident" } else { "id" };
    let new = 100 + round;
    format!(
        "INSERT INTO {table} SELECT (jsonb_populate_record(r, '{{\"{key}\": {new}}}')).* FROM {table} r WHERE {key} = 1;\n\
         UPDATE {table} SET {key} = {key} + 50 WHERE {key} = 3 + {round};\n\
         DELETE FROM {table} WHERE {key} = {round};\n"
    )
}
