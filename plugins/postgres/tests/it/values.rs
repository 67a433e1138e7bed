//! What is stored is what the source prints.

use tidegate_sdk::model::{FailureScope, Table};

use crate::support::rows::*;
use crate::support::{database, open, server};

#[test]
fn signs_that_mean_something_to_copy_or_sql_are_stored_as_they_are() {
    const NOTES: [&str; 8] =
        ["tab\there", "line\nfeed\r", "back\\slash\\", "\\N", "\\.", "it's \"quoted\"", "", "ünïcödé ✓"];
    let db = database("signs");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "note:text?"]);
    mirror.begin_copy(&t, "r").unwrap();
    let ids = ["1", "2", "3", "4", "5", "6", "7", "8"];
    let rows: Vec<[C; 2]> = ids.iter().zip(NOTES).map(|(id, note)| [V(id), V(note)]).collect();
    let rows: Vec<&[C]> = rows.iter().map(|row| &row[..]).collect();
    mirror.write_group(&group(1, vec![copied(&t, "r", "b", &rows)])).unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    let stored =
        || server().sql(&db, "SELECT string_agg(encode(convert_to(note, 'UTF8'), 'hex'), ',' ORDER BY id) FROM t");
    let wanted = NOTES.map(|note| note.bytes().map(|byte| format!("{byte:02x}")).collect::<String>()).join(",");
    assert_eq!(stored(), wanted);
    // The same as constants in a statement.
    mirror.write_group(&group(2, vec![truncated(&t, at(2, 0)), merged(&t, Some(at(3, 0)), &rows, &[], &[])])).unwrap();
    assert_eq!(stored(), wanted);
}

#[test]
fn every_layout_is_stored_as_postgresql_prints_it_by_copy_and_by_statement() {
    let db = database("layouts");
    let (mut mirror, _) = open(&db, 1);
    let t = table(
        1,
        "t",
        &[1],
        &[
            "id:int8",
            "b:bool?",
            "s:int2?",
            "i:int4?",
            "o:oid?",
            "r:float4?",
            "d:float8?",
            "day:date?",
            "tod:time?",
            "ts:timestamp?",
            "tz:timestamptz?",
            "u:uuid?",
            "raw:bytea?",
            "n:numeric?",
            "j:json?",
            "jb:jsonb?",
            "iv:interval?",
            "ia:int4[]?",
            "ta:text[]?",
            "ba:bytea[]?",
            "net:inet?",
            "bx:box[]?",
        ],
    );
    mirror.begin_copy(&t, "r").unwrap();
    let full: &[C] = &[
        V("1"),
        V("t"),
        V("-5"),
        V("70000"),
        V("4000000000"),
        V("0.1"),
        V("1e300"),
        V("1"),
        V("3600000001"),
        V("-1"),
        V("1000000"),
        V("00112233-4455-6677-8899-aabbccddeeff"),
        V("00ff5c"),
        V("0.00"),
        V("{\"a\" :1,\"a\":2}"),
        V("{\"a\": 1}"),
        V("1 day 02:00:00"),
        L(&[Some("1"), None]),
        L(&[Some("a,b"), Some("NULL"), None, Some("q\"\\")]),
        L(&[Some("00ff")]),
        V("10.0.0.1"),
        L(&[Some("(1,1),(0,0)"), Some("(2,2),(0,0)")]),
    ];
    let odd: &[C] = &[
        V("2"),
        V("f"),
        N,
        N,
        N,
        V("NaN"),
        V("-inf"),
        O("infinity"),
        O("24:00:00"),
        O("-infinity"),
        O("infinity"),
        N,
        V(""),
        O("NaN"),
        N,
        N,
        N,
        O("[2:3]={1,2}"),
        L(&[]),
        O("{{\"\\\\x00\",\"\\\\xff\"}}"),
        N,
        N,
    ];
    mirror.write_group(&group(1, vec![copied(&t, "r", "b", &[full, odd])])).unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    let stored = || server().sql(&db, "SELECT * FROM t ORDER BY id");
    let wanted = "1|t|-5|70000|4000000000|0.1|1e+300|1970-01-02|01:00:00.000001|1969-12-31 23:59:59.999999|1970-01-01 00:00:01+00|\
                  00112233-4455-6677-8899-aabbccddeeff|\\x00ff5c|0.00|{\"a\" :1,\"a\":2}|{\"a\": 1}|1 day 02:00:00|\
                  {1,NULL}|{\"a,b\",\"NULL\",NULL,\"q\\\"\\\\\"}|{\"\\\\x00ff\"}|10.0.0.1|{(1,1),(0,0);(2,2),(0,0)}\n\
                  2|f||||NaN|-Infinity|infinity|24:00:00|-infinity|infinity||\\x|NaN||||[2:3]={1,2}|{}|{{\"\\\\x00\",\"\\\\xff\"}}||";
    assert_eq!(stored(), wanted);
    mirror
        .write_group(&group(2, vec![truncated(&t, at(2, 0)), merged(&t, Some(at(3, 0)), &[full, odd], &[], &[])]))
        .unwrap();
    assert_eq!(stored(), wanted);
}

#[test]
fn types_that_are_the_sources_own_are_kept_as_text() {
    let db = database("own_types");
    let (mut mirror, _) = open(&db, 1);
    let t =
        table(1, "t", &[1], &["kind:enum", "tags:enum[]?", "pair:composite?", "shape:geometry?", "shapes:geometry[]?"]);
    mirror.begin_copy(&t, "r").unwrap();
    let row: &[C] = &[V("so 'so'"), L(&[Some("a b"), None]), V("(1,\"x y\")"), V("0101"), O("{0101:0102}")];
    mirror.write_group(&group(1, vec![copied(&t, "r", "b", &[row])])).unwrap();
    assert_eq!(
        server().sql(&db, "SELECT kind, tags[1], pair, shape, shapes FROM t"),
        "so 'so'|a b|(1,\"x y\")|0101|{0101:0102}"
    );
    assert_eq!(
        server().sql(&db, "SELECT string_agg(format_type(atttypid, atttypmod), ',' ORDER BY attnum) FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0"),
        "text,text[],text,text,text"
    );
}

#[test]
fn bytes_that_are_not_utf8_refuse_their_row_only() {
    let db = database("not_utf8");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "note:text?"]);
    mirror.begin_copy(&t, "r").unwrap();
    let failure = mirror
        .write_group(&group(1, vec![copied(&t, "r", "b", &[&[V("1"), V("x")], &[V("2"), H("ff")]])]))
        .unwrap_err();
    assert_eq!((failure.code.as_str(), failure.scope), ("postgres.not-utf8", FailureScope::Row));
    assert_eq!(failure.rows.iter().map(|row| (row.row, row.column)).collect::<Vec<_>>(), [(1, Some(2))]);
    // The session is in order after the COPY that was broken off, and nothing is left of it.
    mirror.write_group(&group(1, vec![copied(&t, "r", "b", &[&[V("1"), V("x")]])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT id FROM t"), "1");
}

#[test]
fn names_may_be_anything_postgresql_takes() {
    let long = "n".repeat(62) + "\"";
    let db = database("names");
    let (mut mirror, _) = open(&db, 1);
    for (id, name) in
        (1..).zip(["UPPER Case", "dots.and.more", "quo\"te", "it's", "ünïcödé", "back\\slash", "select", &long])
    {
        let mut t: Table = table(id, name, &[1], &["ID Column:int4", "a.\"b'c\\:text?", "%s {column}:text?"]);
        t.target.schema = format!("Schema {name}").chars().take(60).collect();
        mirror.begin_copy(&t, "it's \\ run").unwrap();
        mirror.write_group(&group(1, vec![copied(&t, "it's \\ run", "b'", &[&[V("1"), V("x"), V("y")]])])).unwrap();
        mirror.finish_copy(&t, "it's \\ run", at(1, 0)).unwrap();
        mirror
            .write_group(&group(
                2,
                vec![merged(&t, Some(at(2, 0)), &[&[V("2"), V("x"), M]], &[(0, &[V("1")])], &[&[V("1")]])],
            ))
            .unwrap();
        let physical = mirror.inspect_table(&t).unwrap().unwrap();
        assert_eq!(physical, mirror.render_table(&t).unwrap());
        assert_eq!(mirror.attach_table(&t).unwrap(), Some(at(2, 0)), "{name}");
        let quoted = format!("\"{}\".\"{}\"", t.target.schema.replace('"', "\"\""), name.replace('"', "\"\""));
        assert_eq!(server().sql(&db, &format!("SELECT * FROM {quoted}")), "2|x|y");
    }
    let too_long = table(99, &"n".repeat(64), &[1], &["id:int4"]);
    assert_eq!(mirror.begin_copy(&too_long, "r").unwrap_err().code, "postgres.name");
}

#[test]
fn a_row_of_many_megabytes_is_copied_and_merged() {
    let big: &'static str = Box::leak("0123456789\t\\".repeat(1 << 20).into_boxed_str());
    let db = database("big_row");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "note:text?"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.write_group(&group(1, vec![copied(&t, "r", "b", &[&[V("1"), V(big)], &[V("2"), V("x")]])])).unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    mirror.write_group(&group(2, vec![merged(&t, Some(at(2, 0)), &[&[V("3"), V(big)]], &[], &[])])).unwrap();
    assert_eq!(
        server().sql(&db, "SELECT sum(length(note)), count(DISTINCT md5(note)) FROM t"),
        format!("{}|2", big.len() * 2 + 1)
    );
}

#[test]
fn a_table_of_1600_columns_is_copied_and_merged() {
    let db = database("wide");
    let (mut mirror, _) = open(&db, 1);
    let specs: Vec<String> =
        std::iter::once("id:int4".to_owned()).chain((2..=1_600).map(|n| format!("c{n}:int2?"))).collect();
    let specs: Vec<&str> = specs.iter().map(String::as_str).collect();
    let t = table(1, "t", &[1], &specs);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    let row = |id: u32| {
        std::iter::once(V(Box::leak(id.to_string().into_boxed_str()))).chain([V("7"); 1_599]).collect::<Vec<C>>()
    };
    let rows: Vec<Vec<C>> = (0..60).map(row).collect();
    let rows: Vec<&[C]> = rows.iter().map(|row| &row[..]).collect();
    mirror.write_group(&group(1, vec![merged(&t, Some(at(2, 0)), &rows, &[], &[])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*), sum(c1600) FROM t"), "60|420");
}

#[test]
fn every_type_is_spelled_as_the_catalog_reports_it() {
    const BASES: [&str; 53] = [
        "bool",
        "int2",
        "int4",
        "int8",
        "float4",
        "float8",
        "text",
        "name",
        "char",
        "bytea",
        "date",
        "uuid",
        "json",
        "jsonb",
        "jsonpath",
        "inet",
        "cidr",
        "macaddr",
        "macaddr8",
        "money",
        "oid",
        "xid8",
        "pg_lsn",
        "point",
        "line",
        "lseg",
        "box",
        "path",
        "polygon",
        "circle",
        "tsvector",
        "tsquery",
        "int4range",
        "int8range",
        "numrange",
        "tsrange",
        "tstzrange",
        "daterange",
        "int4multirange",
        "int8multirange",
        "nummultirange",
        "tsmultirange",
        "tstzmultirange",
        "datemultirange",
        "varchar",
        "bpchar",
        "bit",
        "varbit",
        "numeric",
        "timetz",
        "interval",
        "xml",
        "hstore",
    ];
    let db = database("spelling");
    let (mut mirror, _) = open(&db, 1);
    let mut t = table(1, "t", &[1], &["id:int4"]);
    let mut add = |spec: String, change: &dyn Fn(&mut tidegate_sdk::model::Column)| {
        let mut column = column(t.columns.len() as u16 + 1, &spec);
        change(&mut column);
        t.columns.push(column);
    };
    for base in BASES {
        add(format!("{base}_one:{base}?"), &|_| {});
        add(format!("{base}_many:{base}[]?"), &|_| {});
    }
    for base in ["varchar", "bpchar", "bit", "varbit"] {
        add(format!("{base}_5:{base}?"), &|column| column.length = Some(5));
        add(format!("{base}_5_many:{base}[]?"), &|column| column.length = Some(5));
    }
    for base in ["time", "timetz", "timestamp", "timestamptz", "interval"] {
        add(format!("{base}_bare:{base}?"), &|_| {});
        add(format!("{base}_3:{base}?"), &|column| column.precision = Some(3));
        add(format!("{base}_0_many:{base}[]?"), &|column| column.precision = Some(0));
    }
    for (name, precision, scale) in [("a", 12, Some(4)), ("b", 5, None), ("c", 2, Some(-3)), ("d", 3, Some(5))] {
        add(format!("numeric_{name}:numeric?"), &|column| (column.precision, column.scale) = (Some(precision), scale));
    }
    mirror.begin_copy(&t, "r").unwrap();
    let (there, rendered) = (mirror.inspect_table(&t).unwrap().unwrap(), mirror.render_table(&t).unwrap());
    for (there, rendered) in there.columns.iter().zip(&rendered.columns) {
        assert_eq!(there, rendered);
    }
    assert_eq!(there, rendered);
}
