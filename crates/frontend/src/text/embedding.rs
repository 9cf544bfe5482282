//! The layer [`EmbeddingLayer`], from ids to vectors.

use candle_core::{D, DType, Module, Result, Tensor, bail};
use candle_nn::{Embedding, Init, VarBuilder};
use serde::{Deserialize, Serialize};

use candle_attention_modules::base::{Dim, Expect, ParameterReader};

/// The sizes of an [`EmbeddingLayer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingConfig {
    /// V, the number of rows of the table.
    pub vocab_size: usize,
    /// E, the length of a row.
    pub embed_dim: usize,
    /// The number of learned positions, if positions are learned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_positions: Option<usize>,
    /// The id of the padding token, whose row is not trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding_idx: Option<usize>,
}

impl EmbeddingConfig {
    /// Describes a table of `vocab_size` rows of `embed_dim` numbers, without positions or a padding row.
    pub fn new(vocab_size: usize, embed_dim: usize) -> Self {
        Self { vocab_size, embed_dim, max_positions: None, padding_idx: None }
    }

    /// Adds a learned vector for each of `max_positions` positions (GPT-2, BERT).
    #[must_use]
    pub fn with_max_positions(self, max_positions: impl Into<Option<usize>>) -> Self {
        Self { max_positions: max_positions.into(), ..self }
    }

    /// Makes `padding_idx` the padding row, as in `torch.nn.Embedding`: a new row starts at zero, a loaded row is used
    /// as it is, and neither gets a gradient.
    #[must_use]
    pub fn with_padding_idx(self, padding_idx: impl Into<Option<usize>>) -> Self {
        Self { padding_idx: padding_idx.into(), ..self }
    }

    fn validate(&self) -> Result<()> {
        let Self { vocab_size, embed_dim, max_positions, padding_idx } = *self;
        if vocab_size == 0 || embed_dim == 0 {
            bail!("[embedding] vocab_size {vocab_size} and embed_dim {embed_dim} must be at least 1")
        }
        if max_positions == Some(0) {
            bail!("[embedding] max_positions must be at least 1, found 0; leave it out for no positions")
        }
        if let Some(i) = padding_idx.filter(|&i| i >= vocab_size) {
            bail!("[embedding] padding_idx {i} is not below the vocabulary size {vocab_size}")
        }
        Ok(())
    }
}

/// Token embedding, with learned positions if the configuration has them: ids (T,) or (B, T) to vectors (T, E) or
/// (B, T, E).
///
/// | parameter | shape | PyTorch |
/// | --- | --- | --- |
/// | `embedding.weight` | (V, E) | `self.embedding = nn.Embedding(V, E)` |
/// | `position_embedding.weight` | (positions, E) | `self.position_embedding = nn.Embedding(positions, E)` |
///
/// New parameters are drawn from the standard normal distribution, as `torch.nn.Embedding` draws them.
///
/// ```
/// # use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = EmbeddingLayer::new(&EmbeddingConfig::new(7, 4).with_max_positions(16), vb)?;
/// let ids = Tensor::new(&[[1u32, 2, 3], [4, 5, 6]], &Device::Cpu)?;
/// assert_eq!(layer.forward(&ids)?.dims(), [2, 3, 4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct EmbeddingLayer {
    table: Tensor,
    positions: Option<Tensor>,
    padding_idx: Option<usize>,
}

impl EmbeddingLayer {
    /// Loads the parameters named above from `vb`.
    ///
    /// With a padding row in `cfg`, a table that is new in `vb` gets zeros in that row; a table that `vb` has, such as
    /// a file's, is not changed.
    ///
    /// # Errors
    ///
    /// If a size is zero, `padding_idx` is not below `vocab_size`, a parameter is missing or has another shape, or `vb`
    /// has positions that `cfg` does not have.
    pub fn new(cfg: &EmbeddingConfig, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let normal = Init::Randn { mean: 0., stdev: 1. };
        let source = ParameterReader::new("embedding", "embedding", vb)?;
        let tokens = source.pp("embedding");
        let is_new = !tokens.has("weight");
        let table = tokens.get((cfg.vocab_size, cfg.embed_dim), "weight", normal)?;
        if let Some(row) = cfg.padding_idx
            && is_new
        {
            let zeros = Tensor::zeros((1, cfg.embed_dim), table.dtype(), table.device())?;
            // In place, because the variable that an optimiser updates or a file saves must have the zeros too.
            table.slice_set(&zeros, 0, row)?;
        }
        let mut positions = None;
        match cfg.max_positions {
            Some(n) => positions = Some(source.pp("position_embedding").get((n, cfg.embed_dim), "weight", normal)?),
            None => source.refuse(["position_embedding.weight"], "the config says there are no positions")?,
        }
        Ok(Self { table, positions, padding_idx: cfg.padding_idx })
    }

    /// Wraps a table of candle-nn in this layer's checks, without positions or a padding row.
    ///
    /// # Errors
    ///
    /// If the table is not a float tensor (V, E) with E the embedding's hidden size and neither zero.
    pub fn from_embedding(embedding: Embedding) -> Result<Self> {
        let table = embedding.embeddings();
        let hidden_size = embedding.hidden_size();
        let dims = table.dims();
        let dtype = table.dtype();
        if !matches!(*dims, [v, e] if v > 0 && e > 0 && e == hidden_size) || !dtype.is_float() {
            bail!(
                "[embedding] expected a float table (V, {hidden_size}) with V and E at least 1, found {dims:?} of \
                 {dtype:?}"
            )
        }
        Ok(Self { table: table.clone(), positions: None, padding_idx: None })
    }

    /// Returns the vectors of ids of which the first is at position `offset` of its sequence, as in decoding with a
    /// cache: ids (T,) or (B, T) to (T, E) or (B, T, E). Without learned positions `offset` makes no difference.
    ///
    /// Ids may have any strides. Their range is checked on the host: on a GPU the call waits for them.
    ///
    /// # Errors
    ///
    /// If `ids` is not an integer tensor (T,) or (B, T) on the table's device, an id is negative or not below V, or
    /// `offset + T` exceeds the number of positions.
    pub fn forward_at(&self, ids: &Tensor, offset: usize) -> Result<Tensor> {
        let one = [Dim::Any("T")];
        let batch = [Dim::Any("B"), Dim::Any("T")];
        let integers = [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64];
        let expected = Expect::many("embedding", "ids", ids).shape_of(&[&one, &batch])?;
        expected.dtype_of(&integers, "")?.same_device("the table", self.table.device())?;
        let t = ids.dim(D::Minus1)?;
        if let Some(n) = self.positions.as_ref().map(|positions| positions.dims()[0])
            && offset.checked_add(t).is_none_or(|end| end > n)
        {
            bail!("[embedding] {t} tokens from position {offset} on do not fit into {n} positions")
        }
        let mut dims = ids.dims().to_vec();
        dims.push(self.embed_dim());
        if ids.elem_count() == 0 {
            return Tensor::zeros(dims, self.table.dtype(), self.table.device());
        }
        let ids = checked_ids(ids, self.vocab_size())?;
        let mut vectors = self.table.contiguous()?.index_select(&ids, 0)?;
        if let Some(padding_idx) = self.padding_idx
            && vectors.track_op()
        {
            // The same values, without gradients for the padding row.
            let is_padding = ids.eq(padding_idx as i64)?.unsqueeze(1)?.broadcast_as(vectors.shape())?;
            vectors = is_padding.where_cond(&vectors.detach(), &vectors)?;
        }
        let vectors = vectors.reshape(dims)?;
        match &self.positions {
            Some(positions) => vectors.broadcast_add(&positions.narrow(0, offset, t)?),
            None => Ok(vectors),
        }
    }

    /// Returns the table, (V, E).
    pub fn embeddings(&self) -> &Tensor {
        &self.table
    }

    /// Returns the learned positions, (positions, E), if there are any.
    pub fn position_embeddings(&self) -> Option<&Tensor> {
        self.positions.as_ref()
    }

    /// Returns V, the number of ids.
    pub fn vocab_size(&self) -> usize {
        self.table.dims()[0]
    }

    /// Returns E, the length of a vector.
    pub fn embed_dim(&self) -> usize {
        self.table.dims()[1]
    }
}

impl Module for EmbeddingLayer {
    /// Calls [`EmbeddingLayer::forward_at`] with position 0: ids (T,) or (B, T) to (T, E) or (B, T, E).
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_at(ids, 0)
    }
}

/// Checks that ids, at least one of them, are in the vocabulary, and returns them in row-major order for candle's
/// `index_select`: (T,) or (B, T) to (B * T,).
///
/// `index_select` returns zeros for an id that is the largest number of its dtype, and on a GPU the memory at any
/// address for other ids out of range. For u8 the largest number is the good id 255, so narrow ids are widened.
fn checked_ids(ids: &Tensor, vocab_size: usize) -> Result<Tensor> {
    let wide = ids.flatten_all()?.contiguous()?.to_dtype(DType::I64)?;
    let is_bad = |id: &i64| !usize::try_from(*id).is_ok_and(|id| id < vocab_size);
    let host = wide.to_vec1::<i64>()?;
    let Some(i) = host.iter().position(is_bad) else { return Ok(wide) };
    let place = match ids.dims() {
        &[_, t] => format!("position {} of sequence {}", i % t, i / t),
        _ => format!("position {i}"),
    };
    match host[i] {
        id @ ..0 => bail!("[embedding] id {id} at {place} is negative"),
        id => bail!("[embedding] id {id} at {place} is not below the vocabulary size {vocab_size}"),
    }
}
