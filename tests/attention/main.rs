//! Everything that computes, as a sceptic would test it: the reference path and the fused kernel against an oracle of
//! plain loops, the gated delta rule and layers likewise, projections against f64, and options against transformers'
//! numbers. The kernels run on every instruction set that this processor has; instruction sets that it lacks are named
//! as skipped.
//!
//! Properties draw a fixed number of random cases from a fixed seed. `PROPTEST_CASES` sets another number for every
//! property, and `PROPTEST_RNG_SEED` another seed; a failure prints both, and the smallest case that still fails. A
//! long run:
//!
//! ```text
//! PROPTEST_CASES=100000 PROPTEST_RNG_SEED=7 cargo test --test attention flash::grid
//! ```

/// Makes a test of `fn check(Feature) -> Result<()>` for each feature that is named.
macro_rules! test_each_feature {
    ($check:ident: $($name:ident => $feature:ident),+ $(,)?) => {
        $( #[test] fn $name() -> Result<()> { $check($crate::registry::Feature::$feature) } )+
    };
}

/// Makes a test of `fn check(Feature, &Device) -> Result<()>` for each feature that is named, on each device.
macro_rules! test_each_feature_on_each_device {
    ($check:ident: $($name:ident => $feature:ident),+ $(,)?) => {
        mod each_feature {
            use super::*;

            $( fn $name(device: &Device) -> Result<()> { $check($crate::registry::Feature::$feature, device) } )+
            $crate::on_each_device!($($name),+);
        }
    };
}

#[path = "../common/mod.rs"]
mod common;
#[path = "../cache/seeded.rs"]
mod seeded;

// Shared by the tests: the oracle, random calls, the comparison, layers and their plain loops, random tensors, and the
// properties of operations.
mod by_hand;
mod call;
mod layer_kind;
mod operation;
mod recipe;
mod registry;
mod tensors;
use attention_oracle::{array, attention as oracle};

// What each module begins with.
use array::{Array, Layout, Random, View, round};
use call::{CPU, Call, Expected, Path, attention_mask, check, check_on, has_word, numbers, reference};
use candle_attention::cpu::InstructionSet;
use candle_attention::{MultiHeadAttentionConfig as Config, MultiHeadLatentAttentionConfig as LatentConfig, *};
use candle_core::{DType, Device, IndexOp, Module, Result, Tensor, Var, bail};
use candle_nn::{Activation, Linear, VarBuilder, VarMap};
use common::*;
use operation::*;
use oracle::{Alignment, Case, Dims, Lens, Mask, Options, Part};
use proptest::prelude::*;
use proptest::sample::select;
use recipe::{
    Chosen, DTYPES, Kind, LENGTHS, MaskShape, Recipe, WIDTHS, dtypes, for_all, kernel_recipes, recipes, wide,
};
use tensors::*;

mod backends;
mod backward_passes;
mod calls;
mod delta;
mod dropout;
mod gradients;
mod isolation;
mod key_lists;
#[cfg(feature = "metal-standin")]
mod launches;
mod layer;
mod layer_gradients;
mod layer_packed;
mod masks;
mod matrices;
mod merge;
mod norms;
mod paged;
mod paged_in_place;
mod planned;
mod small_stack;
mod statistics;
mod varlen;

// Of the kernels alone.
mod environment;
mod flash;
mod linear;
mod precision;
mod threads;

mod embedding;
mod init;
mod options;
mod rope;
