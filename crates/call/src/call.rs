//! The description of one attention call.

use crate::codes::KvCodeFormat;
use crate::dims::AttentionDims;
use crate::gradients::PerInput;
use crate::inputs::Input;
use crate::layout::OutputLayout;
use crate::modifiers::ScoreModifiers;

/// One attention call. `T` is a tensor, `K` describes the keys that each query attends to.
///
/// Scores are made in this order: the product of query and key times the scale, softcap, ALiBi, relative bias, bias,
/// mask; then the softmax in f32, dropout, and the sum of values. A query that attends to no key has zeros.
#[derive(Debug, Clone, Copy)]
pub struct AttentionCall<T, K> {
    /// The sizes of all tensors. Of packed sequences B is 1, and T_q and T_kv are totals.
    pub dims: AttentionDims,
    /// Queries (B, H, T_q, D).
    pub q: T,
    /// Keys (B, H_kv, T_kv, D), or bytes of codes.
    pub k: T,
    /// Values (B, H_kv, T_kv, D_v), likewise.
    pub v: T,
    /// The scales of keys and values that are codes.
    pub kv_scales: Option<KvScales<T>>,
    /// The pages of each sequence, where keys, values and their scales are pools of pages.
    pub pages: Option<KvPages<T>>,
    /// The keys that each query attends to.
    pub keys: K,
    /// The scale and the modifiers of scores and weights.
    pub scores: ScoreModifiers<T>,
    /// The order of the output in memory.
    pub output_layout: OutputLayout,
}

/// The format and the scales of keys and values that are stored as codes.
#[derive(Debug, Clone, Copy)]
pub struct KvScales<T> {
    /// The format of the codes.
    pub format: KvCodeFormat,
    /// (B, H_kv, T_kv, scales of a row).
    pub k: T,
    /// (B, H_kv, T_kv, scales of a row).
    pub v: T,
}

impl<T> KvScales<T> {
    /// Returns the scales with a function applied to both tensors.
    ///
    /// # Errors
    /// As the function.
    pub fn try_map<U, E>(&self, change: impl Fn(&T) -> Result<U, E>) -> Result<KvScales<U>, E> {
        Ok(KvScales { format: self.format, k: change(&self.k)?, v: change(&self.v)? })
    }
}

/// Pools of pages that sequences share. With pages, keys (pages, H_kv, page size, D), values (pages, H_kv, page size,
/// D_v) and scales (pages, H_kv, page size, ..) take the places of the tensors of a batch; key n of sequence b is row
/// `n mod page size` of page `table[b][n / page size]`. In a batch, T_kv is the largest number of keys of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct KvPages<T> {
    /// (B, most pages), or a row for each packed sequence: the pages of the sequence, in the order of its keys. CPU
    /// kernels read u32, also (B, H_kv, 1, most pages) for pages that differ from head to head; CUDA kernels read i32.
    /// An entry that no query's keys need may be any number.
    pub table: T,
    /// The number of keys in a page.
    pub page_size: usize,
}

impl<T, K> AttentionCall<T, K> {
    /// Returns the call with what `change` makes of each tensor, and with another description of the keys to attend to:
    /// the one conversion between the calls of two packages.
    ///
    /// # Errors
    /// If `change` fails.
    pub fn map<'a, U, L, E>(
        &'a self,
        keys: L,
        mut change: impl FnMut(Input, &'a T) -> Result<U, E>,
    ) -> Result<AttentionCall<U, L>, E> {
        let Self { dims, q, k, v, kv_scales, pages, keys: _, scores, output_layout } = self;
        Ok(AttentionCall {
            dims: *dims,
            q: change(Input::Q, q)?,
            k: change(Input::K, k)?,
            v: change(Input::V, v)?,
            kv_scales: match kv_scales {
                Some(scales) => Some(KvScales {
                    format: scales.format,
                    k: change(Input::KeyScales, &scales.k)?,
                    v: change(Input::ValueScales, &scales.v)?,
                }),
                None => None,
            },
            pages: match pages {
                Some(KvPages { table, page_size }) => {
                    Some(KvPages { table: change(Input::PageTable, table)?, page_size: *page_size })
                }
                None => None,
            },
            keys,
            scores: scores.map(&mut change)?,
            output_layout: *output_layout,
        })
    }

    /// Returns the tensors that have gradients.
    pub fn differentiable(&self) -> PerInput<Option<&T>> {
        PerInput { q: Some(&self.q), k: Some(&self.k), v: Some(&self.v), ..self.scores.differentiable() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modifiers::{Dropout, DropoutMask};

    #[test]
    fn attention_call_map_names_and_changes_every_tensor() {
        let call = AttentionCall {
            dims: AttentionDims { b: 1, h: 2, h_kv: 1, t_q: 3, t_kv: 4, d: 5, d_v: 6 },
            q: 0,
            k: 1,
            v: 2,
            kv_scales: Some(KvScales { format: KvCodeFormat::Q4, k: 3, v: 4 }),
            pages: Some(KvPages { table: 11, page_size: 16 }),
            keys: "all",
            scores: ScoreModifiers {
                scale: 0.5,
                softcap: Some(3.0),
                alibi_slopes: Some(5),
                relative_bias: Some(6),
                bias: Some(7),
                boolean_mask: Some(8),
                sinks: Some(9),
                dropout: Some(Dropout { p: 0.25, mask: DropoutMask::KeptBits(10) }),
            },
            output_layout: OutputLayout::Bthd,
        };
        let mut named = Vec::new();
        let texts = call.map("some", |input, number| -> Result<String, ()> {
            named.push((*number, input));
            Ok(format!("tensor {number}"))
        });
        let texts = texts.expect("no tensor fails");
        named.sort_by_key(|(number, _)| *number);
        let names: Vec<_> = named.into_iter().map(|(_, input)| input).collect();
        assert_eq!(
            names,
            [
                Input::Q,
                Input::K,
                Input::V,
                Input::KeyScales,
                Input::ValueScales,
                Input::AlibiSlopes,
                Input::RelativeBias,
                Input::Bias,
                Input::BooleanMask,
                Input::Sinks,
                Input::Dropout,
                Input::PageTable,
            ]
        );
        let AttentionCall { dims, keys, scores, output_layout, .. } = &texts;
        assert_eq!(texts.kv_scales.as_ref().map(|scales| scales.format), Some(KvCodeFormat::Q4));
        assert_eq!(texts.pages.as_ref().map(|pages| pages.page_size), Some(16));
        assert_eq!((*dims, *keys, *output_layout), (call.dims, "some", OutputLayout::Bthd));
        assert_eq!((scores.scale, scores.softcap), (0.5, Some(3.0)));
        let of_gradients = texts.differentiable().map(|text| text.map(String::as_str)).in_order();
        assert_eq!(
            of_gradients,
            ["tensor 0", "tensor 1", "tensor 2", "tensor 7", "tensor 6", "tensor 5", "tensor 9"].map(Some)
        );
        assert_eq!(
            call.map((), |input, _| if input == Input::Bias { Err("bias") } else { Ok(()) }).err(),
            Some("bias")
        );
    }
}
