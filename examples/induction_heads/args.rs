//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Parser;

use crate::common::page::PageArgs;

/// Trains a transformer of two attention layers on random sequences that repeat, until an induction head forms: a head
/// that attends to the token after the previous copy of the present one.
#[derive(Debug, Parser)]
#[command(name = "induction_heads")]
pub struct Args {
    /// Where the model, its checkpoints and its pictures go
    #[arg(long, value_name = "DIR", default_value = "target/induction_heads")]
    pub out: PathBuf,

    /// Goes on from the last checkpoint in --out, which is at most --save-every steps old
    #[arg(long)]
    pub resume: bool,

    /// The most steps of training
    #[arg(long, value_name = "N", default_value = "3000")]
    pub steps: NonZeroUsize,

    /// The share of its weight that the best head puts on tokens after a previous copy before training ends
    #[arg(long, value_name = "SHARE", default_value_t = 0.95)]
    pub until: f64,

    /// Steps between two checkpoints
    #[arg(long, value_name = "N", default_value = "50")]
    pub save_every: NonZeroUsize,

    /// Of the first weights and of all sequences
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Of both layers after training
    #[command(flatten)]
    pub page: PageArgs,
}
