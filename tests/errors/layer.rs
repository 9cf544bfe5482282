//! Inputs that do not fit a layer.

use candle_core::ModuleT;

use crate::wrong::Fitting;
use crate::*;

fn base() -> Config {
    Config::new(8, 4)
}

/// A layer of six positions.
fn short() -> Result<MultiHeadAttention> {
    layer(base().with_context_length(6))
}

/// The first query of each head in the place of attention.
fn first(q: &Tensor, _: &Tensor, _: &Tensor, _: &AttentionMask, _: &SdpaOptions) -> Result<Tensor> {
    q.narrow(2, 0, 1)
}

#[test]
fn inputs() {
    let f32 = DType::F32;
    let dims: [Fitting; 3] = [("xs", f32, "B T 8"), ("positions", DType::U32, "B T"), ("residual", f32, "B T 8")];
    let own = wrong::tensors("B 2 T 3", &dims, |tensors| {
        let input = AttentionInput::new(&tensors[0]).with_positions(&tensors[1]).with_residual(&tensors[2]);
        layer(base().with_context_length(3).with_rope(RopeConfig::new(10_000.0)))?.forward_with(input)
    });
    let dims: [Fitting; 3] = [("queries", f32, "B T 8"), ("keys", f32, "B S 5"), ("values", f32, "B S 7")];
    let cross = wrong::tensors("B 2 T 3 S 4", &dims, |tensors| {
        let layer = layer(base().with_key_size(5).with_value_size(7).with_context_length(4))?;
        layer.forward_with(AttentionInput::new(&tensors[0]).with_key_value(&tensors[1], &tensors[2]))
    });
    let inputs = cases! {
        "inputs in half precision, in training" => short()?.forward_t(&of(DType::BF16, (1, 3, 8)), true),
        "one sequence of another width" => short()?.forward(&zeros((3, 12))),
        "self-attention of a layer whose keys are others" => layer(base().with_key_size(5))?.forward(&zeros((1, 3, 8))),
        "a softcap that f32 does not hold" => layer(base().with_softcap(1e-300))?.forward(&zeros((1, 3, 8))),
        "a fused kernel for F64" => {
            let xs = of(DType::F64, (1, 3, 8));
            layer_in(DType::F64, base())?.forward_with(AttentionInput::new(&xs).with_backend(Backend::Fused))
        },
    };
    assert_reviewed("layer_inputs", &[own, cross, inputs]);
}

#[test]
fn masks_positions_and_functions() {
    let (xs, two) = (zeros((1, 3, 8)), zeros((2, 3, 8)));
    let input = || AttentionInput::new(&xs);
    // Three tokens at these positions.
    let rotated = |positions: Tensor| {
        let cfg = base().with_context_length(6).with_rope(RopeConfig::new(10_000.0));
        layer(cfg)?.forward_with(input().with_positions(&positions))
    };
    let masks = cases! {
        "lengths for another batch" => {
            let mask = AttentionMask::none().with_valid_lens(vec![3]);
            short()?.forward_with(AttentionInput::new(&two).with_mask(&mask))
        },
        "a mask for the learned key as well" => {
            let mask = AttentionMask::none().with_keep(&of(DType::U8, (3, 4)));
            layer(base().with_bias_kv(true))?.forward_with(input().with_mask(&mask))
        },
        "a negative position" => rotated(Tensor::new(&[[0i64, -7, 1]], &CPU)?),
        "a position past the context length" => rotated(Tensor::new(&[0u32, 6, 1], &CPU)?),
        "positions of keys that are the queries" =>
            short()?.forward_with(input().with_key_positions(&Tensor::arange(0u32, 3, &CPU)?)),
        "an attention function and a cache" =>
            short()?.forward_with(input().with_function(&first).with_cache(&mut AttentionCache::default())),
        "weights of an attention function" => short()?.forward_with_weights(input().with_function(&first)),
        "the plan of an attention function" => short()?.plan(&input().with_function(&first)),
        "a context of another shape" => short()?.forward_with(input().with_function(&first)),
        "an attention function beside terms by distance" => {
            let positions = ContentPositions::Clipped { left: 2, right: 2 };
            layer(base().with_content_positions(positions))?.forward_with(input().with_function(&first))
        },
    };
    assert_reviewed("layer_options", &[masks]);
}

#[test]
fn packed_sequences() {
    let (sequences, xs) = (PackedSequences::from_lens(&[3], &[3]).expect("one sequence"), zeros((3, 8)));
    let input = || AttentionInput::new(&xs).with_packed(&sequences);
    let packed = |shape: &[usize], lens_q: &[usize], lens_kv: &[usize]| {
        let sequences = PackedSequences::from_lens(lens_q, lens_kv)?;
        short()?.forward_with(AttentionInput::new(&zeros(shape)).with_packed(&sequences))
    };
    let cases = cases! {
        "sequences of a batch" => packed(&[2, 3, 8], &[3], &[3]),
        "sequences of another total" => packed(&[5, 8], &[3, 3], &[3, 3]),
        "self-attention with other lengths of keys" => packed(&[5, 8], &[3, 2], &[2, 3]),
        "a cache" => short()?.forward_with(input().with_cache(&mut AttentionCache::default())),
        "weights" => short()?.forward_with_weights(input()),
        "a bias" => short()?.forward_with(input().with_mask(&AttentionMask::none().with_bias(&zeros((3, 3))))),
        "a memory of rotated keys" => {
            let layer = layer(base().with_rope(RopeConfig::new(10_000.0)))?;
            layer.forward_with(input().with_memory(&layer.project_memory(&xs, &xs)?))
        },
        "a learned key" => layer(base().with_bias_kv(true))?.forward_with(input()),
    };
    assert_reviewed("layer_packed", &[cases]);
}

#[test]
fn positions_by_content() {
    let grid = |height| ContentPositions::Grid { height, width: 3 };
    let window = |width| ContentPositions::Window { height: 3, width };
    let cosines = |trained| ContentPositions::CosineWindow { height: 3, width: 2, trained };
    let with = |positions| base().with_content_positions(positions);
    let disentangled = || with(ContentPositions::Disentangled(DisentangledConfig::new(4)));
    let vectors_of = |config: DisentangledConfig| RelativeEmbeddings::new(&config, 8, any_weights());
    let vectors = |span| vectors_of(DisentangledConfig::new(span));
    let six = zeros((1, 6, 8));
    let cases = cases! {
        "another grid" => layer(with(grid(2)))?.forward(&zeros((1, 5, 8))),
        "keys beside a grid" => layer(with(grid(2)))?.forward_with(AttentionInput::new(&six).with_key_value(&six, &six)),
        "positions beside a grid" =>
            layer(with(grid(2)))?.forward_with(AttentionInput::new(&six).with_positions(&of(DType::U32, 6))),
        "a grid without rows" => layer(with(grid(0))),
        "a grid and a softcap" => layer(with(grid(2)).with_softcap(5.0)),
        "a grid and no scale" => layer(with(grid(2)).with_scale(0.0)),
        "a window of no column" => layer(with(window(0))),
        "tokens of another window" => layer(with(window(2)))?.forward(&zeros((1, 5, 8))),
        "cosine scores trained on windows of one token" => layer(with(cosines(Some([4, 1])))),
        "cosine scores and a scale" => layer(with(cosines(None)).with_scale(0.5)),
        "disentangled positions without their vectors" => layer(disentangled())?.forward(&zeros((1, 3, 8))),
        "vectors of disentangled positions of another span" =>
            layer(disentangled())?.with_relative_embeddings(vectors(5)?),
        "vectors of distances for a layer without" => short()?.with_relative_embeddings(vectors(4)?),
        "disentangled positions and grouped heads" => layer(disentangled().with_num_kv_heads(2)),
        "no buckets between near and far" => vectors_of(DisentangledConfig::new(4).with_num_buckets(6)),
        "sines without cosines" =>
            layer(Config::new(9, 3).with_content_positions(ContentPositions::TransformerXl)),
        "windows of nothing" => Windows::new([4, 6], 0),
        "windows moved by more than a window" => Windows::new([4, 6], 2)?.with_shift(2),
        "an image of another size" => Windows::new([4, 6], 2)?.partition(&zeros((1, 23, 8))),
        "windows of another size" => Windows::new([4, 6], 2)?.join(&zeros((6, 5, 8))),
    };
    assert_reviewed("layer_positions", &[cases]);
}
