//! `.pth` files of `torch.save`, against the same tensors in safetensors; `tests/data/make.py` makes both.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

use crate::DEVICE;
use crate::common::{assert_close, error_text, models, recorded};

fn data(name: &str) -> PathBuf {
    recorded("data").join(name)
}

/// Returns the tensors of a file as `plain.safetensors` has them.
fn plain(file: &str) -> Result<HashMap<String, Tensor>> {
    let all = candle_core::safetensors::load(data("plain.safetensors"), &Device::Cpu)?;
    let of_file =
        |(name, tensor): (String, Tensor)| Some((name.strip_prefix(&format!("{file}."))?.to_string(), tensor));
    Ok(all.into_iter().filter_map(of_file).collect())
}

#[test]
fn pth_views_of_every_dtype_match_pytorch() -> Result<()> {
    for (file, count) in [("views", 9), ("kinds", 12), ("nested", 9)] {
        let tensors = plain(file)?;
        assert_eq!(tensors.len(), count, "{file}");
        let checkpoint = Checkpoint::open(data(&format!("{file}.pth")))?;
        let shapes: HashMap<_, _> =
            checkpoint.shapes().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect();
        assert_eq!(shapes.len(), tensors.len(), "{file} has tensors beside those: {shapes:?}");
        // Every value of the other dtypes is exact in f64.
        let vb = checkpoint.var_builder(DType::F64, &Device::Cpu)?;
        for (name, tensor) in tensors {
            let what = format!("{file}, {name}");
            assert_eq!(shapes[&name], tensor.dims(), "{what}");
            let expected = tensor.to_dtype(DType::F64)?;
            assert_close(&vb.get(tensor.dims(), &name)?, &expected, 0.0, &what);
            assert_close(&vb.get_unchecked(&name)?, &expected, 0.0, &what);
            assert!(vb.contains_tensor(&name) && !vb.contains_tensor(&format!("{name}_")));
        }
    }
    Ok(())
}

/// Reads `views.pth`, which contains the layer alone, and `nested.pth`, which is `torch.save({"model_state_dict":
/// model.state_dict(), "optimizer_state_dict": ..., "epoch": ...}, path)`.
#[test]
fn pth_layer_in_views_or_nested_dict_is_loaded() -> Result<()> {
    let book = MultiHeadAttentionConfig::new(4, 2).with_bias(true).with_causal(true).with_context_length(6);
    let xs = (Tensor::arange(0f32, 24f32, &DEVICE)?.reshape((2, 3, 4))? / 16.0)?;
    let output = |vb| MultiHeadAttention::load(&book, WeightLayout::Book, vb)?.forward(&xs);
    let expected = output(VarBuilder::from_tensors(plain("views")?, DType::F32, &DEVICE))?;
    for (file, prefix) in [("views.pth", ""), ("nested.pth", "model_state_dict.blocks.0.att")] {
        let checkpoint = Checkpoint::open(data(file))?;
        assert_eq!(checkpoint.attention_layers(), [prefix]);
        assert_eq!(checkpoint.detect(prefix)?, WeightLayout::Book);
        let vb = weights::open(data(file), DType::F32, &DEVICE)?;
        let vb = if prefix.is_empty() { vb } else { vb.pp(prefix) };
        assert_eq!(WeightLayout::detect(&vb)?, WeightLayout::Book);
        assert_close(&output(vb)?, &expected, 1e-6, file);
    }
    let views = Checkpoint::open(data("views.pth"))?;
    assert_eq!(views.infer_config("", WeightLayout::Book, Some(2))?.context_length(), Some(6));
    Ok(())
}

#[test]
fn pth_file_in_folder_is_a_checkpoint() -> Result<()> {
    for file in ["pytorch_model.bin", "model.pth"] {
        let folder = tempfile::tempdir()?;
        std::fs::copy(models().join("book_mha/model.pth"), folder.path().join(file))?;
        let zip = Checkpoint::open(folder.path())?;
        let safetensors = Checkpoint::open(models().join("book_mha"))?;
        assert_eq!(zip.shapes().collect::<Vec<_>>(), safetensors.shapes().collect::<Vec<_>>(), "{file}");
        let ours = zip.var_builder(DType::F32, &DEVICE)?;
        let theirs = safetensors.var_builder(DType::F32, &DEVICE)?;
        for (name, shape) in safetensors.shapes() {
            assert_close(&ours.get(shape, name)?, &theirs.get(shape, name)?, 0.0, name);
        }
    }
    Ok(())
}

/// Checks the rows of c_attn, which are by projection in nanoGPT and by head in GPT-BigCode.
#[test]
fn pth_arguments_of_nanogpt_decide_order_of_rows() -> Result<()> {
    let prefix = "model._orig_mod.transformer.h.0.attn";
    let checkpoint = Checkpoint::open(data("nanogpt.pth"))?;
    assert_eq!(checkpoint.attention_layers(), [prefix]);
    let layout = checkpoint.detect(prefix)?;
    assert_eq!(layout.to_string(), "packed:c_attn");
    let cfg = checkpoint.infer_config(prefix, layout, None)?;
    assert_eq!((cfg.num_heads(), cfg.num_kv_heads(), cfg.embed_dim()), (2, 2, 8));
    assert_eq!([cfg.q_bias(), cfg.k_bias(), cfg.v_bias()], [false; 3]);
    let vb = checkpoint.var_builder(DType::F32, &DEVICE)?.pp(prefix);
    let (_, k, ..) = MultiHeadAttention::load(&cfg, layout, vb.clone())?.projections()?;
    assert_close(k.weight(), &vb.get((24, 8), "c_attn.weight")?.narrow(0, 8, 8)?, 0.0, "the keys");

    // A state dict alone says nothing.
    let error = error_text(WeightLayout::detect(&vb));
    assert!(error.contains("`packed:c_attn` (nanoGPT) or as `packed:c_attn:by-head` (GPT-BigCode)"), "{error}");
    Ok(())
}
