//! Softmax attention of one layer in a file: its names, its weights, and one rank's shard of them.

use std::collections::HashMap;
use std::io::{Read, Seek};
use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

use super::file::{File, FileWeight, FusedWeight, LinearShard};
use candle_attention_core::internal::{ProjectionShape, projection_shape};
use candle_attention_core::{MultiHeadAttention, MultiHeadAttentionConfig};
use candle_attention_modules::base::{HeadCounts, HeadShard, Heads};
use candle_attention_modules::gate::GateLayout;
use candle_attention_modules::linear::{Outputs, PackedProjection, Projection, Projections};
use candle_attention_modules::norm::QkNormKind;

/// The place of a layer's attention in a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Place {
    /// A model that is a decoder alone, or an encoder alone.
    Alone,
    /// The encoder of a model with a decoder.
    Encoder,
    /// The decoder of a model with an encoder.
    Decoder,
    /// The decoder's attention to the encoder's outputs.
    Cross,
}

/// llama.cpp's names of the attention of one layer.
pub(super) struct LayerNames {
    /// The beginning of all names.
    prefix: String,
    /// The rest of the name of the output projection.
    output: &'static str,
}

impl LayerNames {
    /// Returns the names of a layer.
    pub fn new(place: Place, layer: usize) -> Self {
        let (prefix, output) = match place {
            Place::Alone => (format!("blk.{layer}.attn_"), "output"),
            Place::Encoder => (format!("enc.blk.{layer}.attn_"), "o"),
            Place::Decoder => (format!("dec.blk.{layer}.attn_"), "o"),
            Place::Cross => (format!("dec.blk.{layer}.cross_attn_"), "o"),
        };
        Self { prefix, output }
    }

    /// Returns the name of a tensor or of a projection.
    pub fn name(&self, part: &str) -> String {
        format!("{}{part}", self.prefix)
    }

    /// Returns the name of the output projection.
    pub fn output(&self) -> String {
        self.name(self.output)
    }
}

/// The weights of one layer in a file, of which a shard is read.
pub(super) struct LayerWeights<'a, 'f, R> {
    pub file: &'a mut File<'f, R>,
    /// The config of the whole layer.
    pub cfg: &'a MultiHeadAttentionConfig,
    pub names: LayerNames,
    pub shard: HeadShard,
}

/// A projection of the layer's input.
struct InputProjection {
    projection: Projection,
    /// The shape of the whole projection.
    shape: ProjectionShape,
    has_bias: bool,
    /// The rows of this rank's heads.
    own_rows: Range<usize>,
}

impl InputProjection {
    /// Returns this rank's outputs.
    fn outputs(&self) -> (Projection, Outputs) {
        (self.projection, Outputs { count: self.own_rows.len(), has_bias: self.has_bias })
    }
}

/// A tensor of the file with the rows of one or more projections.
struct FileRows {
    name: &'static str,
    shape: ProjectionShape,
    has_bias: bool,
    rows: Rows,
    outputs: Vec<(Projection, Outputs)>,
}

/// The rows of this rank's heads in a tensor.
enum Rows {
    /// A range of rows for each projection: first all rows of one projection, then all rows of the next.
    ByProjection(Vec<Range<usize>>),
    /// For each head, the rows of its queries and then the rows of its gate.
    ByHead { heads: Range<usize>, width: usize, gate_width: usize },
}

impl Rows {
    /// Returns the rows, of one projection after the other. They are listed after the tensor was read, since a config
    /// may claim more heads than any file has.
    fn ranges(self) -> Vec<Range<usize>> {
        let (heads, width, gate_width) = match self {
            Self::ByProjection(ranges) => return ranges,
            Self::ByHead { heads, width, gate_width } => (heads, width, gate_width),
        };
        let start = |head: usize| head * (width + gate_width);
        let queries = heads.clone().map(|head| start(head)..start(head) + width);
        let gates = heads.clone().map(|head| start(head) + width..start(head + 1));
        queries.chain(gates).collect()
    }
}

impl FileRows {
    /// Returns a tensor with the rows of one projection after the other.
    fn new(name: &'static str, inputs: &[InputProjection]) -> Self {
        let mut rows = 0;
        let mut own_rows = Vec::new();
        for input in inputs {
            own_rows.push(rows + input.own_rows.start..rows + input.own_rows.end);
            rows += input.shape.outputs;
        }
        Self {
            name,
            shape: ProjectionShape { outputs: rows, inputs: inputs.first().map_or(0, |input| input.shape.inputs) },
            has_bias: inputs.iter().any(|input| input.has_bias),
            rows: Rows::ByProjection(own_rows),
            outputs: inputs.iter().map(InputProjection::outputs).collect(),
        }
    }

    /// Returns a tensor with, for each head, the rows of its queries and then the rows of its gate.
    fn queries_with_gate(
        name: &'static str,
        query: &InputProjection,
        gate: &InputProjection,
        num_heads: usize,
    ) -> Self {
        let width = query.shape.outputs / num_heads;
        let gate_width = gate.shape.outputs / num_heads;
        let heads = query.own_rows.start / width..query.own_rows.end / width;
        Self {
            name,
            shape: ProjectionShape { outputs: query.shape.outputs + gate.shape.outputs, ..query.shape },
            has_bias: query.has_bias,
            rows: Rows::ByHead { heads, width, gate_width },
            outputs: vec![query.outputs(), gate.outputs()],
        }
    }
}

/// Returns whether ranges are all of `count` rows in their order.
fn are_all(ranges: &[Range<usize>], count: usize) -> bool {
    let mut next = 0;
    for rows in ranges {
        if rows.start != next {
            return false;
        }
        next = rows.end;
    }
    next == count
}

impl<R: Read + Seek> LayerWeights<'_, '_, R> {
    /// Loads this rank's heads.
    ///
    /// # Errors
    /// For options that a shard cannot have, and for a missing or misshapen tensor.
    pub fn load(mut self) -> Result<MultiHeadAttention> {
        let device = self.file.device;
        // Refuses options that a shard cannot have.
        let _ = self.cfg.for_shard(self.shard)?;
        let mut projections = self.read_inputs()?;
        let output = self.output()?.columns()?;
        projections.extend(output.into_iter().map(|columns| (Projection::Output, columns)));
        let vb = VarBuilder::from_tensors(self.parameters()?, DType::F32, device);
        MultiHeadAttention::of_gguf(self.cfg, Projections::of_columns(projections, device), vb, self.shard)
    }

    /// Returns the entries of this rank's heads among `len`.
    fn own_range(&self, heads: Heads, len: usize) -> Range<usize> {
        let counts = HeadCounts { query: self.cfg.num_heads(), key: self.cfg.num_kv_heads() };
        self.shard.range(heads, counts, len)
    }

    /// Returns a projection; none if the config does not have it.
    fn input(&self, projection: Projection, heads: Heads, has_bias: bool) -> Option<InputProjection> {
        let shape = projection_shape(self.cfg, projection);
        let own_rows = self.own_range(heads, shape.outputs);
        (shape.outputs > 0).then_some(InputProjection { projection, shape, has_bias, own_rows })
    }

    /// Returns the tensors of queries, of the gate if there is one, of keys and of values, in this order.
    fn stored(&self) -> Vec<FileRows> {
        let gate_layout = self.cfg.output_gate().map(|gate| gate.layout);
        let has_gate_bias = gate_layout == Some(GateLayout::Separate { bias: true });
        let query = self.input(Projection::Query, Heads::Query, self.cfg.q_bias());
        let gate = self.input(Projection::Gate, Heads::Query, has_gate_bias);
        let key = self.input(Projection::Key, Heads::Key, self.cfg.k_bias());
        let value = self.input(Projection::Value, Heads::Key, self.cfg.v_bias());
        let one = |name, input: Option<InputProjection>| input.map(|input| FileRows::new(name, &[input]));
        if self.file.has(&self.names.name("qkv.weight")) {
            let inputs: Vec<_> = [query, key, value].into_iter().flatten().collect();
            return [Some(FileRows::new("qkv", &inputs)), one("gate", gate)].into_iter().flatten().collect();
        }
        let queries = match (query, gate) {
            (Some(query), Some(gate)) if gate_layout == Some(GateLayout::FusedWithQuery) => {
                [Some(FileRows::queries_with_gate("q", &query, &gate, self.cfg.num_heads())), None]
            }
            (query, gate) => [one("q", query), one("gate", gate)],
        };
        queries.into_iter().chain([one("k", key), one("v", value)]).flatten().collect()
    }

    /// Reads the projections of queries, keys, values and the gate.
    fn read_inputs(&mut self) -> Result<Vec<(Projection, PackedProjection)>> {
        let mut weights = Vec::new();
        let mut projections = Vec::new();
        for stored in self.stored() {
            let name = self.names.name(stored.name);
            let whole = self.file.weight(&name, stored.shape, stored.has_bias)?;
            let rows = stored.rows.ranges();
            let is_whole = are_all(&rows, stored.shape.outputs);
            let weight = if is_whole { whole } else { whole.part(&name, &LinearShard::Outputs(rows))? };
            weights.push(FusedWeight { weight, outputs: stored.outputs.iter().map(|(_, outputs)| *outputs).collect() });
            projections.extend(stored.outputs.into_iter().map(|(projection, _)| projection));
        }
        // Projections of one weight have to follow each other in the order of projections.
        let columns = if projections.is_sorted() {
            FusedWeight::pack_joined(weights)?
        } else {
            weights.into_iter().map(FusedWeight::pack).collect::<Result<Vec<_>>>()?.concat()
        };
        Ok(projections.into_iter().zip(columns).collect())
    }

    /// Reads this rank's inputs of the output projection.
    fn output(&mut self) -> Result<FileWeight> {
        let name = self.names.output();
        let shape = projection_shape(self.cfg, Projection::Output);
        let whole = self.file.weight(&name, shape, self.cfg.out_bias())?;
        if self.shard == HeadShard::WHOLE {
            return Ok(whole);
        }
        let range = self.own_range(Heads::Query, shape.inputs);
        whole.part(&name, &LinearShard::Inputs { range, has_bias: self.shard.rank() == 0 })
    }

    /// Reads the norms of queries and keys and the sinks, by this crate's names. Norms with a bias, which the config
    /// does not have, are read too: the layer refuses them.
    fn parameters(&mut self) -> Result<HashMap<String, Tensor>> {
        let has_norms = self.cfg.qk_norm().is_some_and(|norm| norm.kind != QkNormKind::RmsNoWeight);
        // A layer that reads the keys of an earlier layer has none.
        let has_keys = projection_shape(self.cfg, Projection::Key).outputs > 0;
        let mut parameters = HashMap::new();
        for (parameter, is_expected) in [
            ("q_norm.weight", has_norms),
            ("k_norm.weight", has_norms && has_keys),
            ("q_norm.bias", false),
            ("k_norm.bias", false),
            ("sinks", self.cfg.sinks()),
        ] {
            let name = self.names.name(if parameter == "sinks" { "sinks.weight" } else { parameter });
            if is_expected || self.file.has(&name) {
                parameters.insert(parameter.to_string(), self.file.tensor(&name)?.dequantize(self.file.device)?);
            }
        }
        Ok(parameters)
    }
}
