//! A batch as Arrow arrays. What the host sent is moved into them, not copied,
//! wherever the two agree on the layout, which is nearly everywhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringBuilder};
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, FixedSizeBinaryArray, Float32Array,
    Float64Array, Int16Array, Int32Array, Int64Array, ListArray, RecordBatch, StringArray, Time64MicrosecondArray,
    TimestampMicrosecondArray, UInt64Array, new_null_array,
};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use serde_json::{Map, Value, json};
use tidegate_sdk::model::{self, BytesArray, Cells, ColumnData, ColumnValues, OddCell, Rows};

use crate::changes::Changes;
use crate::physical::{Layout, Physical};

/// Cells that no array can hold: row to column to text.
#[derive(Default)]
struct Odd(BTreeMap<usize, Map<String, Value>>);

impl Odd {
    fn add(&mut self, row: usize, column: &str, kind: &str, text: &str) {
        let value = if kind == "text" { Value::from(text) } else { json!({ kind: text }) };
        self.0.entry(row).or_default().insert(column.to_owned(), value);
    }

    fn array(self, count: usize) -> ArrayRef {
        if self.0.is_empty() {
            return new_null_array(&Physical::Utf8.data_type(), count);
        }
        let text = |row: usize| self.0.get(&row).map(|columns| Value::Object(columns.clone()).to_string());
        Arc::new(StringArray::from_iter((0..count).map(text)))
    }
}

/// Makes the batch. An error says how it breaks the contract.
pub(crate) fn record_batch(changes: Changes, layout: &Layout) -> Result<RecordBatch, String> {
    changes.check()?;
    let count = changes.len();
    let missing = missing(&changes, layout);
    let Changes { ops, epoch, commit, ordinal, origin, rows, old_keys } = changes;
    let mut odd = Odd::default();
    let mut arrays = table_columns(rows, layout, &mut odd)?;
    arrays.push(Arc::new(StringArray::from_iter_values((0..count).map(|row| ops.of(row)))));
    arrays.push(Arc::new(Int64Array::from_value(i64::from(epoch), count)));
    arrays.push(Arc::new(Int64Array::from_iter_values(commit.into_iter().map(|lsn| lsn as i64))));
    arrays.push(Arc::new(UInt64Array::from(ordinal)));
    match origin {
        Some((times, xids)) => {
            arrays.push(Arc::new(TimestampMicrosecondArray::from(times).with_timezone("UTC")));
            arrays.push(Arc::new(Int64Array::from_iter_values(xids.into_iter().map(i64::from))));
        }
        None => {
            arrays.push(new_null_array(&Physical::Timestamp { utc: true }.data_type(), count));
            arrays.push(new_null_array(&Physical::Int64.data_type(), count));
        }
    }
    arrays.push(missing);
    arrays.push(if old_keys.is_empty() {
        new_null_array(&Physical::Utf8.data_type(), count)
    } else {
        Arc::new(StringArray::from_iter((0..count).map(|row| old_keys.get(&row))))
    });
    arrays.push(odd.array(count));
    RecordBatch::try_new(layout.schema.clone(), arrays).map_err(|error| error.to_string())
}

/// Names of the columns that were not sent, for each row.
fn missing(changes: &Changes, layout: &Layout) -> ArrayRef {
    let count = changes.len();
    let views = changes.rows.columns_of(&layout.table);
    let some: Vec<_> = views.iter().zip(&layout.table.columns).filter(|(view, _)| view.missing() > 0).collect();
    let physical = Physical::List(Box::new(Physical::Utf8));
    if some.is_empty() || !changes.lists_missing() {
        return new_null_array(&physical.data_type(), count);
    }
    let mut lists = ListBuilder::new(StringBuilder::new()).with_field(Physical::Utf8.item());
    for row in 0..count {
        let mut any = false;
        for (_, column) in some.iter().filter(|(view, _)| view.is_missing(row)) {
            lists.values().append_value(&column.name);
            any = true;
        }
        lists.append(any);
    }
    Arc::new(lists.finish())
}

fn table_columns(rows: Rows, layout: &Layout, odd: &mut Odd) -> Result<Vec<ArrayRef>, String> {
    let count = rows.len();
    let mut sent: BTreeMap<u16, ColumnValues> =
        rows.columns.into_iter().map(|values| (values.ordinal, values)).collect();
    let mut arrays = Vec::with_capacity(layout.schema.fields().len());
    for (column, physical) in layout.table.columns.iter().zip(&layout.types) {
        let array = match sent.remove(&column.ordinal) {
            Some(values) => column_array(values, column, physical, count, odd)
                .map_err(|error| format!("column {} ({}): {error}", column.name, column.declared))?,
            None => new_null_array(&physical.data_type(), count),
        };
        arrays.push(array);
    }
    match sent.keys().next() {
        Some(ordinal) => {
            Err(format!("the batch has a column with ordinal {ordinal}, the table {} has none", layout.table.source))
        }
        None => Ok(arrays),
    }
}

fn column_array(
    values: ColumnValues,
    column: &model::Column,
    physical: &Physical,
    count: usize,
    odd: &mut Odd,
) -> Result<ArrayRef, String> {
    let ColumnValues { validity, missing, odd: odd_cells, data, .. } = values;
    for cell in &odd_cells {
        odd.add(cell.row as usize, &column.name, &cell.kind, &cell.text);
    }
    let nulls = nulls(validity, missing, &odd_cells, count)?;
    match (data, physical) {
        (ColumnData::Plain(Cells::Utf8(texts)), Physical::Decimal { precision, scale }) => {
            decimals(&texts, nulls, *precision, *scale, |row, text| odd.add(row, &column.name, "text", text))
        }
        (ColumnData::Plain(cells), physical) => plain(cells, physical, nulls, count),
        (ColumnData::Lists(lists), Physical::List(element)) => {
            let items = lists.offsets.last().map_or(0, |&end| end as usize);
            let item_nulls = self::nulls(lists.item_validity, None, &[], items)?;
            let elements = plain(lists.items, element, item_nulls, items)?;
            let offsets = offsets(lists.offsets, count)?;
            let array = ListArray::try_new(element.item(), offsets, elements, nulls);
            array.map(|array| Arc::new(array) as ArrayRef).map_err(|error| error.to_string())
        }
        (ColumnData::Lists(_), _) => Err("arrays came where single values were to come".to_owned()),
    }
}

/// Null is what is null, missing or odd.
fn nulls(
    validity: Option<Vec<u8>>,
    missing: Option<Vec<u8>>,
    odd: &[OddCell],
    count: usize,
) -> Result<Option<NullBuffer>, String> {
    if validity.is_none() && missing.is_none() && odd.is_empty() {
        return Ok(None);
    }
    let mut bits = validity.unwrap_or_else(|| vec![0xff; count.div_ceil(8)]);
    if bits.len() * 8 < count {
        return Err(format!("{} bits of validity for {count} cells", bits.len() * 8));
    }
    if let Some(missing) = missing {
        bits.iter_mut().zip(&missing).for_each(|(valid, missing)| *valid &= !missing);
    }
    for cell in odd {
        let row = cell.row as usize;
        if row >= count {
            return Err(format!("an odd cell in row {row} of {count}"));
        }
        bits[row / 8] &= !(1 << (row % 8));
    }
    Ok(Some(NullBuffer::new(BooleanBuffer::new(Buffer::from_vec(bits), 0, count))))
}

/// The contract's offsets are Arrow's, but for their sign.
fn offsets(offsets: Vec<u32>, count: usize) -> Result<OffsetBuffer<i32>, String> {
    let ascending = offsets.len() == count + 1 && offsets.is_sorted();
    if !ascending || offsets.last().is_some_and(|&end| i32::try_from(end).is_err()) {
        return Err(format!("{} offsets for {count} cells do not ascend below 2 GiB", offsets.len()));
    }
    Ok(OffsetBuffer::new(ScalarBuffer::new(Buffer::from_vec(offsets), 0, count + 1)))
}

fn plain(cells: Cells, physical: &Physical, nulls: Option<NullBuffer>, count: usize) -> Result<ArrayRef, String> {
    macro_rules! numbers {
        ($array:ty, $values:expr) => {
            <$array>::try_new($values.into(), nulls).map(|array| Arc::new(array) as ArrayRef)
        };
    }
    let array = match (cells, physical) {
        (Cells::Booleans(bits), Physical::Bool) => {
            if bits.len() * 8 < count {
                return Err(format!("{} bits for {count} booleans", bits.len() * 8));
            }
            let values = BooleanBuffer::new(Buffer::from_vec(bits), 0, count);
            Ok(Arc::new(BooleanArray::new(values, nulls)) as ArrayRef)
        }
        (Cells::Int16(values), Physical::Int16) => numbers!(Int16Array, values),
        (Cells::Int32(values), Physical::Int32) => numbers!(Int32Array, values),
        (Cells::Int32(values), Physical::Date) => numbers!(Date32Array, values),
        (Cells::Int64(values), Physical::Int64) => numbers!(Int64Array, values),
        (Cells::Int64(values), Physical::Time) => numbers!(Time64MicrosecondArray, values),
        (Cells::Int64(values), Physical::Timestamp { utc }) => TimestampMicrosecondArray::try_new(values.into(), nulls)
            .map(|array| Arc::new(if *utc { array.with_timezone("UTC") } else { array }) as ArrayRef),
        (Cells::Float32(values), Physical::Float32) => numbers!(Float32Array, values),
        (Cells::Float64(values), Physical::Float64) => numbers!(Float64Array, values),
        (Cells::Fixed(fixed), Physical::Uuid) if fixed.width == 16 => {
            FixedSizeBinaryArray::try_new(16, Buffer::from_vec(fixed.data), nulls)
                .map(|array| Arc::new(array) as ArrayRef)
        }
        (Cells::Binary(bytes), Physical::Binary) => {
            let offsets = offsets(bytes.offsets, count)?;
            BinaryArray::try_new(offsets, Buffer::from_vec(bytes.data), nulls).map(|array| Arc::new(array) as ArrayRef)
        }
        (Cells::Utf8(bytes), Physical::Utf8) => {
            let offsets = offsets(bytes.offsets, count)?;
            StringArray::try_new(offsets, Buffer::from_vec(bytes.data), nulls).map(|array| Arc::new(array) as ArrayRef)
        }
        (_, physical) => return Err(format!("cells of another layout came for {}", physical.spelled())),
    }
    .map_err(|error| error.to_string())?;
    if array.len() != count {
        return Err(format!("{} cells for {count} rows", array.len()));
    }
    Ok(array)
}

/// Numbers that the declared precision and scale hold exactly; the others are odd.
fn decimals(
    texts: &BytesArray,
    nulls: Option<NullBuffer>,
    precision: u8,
    scale: i8,
    mut odd: impl FnMut(usize, &str),
) -> Result<ArrayRef, String> {
    let count = texts.offsets.len().saturating_sub(1);
    if nulls.as_ref().is_some_and(|nulls| nulls.len() != count) {
        return Err(format!("{count} numbers do not match their validity"));
    }
    let mut values = vec![0i128; count];
    let mut valid = vec![0u8; count.div_ceil(8)];
    for (row, value) in values.iter_mut().enumerate() {
        if nulls.as_ref().is_some_and(|nulls| nulls.is_null(row)) {
            continue;
        }
        let text = std::str::from_utf8(texts.get(row)).map_err(|error| error.to_string())?;
        match decimal(text, precision, scale) {
            Some(unscaled) => {
                *value = unscaled;
                valid[row / 8] |= 1 << (row % 8);
            }
            None => odd(row, text),
        }
    }
    let nulls = NullBuffer::new(BooleanBuffer::new(Buffer::from_vec(valid), 0, count));
    let array = Decimal128Array::try_new(values.into(), Some(nulls))
        .and_then(|array| array.with_precision_and_scale(precision, scale));
    array.map(|array| Arc::new(array) as ArrayRef).map_err(|error| error.to_string())
}

/// The unscaled value of a number as PostgreSQL prints it; none if it is no number of
/// this precision and scale.
fn decimal(text: &str, precision: u8, scale: i8) -> Option<i128> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let scale = scale.unsigned_abs() as usize;
    if whole.is_empty() || fraction.len() > scale {
        return None;
    }
    let padding = std::iter::repeat_n(b'0', scale - fraction.len());
    let mut value = 0i128;
    for digit in whole.bytes().chain(fraction.bytes()).chain(padding) {
        if !digit.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(i128::from(digit - b'0'))?;
    }
    (value < 10i128.pow(u32::from(precision))).then_some(if negative { -value } else { value })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decimal_is_exact_or_odd() {
        assert_eq!(decimal("0.00", 10, 2), Some(0));
        assert_eq!(decimal("-12.34", 10, 2), Some(-1234));
        assert_eq!(decimal("12", 10, 2), Some(1200));
        assert_eq!(decimal("1.234", 10, 2), None);
        assert_eq!(decimal("NaN", 10, 2), None);
        assert_eq!(decimal("123", 2, 0), None);
        let largest = "9".repeat(38);
        assert_eq!(decimal(&largest, 38, 0), largest.parse().ok());
        assert_eq!(decimal(&format!("1{largest}"), 38, 0), None);
    }
}
