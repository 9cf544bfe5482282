//! Gradients of the functions: of the reference path against the slopes of the oracle's numbers; of the kernel against
//! the reference path's; and of both against PyTorch's.

mod cuda;
mod pytorch;

use crate::isolation::{fill_unseen, vectors};
use crate::merge::{Split, splits};
use crate::*;

/// The results of a call.
#[derive(Debug, Clone)]
pub enum Function {
    Context,
    Weights,
    Lse,
    /// Context, log-sum-exp and, of paths that have them, weights.
    All,
    /// Context and log-sum-exp of keys in parts.
    Merged(Split),
}

/// A call of attention.
#[derive(Clone)]
pub struct Attention {
    pub case: Case,
    function: Function,
    device: Device,
    /// The seed of dropout.
    dropout: Option<u64>,
    /// The factors of the first numbers of the results in the loss, instead of random ones.
    factors: Vec<f64>,
}

impl Attention {
    pub fn new(case: Case, function: Function) -> Self {
        Self::on(&CPU, case, function)
    }

    pub fn on(device: &Device, case: Case, function: Function) -> Self {
        Self { case, function, device: device.clone(), dropout: None, factors: Vec::new() }
    }

    pub fn counted(self, factors: Vec<f64>) -> Self {
        Self { factors, ..self }
    }

    /// Adds dropout for some seeds.
    fn dropping(self, seed: u64) -> Self {
        Self { dropout: seed.is_multiple_of(3).then_some(seed), ..self }
    }
}

impl Operation for Attention {
    type Way = (DType, Path);

    fn run(&self, (dtype, path): &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let mut leaves = Named::new();
        let call = Call::with_leaves(&self.case, *dtype, &self.device, &mut |name, tensor| {
            let leaf = leaf(name, tensor)?;
            leaves.insert(name.to_string(), leaf.clone());
            Ok(leaf)
        })?;
        let call = call.by(*path).with(|options| match self.dropout {
            Some(seed) => options.with_dropout(0.3, true).with_dropout_philox_seed(seed),
            None => options,
        });
        let both = |(context, lse)| vec![context, lse];
        Ok(match &self.function {
            Function::Context => vec![call.context()?],
            Function::Weights => {
                let output = call.with_weights()?;
                vec![output.output, output.weights]
            }
            Function::Lse => both(call.with_lse()?),
            Function::All => call.results()?,
            Function::Merged(split) => both(split.merge(&self.case, &call, &leaves, *path)?),
        })
    }

    fn factor(&self, n: usize) -> f64 {
        self.factors.get(n).copied().unwrap_or_else(|| factor(n))
    }
}

impl Exact for Attention {
    fn buffers(&mut self) -> Vec<(String, &mut Vec<f64>)> {
        let Case { q, k, v, masks, options, .. } = &mut self.case;
        let biases = masks.iter_mut().enumerate().flat_map(|(m, mask)| {
            mask.parts.iter_mut().enumerate().filter_map(move |(p, part)| match part {
                Part::Bias(bias) => Some((format!("bias {m} {p}"), &mut bias.data)),
                _ => None,
            })
        });
        let given = [("sinks", options.sinks.as_mut()), ("slopes", options.alibi_slopes.as_mut())];
        let distances = ("distances", options.relative_bias.as_mut().map(|relative| &mut relative.data));
        let given = given.into_iter().chain([distances]).filter_map(|(name, given)| Some((name.to_string(), given?)));
        let always = [("q", &mut q.data), ("k", &mut k.data), ("v", &mut v.data)];
        always.into_iter().map(|(name, data)| (name.to_string(), data)).chain(biases).chain(given).collect()
    }

    fn exact(&self) -> Vec<f64> {
        let mut attended = self.case.attend();
        // In a row of NaN, weights of masked keys are not compared.
        for (n, weight) in attended.weights.iter_mut().enumerate() {
            *weight = if attended.lse[n / self.case.dims.t_kv].is_nan() { f64::NAN } else { *weight };
        }
        match self.function {
            Function::Context => attended.context,
            Function::Weights => [attended.context, attended.weights].concat(),
            Function::Lse | Function::Merged(..) => [attended.context, attended.lse].concat(),
            Function::All => [attended.context, attended.lse, attended.weights].concat(),
        }
    }
}

const EXACT: (DType, Path) = (DType::F64, Path::REFERENCE);

#[test]
fn sdpa_reference_gradients_match_finite_differences() {
    for_all(400, (splits(recipes(&[DType::F64])), 0..4), |((mut recipe, split), function)| {
        let function = match function {
            0 => Function::Context,
            1 => Function::Weights,
            2 => Function::Lse,
            _ => {
                // Parts would need separate distances, and an empty row of a part is not an empty row of the whole.
                recipe.chosen.alibi = false;
                recipe.chosen.relative_bias = false;
                recipe.uniform_fully_masked_rows = false;
                Function::Merged(split)
            }
        };
        has_slopes(&Attention::new(recipe.case(), function), &EXACT, 1e-6, 16)
    });
}

/// Returns the tolerance of a gradient of the kernel, relative to the largest number of its tensor: some roundings of
/// each score, weight and sum.
fn tolerance(case: &Case, dtype: DType) -> f64 {
    let steepest = case.attend().score_terms.into_iter().fold(1.0, f64::max);
    match dtype {
        DType::F32 => 4e-6 * (4.0 + steepest),
        DType::F16 => 1e-3 * (4.0 + steepest / 16.0),
        _ => 1e-2 * (4.0 + steepest / 16.0),
    }
}

/// Puts NaN and infinities into keys and values to which no query attends, into queries that attend to none, and into
/// the gradients of their outputs.
fn spoil_unseen(call: &mut Attention, special: f64) {
    fill_unseen(&mut call.case, special);
    let Dims { b, h, t_q, t_kv, d, d_v, .. } = call.case.dims;
    let sees = |[sequence, head, i]: [usize; 3]| (0..t_kv).any(|j| call.case.sees([sequence, head, i, j]));
    let unseen: Vec<_> = vectors(b, h, t_q).map(|row| !sees(row)).collect();
    call.factors = (0..unseen.len() * d_v).map(|n| if unseen[n / d_v] { special } else { factor(n) }).collect();
    for ([sequence, head, i], _) in vectors(b, h, t_q).zip(&unseen).filter(|(_, is_unseen)| **is_unseen) {
        for place in (0..d).map(|d| call.case.q.place([sequence, head, i, d])).collect::<Vec<_>>() {
            call.case.q.data[place] = special;
        }
    }
}

/// Draws some cases with dropout, some with the log-sum-exp in the loss, and some with NaN and infinities in keys and
/// values that every query has masked.
#[test]
fn sdpa_kernel_gradients_match_reference() {
    for_all(96, kernel_recipes(), |mut recipe| {
        let dtype = recipe.dtype;
        let seed = recipe.seed;
        let special = [None, None, Some(f64::NAN), Some(f64::INFINITY)][(seed / 16 % 4) as usize];
        if special.is_some() {
            // Views without repetition, and no sinks in rows that are fully masked.
            recipe.layouts = [Layout::HeadsTransposed; 3];
            recipe.chosen.sinks = false;
        }
        let function = if seed.is_multiple_of(4) { Function::Lse } else { Function::Context };
        let mut call = Attention::new(recipe.case(), function).dropping(seed);
        let expected = backward(&call, &EXACT, |_| true)?;
        let tolerance = tolerance(&call.case, dtype);
        let Dims { h, h_kv, t_q, t_kv, d_v, .. } = call.case.dims;
        let most = |name: &str, largest: f64| match name {
            "result 0" | "result 1" => f64::INFINITY,
            // A difference has the rounding error of its terms; a slope is multiplied by a distance.
            "slopes" => tolerance * (largest + 2.0 * (t_q + t_kv) as f64 * (1.0 + 0.01 * d_v as f64)),
            _ => tolerance * (largest + (1.0 + ((t_q * h / h_kv) as f64).sqrt() / 4.0) * (1.0 + 0.01 * d_v as f64)),
        };
        special.into_iter().for_each(|special| spoil_unseen(&mut call, special));
        Path::kernels().into_iter().try_for_each(|path| {
            let found = backward(&call, &(dtype, path), |_| true)?;
            are_near(&found, &expected, most).map_err(|error| error.context(format!("{path:?}")))
        })
    });
}

/// Calls are random ones, one whose keys are split, a plain one, and one with tensors of every shape and all options.
/// They run in pools of several sizes, and on the fastest instruction set with each input tracked alone.
#[test]
fn sdpa_bits_do_not_depend_on_threads_or_tracking() -> Result<()> {
    let pools: Vec<_> = [1, 2, 3, 8].into_iter().map(pool).collect();
    let in_pools = |recipe: &Recipe| {
        let call = Attention::new(recipe.case(), Function::Lse).dropping(recipe.seed);
        let ways = Path::kernels().into_iter().flat_map(|path| [(path, false), (path, true)]);
        let mut ways = ways.map(|(path, is_tracked)| ((recipe.dtype, path), is_tracked));
        ways.try_for_each(|(way, is_tracked)| is_the_same_in(&pools, &call, &way, |_| is_tracked))
    };
    for_all(28, kernel_recipes(), |recipe| in_pools(&recipe));
    for dtype in DTYPES {
        let split = Dims { b: 1, h: 2, h_kv: 1, t_q: 3, t_kv: 2100, d: 32, d_v: 24 };
        let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 60, t_kv: 200, d: 24, d_v: 16 };
        let [split, plain] = [split, dims].map(|dims| Recipe::of_kernel(dims, vec![Kind::Causal], dtype));
        let masks = vec![
            Kind::Causal,
            Kind::BoolMask(MaskShape::Keys),
            Kind::Bias(MaskShape::Head),
            Kind::Bias(MaskShape::Keys),
        ];
        let everything = Recipe { chosen: Chosen::ALL, seed: 4, ..Recipe::of_kernel(dims, masks, dtype) };
        in_pools(&split)?;
        for recipe in [plain, everything] {
            let call = Attention::new(recipe.case(), Function::Context);
            is_tracked_alone(&call, &(dtype, Path::kernels().pop().expect("an instruction set")), [0.0; 2])?;
        }
    }
    Ok(())
}
