//! PostgreSQL's text of numbers, booleans, uuid and bytea to values.
//!
//! `None` means: not exactly a value of the layout. The cell is then an odd one with
//! this text; nothing here is an error.

/// `t` and `f`, as the output function prints; `true` and `false`, as a default spells it.
pub(super) fn boolean(text: &[u8]) -> Option<bool> {
    match text {
        b"t" | b"true" => Some(true),
        b"f" | b"false" => Some(false),
        _ => None,
    }
}

/// int2, int4, int8 and oid; the caller narrows.
#[inline]
pub(super) fn integer(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        _ => (false, text),
    };
    // 19 digits always fit in a u64.
    if digits.is_empty() || digits.len() > 19 {
        return None;
    }
    let mut value = 0u64;
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value * 10 + u64::from(digit);
    }
    match negative {
        false => i64::try_from(value).ok(),
        // The cast wraps only for the smallest number, which negates to itself.
        true if value <= 1 << 63 => Some((value as i64).wrapping_neg()),
        true => None,
    }
}

/// oid: unsigned, 32 bits.
pub(super) fn oid(text: &[u8]) -> Option<i64> {
    u32::try_from(integer(text)?).ok().map(i64::from)
}

/// float4; the shortest text that PostgreSQL prints reads back to the same bits.
pub(super) fn float4(text: &[u8]) -> Option<f32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// float8, as [`float4`]. `NaN`, `Infinity`, `-Infinity` and `-0` are what Rust reads too.
pub(super) fn float8(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Value of each hexadecimal digit; 255 for other bytes.
const HEX: [u8; 256] = {
    let mut table = [255; 256];
    let mut digit = 0u8;
    while digit < 16 {
        table[b"0123456789abcdef"[digit as usize] as usize] = digit;
        table[b"0123456789ABCDEF"[digit as usize] as usize] = digit;
        digit += 1;
    }
    table
};

#[inline]
fn hex_byte(high: u8, low: u8) -> Option<u8> {
    let (high, low) = (HEX[usize::from(high)], HEX[usize::from(low)]);
    // Valid digits are below 16, the mark has the high bits set.
    if (high | low) < 16 { Some(high << 4 | low) } else { None }
}

/// uuid in its one printed form, 8-4-4-4-12.
pub(super) fn uuid(text: &[u8]) -> Option<[u8; 16]> {
    let text: &[u8; 36] = text.try_into().ok()?;
    if [text[8], text[13], text[18], text[23]] != [b'-'; 4] {
        return None;
    }
    let mut bytes = [0; 16];
    let mut at = 0;
    for byte in &mut bytes {
        if text[at] == b'-' {
            at += 1;
        }
        *byte = hex_byte(text[at], text[at + 1])?;
        at += 2;
    }
    Some(bytes)
}

/// bytea appended to `out`, in the hex format that our sessions pin, or in the escape
/// format. On `None` nothing stays appended.
pub(super) fn bytea(text: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let before = out.len();
    let read = match text {
        [b'\\', b'x', hex @ ..] => bytea_hex(hex, out),
        _ => bytea_escaped(text, out),
    };
    if read.is_none() {
        out.truncate(before);
    }
    read
}

fn bytea_hex(hex: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let (pairs, odd) = hex.as_chunks::<2>();
    if !odd.is_empty() {
        return None;
    }
    out.reserve(pairs.len());
    for &[high, low] in pairs {
        out.push(hex_byte(high, low)?);
    }
    Some(())
}

fn bytea_escaped(mut text: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let octal = |digit: u8, most: u8| (b'0'..=most).contains(&digit).then(|| digit - b'0');
    loop {
        match text {
            [] => return Some(()),
            [b'\\', b'\\', rest @ ..] => {
                out.push(b'\\');
                text = rest;
            }
            [b'\\', a, b, c, rest @ ..] => {
                out.push(octal(*a, b'3')? << 6 | octal(*b, b'7')? << 3 | octal(*c, b'7')?);
                text = rest;
            }
            [b'\\', ..] => return None,
            [byte, rest @ ..] => {
                out.push(*byte);
                text = rest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_up_to_both_ends_of_their_range_and_not_beyond() {
        assert_eq!(integer(b"9223372036854775807"), Some(i64::MAX));
        assert_eq!(integer(b"-9223372036854775808"), Some(i64::MIN));
        assert_eq!(integer(b"0"), Some(0));
        for wrong in ["9223372036854775808", "-9223372036854775809", "99999999999999999999", "", "-", "1x", "+1", " 1"]
        {
            assert_eq!(integer(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(oid(b"4294967295"), Some(4_294_967_295));
        assert_eq!(oid(b"4294967296"), None);
        assert_eq!(oid(b"-1"), None);
    }

    #[test]
    fn floats_keep_their_sign_of_zero_their_infinities_and_their_last_bit() {
        assert_eq!(float8(b"-0").map(f64::to_bits), Some((-0.0f64).to_bits()));
        assert_eq!(float8(b"Infinity"), Some(f64::INFINITY));
        assert_eq!(float8(b"-Infinity"), Some(f64::NEG_INFINITY));
        assert!(float8(b"NaN").is_some_and(f64::is_nan));
        assert_eq!(float8(b"5e-324").map(f64::to_bits), Some(1));
        assert_eq!(float8(b"1.7976931348623157e+308"), Some(f64::MAX));
        assert_eq!(float4(b"1e-45").map(f32::to_bits), Some(1));
        assert_eq!(float4(b"3.4028235e+38"), Some(f32::MAX));
        assert_eq!(float8(b""), None);
        assert_eq!(float8(b"\xff"), None);
    }

    #[test]
    fn booleans_are_single_letters_or_the_words_of_a_default() {
        assert_eq!(boolean(b"t"), Some(true));
        assert_eq!(boolean(b"false"), Some(false));
        assert_eq!(boolean(b"yes"), None);
    }

    #[test]
    fn a_uuid_is_its_sixteen_bytes() {
        let bytes = uuid(b"00112233-4455-6677-8899-aAbBcCdDeEfF").unwrap();
        assert_eq!(bytes[..], *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff");
        assert_eq!(uuid(b"00112233-4455-6677-8899-aabbccddeefg"), None);
        assert_eq!(uuid(b"001122334455-6677-8899-aabbccddeeff0"), None);
        assert_eq!(uuid(b"-0112233-4455-6677-8899-aabbccddeeff"), None);
        assert_eq!(uuid(b"0011223344556677"), None);
    }

    #[test]
    fn bytea_is_read_in_either_output_format() {
        let read = |text: &[u8]| {
            let mut out = vec![7];
            let read = bytea(text, &mut out);
            (read.is_some(), out[1..].to_vec())
        };
        assert_eq!(read(b"\\x00fFa0"), (true, vec![0, 255, 160]));
        assert_eq!(read(b"\\x"), (true, vec![]));
        assert_eq!(read(b""), (true, vec![]));
        assert_eq!(read(b"a\\\\b\\000\\377"), (true, vec![b'a', b'\\', b'b', 0, 255]));
        for wrong in [&b"\\x0"[..], b"\\x0g", b"\\", b"a\\4", b"\\400"] {
            assert_eq!(read(wrong), (false, vec![]), "{}", wrong.escape_ascii());
        }
    }
}
