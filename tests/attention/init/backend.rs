//! `TorchSeed` as the backend of a `VarBuilder`.

use candle_nn::Init;
use candle_nn::init::{DEFAULT_KAIMING_NORMAL, DEFAULT_KAIMING_UNIFORM, FanInOut, NonLinearity, NormalOrUniform};
use candle_nn::var_builder::SimpleBackend;

use super::{STANDARD_NORMAL, sha256};
use crate::*;

fn kaiming(dist: NormalOrUniform, fan: FanInOut, non_linearity: NonLinearity) -> Init {
    Init::Kaiming { dist, fan, non_linearity }
}

#[test]
fn torch_seed_hints_match_initialisers_of_pytorch() -> Result<()> {
    // Each hash: torch.manual_seed(9), then the call in the comment, hashed as above, and the beginning of the hash.
    for (hint, shape, expected) in [
        // torch.empty(1000).uniform_(1e6, 1e6 + 1): values that round up to the bound
        (Init::Uniform { lo: 1e6, up: 1e6 + 1.0 }, vec![1000], "fc5e5ab42b8e8935"),
        // torch.empty(1000).uniform_(1e-10, 1)
        (Init::Uniform { lo: 1e-10, up: 1.0 }, vec![1000], "92586decbb21b831"),
        // torch.empty(1000).uniform_(100, 200): one rounding or two make a difference
        (Init::Uniform { lo: 100.0, up: 200.0 }, vec![1000], "ca9fcfc885da77ee"),
        // torch.empty(1000).normal_(0.3, 0.02)
        (Init::Randn { mean: 0.3, stdev: 0.02 }, vec![1000], "5b57b58e8bcc2575"),
        // torch.empty(5).normal_(0.3, 0.02)
        (Init::Randn { mean: 0.3, stdev: 0.02 }, vec![5], "5fa3dc09ec37f383"),
        // torch.nn.init.kaiming_uniform_(torch.empty(7, 9), nonlinearity='relu')
        (kaiming(NormalOrUniform::Uniform, FanInOut::FanIn, NonLinearity::ReLU), vec![7, 9], "ab67f460b0388646"),
        // torch.nn.init.kaiming_normal_(torch.empty(7, 9), mode='fan_out', nonlinearity='tanh')
        (kaiming(NormalOrUniform::Normal, FanInOut::FanOut, NonLinearity::Tanh), vec![7, 9], "1ea7c6b7c32fbcbf"),
        // torch.nn.Conv2d(3, 4, 5, bias=False).weight
        (DEFAULT_KAIMING_NORMAL, vec![4, 3, 5, 5], "9a0a162c70c02eab"),
    ] {
        let drawn = TorchSeed::new(9).var_builder(DType::F32, &CPU).get_with_hints(shape, "w", hint)?;
        assert!(sha256(&drawn)?.starts_with(expected), "{hint:?}");
    }
    Ok(())
}

#[test]
fn torch_seed_advances_for_equal_bounds_and_not_for_constants() -> Result<()> {
    let draws = TorchSeed::new(3).rand(8)?.to_vec1::<f32>()?;
    let seed = TorchSeed::new(3);
    let vb = seed.var_builder(DType::F32, &CPU);
    let zeros = vb.get_with_hints(5, "bias", Init::Uniform { lo: 0.0, up: 0.0 })?;
    assert_eq!(zeros.to_vec1::<f32>()?, [0.0; 5]);
    assert_eq!(vb.get_with_hints(2, "gain", Init::Const(1.5))?.to_vec1::<f32>()?, [1.5; 2]);
    assert_eq!(vb.get_with_hints((0, 4), "none", STANDARD_NORMAL)?.dims(), [0, 4]);
    assert_eq!(seed.rand(3)?.to_vec1::<f32>()?, draws[5..]);
    Ok(())
}

#[test]
fn torch_seed_draws_each_name_once() -> Result<()> {
    let seed = TorchSeed::new(1);
    let vb = seed.var_builder(DType::F32, &CPU);
    let embedding = candle_nn::embedding(7, 4, vb.pp("wte"))?;
    let tied = vb.pp("wte").get((7, 4), "weight")?;
    assert_eq!(tied.id(), embedding.embeddings().id());

    // Another dtype in between changes nothing about the draw.
    let half = vb.to_dtype(DType::BF16).get((7, 4), "wte.weight")?;
    assert_eq!(half.to_vec2::<half::bf16>()?, tied.to_dtype(DType::BF16)?.to_vec2::<half::bf16>()?);
    assert_eq!(vb.get((7, 4), "wte.weight")?.to_vec2::<f32>()?, tied.to_vec2::<f32>()?);
    // Another shape is an error with both.
    let error = error_text(vb.get((4, 7), "wte.weight"));
    let parts = ["[torch_seed]", "`wte.weight`", "[7, 4]", "[4, 7]"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");

    let fresh = TorchSeed::new(1);
    fresh.randn((7, 4))?;
    assert_eq!(seed.rand(4)?.to_vec1::<f32>()?, fresh.rand(4)?.to_vec1::<f32>()?);
    Ok(())
}

#[test]
fn torch_seed_parameters_have_dtype_of_builder() -> Result<()> {
    let expected = TorchSeed::new(1).randn((4, 5))?;
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let vb = TorchSeed::new(1).var_builder(dtype, &CPU);
        let drawn = vb.get_with_hints((4, 5), "w", STANDARD_NORMAL)?;
        assert_eq!((drawn.dtype(), drawn.device().is_cpu()), (dtype, true));
        let difference = drawn.to_dtype(DType::F64)?.sub(&expected.to_dtype(dtype)?.to_dtype(DType::F64)?)?;
        assert_eq!(difference.abs()?.sum_all()?.to_scalar::<f64>()?, 0.0, "{dtype:?}");
    }
    let vb = TorchSeed::new(1).var_builder(DType::U8, &CPU);
    let error = error_text(vb.get_with_hints(4, "w", STANDARD_NORMAL));
    assert!(error.contains("[torch_seed] parameter `w`") && error.contains("U8"), "{error}");
    Ok(())
}

#[test]
fn torch_seed_contains_only_names_that_were_drawn() -> Result<()> {
    let seed = TorchSeed::new(1);
    let vb = seed.var_builder(DType::F64, &CPU);
    assert!(!vb.contains_tensor("w"));
    let error = error_text(vb.get_unchecked("w"));
    assert!(error.contains("[torch_seed] parameter `w`") && error.contains("shape"), "{error}");

    let drawn = vb.get_with_hints(3, "w", STANDARD_NORMAL)?;
    assert!(vb.contains_tensor("w") && seed.contains_tensor("w") && !vb.pp("a").contains_tensor("w"));
    assert_eq!(vb.get_unchecked("w")?.id(), drawn.id());
    assert_eq!(seed.get_unchecked("w", DType::F32, &CPU)?.dtype(), DType::F32);
    Ok(())
}

#[test]
fn torch_seed_rejects_invalid_hints_without_drawing() -> Result<()> {
    let seed = TorchSeed::new(1);
    let vb = seed.var_builder(DType::F32, &CPU);
    for hint in [
        Init::Uniform { lo: 2.0, up: 1.0 },
        Init::Uniform { lo: f64::NAN, up: 1.0 },
        Init::Uniform { lo: f64::NEG_INFINITY, up: 1.0 },
        Init::Uniform { lo: -3e38, up: 3e38 },
        Init::Randn { mean: 0.0, stdev: -1.0 },
        Init::Randn { mean: 0.0, stdev: 1e300 },
        Init::Randn { mean: f64::NAN, stdev: 1.0 },
        Init::Const(1e300),
        kaiming(NormalOrUniform::Uniform, FanInOut::FanIn, NonLinearity::ExplicitGain(-1.0)),
    ] {
        let error = error_text(vb.get_with_hints((1 << 29, 1 << 30), "w", hint));
        assert!(error.starts_with("[torch_seed] parameter `w`:") && !error.contains("memory"), "{error}");
    }
    assert!(!vb.contains_tensor("w"));
    assert_eq!(seed.rand(4)?.to_vec1::<f32>()?, TorchSeed::new(1).rand(4)?.to_vec1::<f32>()?);
    Ok(())
}

#[test]
fn torch_seed_rejects_shapes_beyond_memory() {
    let seed = TorchSeed::new(1);
    for shape in [vec![usize::MAX, 2], vec![2, usize::MAX, 3], vec![0, usize::MAX, 3], vec![usize::MAX], vec![1 << 60]]
    {
        for result in [seed.rand(shape.clone()), seed.randn(shape.clone())] {
            let error = error_text(result);
            assert!(error.contains("more elements than memory can hold"), "{error}");
        }
        let vb = seed.var_builder(DType::F32, &CPU);
        for hint in [DEFAULT_KAIMING_NORMAL, STANDARD_NORMAL, DEFAULT_KAIMING_UNIFORM] {
            let error = error_text(vb.get_with_hints(shape.clone(), "w", hint));
            let is_named = error.starts_with("[torch_seed] parameter `w`:");
            assert!(is_named && error.contains("than memory can hold"), "{error}");
        }
    }
    assert!(seed.dropout_keep(vec![usize::MAX, 2], 0.5).is_err());
}
