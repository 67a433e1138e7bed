//! Names of tables as names of directories.

use tidegate_sdk::model::TableName;

/// Longest encoded name that is used as it is; file systems take 255 bytes.
const LONGEST: usize = 180;

/// `schema.table`, percent-encoded outside of ASCII letters, digits, `_` and `-`. A
/// name too long for a file system is cut, and told apart by a hash of the whole.
pub(crate) fn directory(table: &TableName) -> String {
    let whole = format!("{}.{}", encode(&table.schema), encode(&table.name));
    if whole.len() <= LONGEST {
        return whole;
    }
    format!("{}~{:016x}", &whole[..LONGEST], fnv(whole.as_bytes()))
}

fn encode(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => encoded.push(char::from(byte)),
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

/// FNV-1a: the same on every machine and in every version.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The file that the manifest line `seq` names. The generation keeps apart what an
/// earlier instance may have left.
pub(crate) fn file(seq: u64, generation: u64, extension: &str) -> String {
    format!("{seq:010}-g{generation}.{extension}")
}

/// The `seq` in a name made by [`file`].
pub(crate) fn seq_of(file: &str) -> Option<u64> {
    let (seq, rest) = file.split_once("-g")?;
    let (generation, extension) = rest.split_once('.')?;
    generation.parse::<u64>().ok()?;
    matches!(extension, "parquet" | "ndjson").then(|| seq.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(schema: &str, name: &str) -> TableName {
        TableName { schema: schema.to_owned(), name: name.to_owned() }
    }

    #[test]
    fn two_tables_never_share_a_directory() {
        assert_eq!(directory(&name("public", "orders")), "public.orders");
        assert_eq!(directory(&name("a.b", "c")), "a%2Eb.c");
        assert_eq!(directory(&name("a", "b.c")), "a.b%2Ec");
        assert_eq!(directory(&name("..", "x/y%")), "%2E%2E.x%2Fy%25");
        let long = "ä".repeat(31);
        let (first, second) =
            (directory(&name(&long, &format!("{long}1"))), directory(&name(&long, &format!("{long}2"))));
        assert_ne!(first, second);
        assert!(first.len() < 240);
    }

    #[test]
    fn a_file_name_gives_its_seq_back() {
        assert_eq!(seq_of(&file(42, 7, "parquet")), Some(42));
        assert_eq!(seq_of("0000000042-g7.parquet.tmp"), None);
        assert_eq!(seq_of("notes.parquet"), None);
    }
}
