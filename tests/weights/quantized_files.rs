//! Checkpoints that quantising libraries wrote, with the libraries' own dequantised weights. The scripts in
//! `crates/compare/conformance/quantized` write them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{WeightLayout, hf};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde_json::{Value, json};

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

/// Checks that scales of activations and of caches are not tensors of a checkpoint with float8.
#[test]
fn scales_that_have_no_use_are_passed_over() -> Result<()> {
    let mut seen = 0;
    for case in cases()? {
        let stored = fs::read(case.folder.join("model.safetensors"))?;
        let has = |name: &str| stored.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        let unused = ["input_scale", "scale_input", "input_scale_ub", "self_attn.k_scale", "self_attn.v_scale"];
        if !unused.iter().any(|name| has(name)) {
            continue;
        }
        seen += 1;
        for (name, _) in Checkpoint::open(&case.folder)?.shapes() {
            assert!(unused.iter().all(|unused| !name.ends_with(unused)), "{}: {name}", case.name);
        }
    }
    assert!(seen >= 4);
    Ok(())
}

/// Writes tensors of a file into two files, one after the other in turn, with an index.
fn write_shards(from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from)?;
    let tensors = SafeTensors::deserialize(&bytes)?;
    let mut index = BTreeMap::new();
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    for (first, file) in files.iter().enumerate() {
        let own: Vec<_> = tensors.iter().skip(first).step_by(2).collect();
        index.extend(own.iter().map(|(name, _)| (name.to_string(), *file)));
        safetensors::serialize_to_file(own, None, &to.join(file))?;
    }
    fs::write(to.join("model.safetensors.index.json"), json!({"weight_map": index}).to_string())?;
    Ok(())
}

/// Checks layers whose tensors are in several files.
#[test]
fn quantized_layers_across_shards_have_the_bits_of_one_file() -> Result<()> {
    for name in ["mlx_mixed", "bnb_nf4_double", "fp8_blocks_of_32"] {
        let case = cases()?.into_iter().find(|case| case.name == name).expect("a folder");
        let folder = tempfile::tempdir()?;
        write_shards(&case.folder.join("model.safetensors"), folder.path())?;
        fs::copy(case.folder.join("config.json"), folder.path().join("config.json"))?;
        let vb = weights::open(folder.path(), DType::F32, &DEVICE)?;
        for (tensor, want) in &case.want {
            assert_eq!(fnv1a(&vb.get(want.shape.as_slice(), tensor)?)?, want.fnv1a, "{name}, {tensor}");
        }
    }
    Ok(())
}

/// Checks a model of which MLX quantised the projections and stores the norms as 1 + w.
#[test]
fn norms_next_to_quantized_layers_of_mlx_are_as_in_pytorch() -> Result<()> {
    let case = cases()?.into_iter().find(|case| case.name == "mlx_4_bits").expect("a folder");
    let bytes = fs::read(case.folder.join("model.safetensors"))?;
    let stored = SafeTensors::deserialize(&bytes)?;
    let norm: Vec<u8> = [1.5f32, 0.25].iter().flat_map(|number| number.to_le_bytes()).collect();
    let mut tensors: Vec<_> = stored.tensors();
    tensors.push((format!("{LAYER}.q_norm.weight"), TensorView::new(Dtype::F32, vec![2], &norm)?));
    let folder = tempfile::tempdir()?;
    let header = HashMap::from([("format".to_string(), "mlx".to_string())]);
    safetensors::serialize_to_file(tensors, Some(header), &folder.path().join("model.safetensors"))?;
    let mut config = case.config.clone();
    config["model_type"] = json!("qwen3_next");
    fs::write(folder.path().join("config.json"), config.to_string())?;
    let vb = weights::open(folder.path(), DType::F32, &DEVICE)?;
    assert_eq!(vb.get(2, &format!("{LAYER}.q_norm.weight"))?.to_vec1::<f32>()?, [0.5, -0.75]);
    for (name, want) in &case.want {
        assert_eq!(fnv1a(&vb.get(want.shape.as_slice(), name)?)?, want.fnv1a, "{name}");
    }
    Ok(())
}

/// Reads floats of 8 bits as they are stored, for a builder of their dtype.
#[test]
fn float8_weights_are_returned_as_stored_to_a_builder_of_float8() -> Result<()> {
    let case = cases()?.into_iter().find(|case| case.name == "fp8_rows").expect("a folder");
    let name = format!("{LAYER}.q_proj.weight");
    let raw = weights::open(&case.folder, DType::F8E4M3, &DEVICE)?.get((64, 64), &name)?;
    assert_eq!(raw.dtype(), DType::F8E4M3);
    let bytes = fs::read(case.folder.join("model.safetensors"))?;
    let tensors = SafeTensors::deserialize(&bytes)?;
    let scales = tensors.tensor(&format!("{name}_scale"))?;
    let scales = Tensor::from_raw_buffer(scales.data(), DType::F32, scales.shape(), &Device::Cpu)?;
    // Metal converts no floats of 8 bits.
    let scaled = raw.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.broadcast_mul(&scales)?;
    assert_eq!(fnv1a(&scaled)?, case.want[&name].fnv1a);
    Ok(())
}

/// A tensor of a file, changed.
struct Changed {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Returns the tensor as bytes, as whole numbers, without elements, with other numbers, and with a row less or more.
fn changes(tensor: &TensorView) -> Vec<Changed> {
    let data = tensor.data();
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    let words = data.len() / 4;
    let mut all = vec![
        Changed { dtype: Dtype::U8, shape: vec![data.len()], bytes: data.to_vec() },
        Changed { dtype: Dtype::I32, shape: vec![words], bytes: data[..words * 4].to_vec() },
        Changed { dtype: Dtype::F32, shape: vec![0, 7], bytes: Vec::new() },
        Changed { dtype, shape: shape.clone(), bytes: vec![0xff; data.len()] },
        Changed { dtype, shape: shape.clone(), bytes: vec![0; data.len()] },
    ];
    if let [rows, rest @ ..] = shape.as_slice()
        && *rows > 1
    {
        let row = data.len() / rows;
        let of_rows = |count| [&[count], rest].concat();
        all.push(Changed { dtype, shape: of_rows(rows - 1), bytes: data[row..].to_vec() });
        all.push(Changed { dtype, shape: of_rows(rows + 1), bytes: [data, &data[..row]].concat() });
    }
    all
}

/// Changes each tensor of a layer in turn: reading it is an error, or returns a weight of the shape that is listed.
#[test]
fn quantized_layers_with_a_changed_tensor_are_read_or_are_errors() -> Result<()> {
    let weight = format!("{LAYER}.q_proj.weight");
    for case in cases()? {
        let file = fs::read(case.folder.join("model.safetensors"))?;
        let (_, header) = SafeTensors::read_metadata(&file)?;
        let stored = SafeTensors::deserialize(&file)?;
        let own: Vec<_> = stored.tensors().into_iter().filter(|(name, _)| name.contains(".q_proj.")).collect();
        let folder = tempfile::tempdir()?;
        fs::copy(case.folder.join("config.json"), folder.path().join("config.json"))?;
        for (name, tensor) in &own {
            let others = || own.iter().filter(|(other, _)| other != name).cloned();
            let changed = changes(tensor);
            let mut files: Vec<Vec<_>> = vec![others().collect()];
            for Changed { dtype, shape, bytes } in &changed {
                let view = TensorView::new(*dtype, shape.clone(), bytes)?;
                files.push(others().chain([(name.clone(), view)]).collect());
            }
            for tensors in files {
                let texts = header.metadata().clone();
                safetensors::serialize_to_file(tensors, texts, &folder.path().join("model.safetensors"))?;
                let checkpoint = Checkpoint::open(folder.path())?;
                let listed = checkpoint.shapes().find(|(listed, _)| *listed == weight).map(|(_, shape)| shape.to_vec());
                let vb = checkpoint.var_builder(DType::F32, &DEVICE)?;
                if let (Some(shape), Ok(read)) = (listed, vb.get_unchecked(&weight)) {
                    assert_eq!(read.dims(), shape, "{}, {name}", case.name);
                }
            }
        }
    }
    Ok(())
}
