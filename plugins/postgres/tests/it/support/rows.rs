//! Tables and rows, written down shortly.

use tidegate_sdk::model::*;

/// A cell of a test's row.
#[derive(Clone, Copy, Debug)]
pub enum C {
    /// A value by its text; for dates, times and timestamps the layout's number.
    V(&'static str),
    /// NULL.
    N,
    /// Not sent.
    M,
    /// Odd: PostgreSQL's text.
    O(&'static str),
    /// Odd: bytes that are not UTF-8.
    H(&'static str),
    /// An array.
    L(&'static [Option<&'static str>]),
}
pub use C::{H, L, M, N, O, V};

/// A column `name` of a base type; `name:base?` is nullable, `name:element[]` an array.
pub fn column(ordinal: u16, spec: &str) -> Column {
    let (name, base) = spec.rsplit_once(':').unwrap();
    let (base, nullable) = match base.strip_suffix('?') {
        Some(base) => (base, true),
        None => (base, false),
    };
    let (base, element) = match base.strip_suffix("[]") {
        Some(element) => ("array", Some(element.to_owned())),
        None => (base, None),
    };
    let of_boxes = element.as_deref() == Some("box");
    Column {
        ordinal,
        name: name.to_owned(),
        declared: base.to_owned(),
        base: base.to_owned(),
        element,
        length: None,
        precision: None,
        scale: None,
        type_oid: 0,
        nullable,
        key_position: None,
        identity: false,
        default_expression: None,
        default_literal: None,
        details: if of_boxes { vec![("delimiter".to_owned(), ";".to_owned())] } else { Vec::new() },
    }
}

/// A literal default.
pub fn with_default(column: Column, text: &str) -> Column {
    Column { default_literal: Some(Literal { kind: "string".to_owned(), text: text.to_owned() }), ..column }
}

/// A table `public.<name>` whose columns have the ordinals 1, 2, …
pub fn table(id: u32, name: &str, key: &[u16], columns: &[&str]) -> Table {
    let columns = (1..).zip(columns).map(|(ordinal, spec)| column(ordinal, spec)).collect();
    let named = TableName { schema: "public".to_owned(), name: name.to_owned() };
    Table {
        id,
        source: named.clone(),
        target: named,
        snapshot: SnapshotId { commit: 100, message: 0 },
        shape: String::new(),
        mode: "merge".to_owned(),
        key: key.to_vec(),
        columns,
        settings: "{}".to_owned(),
        details: Vec::new(),
    }
}

/// Rows of all of the table's columns, or of its key's.
pub fn rows(table: &Table, cells: &[&[C]]) -> Rows {
    of(table.columns.iter().collect(), cells)
}

/// Rows of the key's columns.
pub fn keys(table: &Table, cells: &[&[C]]) -> Rows {
    let mut key: Vec<&Column> = table.columns.iter().filter(|column| table.key.contains(&column.ordinal)).collect();
    key.sort_by_key(|column| column.ordinal);
    of(key, cells)
}

fn of(columns: Vec<&Column>, cells: &[&[C]]) -> Rows {
    let count = cells.len() as u32;
    let made = columns.iter().enumerate().map(|(index, column)| {
        let cells: Vec<C> = cells.iter().map(|row| row[index]).collect();
        values(column, &cells)
    });
    // As the host does: what no row was sent is left out.
    let sent = made.zip(0..).filter(|(_, index)| !cells.iter().all(|row| matches!(row[*index], M)) || cells.is_empty());
    Rows { count, columns: sent.map(|(values, _)| values).filter(|_| count > 0).collect() }
}

fn bitmap(bits: &[bool]) -> Vec<u8> {
    let mut bytes = vec![0; bits.len().div_ceil(8)];
    for (index, bit) in bits.iter().enumerate() {
        bytes[index / 8] |= u8::from(*bit) << (index % 8);
    }
    bytes
}

fn values(column: &Column, cells: &[C]) -> ColumnValues {
    let nulls: Vec<bool> = cells.iter().map(|cell| !matches!(cell, N)).collect();
    let missing: Vec<bool> = cells.iter().map(|cell| matches!(cell, M)).collect();
    let odd = (0..).zip(cells).filter_map(|(row, cell)| match cell {
        O(text) => Some(OddCell { row, kind: "text".to_owned(), text: (*text).to_owned() }),
        H(text) => Some(OddCell { row, kind: "hex".to_owned(), text: (*text).to_owned() }),
        _ => None,
    });
    let data = match &column.element {
        Some(element) => ColumnData::Lists(lists(element, cells)),
        None => {
            let texts: Vec<&str> = cells.iter().map(|cell| if let V(text) = cell { text } else { "" }).collect();
            ColumnData::Plain(layout(&column.base, &texts))
        }
    };
    ColumnValues {
        ordinal: column.ordinal,
        validity: nulls.contains(&false).then(|| bitmap(&nulls)),
        missing: missing.contains(&true).then(|| bitmap(&missing)),
        odd: odd.collect(),
        data,
    }
}

fn lists(element: &str, cells: &[C]) -> ListArray {
    let (mut offsets, mut items) = (vec![0], Vec::new());
    for cell in cells {
        if let L(list) = cell {
            items.extend_from_slice(list);
        }
        offsets.push(items.len() as u32);
    }
    let valid: Vec<bool> = items.iter().map(Option::is_some).collect();
    let texts: Vec<&str> = items.iter().map(|item| item.unwrap_or("")).collect();
    ListArray { offsets, item_validity: valid.contains(&false).then(|| bitmap(&valid)), items: layout(element, &texts) }
}

fn layout(base: &str, texts: &[&str]) -> Cells {
    fn numbers<T: std::str::FromStr + Default>(texts: &[&str]) -> Vec<T> {
        texts.iter().map(|text| text.parse().unwrap_or_default()).collect()
    }
    let bytes = |of: &dyn Fn(&str) -> Vec<u8>| {
        let mut array = BytesArray { offsets: vec![0], data: Vec::new() };
        for text in texts {
            array.data.extend(of(text));
            array.offsets.push(array.data.len() as u32);
        }
        array
    };
    let hex = |text: &str| {
        (0..text.len() / 2)
            .map(|index| u8::from_str_radix(&text[index * 2..index * 2 + 2], 16).unwrap())
            .collect::<Vec<u8>>()
    };
    match base {
        "bool" => Cells::Booleans(bitmap(&texts.iter().map(|text| *text == "t").collect::<Vec<_>>())),
        "int2" => Cells::Int16(numbers(texts)),
        "int4" | "date" => Cells::Int32(numbers(texts)),
        "int8" | "oid" | "time" | "timestamp" | "timestamptz" => Cells::Int64(numbers(texts)),
        "float4" => Cells::Float32(numbers(texts)),
        "float8" => Cells::Float64(numbers(texts)),
        "uuid" => {
            let data =
                texts.iter().flat_map(|text| if text.is_empty() { vec![0; 16] } else { hex(&text.replace('-', "")) });
            Cells::Fixed(FixedArray { width: 16, data: data.collect() })
        }
        "bytea" => Cells::Binary(bytes(&hex)),
        _ => Cells::Utf8(bytes(&|text| text.as_bytes().to_vec())),
    }
}

/// A position of epoch 1.
pub fn at(commit: u64, ordinal: u64) -> Position {
    Position { epoch: 1, commit, ordinal }
}

fn sequence(count: u32) -> Sequence {
    let count = count as usize;
    Sequence {
        epoch: 1,
        commit: vec![0; count],
        ordinal: vec![0; count],
        committed_at: vec![0; count],
        xid: vec![0; count],
    }
}

/// A batch of a copy.
pub fn copied(table: &Table, run: &str, id: &str, cells: &[&[C]]) -> Batch {
    let copy = CopyRows { run: run.to_owned(), batch_id: id.to_owned(), as_of: at(1_000, 0), rows: rows(table, cells) };
    Batch { table_id: table.id, snapshot: table.snapshot, through: None, content: Content::Copy(copy) }
}

/// A batch of merge rows.
pub fn merged(
    table: &Table,
    through: Option<Position>,
    upserts: &[&[C]],
    moved: &[(u32, &[C])],
    deletes: &[&[C]],
) -> Batch {
    let from: Vec<&[C]> = moved.iter().map(|(_, key)| *key).collect();
    let merge = MergeRows {
        sequence: sequence((upserts.len() + deletes.len()) as u32),
        upserts: rows(table, upserts),
        moved_index: moved.iter().map(|(index, _)| *index).collect(),
        moved_from: keys(table, &from),
        deletes: keys(table, deletes),
    };
    Batch { table_id: table.id, snapshot: table.snapshot, through, content: Content::Merge(merge) }
}

/// A truncation.
pub fn truncated(table: &Table, through: Position) -> Batch {
    let content = Content::Truncate(Truncation { sequence: sequence(1), cascade: false, restart_identity: false });
    Batch { table_id: table.id, snapshot: table.snapshot, through: Some(through), content }
}

/// A group.
pub fn group(ticket: u64, batches: Vec<Batch>) -> Group {
    Group { ticket, whole: true, batches, details: Vec::new() }
}
