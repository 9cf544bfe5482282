//! Files are read a tensor at a time: what changes them afterwards is an error; float8 comes with its scales.

use std::collections::HashMap;

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Device, Result, Tensor};
use proptest::prelude::*;

use crate::common::{assert_close, error_text, models};
use crate::{DEVICE, wave, wave_on};

#[test]
fn file_truncated_after_opening_is_rejected() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for file in ["model.safetensors", "model.pth"] {
        let path = folder.path().join(file);
        std::fs::copy(models().join("book_mha").join(file), &path)?;
        let checkpoint = Checkpoint::open(&path)?;
        let vb = weights::open(&path, DType::F32, &DEVICE)?;
        std::fs::OpenOptions::new().write(true).open(&path)?.set_len(100)?;
        for (name, shape) in checkpoint.shapes() {
            let error = error_text(vb.get(shape, name));
            let expected = format!("{} ends before the tensor does; it was whole when it was opened", path.display());
            assert_eq!(error, format!("[weights] {expected}"), "{name}");
        }
        std::fs::remove_file(&path)?;
        assert!(error_text(vb.get_unchecked("W_query.weight")).starts_with("[weights] cannot read "));
    }
    Ok(())
}

/// Reads tensors with more elements than are converted at once, in every dtype and from each kind of builder.
#[test]
fn large_tensors_are_read_whole_and_equal_mapped_ones() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let large = wave(0.61, (1031, 1021))?;
    let in_half = |dtype| large.to_dtype(dtype);
    let tensors = [
        ("f32", large.clone()),
        ("bf16", in_half(DType::BF16)?),
        ("f16", in_half(DType::F16)?),
        ("none", large.narrow(0, 0, 0)?),
    ];
    candle_core::safetensors::save(&HashMap::from(tensors.clone()), &path)?;
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        if dtype == DType::F64 && DEVICE.is_metal() {
            let refused = weights::open(&path, dtype, &DEVICE)?.get((1031, 1021), "f32");
            assert_eq!(error_text(refused), "f32 is read as F64, expected F32, F16 or BF16 on Metal");
            continue;
        }
        let read = weights::open(&path, dtype, &DEVICE)?;
        // SAFETY: nobody changes the file of this test.
        let mapped = unsafe { weights::open_mmaped(&path, dtype, &DEVICE)? };
        for (name, stored) in &tensors {
            let tensor = read.get(stored.dims(), name)?;
            assert_close(&tensor, &stored.to_dtype(dtype)?, 0.0, name);
            assert_close(&tensor, &mapped.get(stored.dims(), name)?, 0.0, name);
        }
    }
    // SAFETY: as above.
    let pth = unsafe { weights::open_mmaped(models().join("book_mha/model.pth"), DType::F32, &DEVICE)? };
    assert_eq!(WeightLayout::detect(&pth)?, WeightLayout::Book);
    Ok(())
}

#[test]
fn float8_weights_are_multiplied_by_their_scales() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let weight = wave_on(&Device::Cpu, 0.61, (300, 260))?.to_dtype(DType::F8E4M3)?;
    let exact = weight.to_dtype(DType::F32)?;
    let rows = (wave_on(&Device::Cpu, 0.61, (300, 1))? + 1.5)?;
    let blocks = (wave_on(&Device::Cpu, 0.61, (3, 3))? + 1.5)?;
    let scalar = Tensor::new(0.37f32, &Device::Cpu)?;
    let rounded = scalar.reshape(1)?.to_dtype(DType::BF16)?;
    let index = |len: u32| Tensor::from_iter((0..len).map(|i| i / 128), &Device::Cpu);
    let of_blocks = blocks.index_select(&index(300)?, 0)?.index_select(&index(260)?, 1)?;
    let scaled = [
        ("number", "weight_scale", scalar.clone(), exact.broadcast_mul(&scalar)?),
        ("inverse", "weight_scale_inv", rounded.clone(), exact.broadcast_mul(&rounded.to_dtype(DType::F32)?)?),
        ("rows", "weight_scale", rows.clone(), exact.broadcast_mul(&rows)?),
        ("flat_rows", "weight_scale", rows.flatten_all()?, exact.broadcast_mul(&rows)?),
        ("blocks", "weight_scale_inv", blocks, (&exact * of_blocks)?),
    ];
    let mut stored = HashMap::from([
        ("none.weight".to_string(), weight.clone()),
        ("other.weight".to_string(), weight.clone()),
        ("other.weight_scale".to_string(), wave_on(&Device::Cpu, 0.61, (2, 2))?),
        ("plain.weight".to_string(), exact.clone()),
        ("plain.weight_scale".to_string(), scalar),
    ]);
    for (name, kind, scale, _) in &scaled {
        stored.insert(format!("{name}.weight"), weight.clone());
        stored.insert(format!("{name}.{kind}"), scale.clone());
    }
    // More elements than are converted at once.
    let tall = wave_on(&Device::Cpu, 0.61, (4100, 260))?.to_dtype(DType::F8E4M3)?;
    let scale = (wave_on(&Device::Cpu, 0.61, (4100, 1))? + 1.5)?;
    stored.insert("tall.weight".into(), tall.clone());
    stored.insert("tall.weight_scale".into(), scale.clone());
    candle_core::safetensors::save(&stored, &path)?;
    let found = weights::open(&path, DType::F32, &DEVICE)?.get((4100, 260), "tall.weight")?.narrow(0, 4090, 10)?;
    let last_rows = tall.to_dtype(DType::F32)?.broadcast_mul(&scale)?.narrow(0, 4090, 10)?;
    assert_close(&found, &last_rows, 0.0, "the last rows of a tall weight");
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        // SAFETY: nobody changes the file of this test.
        let mapped = unsafe { weights::open_mmaped(&path, dtype, &DEVICE)? };
        for vb in [weights::open(&path, dtype, &DEVICE)?, mapped] {
            let cases = scaled.iter().map(|(name, _, _, product)| (*name, product));
            for (name, expected) in cases.chain([("plain", &exact)]) {
                let got = vb.pp(name).get((300, 260), "weight")?;
                assert_close(&got, &expected.to_dtype(dtype)?, 0.0, &format!("{name} as {dtype:?}"));
            }
            assert!(vb.contains_tensor("plain.weight_scale") && !vb.contains_tensor("blocks.weight_scale_inv"));
            assert_eq!(
                error_text(vb.get((300, 260), "none.weight")),
                "none.weight is float8, and the file has no none.weight_scale_inv or none.weight_scale for it; a \
                 builder of F8E4M3 returns weights as stored"
            );
            assert_eq!(
                error_text(vb.get((300, 260), "other.weight")),
                "other.weight is float8 of shape [300, 260] and other.weight_scale has shape [2, 2], expected one \
                 number, one for each row, or one for each block of 128 by 128"
            );
        }
    }
    let raw = weights::open(&path, DType::F8E4M3, &DEVICE)?.get((300, 260), "none.weight")?;
    assert_eq!(raw.dtype(), DType::F8E4M3);
    assert_close(&raw.to_device(&Device::Cpu)?.to_dtype(DType::F32)?, &exact, 0.0, "as it is stored");
    Ok(())
}

/// Reads weights of experts, which are parameters of another name with several matrices.
#[test]
fn float8_experts_are_multiplied_by_the_scales_of_their_matrices() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let weight = wave_on(&Device::Cpu, 0.61, (2, 130, 4))?.to_dtype(DType::F8E4M3)?;
    let scales = (wave_on(&Device::Cpu, 0.37, (2, 2, 1))? + 1.5)?;
    let tensors = HashMap::from([
        ("experts.gate_up_proj", weight.clone()),
        ("experts.gate_up_proj_scale_inv", scales.clone()),
        ("experts.down_proj", weight.clone()),
        ("experts.down_proj_scale", scales.narrow(1, 0, 1)?.flatten_all()?),
    ]);
    candle_core::safetensors::save(&tensors, &path)?;
    let index = Tensor::from_iter((0..130u32).map(|row| row / 128), &Device::Cpu)?;
    let exact = weight.to_dtype(DType::F32)?;
    let vb = weights::open(&path, DType::F32, &DEVICE)?.pp("experts");
    let of_blocks = exact.broadcast_mul(&scales.index_select(&index, 1)?)?;
    assert_close(&vb.get((2, 130, 4), "gate_up_proj")?, &of_blocks, 0.0, "blocks of rows");
    let of_matrices = exact.broadcast_mul(&scales.narrow(1, 0, 1)?)?;
    assert_close(&vb.get((2, 130, 4), "down_proj")?, &of_matrices, 0.0, "matrices");
    assert!(!vb.contains_tensor("gate_up_proj_scale_inv"));
    Ok(())
}

#[test]
fn float8_without_a_fraction_is_refused_with_the_name_of_its_tensor() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    for dtype in ["F8_E5M2", "F8_E8M0"] {
        let header = format!(r#"{{"attn.q_proj.weight":{{"dtype":"{dtype}","shape":[2,2],"data_offsets":[0,4]}}}}"#);
        let len = (header.len() as u64).to_le_bytes();
        std::fs::write(&path, [&len[..], header.as_bytes(), &[0; 4]].concat())?;
        // SAFETY: nobody changes the file of this test.
        let mapped = unsafe { weights::open_mmaped(&path, DType::F32, &DEVICE)? };
        for vb in [weights::open(&path, DType::F32, &DEVICE)?, mapped] {
            let expected = format!("attn.q_proj.weight: unsupported safetensors dtype {dtype}");
            assert_eq!(error_text(vb.get((2, 2), "attn.q_proj.weight")), expected);
            let cfg = MultiHeadAttentionConfig::new(2, 1);
            let text = error_text(MultiHeadAttention::new(&cfg, vb.pp("attn")));
            assert_eq!(text, format!("[multi_head_attention] {expected} (layout canonical)"));
        }
    }
    Ok(())
}

#[test]
fn names_with_slashes_are_read_with_dots() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let named = |name: &str, step| Ok::<_, candle_core::Error>((name.to_string(), wave(step, (2, 2))?));
    let tensors = HashMap::from([named("a/b/kernel", 0.1)?, named("c/d", 0.2)?, named("c.d", 0.3)?]);
    candle_core::safetensors::save(&tensors, &path)?;
    let checkpoint = Checkpoint::open(&path)?;
    assert_eq!(checkpoint.shapes().map(|(name, _)| name).collect::<Vec<_>>(), ["a.b.kernel", "c.d", "c/d"]);
    // SAFETY: nobody changes the file of this test.
    let mapped = unsafe { weights::open_mmaped(&path, DType::F32, &DEVICE)? };
    for vb in [weights::open(&path, DType::F32, &DEVICE)?, mapped] {
        assert_close(&vb.pp("a").pp("b").get((2, 2), "kernel")?, &tensors["a/b/kernel"], 0.0, "by its prefix");
        assert_close(&vb.get((2, 2), "a/b/kernel")?, &tensors["a/b/kernel"], 0.0, "by its name");
        assert_close(&vb.get((2, 2), "c/d")?, &tensors["c/d"], 0.0, "beside the same name with a dot");
        assert_close(&vb.get((2, 2), "c.d")?, &tensors["c.d"], 0.0, "a name with a dot");
    }
    Ok(())
}

/// Reads a file of one layer by the prefix that its checkpoint lists, which is "".
#[test]
fn layer_alone_in_a_file_loads_below_its_listed_prefix() -> Result<()> {
    let path = models().join("gqa_48/model.safetensors");
    let checkpoint = Checkpoint::open(&path)?;
    let [prefix] = &checkpoint.attention_layers()[..] else { panic!("expected one layer") };
    let layout = checkpoint.detect(prefix)?;
    let cfg = checkpoint.infer_config(prefix, layout, Some(4))?;
    let root = weights::open(&path, DType::F32, &DEVICE)?;
    let xs = wave(0.37, (2, 5, 48))?;
    let expected = MultiHeadAttention::load(&cfg, layout, root.clone())?.forward(&xs)?;
    // SAFETY: nobody changes the file of this test.
    let mapped = unsafe { weights::open_mmaped(&path, DType::F32, &DEVICE)? };
    for vb in [root.pp(prefix), mapped.pp(prefix)] {
        assert_eq!(WeightLayout::detect(&vb)?, layout);
        let found = MultiHeadAttention::load(&cfg, layout, vb)?.forward(&xs)?;
        assert_close(&found, &expected, 0.0, "below the prefix");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Draws prefixes with empty parts, for plain tensors and for float8 with its scale.
    #[test]
    fn empty_prefixes_of_a_builder_change_no_tensor(
        prefixes in proptest::collection::vec("(a|b)?", 0..5),
        is_float8 in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let parts: Vec<_> = prefixes.iter().filter(|part| !part.is_empty()).map(String::as_str).collect();
        let name = [parts.as_slice(), &["weight"]].concat().join(".");
        let weight = wave_on(&Device::Cpu, 0.61, (3, 2)).unwrap();
        let mut tensors = HashMap::from([(name.clone(), weight.clone())]);
        let mut expected = weight.clone();
        if is_float8 {
            let stored = weight.to_dtype(DType::F8E4M3).unwrap();
            expected = (stored.to_dtype(DType::F32).unwrap() * 0.5).unwrap();
            tensors.insert(format!("{name}_scale"), Tensor::new(0.5f32, &Device::Cpu).unwrap());
            tensors.insert(name, stored);
        }
        candle_core::safetensors::save(&tensors, &path).unwrap();
        let mut vb = weights::open(&path, DType::F32, &DEVICE).unwrap();
        for prefix in &prefixes {
            vb = vb.pp(prefix);
        }
        prop_assert!(vb.contains_tensor("weight") && !vb.contains_tensor("weight_scale"));
        assert_close(&vb.get((3, 2), "weight").unwrap(), &expected, 0.0, "the weight");
        assert_close(&vb.get_unchecked("weight").unwrap(), &expected, 0.0, "the weight");
        prop_assert!(!vb.contains_tensor("bias"));
    }
}

#[test]
fn layer_of_bert_given_to_new_is_refused_with_its_layout() -> Result<()> {
    let cfg = MultiHeadAttentionConfig::new(8, 2);
    let tensors = crate::invented(&cfg, WeightLayout::Bert)?.state_dict(WeightLayout::Bert)?;
    let text = error_text(crate::load(&cfg, WeightLayout::Canonical, &tensors));
    assert!(text.contains("q_proj.weight is missing") && text.contains("have the layout `bert`"), "{text}");
    Ok(())
}
