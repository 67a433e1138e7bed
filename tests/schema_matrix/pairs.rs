//! Pairs of schemas of one table, made at random.

use std::sync::Arc;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use tidegate::position::{Lsn, SnapshotId};
use tidegate::schema::table::{Column, Literal, Origin, ReplicaIdentity, TableName, TableSchema};

/// Few, so that they meet: as themselves, folded, and as what a plan makes up.
const NAMES: [&str; 12] = ["a", "b", "c", "d", "A", "B", "é", "É", "tidegate_rename_0", "x y", "q\"q", "id"];

/// `pg_type` of what columns are made of: base, declared, oid, modifier, a default's kind.
type Type = (&'static str, &'static str, u32, i32, &'static str);

const INT: Type = ("int4", "integer", 23, -1, "numeric");
const BIGINT: Type = ("int8", "bigint", 20, -1, "numeric");
const MONEY: Type = ("numeric", "numeric(10,2)", 1700, (10 << 16 | 2) + 4, "numeric");
const LONG_MONEY: Type = ("numeric", "numeric(12,2)", 1700, (12 << 16 | 2) + 4, "numeric");
const SHORT: Type = ("varchar", "character varying(10)", 1043, 14, "string");
const LONGER: Type = ("varchar", "character varying(20)", 1043, 24, "string");
const TEXT: Type = ("text", "text", 25, -1, "string");

const NUMBERS: [Type; 4] = [INT, BIGINT, MONEY, LONG_MONEY];
const STRINGS: [Type; 3] = [SHORT, LONGER, TEXT];

/// Two versions.
#[derive(Clone)]
pub struct Pair {
    pub before: Vec<Column>,
    pub after: Vec<Column>,
}

impl Pair {
    /// Renames alone, or anything; a key that stays, under whatever name.
    pub fn random(random: &mut StdRng) -> Pair {
        let count = random.random_range(1..=7_u16);
        let names = random_names(random, usize::from(count));
        let before: Vec<Column> =
            (1..=count).zip(&names).map(|(ordinal, name)| random_column(random, ordinal, name)).collect();
        let mut kept: Vec<&Column> =
            before.iter().filter(|column| column.ordinal == 1 || random.random_bool(0.8)).collect();
        kept.sort_by_key(|column| column.ordinal);
        let only_renamed = random.random_bool(0.5);
        let added = if only_renamed { 0 } else { random.random_range(0..3_u16) };
        let names = random_names(random, kept.len() + usize::from(added));
        let mut names = names.into_iter();
        let mut after = Vec::new();
        for (old, name) in kept.into_iter().zip(names.by_ref()) {
            let name = if random.random_bool(0.2) && !only_renamed { old.name.clone() } else { name.to_owned() };
            let column = Column { name, ..old.clone() };
            after.push(if only_renamed || old.ordinal == 1 { column } else { altered(random, column) });
        }
        for (more, name) in (1..=added).zip(names) {
            after.push(random_column(random, count + more, name));
        }
        // Names that were kept may be taken twice now.
        for index in 0..after.len() {
            if after[..index].iter().any(|other| other.name == after[index].name) {
                after[index].name = format!("{}_{index}", after[index].name);
            }
        }
        Pair { before, after }
    }

    /// As versions of a table.
    pub fn versions(&self, oid: u32) -> (Arc<TableSchema>, Arc<TableSchema>) {
        let version = |columns: &[Column], commit: u64| {
            Arc::new(TableSchema {
                oid,
                name: TableName::new("public", format!("t{oid}")),
                snapshot: SnapshotId { commit: Lsn(commit), message: Lsn(commit - 1) },
                origin: Origin::Message,
                replica_identity: ReplicaIdentity::Default,
                highest: 20,
                listed: false,
                rewritten: false,
                committed_at: None,
                columns: columns.to_vec(),
            })
        };
        (version(&self.before, 1_000), version(&self.after, 1_000_000))
    }

    /// The same with one thing less that differs, in every way.
    pub fn smaller(&self) -> Vec<Pair> {
        let mut all = Vec::new();
        let ordinals =
            self.before.iter().chain(&self.after).map(|column| column.ordinal).filter(|ordinal| *ordinal > 1);
        for gone in ordinals {
            let mut pair = self.clone();
            pair.before.retain(|column| column.ordinal != gone);
            pair.after.retain(|column| column.ordinal != gone);
            all.push(pair);
        }
        for (index, new) in self.after.iter().enumerate() {
            let Some(old) = self.before.iter().find(|old| old.ordinal == new.ordinal && *old != new) else { continue };
            for simpler in [old.clone(), Column { name: new.name.clone(), ..old.clone() }] {
                let taken = self.after.iter().any(|other| other.ordinal != new.ordinal && other.name == simpler.name);
                if simpler != *new && !taken {
                    let mut pair = self.clone();
                    pair.after[index] = simpler;
                    all.push(pair);
                }
            }
        }
        all
    }

    /// For a person.
    pub fn shown(&self) -> String {
        let list = |columns: &[Column]| {
            let column = |column: &Column| {
                let default =
                    column.default_expression.as_ref().map(|text| format!(" default {text}")).unwrap_or_default();
                let required = if column.nullable { "" } else { " not null" };
                format!("{} {:?} {}{default}{required}", column.ordinal, column.name, column.declared)
            };
            columns.iter().map(column).collect::<Vec<_>>().join(", ")
        };
        format!("({}) -> ({})", list(&self.before), list(&self.after))
    }
}

fn random_names(random: &mut StdRng, count: usize) -> Vec<&'static str> {
    let mut names = NAMES;
    names.shuffle(random);
    names[..count].to_vec()
}

fn random_column(random: &mut StdRng, ordinal: u16, name: &str) -> Column {
    let kinds = [NUMBERS.as_slice(), &STRINGS].concat();
    let kind = if ordinal == 1 { INT } else { *kinds.choose(random).expect("there are some") };
    let column = Column {
        ordinal,
        name: name.to_owned(),
        declared: String::new(),
        base: String::new(),
        element: None,
        delimiter: None,
        type_oid: 0,
        typmod: -1,
        base_typmod: -1,
        nullable: ordinal != 1 && random.random_bool(0.6),
        key_position: (ordinal == 1).then_some(1),
        identity: ordinal == 1,
        default_expression: None,
        default_literal: None,
        generated: false,
        within: None,
        enum_labels: Vec::new(),
    };
    let column = of_type(column, kind);
    if ordinal == 1 { column } else { with_random_default(random, column, kind) }
}

fn of_type(column: Column, (base, declared, type_oid, typmod, _): Type) -> Column {
    Column { declared: declared.to_owned(), base: base.to_owned(), type_oid, typmod, base_typmod: typmod, ..column }
}

fn with_random_default(random: &mut StdRng, column: Column, (.., kind): Type) -> Column {
    let text = ["1", "2", "", ""].choose(random).copied().filter(|text| !text.is_empty());
    Column {
        default_expression: text.map(|text| if kind == "string" { format!("'{text}'") } else { text.to_owned() }),
        default_literal: text.map(|text| Literal { kind: kind.to_owned(), text: text.to_owned() }),
        ..column
    }
}

/// Another type that values of the old one can be assigned to, default and nullability.
fn altered(random: &mut StdRng, column: Column) -> Column {
    let is_text = STRINGS.iter().any(|kind| kind.0 == column.base);
    let kinds = if is_text { STRINGS.to_vec() } else { [NUMBERS.as_slice(), &STRINGS].concat() };
    let all = [NUMBERS.as_slice(), &STRINGS].concat();
    let own = *all.iter().find(|kind| kind.1 == column.declared).expect("it is one of them");
    let kind = if random.random_bool(0.5) { own } else { *kinds.choose(random).expect("there are some") };
    let nullable = random.random_bool(0.6);
    with_random_default(random, of_type(Column { nullable, ..column }, kind), kind)
}
