//! The tensors that a layer in each layout may have.

use super::layout::{Naming, Orientation, Storage, WeightLayout};
use super::names::{LinearNames, PackedNames};
use candle_attention_modules::base::StoredDims;
use candle_attention_modules::linear::Projection::{self, Gate, Key, Output, Query, Value};

impl WeightLayout {
    /// Returns the weights and biases of the projections that a layer in this layout may have, in the order in which
    /// PyTorch draws them. Detection, inference of configs, loading and saving go by this list. For a stack it has the
    /// tensors of one head and of the output projection. The layout `torch` has a weight each for queries, keys and
    /// values unless their inputs are of `one_width`.
    #[doc(hidden)]
    pub fn tensors(self, head: usize, one_width: bool) -> Vec<LayoutTensor> {
        if let Some(names) = self.linear_names() {
            return with_gate(tensors_of_four(names, Kind::Linear));
        }
        if let Some(names) = self.names_with_heads() {
            let kernels = if self == Self::KerasH5 { KernelNames::Vars } else { KernelNames::Kernel };
            return tensors_of_four(names, Kind::Heads(kernels));
        }
        match self {
            Self::Dense(naming) => tensors_of_four(naming.names(), Kind::Dense),
            Self::InOut(naming) => tensors_of_four(naming.names(), Kind::Conv1d),
            Self::Raw(naming, orientation) => tensors_of_four(naming.names(), Kind::Raw(orientation)),
            Self::StackedHeads(naming, storage) => {
                let kind = match storage {
                    Storage::Linear => Kind::Linear,
                    Storage::Raw(orientation) => Kind::Raw(orientation),
                };
                tensors_of_stack(naming, head, kind)
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

    /// Returns the names of the weights of this layout, without gates, for inputs of one width; for a stack, of its
    /// first head and of the output projection.
    pub(super) fn weight_names(self) -> Vec<String> {
        let tensors = self.tensors(0, true);
        tensors.iter().filter(|tensor| !tensor.is_bias && !tensor.holds(Gate)).map(LayoutTensor::name).collect()
    }

    /// Returns whether each head is a module.
    #[doc(hidden)]
    pub fn is_stacked(self) -> bool {
        matches!(self, Self::StackedHeads(..))
    }

    /// Returns the buffer as which the modules of this layout register their causal mask. In other layouts a tensor of
    /// that name is something else.
    #[doc(hidden)]
    pub fn mask_buffer(self) -> Option<MaskBuffer> {
        match self {
            Self::Book | Self::Short | Self::StackedHeads(Naming::Book | Naming::Short, _) => {
                Some(MaskBuffer { name: "mask", attends: 0.0 })
            }
            Self::StackedHeads(Naming::MinGpt, _) => Some(MaskBuffer { name: "tril", attends: 1.0 }),
            _ => None,
        }
    }
}

/// A buffer (T, T) of a causal mask.
#[derive(Debug, Clone, Copy)]
pub struct MaskBuffer {
    /// The name of the buffer.
    pub name: &'static str,
    /// The entry of a key that a query attends to; the other entry is 1 or 0.
    pub attends: f64,
}

/// Returns the tensors of four projections.
fn tensors_of_four(names: LinearNames, kind: Kind) -> Vec<LayoutTensor> {
    let mut tensors = Vec::with_capacity(8);
    tensors.extend(LayoutTensor::of_module(names.query, kind, &[Query]));
    tensors.extend(LayoutTensor::of_module(names.key, kind, &[Key]));
    tensors.extend(LayoutTensor::of_module(names.value, kind, &[Value]));
    tensors.extend(LayoutTensor::of_module(names.output, kind, &[Output]));
    tensors
}

/// Returns the tensors of one head of a stack, and of the output projection next to `heads`.
fn tensors_of_stack(naming: Naming, head: usize, kind: Kind) -> Vec<LayoutTensor> {
    let names = naming.names();
    let in_head = |name: &str| format!("heads.{head}.{name}");
    let query = LayoutTensor::of_module(in_head(names.query), kind, &[Query]);
    let key = LayoutTensor::of_module(in_head(names.key), kind, &[Key]);
    let mut tensors = Vec::with_capacity(8);
    // The tutorial makes the keys first, so PyTorch draws them first.
    tensors.extend(if naming == Naming::MinGpt { [key, query] } else { [query, key] }.into_iter().flatten());
    tensors.extend(LayoutTensor::of_module(in_head(names.value), kind, &[Value]));
    tensors.extend(LayoutTensor::of_module(names.output, kind, &[Output]));
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

    /// Returns the biases that a packed layer may have next to its weight instead of one packed bias.
    pub fn separate_biases() -> [Self; 3] {
        [
            Self::bias("q_bias", Kind::Bias, &[Query]),
            Self::bias("k_bias", Kind::Bias, &[Key]),
            Self::bias("v_bias", Kind::Bias, &[Value]),
        ]
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
            Kind::Bias => self.module.clone(),
            Kind::InProj => format!("{}_{suffix}", self.module),
            Kind::Heads(KernelNames::Vars) => {
                format!("{}.vars.{}", self.module, if self.is_bias { 1 } else { 0 })
            }
            Kind::Dense | Kind::Heads(KernelNames::Kernel) if !self.is_bias => {
                format!("{}.kernel", self.module)
            }
            _ => format!("{}.{suffix}", self.module),
        }
    }

    /// Returns the other name that some files have for the tensor.
    pub fn other_name(&self) -> Option<String> {
        other_name(&self.name(), self.is_bias, self.projections)
    }

    /// Returns whether the tensor has rows of a projection's weight.
    pub fn holds(&self, projection: Projection) -> bool {
        !self.is_bias && self.projections.contains(&projection)
    }

    /// Returns the dimensions in which the tensor is stored.
    pub fn dims(&self) -> StoredDims {
        match self.kind {
            Kind::Heads(_) if self.projections == [Output] => StoredDims::HeadsOut,
            Kind::Heads(_) => StoredDims::InHeads,
            Kind::Conv1d | Kind::Dense | Kind::Raw(Orientation::InOut) => StoredDims::InOut,
            Kind::Linear | Kind::Raw(Orientation::OutIn) | Kind::InProj | Kind::OutProj | Kind::Bias => {
                StoredDims::OutIn
            }
        }
    }
}

/// Returns the other name that some files have for a parameter: that of a gate's projection; and the parameters outside
/// the projections in which the first files of BEiT, EVA and VideoMAE store biases.
pub(super) fn other_name(name: &str, is_bias: bool, projections: &[Projection]) -> Option<String> {
    let bias = match projections {
        [Gate] => return Some(name.replace(GATE_NAME, OTHER_GATE_NAME)),
        [Query] => "q_bias",
        [Key] => "k_bias",
        [Value] => "v_bias",
        _ => return None,
    };
    let module = name.strip_suffix(".bias").filter(|_| is_bias)?;
    Some(match module.rsplit_once('.') {
        Some((outer, _)) => format!("{outer}.{bias}"),
        None => bias.to_string(),
    })
}

/// The form of a stored projection: a [`Storage`], or that of another library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `.weight` (out, in) and perhaps `.bias`.
    Linear,
    /// `.weight` (in, out) and perhaps `.bias`.
    Conv1d,
    /// `.kernel` (in, out) and perhaps `.bias`.
    Dense,
    /// A kernel (in, H, D) and perhaps a bias (H, D); the kernel of an output projection is (H, D, out), its bias
    /// (out,).
    Heads(KernelNames),
    /// The weight itself.
    Raw(Orientation),
    /// `_weight` (out, in), and perhaps `in_proj_bias` for all of q, k and v.
    InProj,
    /// The output projection of PyTorch's `MultiheadAttention`, a linear layer whose bias is initialised with zeros.
    OutProj,
    /// A bias alone, whose name is that of the module.
    Bias,
}

/// The names of kernels with a dimension of heads, and of their biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KernelNames {
    /// `.kernel` and `.bias`.
    Kernel,
    /// `.vars.0` and `.vars.1`.
    Vars,
}
