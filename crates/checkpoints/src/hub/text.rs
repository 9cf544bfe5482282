//! The texts of errors in one line, without secrets.

use candle_core::Error;

/// Returns an error in one line, without control characters and without the credentials of an address.
pub(super) fn message(text: &str) -> Error {
    Error::Msg(format!("[hub] {}", without_credentials(&text.replace(|c: char| c.is_control(), " "))))
}

/// Removes the credentials before the `@` of addresses: `https://name:secret@host` becomes `https://host`.
pub(super) fn without_credentials(text: &str) -> String {
    let mut parts = text.split("://");
    let mut shown = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let end = part.find(|c: char| c.is_whitespace() || c == '"').unwrap_or(part.len());
        let host = part[..end].rfind('@').map_or(0, |at| at + 1);
        shown = format!("{shown}://{}", &part[host..]);
    }
    shown
}

/// Returns the text of an error with its innermost cause, since reqwest's own text is only that a request failed.
pub(super) fn with_root(error: &(dyn std::error::Error + 'static)) -> String {
    let outer = error.to_string();
    let inner = root(error);
    if outer.contains(&inner) { outer } else { format!("{outer} ({inner})") }
}

/// Returns the text of the innermost cause of an error.
pub(super) fn root(error: &(dyn std::error::Error + 'static)) -> String {
    error.source().map_or_else(|| error.to_string(), root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_errors_show_no_credentials() {
        for (text, shown) in [
            ("at https://user:secret@host:8080/a, and http://b", "at https://host:8080/a, and http://b"),
            ("\"http://t(o),k'en@host\" e@mail", "\"http://host\" e@mail"),
            ("https://a:b/c@d@host?x", "https://host?x"),
            ("no address", "no address"),
        ] {
            assert_eq!(without_credentials(text), shown);
        }
    }
}
