//! A small model of gated delta layers and attention layers, as Qwen3-Next has them, with a head that drafts tokens.

use candle_core::Module;
use candle_nn::{Activation, Init};

use crate::*;

/// The numbers of the hidden states and of the tokens.
const WIDTH: usize = 32;
pub const VOCABULARY: usize = 12;

pub struct Model {
    /// The embedding and the output projection.
    embedding: PackedLinear,
    blocks: Vec<Block>,
    norm: RmsNorm,
}

enum Mixer {
    Attention(Box<MultiHeadAttention>),
    Linear(Box<GatedDeltaNet>),
}

struct Block {
    before_mixer: RmsNorm,
    mixer: Mixer,
    before_mlp: RmsNorm,
    gate_up: PackedGatedLinear,
    down: PackedLinear,
}

/// The cache of one layer.
pub enum Cache {
    Attention(AttentionCache),
    Linear(DeltaCache),
}

impl Cache {
    pub fn lens(&self) -> Vec<usize> {
        match self {
            Self::Attention(cache) => cache.lens(),
            Self::Linear(cache) => cache.lens(),
        }
    }

    pub fn join(&mut self, other: &Self) -> Result<()> {
        match (self, other) {
            (Self::Attention(cache), Self::Attention(other)) => cache.join(other),
            (Self::Linear(cache), Self::Linear(other)) => cache.join(other),
            _ => unreachable!("the caches are of one layer"),
        }
    }

    pub fn truncate_to(&mut self, lens: &[usize]) -> Result<()> {
        match self {
            Self::Attention(cache) => cache.truncate_to(lens),
            Self::Linear(cache) => cache.truncate_to(lens),
        }
    }

    pub fn keep(&mut self, lens: &[usize], kept: &[Vec<usize>]) -> Result<()> {
        match self {
            Self::Attention(cache) => cache.keep(lens, kept),
            Self::Linear(cache) => cache.keep(lens, kept),
        }
    }
}

/// The tokens of a call, with padding on the right.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The number of tokens of each sequence.
    pub lens: &'a [usize],
    pub tree: Option<&'a TokenTree>,
}

impl Block {
    fn new(mixer: Mixer, vb: &VarBuilder) -> Result<Self> {
        let linear = |inputs, outputs, name: &str| packed_linear_no_bias(inputs, outputs, vb.pp(name));
        let gate = linear(WIDTH, 2 * WIDTH, "gate_proj")?;
        let up = linear(WIDTH, 2 * WIDTH, "up_proj")?;
        Ok(Self {
            before_mixer: rms_norm(WIDTH, 1e-6, vb.pp("input_layernorm"))?,
            mixer,
            before_mlp: rms_norm(WIDTH, 1e-6, vb.pp("post_attention_layernorm"))?,
            gate_up: PackedGatedLinear::new(gate, up, Activation::Silu)?,
            down: linear(2 * WIDTH, WIDTH, "down_proj")?,
        })
    }

    fn attention(vb: &VarBuilder) -> Result<Self> {
        let cfg = Config::new(WIDTH, 4)
            .with_num_kv_heads(2)
            .with_causal(true)
            .with_rope(RopeConfig::new(1e4))
            .with_qk_norm(QkNorm::rms(1e-6));
        let layer = MultiHeadAttention::new(&cfg, vb.pp("self_attn"))?;
        Self::new(Mixer::Attention(Box::new(layer)), vb)
    }

    fn linear(vb: &VarBuilder) -> Result<Self> {
        let cfg = GatedDeltaNetConfig::new(WIDTH, 4).with_num_key_heads(2).with_key_head_dim(8).with_value_head_dim(8);
        Self::new(Mixer::Linear(Box::new(GatedDeltaNet::new(&cfg, vb.pp("linear_attn"))?)), vb)
    }

    /// Computes hidden states (B, T, E).
    fn forward(&self, xs: &Tensor, call: Call, cache: &mut Cache) -> Result<Tensor> {
        let normed = self.before_mixer.forward(xs)?;
        let mixed = match (&self.mixer, cache) {
            (Mixer::Attention(layer), Cache::Attention(cache)) => {
                let input = AttentionInput::new(&normed).with_valid_lens(call.lens).with_tree(call.tree);
                layer.forward_with(input.with_residual(xs).with_cache(cache))?
            }
            (Mixer::Linear(layer), Cache::Linear(cache)) => {
                let input = DeltaInput::new(&normed).with_valid_lens(call.lens).with_tree(call.tree);
                layer.forward_with(input.with_residual(xs).with_cache(cache))?
            }
            _ => unreachable!("a cache is made for its layer"),
        };
        self.down.forward_with_residual(&self.gate_up.forward(&self.before_mlp.forward(&mixed)?)?, &mixed)
    }
}

impl Model {
    pub fn new(seed: &TorchSeed, dtype: DType) -> Result<Self> {
        let vb = seed.var_builder(dtype, &DEVICE);
        let init = Init::Randn { mean: 0.0, stdev: 0.05 };
        let embedding = vb.get_with_hints((VOCABULARY, WIDTH), "embed_tokens.weight", init)?;
        let block = |layer: usize| {
            let own = vb.pp(format!("layers.{layer}"));
            if layer == 2 { Block::attention(&own) } else { Block::linear(&own) }
        };
        Ok(Self {
            embedding: PackedLinear::new(&embedding, None)?,
            blocks: (0..4).map(block).collect::<Result<_>>()?,
            norm: rms_norm(WIDTH, 1e-6, vb.pp("norm"))?,
        })
    }

    /// Returns empty caches, which can take back `drafts` tokens.
    pub fn caches(&self, drafts: usize) -> Vec<Cache> {
        let cache = |block: &Block| match block.mixer {
            Mixer::Attention(_) => Cache::Attention(AttentionCache::default()),
            Mixer::Linear(_) => Cache::Linear(DeltaCache::with_drafts(drafts)),
        };
        self.blocks.iter().map(cache).collect()
    }

    /// Returns the hidden states (B, T, E) of rows of tokens, before the last norm.
    pub fn forward(&self, rows: &[Vec<u32>], tree: Option<&TokenTree>, caches: &mut [Cache]) -> Result<Tensor> {
        let lens: Vec<_> = rows.iter().map(Vec::len).collect();
        let call = Call { lens: &lens, tree };
        let mut xs = self.embedding.weight_rows(&padded(rows)?)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            xs = block.forward(&xs, call, cache)?;
        }
        Ok(xs)
    }

    /// Returns the logits (B, T, V) of hidden states (B, T, E).
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.embedding.forward(&self.norm.forward(hidden)?)
    }

    /// Returns the most likely next token of each position of hidden states (B, T, E).
    pub fn choices(&self, hidden: &Tensor) -> Result<Vec<Vec<u32>>> {
        self.logits(hidden)?.argmax(2)?.to_vec2()
    }
}

/// Returns rows of tokens as (B, T), with token 0 after the end of a row.
fn padded(rows: &[Vec<u32>]) -> Result<Tensor> {
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut ids = Vec::new();
    for row in rows {
        ids.extend(row);
        ids.resize(ids.len() + longest - row.len(), 0);
    }
    copied_to(&DEVICE, ids, (rows.len(), longest))
}

/// A head that drafts tokens (MTP): a block over hidden states of the model and the tokens that follow them.
pub struct DraftHead {
    norm_hidden: RmsNorm,
    norm_token: RmsNorm,
    merge: PackedLinear,
    block: Block,
    pub cache: Cache,
}

impl DraftHead {
    pub fn new(seed: &TorchSeed) -> Result<Self> {
        let vb = seed.var_builder(DType::F32, &DEVICE).pp("mtp");
        // The sum of both inputs, so that the head is right now and then without training.
        let eye = Tensor::eye(WIDTH, DType::F32, &DEVICE)?;
        Ok(Self {
            norm_hidden: rms_norm(WIDTH, 1e-6, vb.pp("pre_fc_norm_hidden"))?,
            norm_token: rms_norm(WIDTH, 1e-6, vb.pp("pre_fc_norm_embedding"))?,
            merge: PackedLinear::new(&Tensor::cat(&[&eye, &eye], 1)?, None)?,
            block: Block::attention(&vb)?,
            cache: Cache::Attention(AttentionCache::default()),
        })
    }

    /// Returns the head's hidden states (B, T, E) of positions with the hidden states (B, T, E) and the next tokens.
    pub fn forward(&mut self, model: &Model, hidden: &Tensor, next: &[Vec<u32>]) -> Result<Tensor> {
        let lens: Vec<_> = next.iter().map(Vec::len).collect();
        let tokens = model.embedding.weight_rows(&padded(next)?)?;
        let both = Tensor::cat(&[&self.norm_token.forward(&tokens)?, &self.norm_hidden.forward(hidden)?], 2)?;
        let call = Call { lens: &lens, tree: None };
        self.block.forward(&self.merge.forward(&both)?, call, &mut self.cache)
    }
}
