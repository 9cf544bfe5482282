//! The tensors that a layer in each layout may have.

use super::layout::{Naming, Orientation, Storage, WeightLayout};
use super::names::{LinearNames, PackedNames};
use candle_attention_modules::linear::Projection::{self, Gate, Key, Output, Query, Value};

impl WeightLayout {
    /// Returns the weights and biases of the projections that a layer in this layout may have, in the order in which
    /// PyTorch draws them. Detection, inference of configs, loading and saving go by this list. For a stack they are
    /// the tensors of one head. The layout `torch` has a weight each for queries, keys and values unless their inputs
    /// are of `one_width`.
    #[doc(hidden)]
    pub fn tensors(self, head: usize, one_width: bool) -> Vec<LayoutTensor> {
        if let Some(names) = self.linear_names() {
            return with_gate(tensors_of_four(names, "", Kind::Linear));
        }
        match self {
            Self::Raw(naming, orientation) => tensors_of_four(naming.names(), "", Kind::Raw(orientation)),
            Self::StackedHeads(naming, storage) => {
                let kind = match storage {
                    Storage::Linear => Kind::Linear,
                    Storage::Raw(orientation) => Kind::Raw(orientation),
                };
                tensors_of_four(naming.names(), &format!("heads.{head}."), kind)
            }
            Self::Conv1d => tensors_of_packed("c_attn", "c_proj", Kind::Conv1d),
            Self::Packed(naming, _) => {
                let PackedNames { packed, output, .. } = naming.names();
                with_gate(tensors_of_packed(packed, output, Kind::Linear))
            }
            _ => tensors_of_torch(one_width),
        }
    }

    /// Returns the name of the first weight that has rows of a projection; "" if the layout has no such weight. For the
    /// layout `torch` it depends on whether inputs are of `one_width`.
    #[doc(hidden)]
    pub fn weight_name(self, projection: Projection, one_width: bool) -> String {
        let tensors = self.tensors(0, one_width);
        tensors.iter().find(|tensor| tensor.holds(projection)).map(LayoutTensor::name).unwrap_or_default()
    }

    /// Returns whether each head is a module.
    #[doc(hidden)]
    pub fn is_stacked(self) -> bool {
        matches!(self, Self::StackedHeads(..))
    }

    /// Returns whether the modules of this layout register their causal mask as a buffer, `mask`. In other layouts a
    /// tensor of that name is something else.
    #[doc(hidden)]
    pub fn has_mask_buffer(self) -> bool {
        matches!(self, Self::Book | Self::Short | Self::StackedHeads(Naming::Book | Naming::Short, _))
    }
}

/// Returns the tensors of four projections.
fn tensors_of_four(names: LinearNames, prefix: &str, kind: Kind) -> Vec<LayoutTensor> {
    let mut tensors = Vec::with_capacity(8);
    tensors.extend(LayoutTensor::of_module(format!("{prefix}{}", names.query), kind, &[Query]));
    tensors.extend(LayoutTensor::of_module(format!("{prefix}{}", names.key), kind, &[Key]));
    tensors.extend(LayoutTensor::of_module(format!("{prefix}{}", names.value), kind, &[Value]));
    tensors.extend(LayoutTensor::of_module(format!("{prefix}{}", names.output), kind, &[Output]));
    tensors
}

/// Returns the tensors of a packed projection and an output projection.
fn tensors_of_packed(packed: &str, output: &str, kind: Kind) -> Vec<LayoutTensor> {
    let mut tensors = Vec::with_capacity(4);
    tensors.extend(LayoutTensor::of_module(packed, kind, &[Query, Key, Value]));
    tensors.extend(LayoutTensor::of_module(output, kind, &[Output]));
    tensors
}

/// Adds the projection of an output gate, which linear layers may have with them.
fn with_gate(mut tensors: Vec<LayoutTensor>) -> Vec<LayoutTensor> {
    tensors.extend(LayoutTensor::of_module(GATE_NAME, Kind::Linear, &[Gate]));
    tensors
}

/// Returns the tensors of `torch.nn.MultiheadAttention`.
fn tensors_of_torch(one_width: bool) -> Vec<LayoutTensor> {
    let mut tensors = Vec::with_capacity(6);
    tensors.extend(LayoutTensor::of_module("out_proj", Kind::OutProj, &[Output]));
    if one_width {
        tensors.push(LayoutTensor::weight("in_proj", Kind::InProj, &[Query, Key, Value]));
    } else {
        tensors.push(LayoutTensor::weight("q_proj", Kind::InProj, &[Query]));
        tensors.push(LayoutTensor::weight("k_proj", Kind::InProj, &[Key]));
        tensors.push(LayoutTensor::weight("v_proj", Kind::InProj, &[Value]));
    }
    tensors.push(LayoutTensor::bias("in_proj", Kind::InProj, &[Query, Key, Value]));
    tensors
}

/// The name of the projection of an output gate.
pub const GATE_NAME: &str = "gate_proj";

/// The name that some models have for the projection of an output gate.
pub const OTHER_GATE_NAME: &str = "g_proj";

/// A weight or a bias of a layout.
#[derive(Debug, Clone)]
pub struct LayoutTensor {
    /// The name of the linear layer that has it, or of the plain parameter.
    pub module: String,
    pub(super) kind: Kind,
    /// Whether it is a bias.
    pub is_bias: bool,
    /// The projections whose rows it has.
    pub projections: &'static [Projection],
}

impl LayoutTensor {
    /// Returns a weight and its bias.
    fn of_module(module: impl Into<String>, kind: Kind, projections: &'static [Projection]) -> [Self; 2] {
        let module = module.into();
        [Self::weight(module.clone(), kind, projections), Self::bias(module, kind, projections)]
    }

    fn weight(module: impl Into<String>, kind: Kind, projections: &'static [Projection]) -> Self {
        Self { module: module.into(), kind, is_bias: false, projections }
    }

    fn bias(module: impl Into<String>, kind: Kind, projections: &'static [Projection]) -> Self {
        Self { module: module.into(), kind, is_bias: true, projections }
    }

    /// Returns the name in a file.
    pub fn name(&self) -> String {
        let suffix = if self.is_bias { "bias" } else { "weight" };
        match self.kind {
            Kind::Raw(_) if !self.is_bias => self.module.clone(),
            Kind::InProj => format!("{}_{suffix}", self.module),
            Kind::Raw(_) | Kind::Linear | Kind::Conv1d | Kind::OutProj => format!("{}.{suffix}", self.module),
        }
    }

    /// Returns whether the tensor has rows of a projection's weight.
    pub fn holds(&self, projection: Projection) -> bool {
        !self.is_bias && self.projections.contains(&projection)
    }

    /// Returns whether the tensor is (in, out).
    pub fn is_transposed(&self) -> bool {
        !self.is_bias && matches!(self.kind, Kind::Conv1d | Kind::Raw(Orientation::InOut))
    }
}

/// The form of a stored projection: a [`Storage`], or that of GPT-2 or `torch.nn.MultiheadAttention`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `.weight` (out, in) and perhaps `.bias`.
    Linear,
    /// `.weight` (in, out) and perhaps `.bias`.
    Conv1d,
    /// The weight itself.
    Raw(Orientation),
    /// `_weight` (out, in), and perhaps `in_proj_bias` for all of q, k and v.
    InProj,
    /// A linear layer whose bias begins with zeros.
    OutProj,
}
