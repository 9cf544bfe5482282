//! Gradients against PyTorch's, which `pytorch.py` writes: of every option alone and of every pair.

use std::collections::HashMap;

use crate::precision::errors;
use crate::*;

/// What the script wrote.
struct Numbers(HashMap<String, Tensor>);

impl Numbers {
    fn load() -> Result<Self> {
        Ok(Self(recorded_tensors("attention/gradients/pytorch.safetensors")?))
    }

    fn input(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.0[&format!("in.{name}")].to_dtype(dtype)
    }

    /// The gradients of each case.
    fn cases(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(name, tensor)| (name.as_str(), tensor)).filter(|(name, _)| !name.contains('.'))
    }
}

/// A case of the script.
struct Case<'a> {
    numbers: &'a Numbers,
    name: &'a str,
    /// Of the context and, where it takes part, of the log-sum-exp in the loss.
    factors: Vec<f64>,
}

impl<'a> Case<'a> {
    fn new(numbers: &'a Numbers, name: &'a str) -> Result<Self> {
        let mut case = Self { numbers, name, factors: Vec::new() };
        case.factors = values(&numbers.input("context", DType::F64)?.narrow(3, 0, case.width())?);
        if case.has("lse") {
            case.factors.extend(values(&numbers.input("lse", DType::F64)?));
        }
        Ok(case)
    }

    fn has(&self, option: &str) -> bool {
        self.name.split('+').any(|each| each == option)
    }

    fn width(&self) -> usize {
        if self.has("narrow_values") { 3 } else { 4 }
    }

    /// Each tracked tensor has a gradient, near the part of `expected` that is its own.
    fn check(&self, way: &<Self as Operation>::Way, expected: &Tensor, tolerance: f64) -> Result<()> {
        let (found, mut start) = (backward(self, way, |_| true)?, 0);
        let tracked = self.name.split('+').filter(|option| found.contains_key(*option));
        for leaf in ["q", "k", "v"].into_iter().chain(tracked) {
            let gradient = &found[leaf];
            let expected = expected.narrow(0, start, gradient.elem_count())?.reshape(gradient.shape())?;
            assert_near(gradient, &expected, tolerance, &format!("{}, {leaf} by {way:?}", self.name));
            start += gradient.elem_count();
        }
        assert_eq!(start, expected.elem_count(), "{}: as many numbers as PyTorch's", self.name);
        Ok(())
    }
}

impl Operation for Case<'_> {
    /// In one call, or with keys cut in two, whose parts have gradients of their log-sum-exp too.
    type Way = (DType, Path, bool);

    fn run(&self, &(dtype, path, is_cut): &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let mut leaf = |name: &str, tensor: Tensor| leaf(name, tensor.contiguous()?);
        let input = |name: &str| self.numbers.input(name, dtype);
        let heads = if self.has("ungrouped") { 4 } else { 2 - usize::from(self.has("one_key_head")) };
        let q = leaf("q", input("q")?)?;
        let k = leaf("k", input("k")?.narrow(1, 0, heads)?)?;
        let v = leaf("v", input("v")?.narrow(1, 0, heads)?.narrow(3, 0, self.width())?)?;
        let (mut mask, mut options) = (AttentionMask::none(), reference());
        for option in self.name.split('+') {
            let mut tracked = || leaf(option, input(option)?);
            match option {
                "causal" => mask = mask.and(&AttentionMask::causal()),
                "window" => mask = mask.and(&AttentionMask::causal().with_window(3)),
                "band" => mask = mask.with_band(2, 1),
                "prefix" => mask = mask.and(&AttentionMask::causal().with_prefix(vec![5, 2])),
                "lens" => mask = mask.with_valid_lens(vec![6, 3]),
                "keep" => mask = mask.with_keep(&self.numbers.input(option, DType::U8)?),
                "bias_heads" | "bias_keys" => mask = mask.with_bias(&tracked()?),
                "alibi" => options = options.with_alibi_slopes(&tracked()?),
                "sinks" => options = options.with_sinks(&tracked()?),
                "softcap" => options = options.with_softcap(1.5),
                "scale" => options = options.with_scale(-0.75),
                "plain" | "ungrouped" | "one_key_head" | "narrow_values" | "lse" => {}
                other => panic!("{other} is no option"),
            }
        }
        let call = Call { q, k, v, mask, options }.by(path);
        let part = |start: usize, len: usize| {
            let (k, v) = (call.k.narrow(2, start, len)?, call.v.narrow(2, start, len)?);
            Call { k, v, ..call.clone() }.with_lse()
        };
        let both = || if is_cut { merge_attention(&[part(0, 4)?, part(4, 2)?]) } else { call.with_lse() };
        Ok(match self.has("lse") {
            false if !is_cut => vec![call.context()?],
            false => vec![both()?.0],
            true => both().map(|(context, lse)| vec![context, lse])?,
        })
    }

    fn factor(&self, n: usize) -> f64 {
        self.factors[n]
    }
}

#[test]
fn every_option_and_every_pair_has_pytorchs_gradients() -> Result<()> {
    let (numbers, mut count) = (Numbers::load()?, 0);
    for (name, expected) in numbers.cases() {
        let case = Case::new(&numbers, name)?;
        // What is stored in f32 is rounded to it.
        let tolerance = if expected.dtype() == DType::F64 { 1e-12 } else { 6e-8 };
        case.check(&(DType::F64, Path::REFERENCE, false), expected, tolerance)?;
        for path in Path::kernels().into_iter().chain([Path::REFERENCE]) {
            case.check(&(DType::F32, path, false), expected, 1e-5)?;
        }
        count += 1;
    }
    assert_eq!(count, 1 + 16 + 13 * 12 / 2 + 1, "plain, each option, each pair of 13, and most of them at once");
    for name in ["plain", "lse", "softcap+lse", "ungrouped", "narrow_values"] {
        let case = Case::new(&numbers, name)?;
        case.check(&(DType::F64, Path::REFERENCE, true), &numbers.0[name], 6e-8)?;
        case.check(&(DType::F32, Path::Asked(Backend::Fused), true), &numbers.0[name], 1e-5)?;
    }
    Ok(())
}

/// What each gradient in bf16 errs by, root mean square, beyond the rounding of the result that nothing escapes: at
/// most half of what PyTorch's errs by for keys and values, whose error grows with the length there. For queries a tier
/// that multiplies in bf16 errs as PyTorch does, and the others by half of it.
#[test]
fn bf16_gradients_err_less_than_pytorchs() -> Result<()> {
    let numbers = Numbers::load()?;
    for t in [512, 2048] {
        let seed = TorchSeed::new(t as u64);
        let drawn = (0..4).map(|_| seed.randn((1, 2, t, 64))?.to_dtype(DType::BF16)).collect::<Result<Vec<_>>>()?;
        let gradients = |dtype: DType, change: &dyn Fn(Call) -> Call| -> Result<Vec<Tensor>> {
            let vars = drawn[..3].iter().map(|x| Var::from_tensor(&x.to_dtype(dtype)?)).collect::<Result<Vec<_>>>()?;
            let call = change(Call::plain(&vars[0], &vars[1], &vars[2], &AttentionMask::causal()));
            let store = (call.context()? * drawn[3].to_dtype(dtype)?)?.sum_all()?.backward()?;
            Ok(vars.iter().map(|var| store.get(var).expect("a gradient").clone()).collect())
        };
        let exact = gradients(DType::F64, &|call| call.on_reference())?;
        let pytorch = numbers.0[&format!("bf16.{t}")].to_vec2::<f64>()?;
        for tier in Tier::available() {
            let got = gradients(DType::BF16, &|call| call.on_tier(tier))?;
            for (n, leaf) in ["q", "k", "v"].into_iter().enumerate() {
                let [_, of_pytorch, _, of_rounding] = pytorch[n][..] else { panic!("four columns") };
                let [_, own] = errors(&got[n], &values(&exact[n]));
                assert!(own.is_finite(), "{leaf}, T {t}, {tier}: {own}");
                let beyond = |rms: f64| (rms * rms - of_rounding * of_rounding).max(0.0).sqrt();
                let ratio = beyond(own) / beyond(of_pytorch);
                println!("{leaf}, T {t}, {tier}: {ratio:.3} of PyTorch's error beyond rounding");
                let in_bf16 = matches!(tier, Tier::NeonBf16 | Tier::Avx512Bf16 | Tier::Amx);
                let most = if leaf == "q" && in_bf16 { 1.1 } else { 0.5 };
                assert!(ratio <= most, "{leaf}, T {t}, {tier}: {ratio} of PyTorch's error, more than {most}");
            }
        }
    }
    Ok(())
}
