//! The programs of a device, each of which is compiled and loaded once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{Error, Result};

use crate::program::Program;

/// A loaded program, or the reason why it cannot be used.
pub(super) type LoadResult<P> = std::result::Result<Arc<P>, String>;

/// The loaded programs. A program that failed is not tried again.
pub(super) struct Programs<P> {
    slots: Mutex<HashMap<Program, Arc<OnceLock<LoadResult<P>>>>>,
}

impl<P> Default for Programs<P> {
    fn default() -> Self {
        Self { slots: Mutex::default() }
    }
}

impl<P> Programs<P> {
    /// Returns a program, which `load` loads in the first call.
    ///
    /// # Errors
    /// If the program does not load, or did not in an earlier call.
    pub fn get_or_load(&self, program: &Program, load: impl FnOnce() -> LoadResult<P>) -> Result<Arc<P>> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            slots.entry(program.clone()).or_default().clone()
        };
        // Other programs can compile meanwhile; threads that need this one wait for it.
        slot.get_or_init(load).clone().map_err(Error::msg)
    }
}
