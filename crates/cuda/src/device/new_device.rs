//! The emulator as a device on which the kernels have not run, or on which they are wrong.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use candle_attention_device::{DiskCache, FirstUse, Fnv};
use candle_core::{Result, bail};

use super::checks::{DeviceChecks, kernels_version};

/// A part of a kernel's source that is replaced by another one.
#[derive(Debug, Clone, Copy)]
pub struct SourceFault {
    /// A file of `kernels/`.
    pub file: &'static str,
    /// The text, which the file has once.
    pub text: &'static str,
    /// The text in its place.
    pub replacement: &'static str,
}

/// A device on which the kernels have not run.
#[derive(Debug, Clone)]
pub struct NewDevice {
    checks: Arc<FirstUse>,
    fault: Option<SourceFault>,
}

impl NewDevice {
    /// Makes a device by a name. `folder` is the cache folder in which checks are remembered.
    pub fn new(name: &str, folder: &Path) -> Self {
        Self { checks: Arc::new(FirstUse::new(name, kernels_version(), DiskCache::in_folder(folder))), fault: None }
    }

    /// Returns the device with a fault in the source of its kernels.
    #[must_use]
    pub fn with_fault(self, fault: SourceFault) -> Self {
        Self { fault: Some(fault), ..self }
    }
}

thread_local! {
    /// The device that the emulator is on this thread, unless it is one on which the kernels have been run.
    static DEVICE: RefCell<Option<NewDevice>> = const { RefCell::new(None) };
}

/// Runs a function in which the emulator is a device on which the kernels have not run, on the current thread.
pub fn on_new_device<T>(device: &NewDevice, run: impl FnOnce() -> T) -> T {
    DEVICE.replace(Some(device.clone()));
    let result = run();
    DEVICE.take();
    result
}

/// Returns the checks of the thread's device.
pub(super) fn checks_of_thread() -> Option<DeviceChecks> {
    DEVICE.with_borrow(|device| {
        device.as_ref().map(|known| DeviceChecks { checks: known.checks.clone(), have_run: false })
    })
}

/// Returns the fault of the thread's device.
pub fn fault_of_thread() -> Option<SourceFault> {
    DEVICE.with_borrow(|device| device.as_ref().and_then(|known| known.fault))
}

impl SourceFault {
    /// Returns a number by which programs with the fault differ from others.
    pub(super) fn number(&self) -> i64 {
        let mut hash = Fnv::new();
        for text in [self.file, self.text, self.replacement] {
            hash.add_text(text);
        }
        (hash.value() as u64 >> 1) as i64
    }

    /// Writes the kernels with the fault into a folder, unless they are there, and returns it.
    ///
    /// # Errors
    /// If the file does not have the text once, or a file cannot be written.
    pub(super) fn write_sources(&self, kernels: &Path, to: &Path) -> Result<PathBuf> {
        // Threads of a process share the names of temporary files.
        static LOCK: Mutex<()> = Mutex::new(());
        let _one_at_a_time = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let mut texts = BTreeMap::new();
        for entry in fs::read_dir(kernels)? {
            let entry = entry?;
            let mut text = fs::read_to_string(entry.path())?;
            if entry.file_name() == self.file {
                let count = text.matches(self.text).count();
                if count != 1 {
                    bail!("{} has the text {:?} {count} times, expected once", self.file, self.text)
                }
                text = text.replace(self.text, self.replacement);
            }
            texts.insert(entry.file_name(), text);
        }
        let mut hash = Fnv::new();
        texts.values().for_each(|text| hash.add_text(text));
        let folder = to.join(format!("fault-{:032x}", hash.value()));
        fs::create_dir_all(&folder)?;
        for (name, text) in &texts {
            let path = folder.join(name);
            if !path.exists() {
                let temporary = to.join(format!("fault.{}.new", process::id()));
                fs::write(&temporary, text)?;
                fs::rename(&temporary, &path)?;
            }
        }
        Ok(folder)
    }
}
