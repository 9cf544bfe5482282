//! One request with its progress bar and timeouts.
//!
//! hf-hub sets no timeout on its connections, and accepts no HTTP client with a timeout without a second dependency on
//! the same version of reqwest. So a request runs on its own thread, and the caller stops waiting when it has been
//! silent for too long. The thread ends when the system closes the connection.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
use hf_hub::{HFError, HFResult};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use super::settings::HubSettings;

/// A transfer from xet storage reports whole pieces of up to 64 MiB only, so it may be silent this many times longer:
/// five minutes by default, which is the limit that hf-xet itself sets on a silent connection.
const XET_PATIENCE: u32 = 5;
/// The file name, the bar, the bytes, the speed and the time left.
const BAR: &str = "{msg}  {wide_bar}  {bytes}/{total_bytes}  {bytes_per_sec}  {eta}";
/// The parts of [`BAR`] that are known for a file whose size the server does not tell.
const NO_SIZE: &str = "{msg}  {bytes}  {bytes_per_sec}";

/// A message from the thread of a request.
enum Message<T> {
    /// The transfer begins, with its number of bytes, or 0 where the server does not tell.
    Start(u64),
    /// The progress of the transfer.
    Bytes {
        /// The number of bytes that have arrived.
        bytes: u64,
        /// Whether the bytes came from xet storage.
        is_xet: bool,
    },
    Done(HFResult<T>),
}

/// A handler that sends the progress of a download to the waiting thread.
pub(super) struct Events<T>(Sender<Message<T>>);

/// The reason why a request failed.
#[derive(Debug)]
pub(super) enum RequestFailure {
    /// An error of hf-hub.
    Hub(HFError),
    /// The server has not answered within this time.
    NoAnswer(Duration),
    /// The transfer began, and after `bytes` bytes nothing arrived for `waited`.
    Stalled { bytes: u64, waited: Duration },
    /// The request could not be started, or ended without a result.
    Broken(String),
}

/// Runs `request` on its own thread and waits for its result while there is progress. Returns the result, and the size
/// in bytes that the server announced, if a transfer began and the size was known.
pub(super) fn watched<T, F>(file: &str, settings: &HubSettings, request: F) -> Result<(T, Option<u64>), RequestFailure>
where
    T: Send + 'static,
    F: FnOnce(Events<T>) -> HFResult<T> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel();
    let events = Events(sender.clone());
    std::thread::Builder::new()
        .name("hub-request".to_string())
        // After a timeout there is no receiver, and the result is dropped.
        .spawn(move || drop(sender.send(Message::Done(request(events)))))
        .map_err(|e| RequestFailure::Broken(format!("no thread could be started: {e}")))?;
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()).with_message(file.to_string());
    // A bar that is dropped before its end remains on the screen.
    let bar = bar.with_finish(ProgressFinish::Abandon);
    let mut limit = settings.answer;
    let mut heard = Instant::now();
    let mut transfer = None;
    let mut announced = None;
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
                // For xet, hf-hub reports at fixed times: only more bytes are progress.
                if bytes > transfer.unwrap_or(0) {
                    (heard, transfer) = (Instant::now(), Some(bytes));
                    bar.set_position(bytes);
                }
            }
            Ok(Message::Done(result)) => {
                let result = result.map_err(RequestFailure::Hub)?;
                bar.finish();
                return Ok((result, announced));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(RequestFailure::Broken("the request ended without a result".into()));
            }
            Err(RecvTimeoutError::Timeout) => {
                return Err(match transfer {
                    None => RequestFailure::NoAnswer(limit),
                    Some(bytes) => RequestFailure::Stalled { bytes, waited: limit },
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
        // After a timeout there is no receiver.
        let _ = self.0.send(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that is passed a function that reports a size, a number of bytes, and whether they came from xet.
    type Request = fn(&dyn Fn(Option<u64>, u64, bool));

    fn run(answer: u64, stall: u64, request: Request) -> Result<(u8, Option<u64>), RequestFailure> {
        let [answer, stall] = [answer, stall].map(Duration::from_millis);
        let settings = HubSettings { answer, stall, ..HubSettings::default() };
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
    fn progress_templates_are_well_formed() {
        assert!(ProgressStyle::with_template(BAR).is_ok() && ProgressStyle::with_template(NO_SIZE).is_ok());
    }

    #[test]
    fn slow_transfer_with_progress_returns_its_result_and_size() -> Result<(), RequestFailure> {
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
    fn silent_request_times_out_before_an_answer_and_in_a_transfer() {
        assert!(matches!(run(50, 60_000, |_| sleep(5000)), Err(RequestFailure::NoAnswer(_))));
        let stalled = run(60_000, 50, |progress| {
            progress(Some(100), 40, false);
            for _ in 0..250 {
                // The same number again is no progress.
                sleep(20);
                progress(None, 40, false);
            }
        });
        assert!(matches!(stalled, Err(RequestFailure::Stalled { bytes: 40, .. })));
    }

    #[test]
    fn silent_xet_transfer_has_a_longer_timeout() {
        let xet = run(60_000, 1000, |progress| {
            progress(Some(100), 1, true);
            sleep(2500);
        });
        assert!(xet.is_ok());
    }

    #[test]
    fn failed_request_returns_its_error_and_a_panic_is_broken() {
        let settings = HubSettings { answer: Duration::from_secs(60), ..HubSettings::default() };
        let failed = watched::<u8, _>("", &settings, |_| Err(HFError::CacheNotEnabled));
        assert!(matches!(failed, Err(RequestFailure::Hub(HFError::CacheNotEnabled))));
        let broken = watched::<u8, _>("", &settings, |_| std::panic::resume_unwind(Box::new(())));
        assert!(matches!(broken, Err(RequestFailure::Broken(_))));
    }
}
