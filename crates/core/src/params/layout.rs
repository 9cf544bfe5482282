//! The layouts of weights: names, packing and order.

/// The layout in which a checkpoint stores the projections of one attention layer.
///
/// Every layout has a spelling, which `Display` writes and `FromStr` reads:
///
/// | spelling | parameters | comes from |
/// | --- | --- | --- |
/// | `canonical` | q_proj, k_proj, v_proj, o_proj | Llama and similar models; [`MultiHeadAttention::new`] reads it |
/// | `book` | W_query, W_key, W_value, out_proj | Raschka, Build a Large Language Model (From Scratch) |
/// | `short` | Wq, Wk, Wv, Wo | |
/// | `d2l` | W_q, W_k, W_v, W_o | Dive into Deep Learning |
/// | `bert` | self.query, self.key, self.value, output.dense | BERT and similar models |
/// | `vit` | attention.query, attention.key, attention.value, output.dense | ViT and similar models in transformers |
/// | `distilbert` | q_lin, k_lin, v_lin, out_lin | DistilBERT |
/// | `opt` | q_proj, k_proj, v_proj, out_proj | OPT, GPT-J, and many others |
/// | `phi` | q_proj, k_proj, v_proj, dense | Phi and Phi-2 |
/// | `t5` | q, k, v, o | T5 and similar models |
/// | `meta` | wq, wk, wv, wo | Meta's own Llama files; their rotary positions are interleaved ([`RopeStyle::Interleaved`]) |
/// | `diffusers` | to_q, to_k, to_v, to_out.0 | diffusers, latent diffusion |
/// | `x-transformers` | to_q, to_k, to_v, to_out; query head h reads key head h % H_kv | x-transformers |
/// | `mingpt` | query, key, value, proj | minGPT |
/// | `albert` | query, key, value, dense | ALBERT |
/// | `internvl` | q_proj, k_proj, v_proj, projection_layer | InternVL's and Janus' images |
/// | `ctrl` | Wq, Wk, Wv, dense | CTRL |
/// | `modernbert-decoder` | q_proj, k_proj, v_proj, Wo | ModernBERT as a decoder |
/// | `moshi` | q_proj.linear, k_proj.linear, v_proj.linear, o_proj.linear | Moshi |
/// | `nemo` | query_net, key_net, value_net, out_projection | NeMo's decoders, Cohere's transcription |
/// | `deberta` | self.query_proj, self.key_proj, self.value_proj, output.dense | DeBERTa v2 and v3 |
/// | `espnet` | linear_q, linear_k, linear_v, linear_out | ESPnet's conformers, wav2vec 2.0's in transformers |
/// | `mlx` | query_proj, key_proj, value_proj, out_proj | `mlx.nn.MultiHeadAttention` |
/// | `torchtune` | q_proj, k_proj, v_proj, output_proj | torchtune; its Llama, Mistral and Gemma have interleaved rotary positions ([`RopeStyle::Interleaved`]) |
/// | `kimi` | q_proj, k_proj, v_proj, proj | the images of Kimi K2.5 and similar models in transformers |
/// | `qwen-omni` | q, k, v, proj | the images of Qwen2.5-Omni |
/// | `sapiens` | wq, wk, wv, proj | Sapiens 2 |
/// | `pix2struct` | query, key, value, output | the images of Pix2Struct and Kosmos-2.5 |
/// | `flax` | query.kernel (E, H, D), key.kernel, value.kernel, out.kernel (H, D, E), biases (H, D) and (E,) | `MultiHeadAttention` of flax, linen and nnx |
/// | `keras` | the same, with attention_output.kernel | `MultiHeadAttention` and `GroupQueryAttention` of Keras 3, by the paths of their variables |
/// | `keras-h5` | query_dense.vars.0 (E, H, D), query_dense.vars.1 .., output_dense.vars.0 (H, D, E) | the same layers, by the names in a `.weights.h5` file |
/// | `dense:canonical` (`:book`, `:short`, `:d2l`, `:opt`, `:bert`, `:albert`, `:t5`) | the same names with `.kernel` (in, out) and `.bias` | four `Dense` layers of flax or Keras; Flax models of transformers |
/// | `in-out:canonical` (`:book`, `:short`, `:d2l`, `:mingpt`) | the same names with `.weight` (in, out) and `.bias` | four layers x · W + b; has to be named |
/// | `raw:book` (`:short`, `:d2l`, `:canonical`, `:mingpt`) | the same names as plain (in, out) parameters, x · W | `nn.Parameter(torch.rand(d_in, d_out))` |
/// | `raw-transposed:book` .. | plain (out, in) parameters, x · Wᵀ | |
/// | `stacked:book` .. | heads.{i}.W_query .., and perhaps out_proj | a `ModuleList` of single heads |
/// | `stacked:mingpt` | heads.{i}.query, heads.{i}.key, heads.{i}.value, and perhaps proj | Karpathy, "Let's build GPT" |
/// | `stacked-raw:short` .. | heads.{i}.Wq .. as plain (in, out) parameters | |
/// | `stacked-raw-transposed:short` .. | the same as plain (out, in) parameters | |
/// | `torch` | in_proj_weight (or q_proj_weight, k_proj_weight, v_proj_weight), in_proj_bias, bias_k, bias_v, out_proj | `torch.nn.MultiheadAttention` |
/// | `conv1d` | c_attn, c_proj, transposed | GPT-2 |
/// | `packed:qkv_proj` | qkv_proj, o_proj; rows by part | Phi-3 |
/// | `packed:qkv_proj-out_proj` | qkv_proj, out_proj; rows by part | Unlimited OCR's images |
/// | `packed:Wqkv` | Wqkv, out_proj; rows by part | MPT |
/// | `packed:Wqkv-Wo` | Wqkv, Wo; rows by part | ModernBERT |
/// | `packed:att_proj` | att_proj, attn_out; rows by part | Molmo |
/// | `packed:query_key_value` | query_key_value, dense; rows by part | ChatGLM |
/// | `packed:query_key_value:by-head` | query_key_value, dense; rows by head | GPT-NeoX, Bloom, Falcon |
/// | `packed:c_attn` | c_attn, c_proj, not transposed; rows by part | nanoGPT, GPT-BigCode with one key head |
/// | `packed:c_attn:by-head` | c_attn, c_proj, not transposed; rows by head | GPT-BigCode |
/// | `packed:qkv` | qkv, proj; rows by part; `qkv.bias_mask` is multiplied by the bias (DINOv3) | timm |
/// | `packed:qkv-projection` | qkv, projection; rows by part | BLIP's images |
/// | `packed:to_qkv` | to_qkv, to_out; rows by part | lucidrains' vit-pytorch (`SimpleViT`) and others |
/// | `packed:to_qkv-to_out.0` | to_qkv, to_out.0; rows by part | lucidrains' vit-pytorch |
///
/// Every packed spelling accepts `:by-head`, and reads separate biases, `q_bias` and `v_bias` (BEiT, EVA, VideoMAE).
/// Persistent buffers in the file (`mask`, `tril`) are passed over. Names with `/` between their parts, as flax and
/// Keras have, are read by `weights::open` with `.` instead.
///
/// [`MultiHeadAttention::new`]: crate::MultiHeadAttention::new
/// [`RopeStyle::Interleaved`]: crate::RopeStyle::Interleaved
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightLayout {
    /// q_proj, k_proj, v_proj, o_proj.
    Canonical,
    /// W_query, W_key, W_value, out_proj.
    Book,
    /// Wq, Wk, Wv, Wo.
    Short,
    /// W_q, W_k, W_v, W_o.
    D2l,
    /// self.query, self.key, self.value, output.dense.
    Bert,
    /// attention.query, attention.key, attention.value, output.dense.
    Vit,
    /// q_lin, k_lin, v_lin, out_lin.
    DistilBert,
    /// q_proj, k_proj, v_proj, out_proj.
    Opt,
    /// q_proj, k_proj, v_proj, dense.
    Phi,
    /// q, k, v, o.
    T5,
    /// wq, wk, wv, wo.
    Meta,
    /// to_q, to_k, to_v, to_out.0.
    Diffusers,
    /// to_q, to_k, to_v, to_out.
    XTransformers,
    /// query, key, value, proj.
    MinGpt,
    /// query, key, value, dense.
    Albert,
    /// q_proj, k_proj, v_proj, projection_layer.
    InternVl,
    /// Wq, Wk, Wv, dense.
    Ctrl,
    /// q_proj, k_proj, v_proj, Wo.
    ModernBertDecoder,
    /// q_proj.linear, k_proj.linear, v_proj.linear, o_proj.linear.
    Moshi,
    /// query_net, key_net, value_net, out_projection.
    Nemo,
    /// self.query_proj, self.key_proj, self.value_proj, output.dense.
    Deberta,
    /// linear_q, linear_k, linear_v, linear_out.
    Espnet,
    /// query_proj, key_proj, value_proj, out_proj.
    Mlx,
    /// q_proj, k_proj, v_proj, output_proj.
    Torchtune,
    /// q_proj, k_proj, v_proj, proj.
    Kimi,
    /// q, k, v, proj.
    QwenOmni,
    /// query, key, value, output.
    Pix2Struct,
    /// wq, wk, wv, proj.
    Sapiens,
    /// query, key, value, out: kernels (E, H, D) and (H, D, E), and biases.
    Flax,
    /// query, key, value, attention_output: kernels and biases as in [`Flax`](Self::Flax).
    Keras,
    /// query_dense, key_dense, value_dense, output_dense: kernels `.vars.0` and biases `.vars.1` as in
    /// [`Flax`](Self::Flax).
    KerasH5,
    /// Four layers with `.kernel` (in, out) and perhaps `.bias`.
    Dense(DenseNaming),
    /// Four layers with `.weight` (in, out) and perhaps `.bias`.
    InOut(Naming),
    /// Plain parameters without `.weight`, stored (in, out) or (out, in), without biases.
    Raw(Naming, Orientation),
    /// `heads.{i}.<names>`: a module for each head, and perhaps an output projection next to `heads`. It loads into one
    /// layer.
    StackedHeads(Naming, Storage),
    /// The packed in_proj of `torch.nn.MultiheadAttention`.
    Torch,
    /// GPT-2's transposed c_attn and c_proj.
    Conv1d,
    /// Query, key and value rows in one weight.
    Packed(PackedNaming, QkvOrder),
}

/// Parameter names of the query, key, value and output projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Naming {
    /// q_proj, k_proj, v_proj, o_proj.
    Canonical,
    /// W_query, W_key, W_value, out_proj.
    Book,
    /// Wq, Wk, Wv, Wo.
    Short,
    /// W_q, W_k, W_v, W_o.
    D2l,
    /// query, key, value, proj.
    MinGpt,
}

/// Parameter names of four layers with `.kernel` (in, out).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DenseNaming {
    /// q_proj, k_proj, v_proj, o_proj.
    Canonical,
    /// W_query, W_key, W_value, out_proj.
    Book,
    /// Wq, Wk, Wv, Wo.
    Short,
    /// W_q, W_k, W_v, W_o.
    D2l,
    /// q_proj, k_proj, v_proj, out_proj.
    Opt,
    /// self.query, self.key, self.value, output.dense.
    Bert,
    /// query, key, value, dense.
    Albert,
    /// q, k, v, o.
    T5,
}

/// The form in which a projection is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// An `nn.Linear`: `.weight` (out, in) and perhaps `.bias`.
    Linear,
    /// A plain parameter by the name of the projection, without `.weight` and without a bias.
    Raw(Orientation),
}

/// The order of the dimensions of a plain parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// (in, out), for x · W.
    InOut,
    /// (out, in), for x · Wᵀ.
    OutIn,
}

/// Parameter names of a packed projection and its output projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PackedNaming {
    /// qkv_proj, o_proj.
    QkvProj,
    /// Wqkv, out_proj.
    Wqkv,
    /// Wqkv, Wo.
    WqkvWo,
    /// query_key_value, dense.
    QueryKeyValue,
    /// c_attn, c_proj.
    CAttn,
    /// qkv, proj.
    Qkv,
    /// qkv, projection.
    QkvProjection,
    /// to_qkv, to_out.
    ToQkv,
    /// to_qkv, to_out.0.
    ToQkvToOut0,
    /// att_proj, attn_out.
    AttProj,
    /// qkv_proj, out_proj.
    QkvProjOutProj,
}

/// The order of rows in a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QkvOrder {
    /// All queries, then all keys, then all values.
    ByPart,
    /// For each key head: its query heads, the key, the value. With a key head for each query head that is (H, 3, D),
    /// as in GPT-NeoX and Bloom; with fewer it is Falcon's grouping.
    ByHead,
}
