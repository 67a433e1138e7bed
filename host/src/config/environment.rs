//! `${NAME}` in the configuration, and references to secrets.

use std::env::VarError;

use crate::error::{Error, Result};

/// What the contract fills in itself when it sends a header (`${secret:NAME}`,
/// `${basic:USER:NAME}`): left as it is.
const LEFT_TO_THE_HOST: [&str; 2] = ["secret:", "basic:"];

/// An environment variable of this process.
pub(super) fn variable(name: &str) -> Result<String> {
    match std::env::var(name) {
        Ok(value) => Ok(value),
        Err(VarError::NotPresent) => {
            Err(Error::usage("config.environment", format!("the environment variable {name} is not set"))
                .next(format!("Set {name}, or write `$${{` where `${{` is meant literally.")))
        }
        Err(VarError::NotUnicode(_)) => {
            Err(Error::usage("config.environment", format!("the environment variable {name} is not valid UTF-8"))
                .next(format!("Set {name} to UTF-8 text.")))
        }
    }
}

/// The text with each `${NAME}` replaced by what `variable` says; `$${` stands for `${`.
pub(super) fn fill(text: &str, variable: &dyn Fn(&str) -> Result<String>) -> Result<String> {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            filled.push_str(&rest[..at - 1]);
            filled.push_str("${");
            rest = &rest[at + 2..];
            continue;
        }
        filled.push_str(&rest[..at]);
        let inside = &rest[at + 2..];
        let (name, after) = inside.split_once('}').ok_or_else(|| {
            Error::usage("config.environment", "`${` is never closed")
                .next("Close it with `}`, or write `$${` where `${` is meant literally.")
        })?;
        if LEFT_TO_THE_HOST.iter().any(|prefix| name.starts_with(prefix)) {
            filled.push_str(&rest[at..rest.len() - after.len()]);
        } else if is_name(name) {
            filled.push_str(&variable(name)?);
        } else {
            return Err(Error::usage(
                "config.environment",
                format!("`${{{name}}}` does not name an environment variable"),
            )
            .next("Use letters, digits and `_`, or write `$${` where `${` is meant literally."));
        }
        rest = after;
    }
    filled.push_str(rest);
    Ok(filled)
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_test(name: &str) -> Result<String> {
        match name {
            "HOST" => Ok("db.internal".to_owned()),
            "NESTED" => Ok("${HOST}".to_owned()),
            _ => variable("TIDEGATE_TEST_SURELY_NOT_SET"),
        }
    }

    #[test]
    fn a_name_in_braces_is_replaced_once_and_its_value_is_not_looked_into() {
        assert_eq!(
            fill("postgres://${HOST}:5432/${HOST}", &of_test).unwrap(),
            "postgres://db.internal:5432/db.internal"
        );
        assert_eq!(fill("${NESTED}", &of_test).unwrap(), "${HOST}");
    }

    #[test]
    fn a_doubled_dollar_keeps_the_braces_and_a_lone_dollar_is_a_dollar() {
        assert_eq!(fill("$${HOST} costs 5$", &of_test).unwrap(), "${HOST} costs 5$");
    }

    #[test]
    fn a_secret_in_a_header_is_left_to_the_host() {
        let header = "Bearer ${secret:token} ${basic:me:password}";
        assert_eq!(fill(header, &of_test).unwrap(), header);
    }

    #[test]
    fn a_variable_that_is_not_set_is_named() {
        let error = fill("${MISSING}", &of_test).unwrap_err();
        assert_eq!(error.code(), "config.environment");
        assert!(error.message().contains("TIDEGATE_TEST_SURELY_NOT_SET"));
    }

    #[test]
    fn braces_that_do_not_close_or_hold_no_name_are_refused() {
        assert_eq!(fill("${HOST", &of_test).unwrap_err().code(), "config.environment");
        assert_eq!(fill("${}", &of_test).unwrap_err().code(), "config.environment");
        assert_eq!(fill("${A B}", &of_test).unwrap_err().code(), "config.environment");
    }
}
