//! Gradients against PyTorch's, which `pytorch.py` writes: of every option alone and of every pair.

use std::collections::HashMap;

use super::{Attention, Function, Split};
use crate::precision::errors;
use crate::*;

/// The tensors that the script wrote.
struct Numbers(HashMap<String, Tensor>);

impl Numbers {
    fn load() -> Result<Self> {
        Ok(Self(recorded_tensors("attention/gradients/pytorch.safetensors")?))
    }

    /// Returns the first entries of each dimension of an input.
    fn input(&self, name: &str, shape: [usize; 4]) -> Result<Array> {
        let whole = &self.0[&format!("in.{name}")];
        let own = &shape[4 - whole.rank()..];
        let part = own.iter().enumerate().try_fold(whole.clone(), |part, (dim, &len)| part.narrow(dim, 0, len))?;
        Ok(Array::of(own, values(&part)))
    }

    /// Returns a case of the script, and its tracked tensors in the order in which the script wrote gradients.
    fn call(&self, name: &str, function: Function) -> Result<(Attention, Vec<String>)> {
        let has = |option: &str| name.split('+').any(|each| each == option);
        let h_kv = if has("ungrouped") { 4 } else { 2 - usize::from(has("one_key_head")) };
        let dims = Dims { b: 2, h: 4, h_kv, t_q: 3, t_kv: 6, d: 4, d_v: if has("narrow_values") { 3 } else { 4 } };
        let Dims { b, h, t_q, t_kv, d, d_v, .. } = dims;
        let mut masks = Vec::new();
        let mut options = Options::default();
        let mut tracked = vec!["q".to_string(), "k".into(), "v".into()];
        let heads = |option: &str| self.input(option, [1, 1, 1, h]).map(|heads| Some(heads.data));
        for option in name.split('+') {
            let lens = |lens: [usize; 2]| Lens::PerSequence(lens.into());
            masks.extend(match option {
                "causal" => Some(Mask::new(Alignment::Causal, [])),
                "window" => Some(Mask::new(Alignment::Causal, [Part::Window(3)])),
                "local_window" => Some(Mask::of(Part::LocalWindow(2, 1))),
                "prefix" => Some(Mask::new(Alignment::Causal, [Part::Prefix(lens([5, 2]))])),
                "lens" => Some(Mask::of(Part::ValidLens(lens([6, 3])))),
                "bool_mask" => Some(Mask::of(Part::BoolMask(self.input(option, [b, 1, t_q, t_kv])?))),
                "bias_heads" | "bias_keys" => {
                    tracked.push(format!("bias {} 0", masks.len()));
                    Some(Mask::of(Part::Bias(self.input(option, [1, h, t_q, t_kv])?)))
                }
                _ => None,
            });
            match option {
                "alibi" => (options.alibi_slopes, _) = (heads(option)?, tracked.push("slopes".into())),
                "sinks" => (options.sinks, _) = (heads(option)?, tracked.push("sinks".into())),
                "softcap" => options.softcap = Some(1.5),
                "scale" => options.scale = Some(-0.75),
                _ => {}
            }
        }
        let [q, k, v] = [("q", h, t_q, d), ("k", h_kv, t_kv, d), ("v", h_kv, t_kv, d_v)]
            .map(|(buffer, count, t, width)| self.input(buffer, [b, count, t, width]));
        let case = Case { dims, q: q?, k: k?, v: v?, masks, uniform_fully_masked_rows: false, options };
        let of_output = self.input("output", [b, h, t_q, d_v])?.data;
        let of_lse = if has("lse") { self.input("lse", [1, b, h, t_q])?.data } else { vec![0.0; b * h * t_q] };
        Ok((Attention::new(case, function).counted([of_output, of_lse].concat()), tracked))
    }

    /// Compares the gradient of each tracked tensor with its part of `expected`. If no other function is given, the
    /// log-sum-exp is one of the results if it is in the loss.
    fn check(&self, name: &str, of: Option<Function>, way: (DType, Path), tolerance: f64) -> Result<()> {
        let plain = if name.contains("lse") { Function::Lse } else { Function::Context };
        let (call, tracked) = self.call(name, of.unwrap_or(plain))?;
        let expected = &self.0[name];
        let found = backward(&call, &way, |_| true)?;
        let mut start = 0;
        for leaf in &tracked {
            let gradient = &found[leaf];
            let expected = expected.narrow(0, start, gradient.elem_count())?.reshape(gradient.shape())?;
            assert_near(gradient, &expected, tolerance, &format!("{name}, {leaf} by {way:?}"));
            start += gradient.elem_count();
        }
        assert_eq!(start, expected.elem_count(), "{name}: as many numbers as PyTorch's");
        Ok(())
    }
}

/// Checks the gradients whose first option is `first`: of the option alone, and of each pair with another.
fn check_first_option(first: &str, count: usize) -> Result<()> {
    let numbers = Numbers::load()?;
    let is_of_option = |name: &str| name.split('+').next() == Some(first);
    let cases: Vec<_> = numbers.0.iter().filter(|(name, _)| is_of_option(name)).collect();
    assert_eq!(cases.len(), count, "{first}");
    for (name, expected) in cases {
        // What is stored in f32 is rounded to it.
        let tolerance = if expected.dtype() == DType::F64 { 1e-12 } else { 6e-8 };
        numbers.check(name, None, (DType::F64, Path::REFERENCE), tolerance)?;
        for path in Path::kernels().into_iter().chain([Path::REFERENCE]) {
            numbers.check(name, None, (DType::F32, path), 1e-5)?;
        }
    }
    Ok(())
}

/// Makes a test for each first option, with the number of its cases, and one that they are all cases of the file.
macro_rules! test_options {
    ($($name:ident => $option:literal, $count:literal;)+) => {
        $( #[test] fn $name() -> Result<()> { check_first_option($option, $count) } )+

        #[test]
        fn gradients_of_pytorch_all_have_a_test() -> Result<()> {
            let recorded = Numbers::load()?.0.into_keys().filter(|name| !name.contains('.')).count();
            assert_eq!(recorded, [$($count),+].into_iter().sum::<usize>());
            Ok(())
        }
    };
}

test_options! {
    gradients_without_options_match_pytorch => "plain", 1;
    gradients_with_causal_mask_match_pytorch => "causal", 13;
    gradients_with_window_match_pytorch => "window", 12;
    gradients_with_local_window_match_pytorch => "local_window", 11;
    gradients_with_prefix_match_pytorch => "prefix", 11;
    gradients_with_valid_lens_match_pytorch => "lens", 9;
    gradients_with_bool_mask_match_pytorch => "bool_mask", 8;
    gradients_with_bias_per_head_match_pytorch => "bias_heads", 7;
    gradients_with_bias_per_key_match_pytorch => "bias_keys", 6;
    gradients_with_alibi_match_pytorch => "alibi", 5;
    gradients_with_sinks_match_pytorch => "sinks", 4;
    gradients_with_softcap_match_pytorch => "softcap", 3;
    gradients_with_scale_match_pytorch => "scale", 2;
    gradients_with_lse_match_pytorch => "lse", 1;
    gradients_with_gqa_of_one_key_head_match_pytorch => "one_key_head", 1;
    gradients_with_as_many_key_heads_match_pytorch => "ungrouped", 1;
    gradients_with_narrow_values_match_pytorch => "narrow_values", 1;
}

/// Splits the keys, so that the log-sum-exps of parts have gradients too.
#[test]
fn gradients_of_merge_attention_match_pytorch() -> Result<()> {
    let numbers = Numbers::load()?;
    for name in ["plain", "lse", "softcap+lse", "ungrouped", "narrow_values"] {
        for (way, tolerance) in
            [((DType::F64, Path::REFERENCE), 6e-8), ((DType::F32, Path::Asked(Backend::Fused)), 1e-5)]
        {
            let split = Split { parts: 2, sinks_in: 0, assigned: vec![0, 0, 0, 0, 1, 1], in_stages: false };
            numbers.check(name, Some(Function::Merged(split)), way, tolerance)?;
        }
    }
    Ok(())
}

/// Compares root mean square errors beyond the rounding of the result, which nothing avoids. For keys and values the
/// error is at most half of PyTorch's, which grows with the length. For queries, instruction sets that multiply in bf16
/// have PyTorch's error, and the others half of it.
#[test]
fn bf16_gradients_of_causal_attention_are_within_bounds_of_pytorchs_error() -> Result<()> {
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
        let exact = gradients(DType::F64, &|call| call.on(Backend::Reference))?;
        let pytorch = numbers.0[&format!("bf16.{t}")].to_vec2::<f64>()?;
        for instruction_set in InstructionSet::available() {
            let got = gradients(DType::BF16, &|call| call.on_instruction_set(instruction_set))?;
            for (n, leaf) in ["q", "k", "v"].into_iter().enumerate() {
                let [_, of_pytorch, _, of_rounding] = pytorch[n][..] else { panic!("four columns") };
                let [_, own] = errors(&got[n], &values(&exact[n]));
                assert!(own.is_finite(), "{leaf}, T {t}, {instruction_set}: {own}");
                let beyond = |rms: f64| (rms * rms - of_rounding * of_rounding).max(0.0).sqrt();
                let ratio = beyond(own) / beyond(of_pytorch);
                println!("{leaf}, T {t}, {instruction_set}: {ratio:.3} of PyTorch's error beyond rounding");
                let in_bf16 = matches!(
                    instruction_set,
                    InstructionSet::NeonBf16 | InstructionSet::Avx512Bf16 | InstructionSet::Amx
                );
                let most = if leaf == "q" && in_bf16 { 1.1 } else { 0.5 };
                assert!(
                    ratio <= most,
                    "{leaf}, T {t}, {instruction_set}: {ratio} of PyTorch's error, more than {most}"
                );
            }
        }
    }
    Ok(())
}
