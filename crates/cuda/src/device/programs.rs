//! The programs of a device, each of which is compiled and loaded once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_attention_device::{Attempt, Failure};

use crate::program::Program;

/// A loaded program, or the failure to load it.
pub(super) type LoadResult<P> = Result<Arc<P>, Failure>;

/// The loaded programs.
pub(super) struct Programs<P> {
    slots: Mutex<HashMap<Program, Arc<Attempt<Arc<P>>>>>,
    /// Whether a program has failed.
    has_failed: AtomicBool,
}

impl<P> Default for Programs<P> {
    fn default() -> Self {
        Self { slots: Mutex::default(), has_failed: AtomicBool::new(false) }
    }
}

impl<P> Programs<P> {
    /// Returns a program, which `load` loads in the first call, and after a failure that may have passed.
    ///
    /// # Errors
    /// If the program does not load, or did not in an earlier call.
    pub fn get_or_load(&self, program: &Program, load: impl FnOnce() -> LoadResult<P>) -> LoadResult<P> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            slots.entry(program.clone()).or_default().clone()
        };
        // Other programs can compile meanwhile; threads that need this one wait for it.
        let loaded = slot.get_or_make(load);
        if loaded.is_err() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        loaded
    }

    /// Returns the failure of a program that an earlier call could not load, unless it is time for another try.
    /// `program` is called only if any program has failed.
    pub fn known_failure(&self, program: impl FnOnce() -> Option<Program>) -> Option<Failure> {
        if !self.has_failed.load(Ordering::Relaxed) {
            return None;
        }
        let program = program()?;
        let slot = self.slots.lock().unwrap_or_else(PoisonError::into_inner).get(&program).cloned()?;
        slot.known_failure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::AttentionArguments;
    use crate::kernel_struct::KernelStruct;

    fn program(root: &'static str) -> Program {
        Program { root, arguments: AttentionArguments::DEFINITION, defines: Vec::new() }
    }

    #[test]
    fn failed_program_is_known_and_others_load() {
        let programs = Programs::<u32>::default();
        let known = |root| programs.known_failure(|| Some(program(root)));
        assert_eq!(known("a.cu"), None);
        let failure = Failure::lasting("it does not compile");
        let load = |root, result: LoadResult<u32>| programs.get_or_load(&program(root), || result);
        assert_eq!(load("a.cu", Err(failure.clone())), Err(failure.clone()));
        assert_eq!(known("a.cu"), Some(failure.clone()));
        assert_eq!(load("a.cu", Ok(Arc::new(1))), Err(failure));
        assert_eq!((load("b.cu", Ok(Arc::new(2))), known("b.cu")), (Ok(Arc::new(2)), None));
    }
}
