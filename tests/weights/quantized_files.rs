//! Checkpoints that quantising libraries wrote, with the libraries' own dequantised weights. The scripts in
//! `crates/compare/conformance/quantized` write them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{WeightLayout, hf};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use serde::Deserialize;
use serde_json::Value;

use crate::common::assert_near;
use crate::{DEVICE, wave};

const LAYER: &str = "model.layers.0.self_attn";

/// A folder that a library wrote.
struct Case {
    name: String,
    folder: PathBuf,
    config: Value,
    /// The dequantised weights.
    want: BTreeMap<String, Want>,
}

/// A dequantised weight, in f32.
#[derive(Deserialize)]
struct Want {
    shape: Vec<usize>,
    first: Vec<f32>,
    /// The FNV-1a hash of its bytes.
    fnv1a: String,
}

fn cases() -> Result<Vec<Case>> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("weights/quantized");
    let mut cases = Vec::new();
    for entry in fs::read_dir(all)? {
        let folder = entry?.path();
        let config = serde_json::from_slice(&fs::read(folder.join("config.json"))?).expect("a config");
        let want = serde_json::from_slice(&fs::read(folder.join("want.json"))?).expect("dequantised weights");
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        cases.push(Case { name, folder, config, want });
    }
    assert!(!cases.is_empty());
    Ok(cases)
}

/// Returns the FNV-1a hash of the bytes of a tensor.
fn fnv1a(tensor: &Tensor) -> Result<String> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in tensor.flatten_all()?.to_vec1::<f32>()?.iter().flat_map(|number| number.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    Ok(format!("{hash:016x}"))
}

#[test]
fn quantized_weights_have_the_bits_of_their_library() -> Result<()> {
    for case in cases()? {
        let vb = weights::open(&case.folder, DType::F32, &DEVICE)?;
        for (name, want) in &case.want {
            let got = vb.get(want.shape.as_slice(), name)?;
            let first = got.flatten_all()?.narrow(0, 0, want.first.len())?.to_vec1::<f32>()?;
            assert_eq!(first, want.first, "{}, {name}", case.name);
            assert_eq!(fnv1a(&got)?, want.fnv1a, "{}, {name}", case.name);
        }
    }
    Ok(())
}

#[test]
fn quantized_attention_layers_compute_as_with_dequantized_weights() -> Result<()> {
    for case in cases()? {
        let open = || weights::open(&case.folder, DType::F32, &DEVICE);
        let layer = hf::load_attention(&case.config, 0, open()?)?;
        // Tensors that are not quantised, such as biases, are as stored.
        let mut tensors = HashMap::new();
        let checkpoint = Checkpoint::open(&case.folder)?;
        for (name, shape) in checkpoint.shapes().filter(|(name, _)| name.ends_with("bias")) {
            tensors.insert(name.to_string(), open()?.get(shape, name)?);
        }
        for (name, want) in &case.want {
            tensors.insert(name.clone(), open()?.get(want.shape.as_slice(), name)?);
        }
        let mut config = case.config.clone();
        config.as_object_mut().expect("an object").retain(|key, _| !key.starts_with("quantization"));
        let plain = hf::load_attention(&config, 0, VarBuilder::from_tensors(tensors, DType::F32, &DEVICE))?;
        let xs = wave(0.61, (2, 5, plain.config().embed_dim()))?;
        assert_near(&layer.forward(&xs)?, &plain.forward(&xs)?, 1e-5, &case.name);
    }
    Ok(())
}

#[test]
fn layouts_and_shapes_of_quantized_layers_are_found() -> Result<()> {
    for case in cases()? {
        let checkpoint = Checkpoint::open(&case.folder)?;
        assert_eq!(checkpoint.attention_layers(), [LAYER], "{}", case.name);
        assert_eq!(checkpoint.detect(LAYER)?, WeightLayout::Canonical, "{}", case.name);
        let inferred = checkpoint.infer_config(LAYER, WeightLayout::Canonical, Some(4))?;
        let expected = case.config["hidden_size"].as_u64().map(|dim| (dim as usize, 2));
        assert_eq!(Some((inferred.embed_dim(), inferred.num_kv_heads())), expected, "{}", case.name);
    }
    Ok(())
}
