//! One download, watched: its progress bar, and how long it has been silent.
//!
//! hf-hub sets no timeout on its connections, and takes no HTTP client that has one without a second dependency on the
//! same version of reqwest. So a download runs on a thread of its own, and its caller stops waiting once it has been
//! silent for too long; the thread ends when the system gives the connection up.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hf_hub::HFResult;
use hf_hub::progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::settings::Settings;

/// A transfer from xet storage reports whole pieces of up to 64 MiB only, so it may be silent this many times longer:
/// five minutes by default, which is the limit that hf-xet itself sets on a silent connection.
const XET_PATIENCE: u32 = 5;

/// How often the wait looks whether another limit holds by now, since the stages have different ones.
const LOOK: Duration = Duration::from_millis(100);

/// The file name, the bar, the bytes, the speed and the time left.
const BAR: &str = "{msg}  {wide_bar}  {bytes}/{total_bytes}  {bytes_per_sec}  {eta}";

/// As above, for a file whose size the server does not tell.
const NO_SIZE: &str = "{msg}  {bytes}  {bytes_per_sec}";

/// Receives a download's progress.
pub(super) struct Watch {
    bar: ProgressBar,
    draw: bool,
    settings: Settings,
    state: Mutex<State>,
}

struct State {
    stage: Stage,
    /// The last sign of life.
    heard: Instant,
    bytes: u64,
    /// The size that the server announced, in bytes.
    size: Option<u64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Asked,
    Http,
    Xet,
}

/// Why a watched piece of work gave no result.
#[derive(Debug)]
pub(super) enum Silence {
    /// The server has not answered within this time.
    NoAnswer(Duration),
    /// The transfer began, brought `bytes` bytes, and then nothing more for `waited`.
    Stalled { bytes: u64, waited: Duration },
    /// The work could not be started, or ended without a result.
    Broken(String),
}

impl Watch {
    /// A watch on `file`; nothing is drawn unless `draw`, and then only once a transfer has begun.
    pub(super) fn new(file: &str, settings: Settings, draw: bool) -> Arc<Self> {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()).with_message(file.to_string());
        let state = State { stage: Stage::Asked, heard: Instant::now(), bytes: 0, size: None };
        Arc::new(Self { bar, draw, settings, state: Mutex::new(state) })
    }

    /// The size that the server announced for the file, in bytes, if a transfer began and there was one.
    pub(super) fn announced(&self) -> Option<u64> {
        self.state().size
    }

    /// Runs `work` on a thread of its own and waits for its result for as long as this watch hears from it.
    pub(super) fn over<T, F>(&self, work: F) -> Result<HFResult<T>, Silence>
    where
        T: Send + 'static,
        F: FnOnce() -> HFResult<T> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel();
        self.state().heard = Instant::now();
        std::thread::Builder::new()
            .name("hub-download".to_string())
            // Nobody receives any more once the wait is over: then the result has no use.
            .spawn(move || drop(sender.send(work())))
            .map_err(|e| Silence::Broken(format!("no thread could be started: {e}")))?;
        loop {
            let (_, left) = self.patience();
            match receiver.recv_timeout(left.min(LOOK)) {
                Ok(result) => {
                    if result.is_err() {
                        self.bar.abandon();
                    }
                    return Ok(result);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.bar.abandon();
                    return Err(Silence::Broken("the download ended without a result".to_string()));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let (limit, left) = self.patience();
                    if left.is_zero() {
                        self.bar.abandon();
                        return Err(self.silence(limit));
                    }
                }
            }
        }
    }

    /// The limit that holds at this stage, and what is left of it.
    fn patience(&self) -> (Duration, Duration) {
        let state = self.state();
        let limit = match state.stage {
            Stage::Asked => self.settings.answer,
            Stage::Http => self.settings.stall,
            Stage::Xet => self.settings.stall * XET_PATIENCE,
        };
        (limit, limit.saturating_sub(state.heard.elapsed()))
    }

    fn silence(&self, waited: Duration) -> Silence {
        let state = self.state();
        match state.stage {
            Stage::Asked => Silence::NoAnswer(waited),
            Stage::Http | Stage::Xet => Silence::Stalled { bytes: state.bytes, waited },
        }
    }

    fn begin(&self, size: u64) {
        let size = Some(size).filter(|&size| size > 0);
        {
            let mut state = self.state();
            state.stage = Stage::Http;
            state.heard = Instant::now();
            state.size = size;
        }
        if let Ok(style) = ProgressStyle::with_template(if size.is_some() { BAR } else { NO_SIZE }) {
            self.bar.set_style(style);
        }
        if let Some(size) = size {
            self.bar.set_length(size);
        }
        self.bar.reset_elapsed();
        if self.draw {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    fn advance(&self, bytes: u64) {
        let mut state = self.state();
        // hf-hub reports on a clock for xet: only more bytes are a sign of life.
        if bytes > state.bytes {
            state.bytes = bytes;
            state.heard = Instant::now();
            drop(state);
            self.bar.set_position(bytes);
        }
    }

    /// A panic elsewhere leaves numbers behind, which are whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProgressHandler for Watch {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else {
            return;
        };
        match event {
            DownloadEvent::Start { total_bytes, .. } => self.begin(*total_bytes),
            DownloadEvent::Progress { files } => {
                for file in files {
                    self.advance(file.bytes_completed);
                    if file.status == FileStatus::Complete {
                        self.bar.finish();
                    }
                }
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => {
                self.state().stage = Stage::Xet;
                self.advance(*bytes_completed);
            }
            // Also sent for a file that was in the cache all along, whose bar was never shown.
            DownloadEvent::Complete => {
                if self.state().stage != Stage::Asked {
                    self.bar.finish();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hf_hub::HFError;
    use hf_hub::progress::FileProgress;

    fn watch(answer: u64, stall: u64) -> Arc<Watch> {
        let settings = Settings {
            offline: None,
            progress: true,
            answer: Duration::from_millis(answer),
            stall: Duration::from_millis(stall),
        };
        Watch::new("model.safetensors", settings, false)
    }

    fn bytes(watch: &Watch, bytes: u64, status: FileStatus) {
        let file = FileProgress {
            filename: "model.safetensors".to_string(),
            bytes_completed: bytes,
            total_bytes: 100,
            status,
        };
        watch.on_progress(&DownloadEvent::Progress { files: vec![file] }.into());
    }

    fn start(watch: &Watch, total_bytes: u64) {
        let event = DownloadEvent::Start { total_files: 1, total_bytes };
        watch.on_progress(&event.into());
    }

    #[test]
    fn the_bar_follows_the_bytes() {
        let watch = watch(1000, 1000);
        assert_eq!(watch.announced(), None);
        start(&watch, 100);
        bytes(&watch, 40, FileStatus::InProgress);
        assert_eq!(watch.bar.message(), "model.safetensors");
        assert_eq!((watch.bar.position(), watch.bar.length()), (40, Some(100)));
        bytes(&watch, 100, FileStatus::Complete);
        assert!(watch.bar.is_finished());
        assert_eq!(watch.announced(), Some(100));
    }

    #[test]
    fn a_size_of_nought_is_no_size() {
        let watch = watch(1000, 1000);
        start(&watch, 0);
        bytes(&watch, 7, FileStatus::InProgress);
        assert_eq!((watch.bar.position(), watch.bar.length()), (7, None));
        assert_eq!(watch.announced(), None);
    }

    #[test]
    fn both_templates_are_well_formed() {
        assert!(ProgressStyle::with_template(BAR).is_ok());
        assert!(ProgressStyle::with_template(NO_SIZE).is_ok());
    }

    #[test]
    fn silence_before_an_answer_ends_the_wait() {
        let watch = watch(50, 60_000);
        let result = watch.over(|| {
            std::thread::sleep(Duration::from_secs(5));
            Ok(())
        });
        assert!(matches!(result, Err(Silence::NoAnswer(_))), "{result:?}");
    }

    #[test]
    fn silence_in_a_transfer_ends_the_wait_and_counts_its_bytes() {
        let watch = watch(60_000, 50);
        let inner = Arc::clone(&watch);
        let result = watch.over(move || {
            start(&inner, 100);
            bytes(&inner, 40, FileStatus::InProgress);
            for _ in 0..250 {
                // The same number again is no progress.
                std::thread::sleep(Duration::from_millis(20));
                bytes(&inner, 40, FileStatus::InProgress);
            }
            Ok(())
        });
        assert!(matches!(result, Err(Silence::Stalled { bytes: 40, .. })), "{result:?}");
    }

    #[test]
    fn a_slow_transfer_that_moves_is_waited_for() {
        let watch = watch(60_000, 1000);
        let inner = Arc::clone(&watch);
        let result = watch.over(move || {
            start(&inner, 100);
            for i in 1..=30 {
                std::thread::sleep(Duration::from_millis(50));
                bytes(&inner, i * 3, FileStatus::InProgress);
            }
            Ok(7)
        });
        assert!(matches!(result, Ok(Ok(7))), "{result:?}");
    }

    #[test]
    fn a_transfer_from_xet_may_be_silent_for_longer() {
        let watch = watch(60_000, 1000);
        start(&watch, 100);
        assert_eq!(watch.patience().0, Duration::from_secs(1));
        let event = DownloadEvent::AggregateProgress { bytes_completed: 0, total_bytes: 100, bytes_per_sec: None };
        watch.on_progress(&event.into());
        assert_eq!(watch.patience().0, Duration::from_secs(5));
    }

    #[test]
    fn an_error_of_the_work_is_handed_on() {
        let result = watch(60_000, 60_000).over(|| Err::<(), _>(HFError::CacheNotEnabled));
        assert!(matches!(result, Ok(Err(HFError::CacheNotEnabled))), "{result:?}");
    }
}
