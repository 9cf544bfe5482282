//! The texts of errors: what failed, and what a user can do.

use candle_core::Error;
use hf_hub::HFError;

use super::request::{RequestFailure, watched};
use super::server::Hub;
use super::session::{Cached, Session};
use super::text::{message, root, with_root};

impl Session<'_> {
    /// Returns an error about `file` in one line, since text from a server is shown in a terminal.
    pub(super) fn error(&self, file: &str, what: &str) -> Error {
        message(&format!("{file} of {}: {what}", self.model))
    }

    /// Returns the error for a file, or for several alternatives, that is neither in the cache nor, online, on the hub.
    pub(super) fn missing(&self, file: &str) -> Error {
        let id = &self.model.id;
        let revision = &self.model.revision;
        let Some(Hub { endpoint, repo }) = &self.hub else {
            let folder = self.folder.display();
            let why = self.settings.offline.unwrap_or_default();
            let what =
                format!("not in the cache {folder}, and {why}, so nothing was requested; fetch it once while online");
            return self.error(file, &what);
        };
        let what = if self.is_pinned || self.cached(file) == Cached::Absent {
            format!("{endpoint}/{id} has no such file at {revision}")
        } else {
            let repo = repo.clone();
            match watched("", &self.settings, move |_| repo.exists().send()) {
                Ok((true, _)) => format!("{endpoint}/{id} has no revision {revision}, or not this file in it"),
                Ok((false, _)) => format!("{endpoint} has no model {id}; check the id"),
                _ => format!(
                    "{endpoint} has no model {id} that may be read, or no revision {revision}; check both, and for \
                     a private model set HF_TOKEN"
                ),
            }
        };
        self.error(file, &format!("not found: {what}"))
    }

    /// Describes why a request failed.
    pub(super) fn explain(&self, Hub { endpoint, .. }: &Hub, failure: &RequestFailure) -> String {
        let in_brackets = |text: Option<&str>| text.map(|text| format!(" ({text})")).unwrap_or_default();
        let id = &self.model.id;
        let folder = self.folder.display();
        let unreachable = |what: String| {
            format!("{what}, and it is not in the cache {folder}; check the network, the proxy and HF_ENDPOINT")
        };
        let error = match failure {
            RequestFailure::NoAnswer(waited) => return unreachable(format!("no answer from {endpoint} in {waited:?}")),
            RequestFailure::Stalled { bytes, waited } => {
                return format!(
                    "the download from {endpoint} stalled for {waited:?} after {bytes} bytes; try again \
                     (HF_HUB_DOWNLOAD_TIMEOUT sets the limit in seconds)"
                );
            }
            RequestFailure::Broken(why) => return why.clone(),
            RequestFailure::Hub(error) => error,
        };
        match error {
            HFError::AuthRequired { context } | HFError::Forbidden { context } => {
                let status = context.status.as_u16();
                match context.error_code.as_deref() {
                    Some("GatedRepo") => format!(
                        "the model is gated ({status}); accept its terms at {endpoint}/{id}, then set HF_TOKEN to \
                         a token of that account"
                    ),
                    Some("RepoNotFound") | None if status == 401 => format!(
                        "{endpoint} answered 401: there is no such model, or it is private, or HF_TOKEN is not \
                         valid; check the id, and set HF_TOKEN to a token that may read it"
                    ),
                    code => format!(
                        "{endpoint} answered {status}{}: HF_TOKEN is missing or may not read it; set it to a token \
                         that may",
                        in_brackets(code)
                    ),
                }
            }
            HFError::RateLimited { retry_after, .. } => format!(
                "{endpoint} answers too many requests (429); try again {}, or set HF_TOKEN for a higher limit",
                retry_after.map_or("later".to_string(), |delay| format!("in {} s", delay.as_secs()))
            ),
            HFError::Http { context } => {
                let server = in_brackets(context.server_message.as_deref());
                format!("{endpoint} answered {}{server}; try again later", context.status)
            }
            HFError::Request { source, .. } if source.is_connect() || source.is_timeout() => {
                unreachable(format!("no connection to {endpoint} ({})", root(source)))
            }
            HFError::Request { source, .. } => {
                format!("the connection to {endpoint} broke off ({}); try again", root(source))
            }
            HFError::Io(e) => format!("the cache {folder} could not be read or written: {e}"),
            e => with_root(e),
        }
    }
}
