//! Spelling of names, values and positions in SQL.

/// An identifier in double quotes.
pub fn ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A string constant, read the same whatever `standard_conforming_strings` says.
pub fn literal(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    push_literal(&mut out, text);
    out
}

/// Appends a string constant.
pub fn push_literal(out: &mut String, text: &str) {
    if text.contains('\\') {
        out.push_str(" E");
    }
    out.push('\'');
    for piece in text.split_inclusive(['\'', '\\']) {
        out.push_str(piece);
        match piece.as_bytes().last() {
            Some(b'\'') => out.push('\''),
            Some(b'\\') => out.push('\\'),
            _ => {}
        }
    }
    out.push('\'');
}

/// An LSN as `pg_lsn` spells it.
pub fn lsn(lsn: u64) -> String {
    format!("{:X}/{:X}", lsn >> 32, lsn & 0xffff_ffff)
}

/// Reads what `pg_lsn` prints.
pub fn parse_lsn(text: &str) -> Option<u64> {
    let (high, low) = text.split_once('/')?;
    Some(u64::from(u32::from_str_radix(high, 16).ok()?) << 32 | u64::from(u32::from_str_radix(low, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_backslashes_are_doubled() {
        assert_eq!(literal("it's"), "'it''s'");
        assert_eq!(literal("a\\'b"), " E'a\\\\''b'");
        assert_eq!(literal(""), "''");
        assert_eq!(ident("a\"b"), "\"a\"\"b\"");
    }

    #[test]
    fn lsns_survive_the_way_through_pg_lsn() {
        for value in [0, 1, 0x16_B374_D848, u64::MAX] {
            assert_eq!(parse_lsn(&lsn(value)), Some(value));
        }
        assert_eq!(parse_lsn("zz"), None);
    }
}
