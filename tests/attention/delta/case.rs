//! Random calls: a recipe is small, prints on one line and shrinks; its case has the numbers.

use attention_oracle::delta::{Delta, Recurred};

use crate::*;

/// The numbers of heads of q, k and v: one head each, several, a key for several values and the reverse, queries that
/// share a state, and queries that several states share.
const HEADS: [[usize; 3]; 9] =
    [[1, 1, 1], [3, 3, 3], [2, 2, 4], [1, 1, 3], [4, 2, 2], [6, 1, 3], [2, 4, 1], [1, 2, 2], [4, 1, 4]];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    PerHead,
    PerChannel,
}

#[derive(Debug, Clone)]
pub struct Recipe {
    /// The lengths of the sequences: of packed ones, or of each entry of a batch.
    pub lens: Vec<usize>,
    pub is_packed: bool,
    pub heads: [usize; 3],
    pub d_k: usize,
    pub d_v: usize,
    pub decay: Option<Decay>,
    pub has_beta: bool,
    pub has_state: bool,
    /// One head of decays and betas for all.
    pub one_factor: bool,
    pub scale: Option<f64>,
    pub qk_norm: Option<f64>,
    pub dtype: DType,
    /// The dtype of decays, betas and states.
    pub factor_dtype: DType,
    pub layouts: [Layout; 3],
    pub seed: u64,
}

pub fn recipes(dtypes: &'static [DType]) -> impl Strategy<Value = Recipe> {
    let dense = (0..=3usize, select(&[0, 1, 2, 7, 63, 64, 65, 130][..])).prop_map(|(b, t)| (vec![t; b], false));
    let packed = proptest::collection::vec(select(&[0, 1, 5, 64, 70][..]), 0..=4).prop_map(|lens| (lens, true));
    let widths = (select(&[1, 3, 16, 33, 64][..]), select(&[0, 1, 5, 16, 40, 64][..]));
    let dims = (select(&HEADS[..]), widths.prop_map(|(d_k, d_v)| [d_k, d_v]));
    let kinds = select(&[None, Some(Decay::PerHead), Some(Decay::PerChannel)][..]);
    let inputs = (kinds, any::<bool>(), any::<bool>(), proptest::bool::weighted(0.2));
    let options = (select(&[None, Some(-0.7)][..]), select(&[None, Some(1e-6), Some(0.5)][..]));
    let memory = (select(dtypes), select(dtypes), [(); 3].map(|()| select(&Layout::ALL[..])), any::<u64>().no_shrink());
    (prop_oneof![dense, packed], dims, inputs, options, memory).prop_map(
        |((lens, is_packed), (heads, dims), (decay, has_beta, has_state, one_factor), (scale, qk_norm), memory)| {
            let (dtype, factor_dtype, layouts, seed) = memory;
            let given =
                Recipe { is_packed, decay, has_beta, has_state, one_factor, ..Recipe::plain(lens, heads, dims) };
            Recipe { scale, qk_norm, dtype, factor_dtype, layouts, seed, ..given }
        },
    )
}

impl Recipe {
    /// Returns the gated delta rule over a batch, from states, in f64.
    pub fn plain(lens: Vec<usize>, heads: [usize; 3], [d_k, d_v]: [usize; 2]) -> Self {
        Self {
            lens,
            is_packed: false,
            heads,
            d_k,
            d_v,
            decay: Some(Decay::PerHead),
            has_beta: true,
            has_state: true,
            one_factor: false,
            scale: None,
            qk_norm: None,
            dtype: DType::F64,
            factor_dtype: DType::F64,
            layouts: [Layout::Contiguous; 3],
            seed: 1,
        }
    }

    /// Draws the case. Keys are no longer than one, so that no rule lets states grow without end.
    pub fn case(&self) -> Delta {
        let Self { d_k, d_v, dtype, factor_dtype, .. } = *self;
        let random = &mut Random::new(self.seed);
        let (b, t) = match self.is_packed {
            true => (1, self.lens.iter().sum()),
            false => (self.lens.len(), self.lens.first().copied().unwrap_or(4)),
        };
        let [h_q, h_k, h_v] = self.heads;
        let h_s = h_k.max(h_v);
        let key_bound = 1.0 / (d_k as f64).sqrt();
        let [q, k, v] = [(h_q, d_k, 2.0), (h_k, d_k, key_bound), (h_v, d_v, 1.0)];
        let [q, k, v] = [(q, 0), (k, 1), (v, 2)]
            .map(|((h, d, most), n)| self.layouts[n].array([b, h, t, d]).uniform(random, most, dtype));
        let heads = if self.one_factor { 1 } else { h_s };
        let decay = self.decay.map(|kind| {
            let width = if kind == Decay::PerHead { 1 } else { d_k };
            self.layouts[0].array([b, heads, t, width]).filled(|| round(log_factor(random), factor_dtype))
        });
        let beta = self.has_beta.then(|| {
            self.layouts[1].array([b, heads, t, 1]).filled(|| match random.up_to(9) {
                n @ 0..=2 => n as f64,
                _ => round(random.between(0.0, 1.0), factor_dtype),
            })
        });
        let n = self.lens.len();
        let state =
            self.has_state.then(|| self.layouts[2].array([n, h_s, d_k, d_v]).uniform(random, 1.0, factor_dtype));
        let starts = self.lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end - len)
        });
        let sequences = match self.is_packed {
            true => starts.zip(&self.lens).map(|(start, len)| (0, start..start + len)).collect(),
            false => (0..b).map(|entry| (entry, 0..t)).collect(),
        };
        let scale = self.scale.unwrap_or(1.0 / (d_k as f64).sqrt());
        Delta { q, k, v, decay, beta, state, sequences, scale, qk_norm: self.qk_norm }
    }

    /// Returns all paths that can compute the case.
    pub fn paths(&self, device: &Device) -> Vec<DeltaOptions> {
        let asked = |backend| DeltaOptions::default().with_backend(backend);
        let mut paths = vec![asked(Backend::Reference), asked(Backend::Auto)];
        if device.is_cpu() && self.dtype != DType::F64 {
            let fused = |instruction_set| asked(Backend::Fused).with_instruction_set(instruction_set);
            paths.extend(InstructionSet::available().into_iter().map(fused));
        }
        paths
    }

    /// Compares the case on a path with the oracle's numbers.
    pub fn check(&self, case: &Delta, expected: &Recurred, device: &Device, path: &DeltaOptions) -> Result<()> {
        let (y, state) = self.call(case, device, &mut |_, tensor| Ok(tensor))?.run(path)?;
        let wide = if self.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let epsilon = if wide == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let unit = match self.dtype {
            DType::BF16 => 2f64.powi(-8),
            DType::F16 => 2f64.powi(-11),
            _ => 0.0,
        };
        // Each token rounds a state, and each number of a key a sum of it.
        let of_states = (case.q.dim(2) + self.d_k + 16) as f64 * epsilon * expected.largest_state;
        let of_ys = of_states * expected.largest_query;
        let b = case.q.dim(0);
        let sequences = self.lens.len();
        let t = case.q.dim(2);
        let smallest = if self.dtype == DType::F16 { 2f64.powi(-25) } else { 1e-37 };
        compare("y", &y, (&[b, case.h(), t, self.d_v], self.dtype), &expected.y, |n| {
            of_ys + expected.y[n].abs() * unit + smallest
        })?;
        compare("state", &state, (&[sequences, case.h_s(), self.d_k, self.d_v], wide), &expected.state, |n| match t {
            // What no token changes is at most rounded to the dtype of the result.
            0 => expected.state[n].abs() * epsilon / 2.0,
            _ => of_states + 1e-37,
        })
    }

    /// Builds the call with `leaf` applied to each buffer, for example to make it a variable.
    fn call(&self, case: &Delta, device: &Device, leaf: Leaf) -> Result<Call> {
        let mut viewed = |name: &str, xs: &Array, dtype| xs.look(&leaf(name, xs.leaf(dtype, device)?)?);
        let in_order = |xs: Tensor| if self.is_packed { xs.squeeze(0)?.transpose(0, 1) } else { Ok(xs) };
        let factor = |xs: Tensor, is_vector: bool| in_order(if is_vector { xs } else { xs.squeeze(3)? });
        let per_channel = self.decay == Some(Decay::PerChannel);
        let q = in_order(viewed("q", &case.q, self.dtype)?)?;
        let k = in_order(viewed("k", &case.k, self.dtype)?)?;
        let v = in_order(viewed("v", &case.v, self.dtype)?)?;
        let mut given =
            |name: &str, xs: &Option<Array>| xs.as_ref().map(|xs| viewed(name, xs, self.factor_dtype)).transpose();
        Ok(Call {
            q,
            k,
            v,
            decay: given("decay", &case.decay)?.map(|decay| factor(decay, per_channel)).transpose()?,
            beta: given("beta", &case.beta)?.map(|beta| factor(beta, false)).transpose()?,
            state: given("state", &case.state)?,
            sequences: self.is_packed.then(|| PackedSequences::from_lens(&self.lens, &self.lens)).transpose()?,
            scale: self.scale,
            qk_norm: self.qk_norm,
        })
    }
}

/// A recipe, its numbers, and which of the results counts: y, the states or both.
#[derive(Clone)]
pub struct Rule {
    pub recipe: Recipe,
    pub case: Delta,
    pub only: Option<usize>,
}

impl Rule {
    pub fn of(recipe: Recipe) -> Self {
        Self { case: recipe.case(), recipe, only: None }
    }

    fn counted<T>(&self, y: T, state: T) -> Vec<T> {
        let both = [y, state].into_iter().enumerate();
        both.filter(|(n, _)| self.only.is_none_or(|only| only == *n)).map(|(_, result)| result).collect()
    }
}

impl Operation for Rule {
    /// In f64, or in the dtypes of the recipe.
    type Way = (bool, DeltaOptions);

    fn run(&self, (is_wide, options): &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let wide = Recipe { dtype: DType::F64, factor_dtype: DType::F64, ..self.recipe.clone() };
        let recipe = if *is_wide { &wide } else { &self.recipe };
        let (y, state) = recipe.call(&self.case, &Device::Cpu, leaf)?.run(options)?;
        Ok(self.counted(y, state))
    }
}

impl Exact for Rule {
    fn buffers(&mut self) -> Vec<(String, &mut Vec<f64>)> {
        let Delta { q, k, v, decay, beta, state, .. } = &mut self.case;
        let given = [("decay", decay.as_mut()), ("beta", beta.as_mut()), ("state", state.as_mut())];
        let all = [("q", Some(q)), ("k", Some(k)), ("v", Some(v))].into_iter().chain(given);
        all.filter_map(|(name, array)| Some((name.to_string(), &mut array?.data))).collect()
    }

    fn exact(&self) -> Vec<f64> {
        let recurred = self.case.recur();
        self.counted(recurred.y, recurred.state).concat()
    }
}

fn log_factor(random: &mut Random) -> f64 {
    match random.up_to(19) {
        0 => f64::NEG_INFINITY,
        1 => -200.0,
        2 | 3 => 0.0,
        _ => random.between(-1.5, 0.0),
    }
}

/// A case as the crate takes it.
#[derive(Clone)]
pub struct Call {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub decay: Option<Tensor>,
    pub beta: Option<Tensor>,
    pub state: Option<Tensor>,
    pub sequences: Option<PackedSequences>,
    pub scale: Option<f64>,
    pub qk_norm: Option<f64>,
}

impl Call {
    /// Returns the output (B, H, T, D_v), of packed sequences too, and the states.
    pub fn run(&self, path: &DeltaOptions) -> Result<(Tensor, Tensor)> {
        let mut options = path.clone();
        if let Some(scale) = self.scale {
            options = options.with_scale(scale);
        }
        if let Some(eps) = self.qk_norm {
            options = options.with_qk_norm(eps);
        }
        let Self { q, k, v, .. } = self;
        let decay = self.decay.as_ref();
        let beta = self.beta.as_ref();
        let state = self.state.as_ref();
        match &self.sequences {
            None => gated_delta_rule(q, k, v, decay, beta, state, &options),
            Some(sequences) => {
                let (y, states) = gated_delta_rule_varlen(q, k, v, decay, beta, state, sequences, &options)?;
                Ok((y.transpose(0, 1)?.unsqueeze(0)?, states))
            }
        }
    }
}
