//! The settings of a fetch, from the environment.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use candle_core::{Error, Result};

/// The settings of the environment and of a [`HubModel`](super::HubModel). hf-hub reads a part of the environment, and
/// from version 1.1 on none of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct HubSettings {
    /// The reason for offline mode, as a half sentence for messages; `None` online.
    pub(super) offline: Option<&'static str>,
    pub(super) hides_progress: bool,
    /// The limit on the wait for the first answer about a file.
    pub(super) answer: Duration,
    /// The limit on the wait for the next byte.
    pub(super) stall: Duration,
    pub(super) endpoint: Option<String>,
    pub(super) token: Option<String>,
    pub(super) cache_dir: Option<PathBuf>,
}

impl HubSettings {
    /// Reads the environment by the rules of huggingface_hub (its `constants.py`): a flag is set at 1, ON, YES and TRUE
    /// in any case, an empty variable counts as unset (except `HF_ENDPOINT`), and a timeout of 0 means the default.
    pub(super) fn read(var: impl Fn(&str) -> Option<String>, home: Option<PathBuf>) -> Result<Self> {
        let value = |name: &str| var(name).filter(|value| !value.is_empty());
        let path = |name: &str| value(name).map(PathBuf::from);
        let is_set = |name: &str| {
            value(name).is_some_and(|flag| ["1", "ON", "YES", "TRUE"].contains(&flag.to_uppercase().as_str()))
        };
        let offline = match value("HF_HUB_OFFLINE") {
            Some(_) => is_set("HF_HUB_OFFLINE").then_some("HF_HUB_OFFLINE is set"),
            None => is_set("TRANSFORMERS_OFFLINE").then_some("TRANSFORMERS_OFFLINE is set"),
        };
        let seconds = |name: &str, default| match value(name).map(|text| text.trim().parse::<u32>().map_err(|_| text)) {
            None | Some(Ok(0)) => Ok(Duration::from_secs(default)),
            Some(Ok(seconds)) => Ok(Duration::from_secs(seconds.into())),
            Some(Err(text)) => Err(Error::Msg(format!("[hub] {name} is {text:?}, expected a whole number of seconds"))),
        };
        let hf_home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| home.map(|folder| folder.join(".cache").join("huggingface")));
        let token_file = path("HF_TOKEN_PATH").or_else(|| hf_home.as_ref().map(|folder| folder.join("token")));
        let token = || value("HF_TOKEN").or_else(|| std::fs::read_to_string(token_file?).ok());
        let token = if is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN") { None } else { token() };
        Ok(Self {
            offline,
            hides_progress: is_set("HF_HUB_DISABLE_PROGRESS_BARS") || !std::io::stderr().is_terminal(),
            answer: seconds("HF_HUB_ETAG_TIMEOUT", 30)?,
            stall: seconds("HF_HUB_DOWNLOAD_TIMEOUT", 60)?,
            endpoint: var("HF_ENDPOINT"),
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
            cache_dir: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .or_else(|| hf_home.map(|folder| folder.join("hub"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<HubSettings> {
        let var = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
        HubSettings::read(var, Some(PathBuf::from("home")))
    }

    #[test]
    fn hub_flags_and_timeouts_match_huggingface_hub() -> Result<()> {
        for value in ["1", "ON", "on", "Yes", "TRUE", "true"] {
            assert_eq!(read(&[("HF_HUB_OFFLINE", value)])?.offline, Some("HF_HUB_OFFLINE is set"), "{value}");
        }
        for value in ["", "0", "OFF", "no", "False", " 1", "2"] {
            assert_eq!(read(&[("HF_HUB_OFFLINE", value)])?.offline, None, "{value}");
        }
        let other = ("TRANSFORMERS_OFFLINE", "1");
        assert_eq!(read(&[other])?.offline, Some("TRANSFORMERS_OFFLINE is set"));
        assert!(read(&[("HF_HUB_OFFLINE", ""), other])?.offline.is_some());
        assert_eq!(read(&[("HF_HUB_OFFLINE", "0"), other])?.offline, None);
        assert!(read(&[("HF_HUB_DISABLE_PROGRESS_BARS", "1")])?.hides_progress);

        let settings = read(&[("HF_HUB_ETAG_TIMEOUT", "3"), ("HF_HUB_DOWNLOAD_TIMEOUT", "0")])?;
        assert_eq!((settings.answer, settings.stall), (Duration::from_secs(3), Duration::from_secs(60)));
        let message = read(&[("HF_HUB_ETAG_TIMEOUT", "soon")]).unwrap_err().to_string();
        assert_eq!(message, "[hub] HF_HUB_ETAG_TIMEOUT is \"soon\", expected a whole number of seconds");
        Ok(())
    }

    #[test]
    fn hub_cache_folder_matches_huggingface_hub() -> Result<()> {
        let mut vars = Vec::new();
        for (variable, value, folder) in [
            ("HOME", "unused", "home/.cache/huggingface/hub"),
            ("XDG_CACHE_HOME", "xdg", "xdg/huggingface/hub"),
            ("HF_HOME", "hf", "hf/hub"),
            ("HUGGINGFACE_HUB_CACHE", "old", "old"),
            ("HF_HUB_CACHE", "new", "new"),
        ] {
            // Each comes before those above it.
            vars.push((variable, value));
            assert_eq!(read(&vars)?.cache_dir, Some(PathBuf::from(folder)), "{vars:?}");
        }
        assert_eq!(read(&[("HF_HUB_CACHE", ""), ("HF_HOME", "hf")])?.cache_dir, Some(PathBuf::from("hf/hub")));
        assert_eq!(HubSettings::read(|_| None, None)?.cache_dir, None);
        Ok(())
    }

    #[test]
    fn hub_token_comes_from_the_variable_or_a_file() -> Result<()> {
        let dir = tempfile::TempDir::new()?;
        std::fs::write(dir.path().join("token"), "hf_file\n")?;
        let home = dir.path().display().to_string();
        let file = dir.path().join("token").display().to_string();
        let token = |vars: &[(&str, &str)]| Ok::<_, Error>(read(vars)?.token.unwrap_or_default());
        assert_eq!(token(&[("HF_HOME", &home)])?, "hf_file");
        assert_eq!(token(&[("HF_TOKEN_PATH", &file)])?, "hf_file");
        assert_eq!(token(&[("HF_HOME", &home), ("HF_TOKEN", " hf_variable ")])?, "hf_variable");
        assert_eq!(token(&[("HF_HOME", &home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")])?, "");
        Ok(())
    }
}
