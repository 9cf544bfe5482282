//! Masks of any constraints, held to their definitions, and the fused path to the reference path under them.

use candle_attention::{
    AttentionMask, Backend, SdpaOptions, TorchSeed, scaled_dot_product_attention,
    scaled_dot_product_attention_with_weights,
};
use candle_core::{Result, Tensor};

enum Alignment {
    Free,
    Causal,
    UpperLeft,
    Offset(u8),
    /// Of each of the two sequences.
    Offsets([i8; 2]),
}

struct Case {
    t_q: u8,
    t_kv: u8,
    alignment: Alignment,
    window: Option<u8>,
    /// Keys to the left and to the right.
    band: Option<[u8; 2]>,
    /// Of each of the two sequences.
    prefix: Option<[u8; 2]>,
    starts: Option<[u8; 2]>,
    lens: Option<[u8; 2]>,
}

impl Case {
    /// One byte after the other; those that are not there are 0.
    fn of(bytes: &[u8]) -> Self {
        let mut bytes = bytes.iter().copied();
        let mut next = || bytes.next().unwrap_or(0);
        let (t_q, t_kv) = (next() % 40, next() % 40);
        let alignment = match next() % 5 {
            0 => Alignment::Free,
            1 => Alignment::Causal,
            2 => Alignment::UpperLeft,
            3 => Alignment::Offset(next()),
            _ => Alignment::Offsets([next() as i8, next() as i8]),
        };
        let mut optional = || (next() % 2 == 1).then(|| [next(), next()]);
        let window = optional().map(|[window, _]| window);
        Self {
            t_q,
            t_kv,
            alignment,
            window,
            band: optional(),
            prefix: optional(),
            starts: optional(),
            lens: optional(),
        }
    }

    fn mask(&self) -> AttentionMask {
        let each = |values: [u8; 2]| values.map(usize::from).to_vec();
        let mut mask = match self.alignment {
            Alignment::Free => AttentionMask::none(),
            Alignment::Causal => AttentionMask::causal(),
            Alignment::UpperLeft => AttentionMask::causal_upper_left(),
            Alignment::Offset(n) => AttentionMask::causal_with_offset(n.into()),
            Alignment::Offsets(offsets) => AttentionMask::causal_with_offsets(offsets.map(i64::from)),
        };
        if let Some(w) = self.window {
            mask = mask.with_window(w.into());
        }
        if let Some([left, right]) = self.band {
            mask = mask.with_band(left.into(), right.into());
        }
        if let Some(prefix) = self.prefix {
            mask = mask.with_prefix(each(prefix));
        }
        if let Some(starts) = self.starts {
            mask = mask.with_starts(each(starts));
        }
        if let Some(lens) = self.lens {
            mask = mask.with_valid_lens(each(lens));
        }
        mask
    }

    /// Whether query i of sequence b sees key j, by the definitions.
    fn sees(&self, b: usize, i: usize, j: usize, t_q: usize, t_kv: usize) -> bool {
        let (i, j) = (i as i64, j as i64);
        let position = match self.alignment {
            Alignment::Free | Alignment::Causal => i + t_kv as i64 - t_q as i64,
            Alignment::UpperLeft => i,
            Alignment::Offset(n) => i + i64::from(n),
            Alignment::Offsets(offsets) => i + i64::from(offsets[b]),
        };
        let of = |values: Option<[u8; 2]>| values.map(|values| i64::from(values[b]));
        let later = !matches!(self.alignment, Alignment::Free) && j > position;
        (!later || of(self.prefix).is_some_and(|prefix| j < prefix))
            && self.window.is_none_or(|w| position - j < i64::from(w))
            && self.band.is_none_or(|[l, r]| j >= position - i64::from(l) && j <= position + i64::from(r))
            && of(self.starts).is_none_or(|start| j >= start)
            && of(self.lens).is_none_or(|len| j < len)
    }

    fn check(&self) -> Result<()> {
        let (t_q, t_kv) = (usize::from(self.t_q), usize::from(self.t_kv));
        let seed = TorchSeed::new(0);
        let [q, k, v] = [seed.randn((2, 2, t_q, 4))?, seed.randn((2, 1, t_kv, 4))?, seed.randn((2, 1, t_kv, 4))?];
        let (mask, options) = (self.mask(), SdpaOptions::default());
        let output = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &options)?;
        for (b, heads) in output.weights.to_dtype(candle_core::DType::F32)?.chunk(2, 0)?.iter().enumerate() {
            let rows: Vec<Vec<f32>> = heads.get(0)?.get(0)?.to_vec2()?;
            for (i, row) in rows.iter().enumerate() {
                for (j, &weight) in row.iter().enumerate() {
                    assert_eq!(weight > 0.0, self.sees(b, i, j, t_q, t_kv), "sequence {b}, query {i}, key {j}");
                }
            }
        }
        let fused = options.with_backend(Backend::Fused);
        let gap = (scaled_dot_product_attention(&q, &k, &v, &mask, &fused)? - output.context)?;
        if gap.elem_count() > 0 {
            let gap: f32 = Tensor::abs(&gap)?.max_all()?.to_scalar()?;
            assert!(gap < 1e-5, "the fused path is off by {gap}");
        }
        Ok(())
    }
}

pub fn run(bytes: &[u8]) {
    // An error is an answer, too: constraints may exclude each other.
    drop(Case::of(bytes).check());
}
