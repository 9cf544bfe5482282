//! Modules that the benches share: cells, engines, the check before timing, timing in turn, the machine's limits,
//! reports.

pub mod args;
pub mod cell;
pub mod check;
pub mod engine;
pub mod inputs;
pub mod load;
pub mod memory;
pub mod peak;
pub mod peer;
pub mod report;
pub mod rounds;
pub mod run;
pub mod turns;
