//! Checks of kernels at their first use on a device on which nobody has run them yet.
//!
//! A kernel is right in an emulator before it reaches a device, but the compiler and the device may still differ from
//! what the emulator repeats. So the first call of each kind of kernels computes a small fixed case, which the caller
//! compares with a result of the CPU. If the numbers differ, or the case fails, other operations run instead.

use std::fmt;

use crate::attempts::Attempts;
#[cfg(any(feature = "files", test))]
use crate::disk_cache::DiskCache;
use crate::failure::Failure;
#[cfg(any(feature = "files", test))]
use crate::hash::Fnv;
use crate::warnings::warn_of_each_text;

/// A kind of kernels, which one case checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelKind {
    /// The computation, such as `attention, forward`.
    pub operation: &'static str,
    /// The element type of the inputs, such as `bf16`.
    pub element: &'static str,
}

impl fmt::Display for KernelKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.operation, self.element)
    }
}

/// The reason why the kernels of a case are not used: a sentence without a full stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CaseFailure {
    /// The numbers differ from the expected ones. This is remembered like a success.
    Differs(String),
    /// There are no numbers, since a program did not compile or a launch failed. A later call tries again, since memory
    /// may be free then.
    Stopped(String),
}

/// The checks of a version's kernels on a device on which nobody has run them.
#[derive(Debug)]
pub struct FirstUse {
    device: String,
    version: String,
    #[cfg(any(feature = "files", test))]
    memory: DiskCache,
    attempts: Attempts<KernelKind, ()>,
}

impl FirstUse {
    /// Makes the checks of a device that nothing is known of but what `memory` remembers. `device` names the device and
    /// all that compiles for it, `version` the kernels.
    #[cfg(any(feature = "files", test))]
    pub fn new(device: impl Into<String>, version: impl Into<String>, memory: DiskCache) -> Self {
        Self { device: device.into(), version: version.into(), memory, attempts: Attempts::default() }
    }

    /// Returns the name of the device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns the version of the kernels.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Checks a kind of kernels by a case, which runs in the first call unless an earlier process remembers its result.
    /// Threads that need the same kind wait for it. A failure is logged once.
    ///
    /// # Errors
    /// If the case failed, now or earlier.
    pub fn check(&self, kind: KernelKind, case: impl FnOnce() -> Result<(), CaseFailure>) -> Result<(), Failure> {
        self.attempts.get_or_make(kind, || {
            let checked = self.recall_or_run(kind, case);
            if let Err(failure) = &checked {
                warn_of_each_text(&self.report(failure));
            }
            checked
        })
    }

    /// Returns the failure that [`check`](Self::check) would return without another try, if there is one.
    pub fn known_failure(&self, kind: KernelKind) -> Option<Failure> {
        self.attempts.known_failure(|| Some(kind))
    }

    fn recall_or_run(&self, kind: KernelKind, case: impl FnOnce() -> Result<(), CaseFailure>) -> Result<(), Failure> {
        let reason = |what: &str| format!("the kernels of {kind} failed their check on {}: {what}", self.device);
        match self.recall(kind).as_deref() {
            Some(PASSED) => return Ok(()),
            Some(what) => return Err(Failure::lasting(reason(what))),
            None => {}
        }
        match case() {
            Ok(()) => {
                self.remember(kind, PASSED);
                Ok(())
            }
            Err(CaseFailure::Differs(what)) => {
                self.remember(kind, &what);
                Err(Failure::lasting(reason(&what)))
            }
            Err(CaseFailure::Stopped(what)) => Err(Failure::passing(reason(&what))),
        }
    }

    /// Returns what the log says of a failure.
    fn report(&self, failure: &Failure) -> String {
        format!(
            "{}. Other operations run instead. Please report this line in an issue of candle-attention, with the \
             output of `device_check --first-use`: version {}",
            failure.reason, self.version
        )
    }

    /// Returns the remembered result of a case: [`PASSED`], or what differed.
    #[cfg(any(feature = "files", test))]
    fn recall(&self, kind: KernelKind) -> Option<String> {
        let entry = String::from_utf8(self.memory.read(&self.file_name(kind))?).ok()?;
        // The names of files are hashes: an entry counts only if it is about this kind, device and version.
        Some(entry.strip_prefix(&self.subject(kind))?.to_string())
    }

    #[cfg(not(any(feature = "files", test)))]
    fn recall(&self, _kind: KernelKind) -> Option<String> {
        None
    }

    /// Remembers the result of a case, if the folder can be written.
    #[cfg(any(feature = "files", test))]
    fn remember(&self, kind: KernelKind, result: &str) {
        self.memory.write(&self.file_name(kind), format!("{}{result}", self.subject(kind)).as_bytes());
    }

    #[cfg(not(any(feature = "files", test)))]
    fn remember(&self, _kind: KernelKind, _result: &str) {}

    /// Returns the lines of an entry before its result.
    #[cfg(any(feature = "files", test))]
    fn subject(&self, kind: KernelKind) -> String {
        format!("kernels: {kind}\ndevice: {}\nversion: {}\nresult: ", self.device, self.version)
    }

    #[cfg(any(feature = "files", test))]
    fn file_name(&self, kind: KernelKind) -> String {
        let mut hash = Fnv::new();
        hash.add_text(&self.subject(kind));
        format!("{:032x}.check", hash.value())
    }
}

/// The result of a case whose numbers agree.
const PASSED: &str = "passed";

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::{fs, io, thread};

    use super::*;

    const KIND: KernelKind = KernelKind { operation: "attention", element: "bf16" };

    /// Returns the checks of a new process.
    fn process(folder: &Path) -> FirstUse {
        FirstUse::new("a device", "1.0", DiskCache::in_folder(folder))
    }

    /// Returns whether a check runs its case, which passes.
    fn runs(checks: &FirstUse, kind: KernelKind) -> bool {
        let mut has_run = false;
        let checked = checks.check(kind, || {
            has_run = true;
            Ok(())
        });
        assert_eq!(checked, Ok(()));
        has_run
    }

    #[test]
    fn first_use_check_that_passed_is_remembered_by_later_calls_and_processes() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let first = process(folder.path());
        assert!(runs(&first, KIND));
        assert!(!runs(&first, KIND), "in the same process");
        assert!(!runs(&process(folder.path()), KIND), "in another process");
        Ok(())
    }

    #[test]
    fn first_use_check_of_another_version_device_or_kind_does_not_count() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        assert!(runs(&process(folder.path()), KIND));
        let checks = |device, version| FirstUse::new(device, version, DiskCache::in_folder(folder.path()));
        assert!(runs(&checks("another device", "1.0"), KIND));
        assert!(runs(&checks("a device", "1.1"), KIND));
        assert!(runs(&process(folder.path()), KernelKind { element: "f16", ..KIND }));
        assert!(runs(&process(folder.path()), KernelKind { operation: "norm", ..KIND }));
        Ok(())
    }

    /// Writes the entry of one version to the place of another's, as if their names had the same hash.
    #[test]
    fn first_use_entry_about_another_version_does_not_count() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let own = process(folder.path());
        let other = FirstUse::new("a device", "0.9", DiskCache::in_folder(folder.path()));
        assert!(runs(&other, KIND));
        fs::rename(folder.path().join(other.file_name(KIND)), folder.path().join(own.file_name(KIND)))?;
        assert!(runs(&own, KIND));
        Ok(())
    }

    #[test]
    fn first_use_check_with_other_numbers_fails_in_later_processes_without_the_case() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let first = process(folder.path());
        let failed = first.check(KIND, || Err(CaseFailure::Differs("the output is off by 1".into())));
        let expected = "the kernels of attention in bf16 failed their check on a device: the output is off by 1";
        assert_eq!(failed, Err(Failure::lasting(expected)));
        assert_eq!(first.known_failure(KIND), Some(Failure::lasting(expected)));
        assert_eq!(first.known_failure(KernelKind { element: "f16", ..KIND }), None);
        let second = process(folder.path());
        assert_eq!(second.check(KIND, || panic!("the case runs again")), Err(Failure::lasting(expected)));
        Ok(())
    }

    #[test]
    fn first_use_check_that_stopped_is_not_remembered() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let first = process(folder.path());
        let failed = first.check(KIND, || Err(CaseFailure::Stopped("no memory".into())));
        assert_eq!(failed.as_ref().map_err(|failure| failure.is_lasting), Err(false));
        assert_eq!(first.check(KIND, || panic!("tried again at once")), failed);
        assert!(runs(&process(folder.path()), KIND));
        Ok(())
    }

    #[test]
    fn first_use_checks_without_a_folder_to_write_run_once_in_each_process() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        // A file with the folder's name stops every user, root too.
        let file = folder.path().join("file");
        fs::write(&file, b"")?;
        for _ in 0..2 {
            let unwritable = process(&file);
            assert!(runs(&unwritable, KIND));
            assert!(!runs(&unwritable, KIND));
            let without_folder = FirstUse::new("a device", "1.0", DiskCache::without_folder());
            assert!(runs(&without_folder, KIND));
            assert!(!runs(&without_folder, KIND));
        }
        Ok(())
    }

    #[test]
    fn first_use_check_of_many_threads_runs_once() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let checks = process(folder.path());
        let (cases, barrier) = (AtomicUsize::new(0), Barrier::new(8));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    barrier.wait();
                    let checked = checks.check(KIND, || {
                        cases.fetch_add(1, Ordering::Relaxed);
                        Ok(())
                    });
                    assert_eq!(checked, Ok(()));
                });
            }
        });
        assert_eq!(cases.into_inner(), 1);
        Ok(())
    }
}
