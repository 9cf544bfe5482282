//! The projections of a layer or of one process's heads, from any layout and to any layout that can hold them.

use std::ops::Range;

use candle_core::{Error, Result, Tensor};
use candle_nn::Linear;

use super::layout::{Form, WeightLayout};
use super::source::{Part, Source};
use super::tensors::{GATE_NAMES, PROJECTIONS, Rows, projection_tensors};
use crate::shard::{HeadShard, Share};
use crate::size::fits_in_memory;
use crate::{GatePlace, KvSource, MultiHeadAttentionConfig};

/// The projections of a layer as linear layers: q (H·D, E), k (H_kv·D, key_size), v (H_kv·D_v, value_size), o
/// (out_dim, H·D_v), gate (H·D_v or H, E).
#[derive(Debug, Clone)]
pub(crate) struct Linears {
    pub q: Linear,
    pub k: Option<Linear>,
    pub v: Option<Linear>,
    pub o: Option<Linear>,
    pub gate: Option<Linear>,
}

/// The rows of one projection, in the order of its outputs: one tensor, one for each head, or some rows of a packed
/// one.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProjectionRows {
    /// None where there is no such projection.
    weight: Vec<Piece>,
    /// None without a bias.
    bias: Vec<Piece>,
}

/// `range` of each of the `groups` that the rows of a weight (rows, in) or a bias (rows,) are divided into.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub tensor: Tensor,
    pub groups: usize,
    pub range: Range<usize>,
}

impl Piece {
    pub fn whole(tensor: Tensor) -> Self {
        let rows = tensor.dims()[0];
        Self { tensor, groups: 1, range: 0..rows }
    }

    /// A copy of a share of the rows.
    pub fn share(&self, share: Share) -> Result<Self> {
        Ok(Self::whole(share.copy(&self.rows()?, 0)?))
    }

    fn len(&self) -> usize {
        self.groups * self.range.len()
    }

    /// Whether the rows of `next` follow this piece's own in one tensor.
    fn is_followed_by(&self, next: &Self) -> bool {
        self.tensor.id() == next.tensor.id() && (self.groups, next.groups, self.range.end) == (1, 1, next.range.start)
    }

    /// The rows, which follow the tensor where it is a variable.
    fn view(&self) -> Result<Option<Tensor>> {
        (self.groups == 1).then(|| self.tensor.narrow(0, self.range.start, self.range.len())).transpose()
    }

    fn rows(&self) -> Result<Tensor> {
        let Range { start, end } = self.range;
        let (rows, columns) = (self.tensor.dims()[0], &self.tensor.dims()[1..]);
        if self.groups == 1 && self.range.len() == rows {
            return Ok(self.tensor.clone());
        }
        if self.groups == 1 {
            return self.tensor.narrow(0, start, end - start)?.contiguous();
        }
        let grouped = self.tensor.reshape([&[self.groups, rows / self.groups], columns].concat())?;
        grouped.narrow(1, start, end - start)?.contiguous()?.reshape([&[self.len()], columns].concat())
    }

    /// The same rows in as few pieces as can be.
    fn join(pieces: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut joined: Vec<Self> = Vec::new();
        for piece in pieces {
            match joined.last_mut() {
                Some(last) if last.is_followed_by(&piece) => last.range.end = piece.range.end,
                _ => joined.push(piece),
            }
        }
        joined
    }

    /// The rows of all pieces as one tensor: a view where they follow each other in one, and a copy otherwise.
    fn concat(pieces: impl IntoIterator<Item = Self>) -> Result<Tensor> {
        let joined = Self::join(pieces);
        let mut tensors = joined.iter().map(Self::rows).collect::<Result<Vec<_>>>()?;
        if tensors.len() == 1 { Ok(tensors.remove(0)) } else { Tensor::cat(&tensors, 0) }
    }
}

impl From<Linear> for ProjectionRows {
    fn from(linear: Linear) -> Self {
        let bias = linear.bias().cloned().map(Piece::whole).into_iter().collect();
        Self { weight: vec![Piece::whole(linear.weight().clone())], bias }
    }
}

impl ProjectionRows {
    /// More rows, of the weight or of the bias.
    pub(super) fn push(&mut self, piece: Piece, is_bias: bool) {
        if is_bias { &mut self.bias } else { &mut self.weight }.push(piece);
    }

    /// The width of the output.
    pub(crate) fn len(&self) -> usize {
        self.weight.iter().map(Piece::len).sum()
    }

    /// The width of the input.
    pub(crate) fn in_dim(&self) -> usize {
        self.weight().dims()[1]
    }

    /// The tensor that holds the first of the rows.
    pub(crate) fn weight(&self) -> &Tensor {
        &self.weight[0].tensor
    }

    pub(crate) fn has_bias(&self) -> bool {
        !self.bias.is_empty()
    }

    /// Whether training may change them, weights or biases, so that a copy would not stay the same.
    pub(crate) fn is_tracked(&self) -> bool {
        self.weight.iter().chain(&self.bias).any(|piece| piece.tensor.track_op())
    }

    /// The rows as a linear layer that follows variables; `None` where they lie in several places.
    pub(crate) fn to_view(&self) -> Result<Option<Linear>> {
        let view = |pieces: &[Piece]| match Piece::join(pieces.iter().cloned()).as_slice() {
            [whole] => whole.view(),
            _ => Ok(None),
        };
        let bias = view(&self.bias)?;
        let weight = if bias.is_some() == self.has_bias() { view(&self.weight)? } else { None };
        Ok(weight.map(|weight| Linear::new(weight, bias)))
    }

    /// The rows as one linear layer, with what variables hold now.
    pub(crate) fn to_linear(&self) -> Result<Linear> {
        Self::concat(&[self])
    }

    /// The rows of several projections of inputs of one width as one linear layer.
    pub(crate) fn concat(projections: &[&Self]) -> Result<Linear> {
        let weight = Piece::concat(projections.iter().flat_map(|rows| rows.weight.clone()))?;
        if !projections.iter().any(|rows| rows.has_bias()) {
            return Ok(Linear::new(weight, None));
        }
        let mut bias = Vec::new();
        for rows in projections {
            bias.extend(rows.bias.clone());
            if !rows.has_bias() {
                // Adding zero changes no number.
                bias.push(Piece::whole(Tensor::zeros(rows.len(), weight.dtype(), weight.device())?));
            }
        }
        Ok(Linear::new(weight, Some(Piece::concat(bias)?)))
    }
}

/// The projections of a layer as a checkpoint has them, in the order of [`ProjectionPlace`](crate::ProjectionPlace).
pub(crate) type LoadedProjections = [Option<ProjectionRows>; PROJECTIONS];

/// The projections in any layout; of a `shard`, its part of each, where the config is the whole layer's.
///
/// # Errors
/// For a config that the layout cannot hold, and for a missing or misshapen tensor.
pub(crate) fn load_projections(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    shard: Option<HeadShard>,
    source: &Source,
) -> Result<LoadedProjections> {
    let has_weight = |name: &&str| source.has(&format!("{name}.weight"));
    let gate_name = GATE_NAMES.into_iter().find(has_weight).unwrap_or(GATE_NAMES[0]);
    let tensors = projection_tensors(cfg, layout, gate_name).or_else(|problem| source.fail(problem))?;
    if !cfg.output_gate().is_some_and(|gate| gate.place != GatePlace::Query) {
        source.refuse(&format!("{gate_name}.weight"), "the config says there is no such gate")?;
    }
    let shares = shard.map(|shard| {
        let (queries, keys) = shard.shares(cfg.num_heads(), cfg.num_kv_heads());
        [queries, keys, keys, queries, queries]
    });
    let mut projections: [ProjectionRows; PROJECTIONS] = Default::default();
    for mut tensor in tensors {
        if let Some(beside) =
            tensor.is_bias.then(|| bias_beside(&tensor.name)).flatten().filter(|name| source.has(name))
        {
            tensor.name = beside;
        }
        if !tensor.is_wanted {
            source.refuse(&tensor.name, "the config says there is no such bias")?;
            continue;
        }
        let part = match (tensor.rows, shares) {
            // A share of the heads is one of rows, or of the columns of the output projection, whose bias is whole.
            (Rows::Projection(i), Some(shares)) if i != 3 || !tensor.is_bias => {
                Some(Part { dim: usize::from((i == 3) != tensor.is_transposed), share: shares[i] })
            }
            _ => None,
        };
        let stored = source.get_part(&tensor.shape, &tensor.name, tensor.init, part)?;
        let stored = match (tensor.rows, shard) {
            // Each process's output is added to the others': one of them adds the bias.
            (Rows::Projection(3), Some(shard)) if tensor.is_bias && shard.rank() > 0 => stored.zeros_like()?,
            _ if tensor.is_transposed => stored.t()?,
            _ => stored,
        };
        for (i, piece) in tensor.rows.split(stored) {
            let piece = match (tensor.rows, shares) {
                (Rows::Head { head, .. }, Some(shares)) if !shares[i].range(cfg.num_heads()).contains(&head) => {
                    continue;
                }
                (Rows::Several { .. }, Some(shares)) => piece.share(shares[i])?,
                _ => piece,
            };
            projections[i].push(piece, tensor.is_bias);
        }
    }
    if !cfg.out_proj() {
        refuse_out_proj(source)?;
    }
    // The published files of layers that read those of an earlier one have both, which nobody reads.
    if let (KvSource::KeysAsValues, Form::Separate([.., value, _], kind)) = (cfg.kv_source(), layout.form()) {
        source.refuse(&kind.weight(value), "the config says that values are the keys' projection")?;
    }
    if let Form::Stacked([query, ..], kind) = layout.form() {
        let h = cfg.num_heads();
        (0..h).try_for_each(|head| refuse_out_proj(&source.pp("heads").pp(head)))?;
        if source.has(&kind.weight(&format!("heads.{h}.{query}"))) {
            return source.fail(format!("the file has more than the {h} heads of the config"));
        }
    }
    Ok(projections.map(|rows| (!rows.weight.is_empty()).then_some(rows)))
}

/// The parameter beside the projections in which BEiT's and VideoMAE's first files keep a bias.
fn bias_beside(name: &str) -> Option<String> {
    let names = [("query.bias", "q_bias"), ("key.bias", "k_bias"), ("value.bias", "v_bias")];
    names.into_iter().find_map(|(usual, beside)| Some(format!("{}{beside}", name.strip_suffix(usual)?)))
}

/// No layout's output projection may be there, whatever its name: without it the numbers are others.
fn refuse_out_proj(source: &Source) -> Result<()> {
    for name in WeightLayout::output_names() {
        for name in [format!("{name}.weight"), name.to_string()] {
            source.refuse(&name, "the config says there is no output projection")?;
        }
    }
    Ok(())
}

/// The inverse of [`load_projections`]: the tensors of a layer's projections, and the mask that some layouts keep.
///
/// # Errors
/// For a config that the layout cannot hold.
pub(crate) fn state_dict(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    projections: &Linears,
) -> Result<Vec<(String, Tensor)>> {
    let fail = |problem: String| Error::msg(format!("[state_dict] {problem} (layout {layout})"));
    let Linears { q, k, v, o, gate } = projections;
    let linears = [Some(q), k.as_ref(), v.as_ref(), o.as_ref(), gate.as_ref()];
    let mut named = Vec::new();
    for tensor in projection_tensors(cfg, layout, GATE_NAMES[0]).map_err(fail)?.filter(|tensor| tensor.is_wanted) {
        let rows_of =
            |i: usize| linears[i].and_then(|linear| if tensor.is_bias { linear.bias() } else { Some(linear.weight()) });
        let Some(stored) = tensor.rows.join(rows_of)? else { continue };
        let stored = if tensor.is_transposed { stored.t()? } else { stored };
        named.push((tensor.name, stored.contiguous()?));
    }
    if let Some(t) = cfg.context_length().filter(|_| cfg.causal() && layout.has_mask_buffer()) {
        // Four bytes an entry, and a copy in the weights' own dtype.
        if !fits_in_memory(&[8, t, t]) {
            return Err(fail(format!("the mask buffer of a context length of {t} does not fit in memory")));
        }
        // The book's `triu(ones(T, T), diagonal=1)`: 1 where a key is hidden.
        let hidden: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { 1.0 } else { 0.0 }).collect();
        let mask = Tensor::from_vec(hidden, (t, t), q.weight().device())?.to_dtype(q.weight().dtype())?;
        match layout.form() {
            Form::Stacked(..) => {
                named.extend((0..cfg.num_heads()).map(|head| (format!("heads.{head}.mask"), mask.clone())))
            }
            _ => named.push(("mask".to_string(), mask)),
        }
    }
    Ok(named)
}
