//! A call of the kernel with its tensors, and the same for the oracle, which computes in f64.

use std::fmt;
use std::ops::Range;

use attention_oracle::problem::{Forward, Pair, Problem};

use crate::Element;
use crate::cpu::InstructionSet;
use crate::cpu::tests::numbers;
use crate::flash::{
    AttentionCall, AttentionDims, CpuCall, Dropout, DropoutMask, KeysOfQueries, KvCodeFormat, KvScales, OutputLayout,
    RequestedResults, ScoreModifiers, Strided, View, WeightIndex, attend, philox_keeps,
};

/// A call.
pub struct Case {
    pub dims: AttentionDims,
    pub ranges: Vec<Range<usize>>,
    /// Whether the call has a softcap, ALiBi, a bias, a boolean mask and sinks. Otherwise it has none of them.
    pub has_modifiers: bool,
    /// The format of keys and values, if they are codes.
    pub codes: Option<KvCodeFormat>,
    /// The seed of Philox.
    pub dropout: Option<u64>,
    /// A bit for each weight, which is 1 if dropout keeps the weight.
    pub kept: Vec<u8>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { dims, ranges, has_modifiers, codes, .. } = self;
        write!(f, "{dims:?}, first range {:?}, score modifiers {has_modifiers}, codes {codes:?}", ranges.first())
    }
}

/// The probability that a weight is dropped.
pub const P: f64 = 0.3;

/// Rows of codes.
#[derive(Clone)]
pub struct CodedRows {
    /// The bytes of the codes.
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    /// The numbers that codes and scales represent.
    pub numbers: Vec<f64>,
}

/// A call for the output and the input of a backward pass.
pub const FOR_BACKWARD: RequestedResults =
    RequestedResults { weights: false, log_sum_exp: false, softmax_stats: true, statistics: None };

/// Returns rows of random codes with random scales, and their numbers by the definition of the format.
pub fn coded_rows(format: KvCodeFormat, count: usize, width: usize, salt: u64) -> CodedRows {
    let of_row = format.bytes(width);
    let mut codes: Vec<u8> = numbers::<f32>(count * of_row, salt).iter().map(|x| (x * 127.9 + 128.0) as u8).collect();
    let groups = format.scales(width);
    let largest = match format {
        KvCodeFormat::Q8 => 128.0,
        KvCodeFormat::E4M3 => 448.0,
        KvCodeFormat::Q4 => 7.5,
    };
    if format == KvCodeFormat::E4M3 {
        // The codes of NaN are not used.
        codes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code -= 1);
    }
    let scales: Vec<f32> = numbers::<f32>(count * groups, salt + 10).iter().map(|x| (x + 1.1) / largest).collect();
    let mut rows = CodedRows { codes, scales, numbers: Vec::new() };
    for row in 0..count {
        for n in 0..width {
            let scale = f64::from(rows.scales[row * groups + n * groups / width]);
            rows.numbers.push(code_number(format, &rows.codes[row * of_row..(row + 1) * of_row], n) * scale);
        }
    }
    rows
}

/// Returns number `n` of a row of codes, without its scale.
fn code_number(format: KvCodeFormat, row: &[u8], n: usize) -> f64 {
    match format {
        KvCodeFormat::Q8 => f64::from(row[n]) - 128.0,
        KvCodeFormat::E4M3 => {
            let code = row[n];
            let mantissa = f64::from(code & 7) / 8.0;
            let magnitude = match code >> 3 & 15 {
                0 => mantissa * 2f64.powi(-6),
                exponent => (1.0 + mantissa) * 2f64.powi(i32::from(exponent) - 7),
            };
            if code & 0x80 == 0 { magnitude } else { -magnitude }
        }
        KvCodeFormat::Q4 => {
            let byte = row[n / 32 * 16 + n % 16];
            let code = if n % 32 < 16 { byte & 15 } else { byte >> 4 };
            f64::from(code) - 7.5
        }
    }
}

impl Case {
    pub fn new(dims: AttentionDims, causal: bool, has_modifiers: bool) -> Self {
        let range = |i: usize| 0..if causal { (i + 1 + dims.t_kv).saturating_sub(dims.t_q) } else { dims.t_kv };
        Self {
            ranges: (0..dims.b * dims.t_q).map(|row| range(row % dims.t_q)).collect(),
            dims,
            has_modifiers,
            codes: None,
            dropout: None,
            kept: Vec::new(),
        }
    }

    pub fn with_dropout(mut self, seed: u64) -> Self {
        let AttentionDims { b, h, t_q, t_kv, .. } = self.dims;
        self.dropout = Some(seed);
        self.kept = vec![0; (b * h * t_q * t_kv).div_ceil(8)];
        for at in 0..b * h * t_q * t_kv {
            let weight = WeightIndex {
                b: at / (h * t_q * t_kv),
                head: at / (t_q * t_kv) % h,
                query: at / t_kv % t_q,
                key: at % t_kv,
            };
            self.kept[at / 8] |= u8::from(philox_keeps(seed, P, weight)) << (at % 8);
        }
        self
    }

    pub fn data<E: Element>(&self) -> Data<E> {
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        let format = self.codes.unwrap_or(KvCodeFormat::Q8);
        Data {
            q: numbers(b * h * t_q * d, 1),
            k: numbers(b * h_kv * t_kv * d, 2),
            v: numbers(b * h_kv * t_kv * d_v, 3),
            k_codes: coded_rows(format, b * h_kv * t_kv, d, 2),
            v_codes: coded_rows(format, b * h_kv * t_kv, d_v, 3),
            bias: numbers(t_q * t_kv, 4),
            bool_mask: (0..t_kv).map(|key| u8::from(key % 5 != 2)).collect(),
            slopes: numbers(h, 5),
            sinks: numbers(h, 6),
            // Each sequence of the batch has different positions.
            positions: (0..b * t_q).map(|row| (row % t_q + t_kv) as f32 - (t_q + row / t_q) as f32).collect(),
        }
    }

    pub fn call<'a, E: Element>(&'a self, data: &'a Data<E>) -> CpuCall<'a> {
        let AttentionDims { h, h_kv, t_q, t_kv, d, d_v, .. } = self.dims;
        let has_modifiers = self.has_modifiers;
        let scores = ScoreModifiers {
            scale: 0.7,
            softcap: has_modifiers.then_some(2.0),
            alibi_slopes: has_modifiers.then_some(View::list(&data.slopes)),
            relative_bias: None,
            bias: has_modifiers.then_some(Strided { data: &data.bias[..], strides: [0, 0, t_kv, 1] }.into()),
            boolean_mask: has_modifiers.then_some(Strided { data: &data.bool_mask[..], strides: [0, 0, 0, 1] }.into()),
            sinks: has_modifiers.then_some(View::list(&data.sinks)),
            dropout: self.dropout.map(|seed| {
                let kept_bits = DropoutMask::KeptBits(View::list(&self.kept));
                Dropout { mask: if has_modifiers { kept_bits } else { DropoutMask::Philox(seed) }, p: P }
            }),
        };
        let strides = |width: usize| [h_kv * t_kv * width, t_kv * width, width];
        let kv_rows = |floats: &'a [E], rows: &'a CodedRows, width: usize| match self.codes {
            Some(format) => View::from(Strided { data: &rows.codes[..], strides: strides(format.bytes(width)) }),
            None => Strided { data: floats, strides: strides(width) }.into(),
        };
        let kv_scales = self.codes.map(|format| {
            let scales = |rows: &'a CodedRows, width: usize| {
                Strided { data: &rows.scales[..], strides: strides(format.scales(width)) }.into()
            };
            KvScales { format, k: scales(&data.k_codes, d), v: scales(&data.v_codes, d_v) }
        });
        AttentionCall {
            dims: self.dims,
            q: Strided { data: &data.q[..], strides: [h * t_q * d, t_q * d, d] }.into(),
            k: kv_rows(&data.k, &data.k_codes, d),
            v: kv_rows(&data.v, &data.v_codes, d_v),
            kv_scales,
            pages: None,
            keys: KeysOfQueries { ranges: &self.ranges, positions: &data.positions, ..Default::default() },
            scores,
            output_layout: OutputLayout::Bhtd,
        }
    }

    /// Runs the oracle on the call, with a relative bias for each pair of a query and a key that are not masked.
    pub fn with_problem<T>(
        &self,
        data: &Data<f64>,
        relative_bias: &dyn Fn(Pair) -> f64,
        run: impl FnOnce(&Problem) -> T,
    ) -> T {
        let AttentionDims { t_q, t_kv, .. } = self.dims;
        let has_modifiers = self.has_modifiers;
        let sinks: Vec<f64> = data.sinks.iter().map(|sink| f64::from(*sink)).collect();
        let bias = |pair: Pair| {
            if !has_modifiers {
                return relative_bias(pair);
            }
            let distance = (data.positions[pair.b * t_q + pair.query] - pair.key as f32).abs();
            let alibi = -f64::from(data.slopes[pair.head]) * f64::from(distance);
            alibi + relative_bias(pair) + f64::from(data.bias[pair.query * t_kv + pair.key])
        };
        let attends = |pair: Pair| {
            let is_in_range = self.ranges[pair.b * t_q + pair.query].contains(&pair.key);
            is_in_range && (!has_modifiers || data.bool_mask[pair.key] != 0)
        };
        let index = |pair: Pair| WeightIndex { b: pair.b, head: pair.head, query: pair.query, key: pair.key };
        let dropout = |pair: Pair| match self.dropout {
            Some(seed) if !philox_keeps(seed, P, index(pair)) => 0.0,
            Some(_) => 1.0 / (1.0 - P),
            None => 1.0,
        };
        run(&Problem {
            dims: self.dims,
            q: &data.q,
            k: &data.k,
            v: &data.v,
            scale: 0.7,
            softcap: has_modifiers.then_some(2.0),
            sinks: has_modifiers.then_some(&sinks),
            bias: &bias,
            attends: &attends,
            dropout: &dropout,
            has_uniform_empty_rows: false,
        })
    }

    /// Computes the output, the log-sum-exp and the weights with the oracle.
    pub fn exact(&self, data: &Data<f64>) -> Forward {
        self.with_problem(data, &|_| 0.0, |problem| problem.forward())
    }

    /// Returns the largest difference between the kernel and the oracle, on one instruction set.
    pub fn difference<E: Element + Into<f32>>(&self, instruction_set: InstructionSet) -> f64 {
        let data = self.data::<E>();
        let wanted = RequestedResults { log_sum_exp: true, ..RequestedResults::default() };
        let found = attend::<E>(&self.call(&data), instruction_set, wanted).expect("a few rows");
        let lse = found.log_sum_exp.expect("requested");
        let exact = self.exact(&data.clone().widened(self.codes.is_some()));
        assert!(
            lse.iter().zip(&exact.log_sum_exp).all(|(x, expected)| expected.is_finite() || f64::from(*x) == *expected)
        );
        let mut largest = 0f64;
        let outputs = found.output.into_iter().map(|x| f64::from(x.into())).zip(exact.output);
        for (x, expected) in outputs.chain(lse.into_iter().map(f64::from).zip(exact.log_sum_exp)) {
            if x != expected && expected != f64::NEG_INFINITY {
                largest = largest.max((x - expected).abs());
            }
        }
        largest
    }
}

/// The tensors of a case.
#[derive(Clone)]
pub struct Data<E> {
    pub q: Vec<E>,
    pub k: Vec<E>,
    pub v: Vec<E>,
    /// Replaces the keys in a case of codes.
    pub k_codes: CodedRows,
    pub v_codes: CodedRows,
    pub bias: Vec<f32>,
    pub bool_mask: Vec<u8>,
    pub slopes: Vec<f32>,
    pub sinks: Vec<f32>,
    pub positions: Vec<f32>,
}

impl<E: Element + Into<f32>> Data<E> {
    pub fn widened(self, are_codes: bool) -> Data<f64> {
        let wide = |numbers: Vec<E>| -> Vec<f64> { numbers.into_iter().map(|x| f64::from(x.into())).collect() };
        let kv = |floats: Vec<E>, rows: &CodedRows| if are_codes { rows.numbers.clone() } else { wide(floats) };
        let Self { q, k, v, k_codes, v_codes, bias, bool_mask, slopes, sinks, positions } = self;
        let k = kv(k, &k_codes);
        let v = kv(v, &v_codes);
        Data { q: wide(q), k, v, k_codes, v_codes, bias, bool_mask, slopes, sinks, positions }
    }
}

pub fn dims(h: usize, t_q: usize, t_kv: usize, d: usize, d_v: usize) -> AttentionDims {
    AttentionDims { b: 2, h, h_kv: h.div_ceil(2), t_q, t_kv, d, d_v }
}
