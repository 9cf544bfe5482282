//! What went wrong, in one line: the file and the model asked for, what happened, what to do.

use candle_core::Error;
use hf_hub::HFError;

use super::cache::Cached;
use super::session::{Hub, Session, Source};
use super::watch::Silence;

impl Session<'_> {
    /// A message about `file`, with the part that all have.
    pub(super) fn error(&self, file: &str, what: &str) -> Error {
        Error::Msg(one_line(&format!("[hub] {file} of {}: {what}", self.model)))
    }

    /// The error for a file, or several to choose from, that was found neither in the cache nor, online, on the hub.
    pub(super) fn missing(&self, file: &str) -> Error {
        let (id, revision) = (&self.model.id, &self.model.revision);
        let what = match &self.source {
            Source::Offline(why) => format!(
                "not in the cache {}, and {why}, so nothing was requested; fetch it once while online",
                self.cache.folder().display()
            ),
            Source::Hub(Hub { endpoint, .. }) if self.pinned || self.cached(file) == Cached::Absent => {
                format!("not found: {endpoint}/{id} has no such file at {revision}")
            }
            Source::Hub(hub) => {
                let endpoint = &hub.endpoint;
                match self.exists(hub) {
                    Some(true) => {
                        format!("not found: {endpoint}/{id} has no revision {revision}, or not this file in it")
                    }
                    Some(false) => format!("not found: {endpoint} has no model {id}; check the id"),
                    None => format!(
                        "not found: {endpoint} has no model {id} that may be read, or no revision {revision}; check both, and for a private model set HF_TOKEN"
                    ),
                }
            }
        };
        self.error(file, &what)
    }

    /// Puts an error of hf-hub into words.
    pub(super) fn explain(&self, hub: &Hub, file: &str, error: &HFError) -> Error {
        let (id, endpoint) = (&self.model.id, &hub.endpoint);
        let what = match error {
            HFError::AuthRequired { context } | HFError::Forbidden { context } => {
                let status = context.status.as_u16();
                match context.error_code.as_deref() {
                    Some("GatedRepo") => format!(
                        "the model is gated ({status}); accept its terms at {endpoint}/{id}, then set HF_TOKEN to a token of that account"
                    ),
                    Some("RepoNotFound") | None if status == 401 => format!(
                        "{endpoint} answered 401: there is no such model, or it is private, or HF_TOKEN is not valid; check the id, and set HF_TOKEN to a token that may read it"
                    ),
                    code => format!(
                        "{endpoint} answered {status}{}: HF_TOKEN is missing or may not read it; set it to a token that may",
                        code.map(|code| format!(" ({code})")).unwrap_or_default()
                    ),
                }
            }
            HFError::RateLimited { retry_after, .. } => format!(
                "{endpoint} answers too many requests (429); try again {}, or set HF_TOKEN for a higher limit",
                retry_after.map_or("later".to_string(), |delay| format!("in {} s", delay.as_secs()))
            ),
            HFError::Http { context } => format!(
                "{endpoint} answered {}{}; try again later",
                context.status,
                context.server_message.as_deref().map(|text| format!(" ({text})")).unwrap_or_default()
            ),
            HFError::Request { source, .. } if source.is_connect() || source.is_timeout() => {
                self.unreachable(&format!("no connection to {endpoint} ({})", root(source)))
            }
            HFError::Request { source, .. } => {
                format!("the connection to {endpoint} broke off ({}); try again", root(source))
            }
            HFError::CacheLockTimeout { path } => format!(
                "another process is downloading it (it holds the lock {}); try again when that is done",
                path.display()
            ),
            HFError::MalformedResponse { what, .. } => {
                format!("{endpoint} does not answer as a hub does ({what}); check HF_ENDPOINT")
            }
            HFError::Io(e) => format!("the cache {} could not be read or written: {e}", self.cache.folder().display()),
            e => line(e),
        };
        self.error(file, &what)
    }

    /// The error for a download that was given up.
    pub(super) fn explain_silence(&self, hub: &Hub, file: &str, silence: &Silence) -> Error {
        let endpoint = &hub.endpoint;
        let what = match silence {
            Silence::NoAnswer(waited) => self.unreachable(&format!("no answer from {endpoint} in {waited:?}")),
            Silence::Stalled { bytes, waited } => format!(
                "the download from {endpoint} stood still for {waited:?} after {bytes} bytes; try again (HF_HUB_DOWNLOAD_TIMEOUT sets the patience in seconds)"
            ),
            Silence::Broken(why) => why.clone(),
        };
        self.error(file, &what)
    }

    fn unreachable(&self, what: &str) -> String {
        format!(
            "{what}, and it is not in the cache {}; check the network, the proxy and HF_ENDPOINT",
            self.cache.folder().display()
        )
    }
}

/// An error with its innermost cause, which is what says something: reqwest's own text is only that a request failed.
pub(super) fn line(error: &(dyn std::error::Error + 'static)) -> String {
    let (outer, inner) = (error.to_string(), root(error));
    one_line(&if outer.contains(&inner) { outer } else { format!("{outer} ({inner})") })
}

fn root(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

/// Text from a server is shown in a terminal: no line breaks, no control characters.
fn one_line(text: &str) -> String {
    text.replace(|c: char| c.is_control(), " ")
}
