//! Text that comes from a guest, made fit for logs, terminals and the store.

/// At most `max` bytes of `text`, without control characters (a newline becomes a
/// space, so that one message stays one line).
pub(crate) fn clean(text: &str, max: usize) -> String {
    let mut out = String::with_capacity(text.len().min(max));
    for c in text.chars() {
        let c = match c {
            '\n' | '\r' | '\t' | '\u{2028}' | '\u{2029}' => ' ',
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

/// Spells out what [`clean`] would lose, so that names that differ still do.
pub(crate) fn spell_out(text: &mut String) {
    if text.chars().any(is_invisible) {
        let spelled = |c: char| match is_invisible(c) {
            true => c.escape_unicode().collect::<String>(),
            false => c.to_string(),
        };
        *text = text.chars().map(spelled).collect();
    }
}

/// Controls, marks that turn the direction of the text around them or end a line, and
/// what shows as nothing at all. (Joiners stay: words of some languages need them.)
fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_codes_and_newlines_do_not_pass_and_length_is_bounded() {
        assert_eq!(clean("a\nb\u{1b}[31mc\u{202e}d", 100), "a b\u{fffd}[31mc\u{fffd}d");
        assert_eq!(clean("a\u{2028}b\u{9b}31mc\u{feff}", 100), "a b\u{fffd}31mc\u{fffd}");
        assert_eq!(clean("ééé", 4), "éé…");
        let mut long = "x".repeat(4 << 20);
        clean_in_place(&mut long, 10);
        assert_eq!(long, "xxxxxxxxxx…");
    }

    #[test]
    fn names_that_differ_in_what_cannot_be_seen_still_differ() {
        let spelled = |text: &str| {
            let mut text = text.to_owned();
            spell_out(&mut text);
            text
        };
        assert_eq!(spelled("a\u{1b}b\n"), "a\\u{1b}b\\u{a}");
        assert_ne!(spelled("a\u{1}"), spelled("a\u{2}"));
        assert_eq!(spelled("naïve"), "naïve");
    }
}
