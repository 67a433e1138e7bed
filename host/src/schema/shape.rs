//! The shape of a table schema: what two versions must share for their rows to look
//! alike.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::table::TableSchema;

/// First in the encoding; another encoding begins with another text.
const ENCODING: &str = "tidegate shape 1";

impl TableSchema {
    /// The shape id: SHA-256, in lower-case hexadecimal, over the canonical encoding
    /// of the published columns (`docs/shape.md`, with test vectors).
    ///
    /// The encoding is, one behind the other: the text `tidegate shape 1`; the number
    /// of columns (u32); and for each column, in ordinal order, its ordinal (u16),
    /// name (text), declared type (text), whether it is nullable (u8: 0 or 1), its
    /// 1-based position in the primary key or 0 (u16), whether it is part of the
    /// replica identity (u8: 0 or 1). Numbers are big-endian; a text is its length in
    /// bytes (u32) and its UTF-8.
    ///
    /// The table's name, its version and defaults are no part of it.
    pub fn shape(&self) -> String {
        let mut hash = Sha256::new();
        text(&mut hash, ENCODING);
        hash.update(length(self.columns.len()));
        for column in &self.columns {
            hash.update(column.ordinal.to_be_bytes());
            text(&mut hash, &column.name);
            text(&mut hash, &column.declared);
            hash.update([u8::from(column.nullable)]);
            hash.update(column.key_position.unwrap_or(0).to_be_bytes());
            hash.update([u8::from(column.identity)]);
        }
        hash.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
            // Writing to a String does not fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }
}

fn text(hash: &mut Sha256, text: &str) {
    hash.update(length(text.len()));
    hash.update(text.as_bytes());
}

/// Names and types are far shorter than 4 GiB.
fn length(length: usize) -> [u8; 4] {
    (length as u32).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use crate::position::{Lsn, SnapshotId};
    use crate::schema::samples::{column, table};
    use crate::schema::table::{Origin, TableName};

    #[test]
    fn the_encoding_is_what_the_documentation_says() {
        use sha2::{Digest, Sha256};
        let mut id = column(1, "id", "int4");
        (id.declared, id.nullable, id.key_position, id.identity) = ("integer".to_owned(), false, Some(1), true);
        let mut price = column(3, "prix €", "numeric");
        price.declared = "numeric(12,4)".to_owned();
        let mut encoding = b"\0\0\0\x10tidegate shape 1\0\0\0\x02".to_vec();
        encoding.extend(b"\0\x01\0\0\0\x02id\0\0\0\x07integer\0\0\x01\x01");
        encoding.extend("\0\x03\0\0\0\x08prix €\0\0\0\x0dnumeric(12,4)\x01\0\0\0".as_bytes());
        let expected: String = Sha256::digest(&encoding).iter().map(|byte| format!("{byte:02x}")).collect();
        let shape = table(vec![id, price]).shape();
        assert_eq!(shape, expected);
        assert_eq!(shape, "46d6e729b419bcdc9ece7c5c234494f156ea304ab709623a01cf1b4228ca55db");
    }

    #[test]
    fn the_vectors_in_the_documentation_are_right() {
        use serde_json::Value;
        use sha2::{Digest, Sha256};
        let page = include_str!("../../../docs/shape.md");
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let vectors: Vec<Value> =
            page.lines().filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(vectors.len() >= 5);
        for vector in &vectors {
            let columns = vector["columns"].as_array().unwrap().iter().map(|told| {
                let number = |name: &str| told[name].as_u64().unwrap() as u16;
                let mut column = column(number("ordinal"), told["name"].as_str().unwrap(), "text");
                column.declared = told["declared"].as_str().unwrap().to_owned();
                column.nullable = told["nullable"].as_bool().unwrap();
                column.key_position = Some(number("key_position")).filter(|place| *place > 0);
                column.identity = told["identity"].as_bool().unwrap();
                column
            });
            assert_eq!(table(columns.collect()).shape(), vector["shape"].as_str().unwrap(), "{vector}");
            let encoding = vector["encoding"].as_str().unwrap().as_bytes();
            let bytes: Vec<u8> = encoding
                .chunks(2)
                .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
                .collect();
            assert_eq!(hex(&Sha256::digest(&bytes)), vector["shape"].as_str().unwrap(), "{vector}");
        }
    }

    #[test]
    fn name_version_origin_and_defaults_are_no_part_of_a_shape() {
        let one = table(vec![column(1, "a", "text")]);
        let mut other = one.clone();
        other.name = TableName::new("x", "y");
        other.snapshot = SnapshotId { commit: Lsn(1), message: Lsn(2) };
        other.origin = Origin::Catalog;
        other.columns[0].default_expression = Some("now()".to_owned());
        assert_eq!(one.shape(), other.shape());
    }

    #[test]
    fn whatever_rows_depend_on_changes_the_shape() {
        let one = table(vec![column(1, "a", "text"), column(2, "b", "text")]);
        let shape = one.shape();
        for change in 0..7 {
            let mut other = one.clone();
            let column = &mut other.columns[1];
            match change {
                0 => column.ordinal = 3,
                1 => column.name = "c".to_owned(),
                2 => column.declared = "varchar(3)".to_owned(),
                3 => column.nullable = false,
                4 => column.key_position = Some(1),
                5 => column.identity = true,
                _ => drop(other.columns.pop()),
            }
            assert_ne!(other.shape(), shape, "change {change}");
        }
        // Lengths keep neighbours apart.
        let shifted = table(vec![column(1, "at", "ext"), column(2, "b", "text")]);
        assert_ne!(shifted.shape(), shape);
    }
}
