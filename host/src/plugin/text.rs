//! Text that comes from a guest, made fit for logs, terminals and the store.

/// At most `max` bytes of `text`, without control characters (a newline becomes a
/// space, so that one message stays one line).
pub(crate) fn clean(text: &str, max: usize) -> String {
    let mut out = String::with_capacity(text.len().min(max));
    for c in text.chars() {
        let c = match c {
            '\n' | '\r' | '\t' => ' ',
            c if is_invisible(c) => '\u{fffd}',
            c => c,
        };
        if out.len() + c.len_utf8() > max {
            // The mark may exceed `max` by its own few bytes.
            out.push('…');
            break;
        }
        out.push(c);
    }
    out
}

/// [`clean`] in place; text that is clean already is not copied.
pub(crate) fn clean_in_place(text: &mut String, max: usize) {
    if text.len() > max || text.chars().any(is_invisible) {
        *text = clean(text, max);
    }
}

/// Controls, and the marks that turn the direction of the text around them.
fn is_invisible(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_codes_and_newlines_do_not_pass_and_length_is_bounded() {
        assert_eq!(clean("a\nb\u{1b}[31mc\u{202e}d", 100), "a b\u{fffd}[31mc\u{fffd}d");
        assert_eq!(clean("ééé", 4), "éé…");
        let mut long = "x".repeat(4 << 20);
        clean_in_place(&mut long, 10);
        assert_eq!(long, "xxxxxxxxxx…");
    }
}
