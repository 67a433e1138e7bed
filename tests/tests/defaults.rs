//! Which defaults are literals, with PostgreSQL as the judge: what is taken for one is what
//! the server makes of the default, and what is computed is never taken.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use tidegate::schema::defaults::column_literal;
use tidegate::schema::table::Column;
use tidegate_tests::{Database, database, source};

const CASES: usize = 1500;

/// Types of columns, and of casts.
const TYPES: [&str; 26] = [
    "text",
    "varchar",
    "varchar(5)",
    "char(3)",
    "\"char\"",
    "name",
    "smallint",
    "integer",
    "bigint",
    "numeric",
    "numeric(10,2)",
    "numeric(3)",
    "real",
    "double precision",
    "boolean",
    "date",
    "time",
    "time(2)",
    "timestamp",
    "timestamp(0)",
    "timestamptz",
    "json",
    "jsonb",
    "uuid",
    "interval",
    "text[]",
];

/// Texts that some type reads, in quotes as they are written in SQL.
const STRINGS: [&str; 44] = [
    "'pending'",
    "'don''t'",
    "''",
    "'a\\b'",
    r"E'a\\b\n'",
    r"E'\u00e9'",
    "'schön 🙂'",
    "'x'",
    "'abc'",
    "'  padded '",
    "'42'",
    "'-1'",
    "'007'",
    "'42.10'",
    "'42.105'",
    "'0.1'",
    "'1e6'",
    "'NaN'",
    "'Infinity'",
    "'100000000000000000000'",
    "'0.12345678901234567'",
    "'t'",
    "'true'",
    "'no'",
    "'2026-01-01'",
    "'2024-02-29'",
    "'01/02/2026'",
    "'now'",
    "'today'",
    "'infinity'",
    "'epoch'",
    "'12:30:00'",
    "'12:30:00.125'",
    "'24:00:00'",
    "'2026-01-01 12:30:00'",
    "'2026-01-01 12:30:00.5'",
    "'2026-01-01 12:30:00+02'",
    "'2026-01-01 12:30:00 Europe/Berlin'",
    "'{}'",
    "'{\"b\":1,\"a\":[1, null]}'",
    "'6f1e0a7c-6f7b-4a4e-9d5c-0123456789ab'",
    "'6F1E0A7C6F7B4A4E9D5C0123456789AB'",
    "'1 day'",
    "'{a,b}'",
];
const OTHERS: [&str; 14] =
    ["42", "-1", "0", "1.50", "-0.25", "1e6", "1000000", "5000000000", "true", "FALSE", "NULL", "B'101'", "- 7", ".5"];

/// What only the server can tell: of each a value that could be an argument.
const COMPUTED: [&str; 16] = [
    "lower({})",
    "concat({}, 'x')",
    "md5({}::text)",
    "coalesce({}, {})",
    "({})::text || 'x'",
    "1 + length(({})::text)",
    "now()",
    "CURRENT_TIMESTAMP",
    "CURRENT_USER",
    "random()",
    "gen_random_uuid()",
    "clock_timestamp()",
    "current_setting('search_path')",
    "timezone('UTC', now())",
    "CASE WHEN true THEN {} END",
    "ARRAY[({})::text]",
];

struct Case {
    declared: &'static str,
    expression: String,
    computed: bool,
}

fn literal(random: &mut StdRng) -> String {
    let atom = match random.random_range(0..5) {
        0 => OTHERS.choose(random),
        _ => STRINGS.choose(random),
    };
    let mut expression = (*atom.unwrap()).to_owned();
    for _ in 0..random.random_range(0..4) {
        expression = match random.random_range(0..3) {
            0 => format!("({expression})"),
            1 => format!("{expression}::{}", TYPES.choose(random).unwrap()),
            _ => format!("CAST({expression} AS {})", TYPES.choose(random).unwrap()),
        };
    }
    expression
}

fn case(random: &mut StdRng) -> Case {
    let computed = random.random_bool(0.3);
    // Which takes whatever is computed.
    let declared = if computed && random.random_bool(0.5) { "text" } else { TYPES.choose(random).unwrap() };
    let mut expression = literal(random);
    if computed {
        expression = COMPUTED.choose(random).unwrap().replace("{}", &expression);
        if random.random_bool(0.5) {
            expression = format!("({expression})::{}", TYPES.choose(random).unwrap());
        }
    }
    Case { declared, expression, computed }
}

/// What a column's default is printed as, and what a row gets by it; or an error.
const JUDGE: &str = r#"
    CREATE FUNCTION judge(declared text, expression text) RETURNS jsonb LANGUAGE plpgsql AS $$
    DECLARE
        answer jsonb;
        given text;
    BEGIN
        EXECUTE format('CREATE TEMP TABLE judged (c %s DEFAULT %s)', declared, expression);
        EXECUTE 'INSERT INTO judged DEFAULT VALUES RETURNING c::text' INTO given;
        SELECT jsonb_build_object('printed', pg_get_expr(d.adbin, d.adrelid), 'given', given, 'base', t.typname,
                                  'oid', t.oid::int8, 'typmod', a.atttypmod)
        FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = 'judged'::regclass AND a.attnum = 1 INTO answer;
        DROP TABLE judged;
        RETURN answer;
    EXCEPTION WHEN OTHERS THEN
        RETURN jsonb_build_object('error', SQLERRM);
    END $$"#;

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn judged(database: &Database, asked: impl Iterator<Item = (String, String)>) -> Vec<Value> {
    let rows = asked.map(|(declared, expression)| format!("({}, {})", quoted(&declared), quoted(&expression)));
    let answers = database.sql(&format!(
        "SELECT judge(declared, expression) FROM (VALUES {}) AS v (declared, expression)",
        rows.collect::<Vec<_>>().join(", ")
    ));
    answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn column(answer: &Value) -> Column {
    let typmod = answer["typmod"].as_i64().unwrap() as i32;
    let base = answer["base"].as_str().unwrap();
    let array = base.starts_with('_');
    Column {
        ordinal: 1,
        name: "c".to_owned(),
        declared: String::new(),
        base: if array { "array" } else { base }.to_owned(),
        element: array.then(|| base[1..].to_owned()),
        delimiter: None,
        type_oid: answer["oid"].as_u64().unwrap() as u32,
        typmod,
        base_typmod: typmod,
        nullable: true,
        key_position: None,
        identity: false,
        default_expression: None,
        default_literal: None,
        generated: false,
        within: None,
        enum_labels: Vec::new(),
    }
}

/// Other cases with each `TIDEGATE_SEED`.
#[test]
fn a_default_that_is_taken_for_a_literal_is_what_the_server_makes_of_it_and_none_that_is_computed_is() {
    let seed = std::env::var("TIDEGATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1_u64);
    println!("TIDEGATE_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let database = database(source(), "defaults");
    database.sql(JUDGE);
    let cases: Vec<Case> = (0..CASES).map(|_| case(&mut random)).collect();
    let answers = judged(&database, cases.iter().map(|case| (case.declared.to_owned(), case.expression.clone())));
    assert_eq!(answers.len(), cases.len());
    let (mut taken, mut computed) = (Vec::new(), 0);
    for (case, answer) in cases.iter().zip(&answers) {
        let Some(printed) = answer["printed"].as_str() else { continue };
        let literal = column_literal(printed, &column(answer));
        let told = || format!("{} DEFAULT {}: {printed} is {literal:?}", case.declared, case.expression);
        if case.computed {
            computed += 1;
            assert_eq!(literal, None, "{}", told());
        } else if let Some(literal) = &literal {
            assert!(answer["given"].is_string(), "{}", told());
            taken.push((case.declared.to_owned(), quoted(&literal.text), answer["given"].clone(), told()));
        }
    }
    // The literal's text, as a destination would write it.
    let again = judged(&database, taken.iter().map(|(declared, text, ..)| (declared.clone(), text.clone())));
    for ((_, _, given, told), answer) in taken.iter().zip(&again) {
        assert_eq!(&answer["given"], given, "{told}: {answer}");
    }
    println!("{} taken, {computed} computed, of {CASES}", taken.len());
    assert!(taken.len() > 50 && computed > 30, "{} taken, {computed} computed", taken.len());
}
