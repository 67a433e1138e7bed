//! PostgreSQL's array literals, as `array_out` prints them.

/// Calls `each` for every item of a one-dimensional array with lower bound 1; `None` is
/// a null item.
///
/// False when the text is another kind of array (`{{…}}`, `[2:3]={…}`), is no array, or
/// `each` said false; items may have been given by then. `scratch` holds an item whose
/// escapes had to be taken out.
pub(super) fn items(
    text: &[u8],
    delimiter: u8,
    scratch: &mut Vec<u8>,
    mut each: impl FnMut(Option<&[u8]>) -> bool,
) -> bool {
    let Some(mut rest) = text.strip_prefix(b"{") else { return false };
    if rest == b"}" {
        return true;
    }
    loop {
        let taken = match rest {
            [b'"', quoted @ ..] => match unquote(quoted, scratch) {
                Some((item, after)) => each(Some(item.unwrap_or(scratch))).then_some(after),
                None => None,
            },
            _ => bare(rest, delimiter).and_then(|(item, after)| {
                // Only without quotes is it the null; array_out prints it in capitals.
                let item = if item == b"NULL" { None } else { Some(item) };
                each(item).then_some(after)
            }),
        };
        match taken {
            Some([b'}']) => return true,
            Some([byte, after @ ..]) if *byte == delimiter => rest = after,
            _ => return false,
        }
    }
}

/// An item without quotes, and what follows it. An opening brace is another dimension.
fn bare(text: &[u8], delimiter: u8) -> Option<(&[u8], &[u8])> {
    let end = text.iter().position(|byte| *byte == delimiter || matches!(byte, b'}' | b'{' | b'"' | b'\\'))?;
    if end == 0 { None } else { Some(text.split_at(end)) }
}

/// The item behind an opening quote, and what follows the closing one. An item with
/// escapes is none here and stands in `scratch`.
fn unquote<'a>(text: &'a [u8], scratch: &mut Vec<u8>) -> Option<(Option<&'a [u8]>, &'a [u8])> {
    let mut at = memchr::memchr2(b'"', b'\\', text)?;
    if text[at] == b'"' {
        return Some((Some(&text[..at]), &text[at + 1..]));
    }
    scratch.clear();
    scratch.extend_from_slice(&text[..at]);
    loop {
        match &text[at..] {
            [b'"', after @ ..] => return Some((None, after)),
            [b'\\', byte, ..] => {
                scratch.push(*byte);
                at += 2;
            }
            rest => {
                let plain = memchr::memchr2(b'"', b'\\', rest).filter(|length| *length > 0)?;
                scratch.extend_from_slice(&rest[..plain]);
                at += plain;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, delimiter: u8) -> Option<Vec<Option<String>>> {
        let mut out = Vec::new();
        items(text.as_bytes(), delimiter, &mut Vec::new(), |item| {
            out.push(item.map(|item| String::from_utf8(item.to_vec()).unwrap()));
            true
        })
        .then_some(out)
    }

    fn some(items: &[Option<&str>]) -> Option<Vec<Option<String>>> {
        Some(items.iter().map(|item| item.map(str::to_owned)).collect())
    }

    #[test]
    fn a_quoted_null_is_a_text_and_a_bare_one_is_the_null() {
        assert_eq!(read(r#"{1,NULL,"NULL"}"#, b','), some(&[Some("1"), None, Some("NULL")]));
    }

    #[test]
    fn quotes_keep_delimiters_braces_spaces_and_escaped_bytes() {
        assert_eq!(
            read(r#"{"a,b","","{x}","q\"\\ é\\","\\"," "}"#, b','),
            some(&[Some("a,b"), Some(""), Some("{x}"), Some(r#"q"\ é\"#), Some("\\"), Some(" ")])
        );
    }

    #[test]
    fn boxes_are_delimited_by_semicolons() {
        assert_eq!(read("{(1,1),(0,0);(2,2),(1,1)}", b';'), some(&[Some("(1,1),(0,0)"), Some("(2,2),(1,1)")]));
    }

    #[test]
    fn an_empty_array_has_no_items() {
        assert_eq!(read("{}", b','), some(&[]));
    }

    #[test]
    fn several_dimensions_other_lower_bounds_and_garbage_are_not_lists() {
        for text in [
            "{{1,2},{3,4}}",
            "[2:3]={1,2}",
            "[0:0]={1}",
            "",
            "{",
            "{1",
            "{1,",
            "{1,}",
            "{,1}",
            "{\"a",
            "{\"a\\",
            "{\"a\\b",
            "{a}b",
            "{1}}",
            "{\"a\"b}",
        ] {
            assert_eq!(read(text, b','), None, "{text}");
        }
    }
}
