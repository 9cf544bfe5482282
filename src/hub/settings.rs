//! What the environment says that hf-hub does not read by itself, and where the cache is, which is needed without it.

use std::path::PathBuf;
use std::time::Duration;

use candle_core::{Error, Result};

/// How long all tries for the first answer about a file may take together. hf-hub sets no limit of its own.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a download may bring no byte.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The settings of one fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    /// What asks for offline mode, as a half sentence for messages.
    pub(super) offline: Option<&'static str>,
    /// Whether a progress bar may be drawn.
    pub(super) progress: bool,
    /// The limit on the wait for the first answer about a file.
    pub(super) answer: Duration,
    /// The limit on the wait for the next byte.
    pub(super) stall: Duration,
}

impl Settings {
    /// Reads the environment of this process.
    pub(super) fn from_env() -> Result<Self> {
        Self::read(|name| std::env::var(name).ok())
    }

    /// The cache folder that the environment names, or the usual one; `None` where there is no home folder for that.
    pub(super) fn cache_dir() -> Option<PathBuf> {
        cache_dir(|name| std::env::var(name).ok(), std::env::home_dir())
    }

    /// Reads variables by huggingface_hub's rules (its `constants.py`): a flag is up at 1, ON, YES and TRUE in any case,
    /// `TRANSFORMERS_OFFLINE` counts where `HF_HUB_OFFLINE` is unset or empty, and a timeout of 0 means the default.
    fn read(var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let value = |name: &str| var(name).filter(|value| !value.is_empty());
        let offline = match value("HF_HUB_OFFLINE") {
            Some(flag) => is_true(&flag).then_some("HF_HUB_OFFLINE is set"),
            None => value("TRANSFORMERS_OFFLINE").filter(|flag| is_true(flag)).map(|_| "TRANSFORMERS_OFFLINE is set"),
        };
        let seconds = |name: &str, default: Duration| match value(name) {
            None => Ok(default),
            Some(text) => match text.trim().parse::<u32>() {
                Ok(0) => Ok(default),
                Ok(seconds) => Ok(Duration::from_secs(seconds.into())),
                Err(_) => Err(Error::Msg(format!("[hub] {name} is {text:?}, expected a whole number of seconds"))),
            },
        };
        Ok(Self {
            offline,
            progress: !value("HF_HUB_DISABLE_PROGRESS_BARS").is_some_and(|flag| is_true(&flag)),
            answer: seconds("HF_HUB_ETAG_TIMEOUT", ANSWER_TIMEOUT)?,
            stall: seconds("HF_HUB_DOWNLOAD_TIMEOUT", STALL_TIMEOUT)?,
        })
    }
}

/// hf-hub's order, but for two things: a variable that is empty is unset, and the home folder is the system's where `HOME`
/// is unset (on Windows, as in Python), where hf-hub would take a temporary folder.
fn cache_dir(var: impl Fn(&str) -> Option<String>, home: Option<PathBuf>) -> Option<PathBuf> {
    let path = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).or_else(|| {
        let hf_home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| home.map(|home| home.join(".cache").join("huggingface")))?;
        Some(hf_home.join("hub"))
    })
}

fn is_true(value: &str) -> bool {
    matches!(value.to_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(vars: &[(&str, &str)], name: &str) -> Option<String> {
        vars.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
    }

    fn read(vars: &[(&str, &str)]) -> Result<Settings> {
        Settings::read(|name| lookup(vars, name))
    }

    #[test]
    fn offline_is_read_as_python_reads_it() -> Result<()> {
        for value in ["1", "ON", "on", "Yes", "TRUE", "true"] {
            let settings = read(&[("HF_HUB_OFFLINE", value)])?;
            assert_eq!(settings.offline, Some("HF_HUB_OFFLINE is set"), "{value}");
        }
        for value in ["", "0", "OFF", "no", "False", " 1", "2"] {
            assert_eq!(read(&[("HF_HUB_OFFLINE", value)])?.offline, None, "{value}");
        }
        Ok(())
    }

    #[test]
    fn the_variable_of_transformers_counts_where_the_hubs_own_is_unset() -> Result<()> {
        let theirs = ("TRANSFORMERS_OFFLINE", "1");
        assert_eq!(read(&[theirs])?.offline, Some("TRANSFORMERS_OFFLINE is set"));
        assert!(read(&[("HF_HUB_OFFLINE", ""), theirs])?.offline.is_some());
        assert_eq!(read(&[("HF_HUB_OFFLINE", "0"), theirs])?.offline, None);
        Ok(())
    }

    #[test]
    fn timeouts_are_seconds_and_nonsense_names_its_variable() -> Result<()> {
        let settings = read(&[("HF_HUB_ETAG_TIMEOUT", "3"), ("HF_HUB_DOWNLOAD_TIMEOUT", "0")])?;
        assert_eq!(settings.answer, Duration::from_secs(3));
        assert_eq!(settings.stall, STALL_TIMEOUT);
        let message = read(&[("HF_HUB_ETAG_TIMEOUT", "soon")]).unwrap_err().to_string();
        assert_eq!(message, "[hub] HF_HUB_ETAG_TIMEOUT is \"soon\", expected a whole number of seconds");
        Ok(())
    }

    #[test]
    fn progress_bars_can_be_switched_off() -> Result<()> {
        assert!(read(&[])?.progress);
        assert!(!read(&[("HF_HUB_DISABLE_PROGRESS_BARS", "1")])?.progress);
        Ok(())
    }

    #[test]
    fn the_cache_is_where_all_libraries_have_it() {
        let find = |vars: &[(&str, &str)]| cache_dir(|name| lookup(vars, name), Some(PathBuf::from("home")));
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
            assert_eq!(find(&vars), Some(PathBuf::from(folder)), "{vars:?}");
        }
        assert_eq!(find(&[("HF_HUB_CACHE", ""), ("HF_HOME", "hf")]), Some(PathBuf::from("hf/hub")));
        assert_eq!(cache_dir(|_| None, None), None);
    }
}
