//! Attention on the emulator, by the public functions, against plain loops in f64.

mod backward;
mod case;
mod decode;
mod forward;
mod large_batches;
mod plan;
mod reference;
mod switches;
