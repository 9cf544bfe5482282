//! One request, watched: its progress bar, and how long it has been silent.
//!
//! hf-hub sets no timeout on its connections, and takes no HTTP client that has one without a second dependency on the
//! same version of reqwest. So a request runs on a thread of its own, and its caller stops waiting once it has been
//! silent for too long; the thread ends when the system gives the connection up.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
use hf_hub::{HFError, HFResult};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use super::session::Settings;

/// A transfer from xet storage reports whole pieces of up to 64 MiB only, so it may be silent this many times longer:
/// five minutes by default, which is the limit that hf-xet itself sets on a silent connection.
const XET_PATIENCE: u32 = 5;
/// The file name, the bar, the bytes, the speed and the time left.
const BAR: &str = "{msg}  {wide_bar}  {bytes}/{total_bytes}  {bytes_per_sec}  {eta}";
/// As above, for a file whose size the server does not tell.
const NO_SIZE: &str = "{msg}  {bytes}  {bytes_per_sec}";

/// What the thread of a request says.
enum Message<T> {
    /// The transfer begins, of so many bytes, or 0 where the server does not tell.
    Start(u64),
    /// So many bytes are there.
    Bytes {
        bytes: u64,
        is_xet: bool,
    },
    Done(HFResult<T>),
}

/// Passes a download's progress on.
pub(super) struct Events<T>(Sender<Message<T>>);

/// Why a request gave no result.
#[derive(Debug)]
pub(super) enum Failure {
    /// hf-hub's own reason.
    Hub(HFError),
    /// The server has not answered within this time.
    NoAnswer(Duration),
    /// The transfer began, brought `bytes` bytes, and then nothing more for `waited`.
    Stalled { bytes: u64, waited: Duration },
    /// The request could not be started, or ended without a result.
    Broken(String),
}

/// Runs `request` on a thread of its own and waits for its result for as long as it is heard from. Returns the result,
/// and the size in bytes that the server announced, if a transfer began and there was one.
pub(super) fn watched<T, F>(file: &str, settings: &Settings, request: F) -> Result<(T, Option<u64>), Failure>
where
    T: Send + 'static,
    F: FnOnce(Events<T>) -> HFResult<T> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel();
    let events = Events(sender.clone());
    std::thread::Builder::new()
        .name("hub-request".to_string())
        // Nobody receives any more once the wait is over: then the result has no use.
        .spawn(move || drop(sender.send(Message::Done(request(events)))))
        .map_err(|e| Failure::Broken(format!("no thread could be started: {e}")))?;
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()).with_message(file.to_string());
    // A bar that is dropped before its end stays as it is.
    let bar = bar.with_finish(ProgressFinish::Abandon);
    let (mut limit, mut heard, mut transfer, mut announced) = (settings.answer, Instant::now(), None, None);
    loop {
        match receiver.recv_timeout(limit.saturating_sub(heard.elapsed())) {
            Ok(Message::Start(size)) => {
                (limit, heard, transfer) = (settings.stall, Instant::now(), Some(0));
                announced = Some(size).filter(|&size| size > 0);
                if let Ok(style) = ProgressStyle::with_template(if size > 0 { BAR } else { NO_SIZE }) {
                    bar.set_style(style);
                }
                bar.set_length(size);
                bar.reset_elapsed();
                if !settings.hides_progress {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                }
            }
            Ok(Message::Bytes { bytes, is_xet }) => {
                if is_xet {
                    limit = settings.stall * XET_PATIENCE;
                }
                // hf-hub reports on a clock for xet: only more bytes are a sign of life.
                if bytes > transfer.unwrap_or(0) {
                    (heard, transfer) = (Instant::now(), Some(bytes));
                    bar.set_position(bytes);
                }
            }
            Ok(Message::Done(result)) => {
                let result = result.map_err(Failure::Hub)?;
                bar.finish();
                return Ok((result, announced));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::Broken("the request ended without a result".into()));
            }
            Err(RecvTimeoutError::Timeout) => {
                return Err(match transfer {
                    None => Failure::NoAnswer(limit),
                    Some(bytes) => Failure::Stalled { bytes, waited: limit },
                });
            }
        }
    }
}

impl<T: Send> ProgressHandler for Events<T> {
    fn on_progress(&self, event: &ProgressEvent) {
        let message = match event {
            ProgressEvent::Download(DownloadEvent::Start { total_bytes, .. }) => Message::Start(*total_bytes),
            ProgressEvent::Download(DownloadEvent::Progress { files }) => {
                let bytes = files.iter().map(|file| file.bytes_completed).max().unwrap_or(0);
                Message::Bytes { bytes, is_xet: false }
            }
            ProgressEvent::Download(DownloadEvent::AggregateProgress { bytes_completed, .. }) => {
                Message::Bytes { bytes: *bytes_completed, is_xet: true }
            }
            _ => return,
        };
        // As above: nobody may be waiting any more.
        let _ = self.0.send(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gets a function that reports a size, so many bytes, and whether they came by xet.
    type Request = fn(&dyn Fn(Option<u64>, u64, bool));

    fn run(answer: u64, stall: u64, request: Request) -> Result<(u8, Option<u64>), Failure> {
        let [answer, stall] = [answer, stall].map(Duration::from_millis);
        let settings = Settings { answer, stall, ..Settings::default() };
        watched("model.safetensors", &settings, move |events| {
            request(&|start, bytes, is_xet| {
                if let Some(size) = start {
                    events.on_progress(&DownloadEvent::Start { total_files: 1, total_bytes: size }.into());
                }
                if is_xet {
                    let event = DownloadEvent::AggregateProgress {
                        bytes_completed: bytes,
                        total_bytes: 9,
                        bytes_per_sec: None,
                    };
                    events.on_progress(&event.into());
                } else {
                    let _ = events.0.send(Message::Bytes { bytes, is_xet });
                }
            });
            Ok(7)
        })
    }

    fn sleep(milliseconds: u64) {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }

    #[test]
    fn both_templates_are_well_formed() {
        assert!(ProgressStyle::with_template(BAR).is_ok() && ProgressStyle::with_template(NO_SIZE).is_ok());
    }

    #[test]
    fn a_slow_transfer_that_moves_is_waited_for_and_its_size_is_told() -> Result<(), Failure> {
        let (result, announced) = run(60_000, 2000, |progress| {
            progress(Some(100), 0, false);
            for bytes in 1..=30 {
                sleep(100);
                progress(None, bytes, false);
            }
        })?;
        assert_eq!((result, announced), (7, Some(100)));
        // A size of 0 is none.
        assert_eq!(run(60_000, 60_000, |progress| progress(Some(0), 7, false))?.1, None);
        Ok(())
    }

    #[test]
    fn silence_ends_the_wait_before_an_answer_and_in_a_transfer() {
        assert!(matches!(run(50, 60_000, |_| sleep(5000)), Err(Failure::NoAnswer(_))));
        let stalled = run(60_000, 50, |progress| {
            progress(Some(100), 40, false);
            for _ in 0..250 {
                // The same number again is no progress.
                sleep(20);
                progress(None, 40, false);
            }
        });
        assert!(matches!(stalled, Err(Failure::Stalled { bytes: 40, .. })));
    }

    #[test]
    fn a_transfer_from_xet_may_be_silent_for_longer() {
        let xet = run(60_000, 1000, |progress| {
            progress(Some(100), 1, true);
            sleep(2500);
        });
        assert!(xet.is_ok());
    }

    #[test]
    fn an_error_is_handed_on_and_a_panic_is_a_broken_request() {
        let settings = Settings { answer: Duration::from_secs(60), ..Settings::default() };
        let failed = watched::<u8, _>("", &settings, |_| Err(HFError::CacheNotEnabled));
        assert!(matches!(failed, Err(Failure::Hub(HFError::CacheNotEnabled))));
        let broken = watched::<u8, _>("", &settings, |_| std::panic::resume_unwind(Box::new(())));
        assert!(matches!(broken, Err(Failure::Broken(_))));
    }
}
