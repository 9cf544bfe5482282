//! The programs of a device, each of which is compiled and loaded once.

use std::sync::Arc;

use candle_attention_device::{Attempts, Failure};

use crate::program::Program;

/// A loaded program, or the failure to load it.
pub(super) type LoadResult<P> = Result<Arc<P>, Failure>;

/// The loaded programs.
pub(super) type Programs<P> = Attempts<Program, Arc<P>>;
