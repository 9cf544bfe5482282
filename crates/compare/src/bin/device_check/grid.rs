//! The calls that are checked: masks, options, sizes, strides, and kinds of results.

use super::case::{Case, Dims, Layout, Mask, Options, Want};

/// The calls of a row of the table.
pub struct Group {
    pub name: &'static str,
    pub cases: Vec<Case>,
}

/// The sizes that every row goes over.
pub struct Grid {
    sizes: Vec<Dims>,
    /// The lengths of a cache that one query and some queries attend to.
    cached: usize,
}

const PLAIN: Dims = Dims { b: 2, h: 4, h_kv: 4, t_q: 48, t_kv: 48, d: 64, d_v: 64 };

/// (T_q, T_kv): a square that fills blocks and one that does not, new queries against a cache, one query.
const SHORT: [(usize, usize); 4] = [(32, 32), (37, 37), (9, 70), (1, 70)];
const LONG: [(usize, usize); 6] = [(128, 128), (200, 200), (129, 300), (300, 129), (1, 1030), (7, 2050)];

const CAUSAL: Case = Case { mask: Mask::Causal, ..plain(PLAIN) };

const fn plain(dims: Dims) -> Case {
    Case { dims, layout: Layout::Contiguous, mask: Mask::None, options: Options::Plain, want: Want::Output }
}

impl Grid {
    /// Makes the sizes: every length with every head dimension, with one key head for each query head, for two, or for
    /// all.
    pub fn new(short: bool, widths: &[usize]) -> Self {
        let mut lengths = SHORT.to_vec();
        if !short {
            lengths.extend(LONG);
        }
        let mut sizes = Vec::new();
        for (t_q, t_kv) in lengths {
            for &d in widths {
                let h_kv = [4, 2, 1][sizes.len() % 3];
                sizes.push(Dims { h_kv, t_q, t_kv, d, d_v: d, ..PLAIN });
            }
        }
        Self { sizes, cached: if short { 300 } else { 9000 } }
    }

    /// Returns the rows of the table.
    pub fn groups(&self) -> Vec<Group> {
        let mut groups = self.masks();
        groups.extend(self.options());
        groups.extend(self.layouts_and_widths());
        groups.extend(self.results());
        groups.extend(self.gradients());
        groups
    }

    /// Returns a row with the mask, options, layout and result of a case at every size.
    fn row(&self, name: &'static str, case: Case) -> Group {
        Group { name, cases: self.sizes.iter().map(|&dims| Case { dims, ..case }).collect() }
    }

    fn masks(&self) -> Vec<Group> {
        let row = |name, mask| self.row(name, Case { mask, ..plain(PLAIN) });
        vec![
            row("no mask", Mask::None),
            row("causal", Mask::Causal),
            row("causal, upper left", Mask::UpperLeft),
            row("causal, offset", Mask::Offset),
            row("causal, offsets", Mask::Offsets),
            row("window", Mask::Window),
            row("local window", Mask::LocalWindow),
            row("chunks", Mask::Chunk),
            row("one length", Mask::OneLength),
            row("lengths", Mask::Lens),
            row("left padding", Mask::Starts),
            row("lengths by query", Mask::LensByQuery),
            row("starts by query", Mask::StartsByQuery),
            row("prefix", Mask::Prefix),
            row("boolean mask", Mask::Bool),
            row("boolean mask by head", Mask::BoolByHead),
            row("bias", Mask::Bias),
            row("bias by head", Mask::BiasByHead),
            row("bias in f32", Mask::BiasInF32),
            row("fully masked", Mask::FullyMasked),
        ]
    }

    fn options(&self) -> Vec<Group> {
        let row = |name, options, mask| self.row(name, Case { options, mask, ..plain(PLAIN) });
        vec![
            row("scale", Options::Scale, Mask::None),
            row("softcap", Options::Softcap, Mask::Causal),
            row("ALiBi", Options::Alibi, Mask::Causal),
            row("ALiBi, both sides", Options::Alibi, Mask::None),
            row("relative bias", Options::RelativeBias, Mask::None),
            row("relative bias, causal", Options::RelativeBias, Mask::Causal),
            row("sinks", Options::Sinks, Mask::Causal),
            row("sinks, fully masked", Options::Sinks, Mask::FullyMasked),
            row("dropout", Options::Dropout, Mask::Causal),
            row("tokens first", Options::TokensFirst, Mask::Causal),
            row("everything", Options::Everything, Mask::Everything),
        ]
    }

    fn layouts_and_widths(&self) -> Vec<Group> {
        let row = |name, layout| self.row(name, Case { layout, ..CAUSAL });
        let widths = |widths: &[(usize, usize)]| {
            widths.iter().map(|&(d, d_v)| Case { dims: Dims { d, d_v, ..PLAIN }, ..CAUSAL }).collect()
        };
        let cached = |t_q, h, h_kv, d| {
            let dims = Dims { h, h_kv, t_q, t_kv: self.cached, d, d_v: d, ..PLAIN };
            Case { dims, layout: Layout::Cache, ..CAUSAL }
        };
        vec![
            row("as projected", Layout::Projection),
            row("from a cache", Layout::Cache),
            row("odd rows", Layout::OddRows),
            row("column-major", Layout::ColumnMajor),
            row("keys of one sequence", Layout::OneSequence),
            Group { name: "D of 8, 72, 80, 256", cases: widths(&[(8, 8), (72, 72), (80, 80), (256, 256)]) },
            Group { name: "D of 13, 96, 192", cases: widths(&[(13, 13), (96, 96), (192, 192)]) },
            Group { name: "D_v other than D", cases: widths(&[(64, 32), (64, 65), (7, 64), (192, 128)]) },
            Group {
                name: "a long cache",
                cases: vec![
                    cached(1, 8, 2, 64),
                    cached(1, 8, 8, 128),
                    cached(3, 8, 1, 128),
                    cached(16, 8, 2, 64),
                    cached(1, 8, 2, 256),
                ],
            },
        ]
    }

    fn results(&self) -> Vec<Group> {
        vec![
            self.row("log-sum-exp", Case { want: Want::LogSumExp, ..CAUSAL }),
            self.row(
                "log-sum-exp, everything",
                Case { want: Want::LogSumExp, mask: Mask::Everything, options: Options::Everything, ..CAUSAL },
            ),
            self.row("weights", Case { want: Want::Weights, ..CAUSAL }),
        ]
    }

    fn gradients(&self) -> Vec<Group> {
        let row = |name, mask, options| self.row(name, Case { want: Want::Gradients, mask, options, ..plain(PLAIN) });
        let of_layout = |name, layout| self.row(name, Case { want: Want::Gradients, layout, ..CAUSAL });
        let of_mask =
            |mask| Case { want: Want::Gradients, mask, ..plain(Dims { h_kv: 2, t_q: 70, t_kv: 90, ..PLAIN }) };
        let of_width = |(d, d_v)| Case { want: Want::Gradients, dims: Dims { h_kv: 2, d, d_v, ..PLAIN }, ..CAUSAL };
        let other_masks = [
            Mask::UpperLeft,
            Mask::Offset,
            Mask::Offsets,
            Mask::LocalWindow,
            Mask::Chunk,
            Mask::Starts,
            Mask::LensByQuery,
            Mask::StartsByQuery,
            Mask::Prefix,
            Mask::Bool,
            Mask::BiasInF32,
        ];
        let other_widths = [(8, 8), (13, 13), (80, 80), (96, 96), (192, 128), (64, 65), (256, 256)];
        vec![
            row("gradients", Mask::Causal, Options::Plain),
            row("gradients, no mask", Mask::None, Options::Plain),
            row("gradients, window", Mask::Window, Options::Plain),
            row("gradients, lengths", Mask::Lens, Options::Plain),
            row("gradients, fully masked", Mask::FullyMasked, Options::Plain),
            row("gradients, boolean mask", Mask::BoolByHead, Options::Plain),
            row("gradients, bias", Mask::Bias, Options::Plain),
            row("gradients, bias by head", Mask::BiasByHead, Options::Plain),
            row("gradients, softcap", Mask::Causal, Options::Softcap),
            row("gradients, ALiBi", Mask::Causal, Options::Alibi),
            row("gradients, relative bias", Mask::None, Options::RelativeBias),
            row("gradients, sinks", Mask::Causal, Options::Sinks),
            row("gradients, dropout", Mask::Causal, Options::Dropout),
            row("gradients, everything", Mask::Everything, Options::Everything),
            of_layout("gradients, as projected", Layout::Projection),
            of_layout("gradients, odd rows", Layout::OddRows),
            of_layout("gradients, one sequence", Layout::OneSequence),
            self.row("gradients, log-sum-exp", Case { want: Want::GradientsWithLogSumExp, ..CAUSAL }),
            Group { name: "gradients, other masks", cases: other_masks.map(of_mask).into() },
            Group { name: "gradients, other widths", cases: other_widths.map(of_width).into() },
        ]
    }
}
