//! The fused kernels on a CUDA device: results and gradients against the reference path's in f64. Kernels are compiled
//! for each dtype, head dimension and set of score modifiers, so that all masks share a few of these.

use super::*;

/// Checks results and gradients of a call that takes a fused path.
fn check(recipe: &Recipe, function: &Function, dropout: Option<u64>) -> Result<()> {
    let device = found("CUDA", Device::new_cuda(0));
    let case = recipe.case();
    let on_cpu = Attention { dropout, ..Attention::new(case.clone(), function.clone()) };
    let on_device = Attention { dropout, ..Attention::on(&device, case, function.clone()) };
    let expected = backward(&on_cpu, &EXACT, |_| true)?;
    let computed = backward(&on_device, &(recipe.dtype, Path::Asked(Backend::Fused)), |_| true)?;
    let Dims { h, h_kv, t_q, t_kv, d_v, .. } = recipe.dims;
    let tolerance = tolerance(&on_cpu.case, recipe.dtype);
    let most = |name: &str, largest: f64| match name {
        // A difference has the rounding error of its terms; a slope is multiplied by a distance.
        "slopes" => tolerance * (largest + 2.0 * (t_q + t_kv) as f64 * (1.0 + 0.01 * d_v as f64)),
        _ => tolerance * (largest + (1.0 + ((t_q * h / h_kv) as f64).sqrt() / 4.0) * (1.0 + 0.01 * d_v as f64)),
    };
    are_near(&computed, &expected, most).map_err(|error| error.context(format!("{recipe:?}")))
}

const DIMS: Dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 37, t_kv: 70, d: 64, d_v: 64 };

#[test]
#[cfg_attr(not(feature = "cuda"), ignore = "needs a CUDA device and the feature `cuda`")]
fn cuda_kernels_with_every_mask_of_ranges_match_reference() -> Result<()> {
    for (n, kind) in Kind::all().into_iter().filter(|kind| !kind.is_tensor()).enumerate() {
        for t_q in [1, 37] {
            let recipe = Recipe::plain(Dims { t_q, ..DIMS }, vec![vec![kind]], DTYPES[n % 3]);
            let function = if n % 2 == 0 { Function::Context } else { Function::Lse };
            check(&Recipe { seed: n as u64, ..recipe }, &function, None)?;
        }
    }
    Ok(())
}

#[test]
#[cfg_attr(not(feature = "cuda"), ignore = "needs a CUDA device and the feature `cuda`")]
fn cuda_kernels_with_all_score_modifiers_match_reference() -> Result<()> {
    for (n, reach) in MaskShape::ALL.into_iter().enumerate() {
        for dtype in DTYPES {
            let masks = vec![vec![Kind::Causal, Kind::BoolMask(reach), Kind::Bias(reach)]];
            let recipe = Recipe { chosen: Chosen::ALL, seed: n as u64, ..Recipe::plain(DIMS, masks, dtype) };
            check(&recipe, &Function::Context, None)?;
        }
    }
    Ok(())
}

#[test]
#[cfg_attr(not(feature = "cuda"), ignore = "needs a CUDA device and the feature `cuda`")]
fn cuda_kernels_with_a_dropout_seed_match_reference() -> Result<()> {
    for dtype in DTYPES {
        let recipe = Recipe::plain(DIMS, vec![vec![Kind::Causal]], dtype);
        check(&recipe, &Function::Context, Some(3))?;
    }
    Ok(())
}

#[test]
#[cfg_attr(not(feature = "cuda"), ignore = "needs a CUDA device and the feature `cuda`")]
fn cuda_kernels_with_strided_inputs_match_reference() -> Result<()> {
    for layout in [Layout::HeadsTransposed, Layout::CacheHead, Layout::CacheMiddle] {
        let recipe = Recipe::plain(DIMS, vec![vec![Kind::Causal]], DType::BF16);
        check(&Recipe { layouts: [layout; 3], ..recipe }, &Function::Context, None)?;
    }
    Ok(())
}
