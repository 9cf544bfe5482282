//! The layer in plain f64 loops, made of the other layer's.

use std::ops::Range;

use candle_attention::{MultiHeadLatentAttentionConfig as Config, QkNorm, QkNormKind, QkNormScope};

use crate::by_hand::{Numbers, Output, Parameters, heads, merged, normalise, project, rotate};
use crate::oracle::{Case, Dims, Mask, Options};

/// xs are (B, T, E).
pub fn forward(cfg: &Config, parameters: &Parameters, xs: &Numbers, mask: Mask) -> Output {
    let (b, t, h, d, d_v) = (xs.shape[0], xs.shape[1], cfg.num_heads(), cfg.head_dim(), cfg.value_head_dim());
    let (rank, nope, rope) = (cfg.kv_lora_rank(), cfg.nope_head_dim(), cfg.rope_head_dim());
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::Projection, eps: cfg.norm_eps() };
    let queries = match cfg.q_lora_rank() {
        None => project(parameters, "q_proj", xs),
        Some(rank) => {
            let mut compressed = project(parameters, "q_a_proj", xs);
            normalise(parameters, "q_a_layernorm", norm, rank, &mut compressed);
            project(parameters, "q_b_proj", &compressed)
        }
    };
    let compressed = project(parameters, "kv_a_proj_with_mqa", xs);
    let mut latents = columns(&compressed, 1, 0..rank);
    normalise(parameters, "kv_a_layernorm", norm, rank, &mut latents);
    let up = project(parameters, "kv_b_proj", &latents);
    let (mut q_rope, mut k_rope) = (columns(&queries, h, nope..d), columns(&compressed, 1, rank..rank + rope));
    rotate(cfg.rope(), rope, &mut q_rope);
    rotate(cfg.rope(), rope, &mut k_rope);
    // The rotated key is that of every head.
    k_rope.data = k_rope.data.chunks(rope).flat_map(|row| row.repeat(h)).collect();
    k_rope.shape[2] = h * rope;

    let case = Case {
        dims: Dims { b, h, h_kv: h, t_q: t, t_kv: t, d, d_v },
        q: heads(&join(&columns(&queries, h, 0..nope), &q_rope, h), h, d),
        k: heads(&join(&columns(&up, h, 0..nope), &k_rope, h), h, d),
        v: heads(&columns(&up, h, nope..nope + d_v), h, d_v),
        masks: vec![mask],
        uniform_empty_rows: false,
        options: Options { scale: Some(cfg.scale()), ..Options::default() },
    };
    let attended = case.attend();
    let ys = project(parameters, "o_proj", &merged(&attended.context, [b, h, t, d_v]));
    Output { ys: ys.data, weights: attended.weights }
}

/// Some columns of each head.
fn columns(xs: &Numbers, heads: usize, columns: Range<usize>) -> Numbers {
    let own = xs.data.chunks(xs.width() / heads).flat_map(|head| &head[columns.clone()]);
    Numbers { shape: vec![xs.shape[0], xs.shape[1], heads * columns.len()], data: own.copied().collect() }
}

/// The columns of each head, then the other ones of the same head.
fn join(first: &Numbers, second: &Numbers, heads: usize) -> Numbers {
    let pairs = first.data.chunks(first.width() / heads).zip(second.data.chunks(second.width() / heads));
    let shape = vec![first.shape[0], first.shape[1], first.width() + second.width()];
    Numbers { shape, data: pairs.flat_map(|(first, second)| [first, second].concat()).collect() }
}
