//! Every config in every layout: what is written is read back to the bit, into one weight, and shared out, or refused
//! both ways.

use std::path::Path;

use candle_attention::weights::{Checkpoint, Naming, Storage};
use candle_attention::{
    AttentionInput, GateLayout, MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, weights,
};
use candle_core::{DType, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::common::assert_close;
use crate::grid::{CONTEXT_LENGTH, EMBED_DIM, fits, grid};
use crate::one_weight::assert_joined;
use crate::tensor_parallel::assert_shared_out;
use crate::{Bits, DEVICE, bits, invented, load, projections, wave};

/// Returns the output of the layer for fixed inputs, each with a different width.
fn output(layer: &MultiHeadAttention) -> Result<Tensor> {
    let cfg = layer.config();
    let queries = wave(0.37, (2, 4, EMBED_DIM))?;
    let [keys, values] = [cfg.kdim(), cfg.vdim()].map(|width| wave(0.37, (2, CONTEXT_LENGTH, width)));
    layer.forward_with(AttentionInput::new(&queries).with_key_value(&keys?, &values?))
}

/// Returns the tolerance: transposed weights are multiplied from another memory layout, which may sum in another order.
fn tolerance(layout: WeightLayout) -> f64 {
    match layout {
        WeightLayout::Raw(..) | WeightLayout::Conv1d | WeightLayout::InOut(_) | WeightLayout::Dense(_) => 2e-6,
        WeightLayout::Flax | WeightLayout::Keras | WeightLayout::KerasH5 => 2e-6,
        WeightLayout::StackedHeads(_, storage) if storage != Storage::Linear => 2e-6,
        _ => 0.0,
    }
}

/// Lists the persistent masks of the book's modules: of causal layers with a length, and in no other layout.
fn masks(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> Vec<String> {
    match layout {
        _ if !cfg.causal() || cfg.context_length().is_none() => vec![],
        WeightLayout::Book | WeightLayout::Short => vec!["mask".into()],
        WeightLayout::StackedHeads(Naming::Book | Naming::Short, _) => {
            (0..cfg.num_heads()).map(|i| format!("heads.{i}.mask")).collect()
        }
        WeightLayout::StackedHeads(Naming::MinGpt, _) => {
            (0..cfg.num_heads()).map(|i| format!("heads.{i}.tril")).collect()
        }
        _ => vec![],
    }
}

// Two tests, which run at the same time.
#[test]
fn layouts_round_trip_every_config_of_even_number_bit_for_bit() -> Result<()> {
    check_round_trips(0)
}

#[test]
fn layouts_round_trip_every_config_of_odd_number_bit_for_bit() -> Result<()> {
    check_round_trips(1)
}

/// Checks every second config of the grid, from the `first` on.
fn check_round_trips(first: usize) -> Result<()> {
    let layouts = WeightLayout::all();
    let folder = tempfile::tempdir()?;
    let mut held = 0;
    let mut refused = 0;
    let mut saved = 0;
    let mut shared_out = 0;
    // Other devices have slower products of small matrices.
    let step = if DEVICE.is_cpu() { 2 } else { 32 };
    for (n, cfg) in grid().into_iter().enumerate().skip(first).step_by(step) {
        let layer = invented(&cfg, WeightLayout::Canonical)?;
        let expected = bits(&layer)?;
        let expected_output = output(&layer)?;
        // Two layouts of five, and others for the next config: every option meets every layout.
        for (_, &layout) in layouts.iter().enumerate().filter(|(m, _)| (n + m) % 5 < 2) {
            let what = format!("{layout}, {cfg:?}");
            let written = layer.state_dict(layout);
            assert_eq!(written.is_ok(), fits(&cfg, layout), "{what}: {written:?}");
            let Ok(written) = written else {
                refused += 1;
                // Before anything is drawn for it.
                let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &DEVICE);
                assert!(MultiHeadAttention::load(&cfg, layout, vb).is_err(), "{what}");
                continue;
            };
            held += 1;
            let is_mask = |name: &str| name.contains("mask") || name.contains("tril");
            let of_f32 = written.iter().filter(|(name, mask)| is_mask(name) && mask.dtype() == DType::F32);
            assert_eq!(of_f32.map(|(name, _)| name.clone()).collect::<Vec<_>>(), masks(&cfg, layout), "{what}");
            let read = load(&cfg, layout, &written)?;
            assert_eq!(bits(&read)?, expected, "{what}");
            for (one, other) in projections(&read).into_iter().zip(projections(&layer)) {
                assert_eq!(one.weight().dims(), other.weight().dims(), "{what}");
            }
            assert_close(&output(&read)?, &expected_output, tolerance(layout), &what);
            assert_joined(&read, &what)?;
            if held % 7 == 0 && assert_shared_out(&read, layout, 1 + held % 4, output)? {
                shared_out += 1;
            }
            if held % 17 == 0 {
                let path = folder.path().join(format!("{held}.safetensors"));
                layer.save(&path, layout)?;
                let opened = weights::open(&path, DType::F32, &DEVICE)?;
                assert_eq!(bits(&MultiHeadAttention::load(&cfg, layout, opened)?)?, expected, "{what}, from a file");
                check_inferred(&path, layout, &cfg, &expected)?;
                saved += 1;
            }
        }
    }
    println!("{held} round trips, {saved} of them through files, {shared_out} to processes; {refused} refused");
    assert!(step > 2 || held > 1_000 && refused > 1_000 && saved > 50 && shared_out > 100);
    Ok(())
}

/// Checks that the config that is inferred from the shapes of a file loads an equal layer, or that inference is an
/// error.
fn check_inferred(path: &Path, layout: WeightLayout, cfg: &MultiHeadAttentionConfig, expected: &[Bits]) -> Result<()> {
    let what = format!("{layout}, {cfg:?}");
    let packed = matches!(layout, WeightLayout::Conv1d | WeightLayout::Packed(..));
    let inferred = Checkpoint::open(path)?.infer_config("", layout, Some(cfg.num_heads()));
    let gate = cfg.output_gate().map(|gate| gate.layout);
    match cfg.qk_norm() {
        // Its rows cannot be distinguished from the rows of queries.
        _ if gate == Some(GateLayout::FusedWithQuery) => {}
        _ if gate.is_some() => assert!(inferred.is_err(), "{what}: a gate has no shape"),
        Some(_) => assert!(inferred.is_err(), "{what}: a norm has no shape"),
        // Packed rows tell the width of a head by the output projection, if keys and values are of one width.
        None if packed && (!cfg.out_proj() || cfg.value_head_dim() != cfg.head_dim()) => {}
        None => {
            let opened = weights::open(path, DType::F32, &DEVICE)?;
            assert_eq!(bits(&MultiHeadAttention::load(&inferred?, layout, opened)?)?, expected, "{what}");
        }
    }
    Ok(())
}
