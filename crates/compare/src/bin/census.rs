//! This crate's results for the recorded models of `compare/census`: reads folders, writes a JSON line for each layer.
//!
//! A folder has a model's `config.json` and `model.safetensors`. For linear layers `golden.safetensors` has the
//! recorded inputs and outputs, `{order}|in|{module}` and `{order}|out|{module}`; `modules.json` maps tensors to
//! modules. `positions` are positions on the axes of rotary embeddings, `lengths` the lengths of sequences in one row,
//! and `mask|{module}` what the model adds to the scores of an attention module.
//! A layer is right if it computes the output of the last module whose weight it read from the input of the first.

#[path = "../../../../examples/common/command_line.rs"]
mod command_line;

use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use candle_attention::{
    AttentionInput, AttentionMask, Backend, CompressedKeyAttention, CompressedKeyInput, ContentPositions, DeltaInput,
    GateActivation, GatedDeltaNet, KvSharing, MultiHeadAttention, MultiHeadAttentionConfig, PackedSequences,
    ProjectedMemory, RopeScaling, RopeStyle, hf,
};
use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use clap::Parser;
use command_line::one_line;
use serde_json::{Value, json};

#[derive(Parser)]
struct Args {
    /// Folders of recorded models.
    folders: Vec<PathBuf>,
    /// Write the known values of `model_type` instead.
    #[arg(long)]
    known: bool,
    /// With --known: only those that have layers of linear attention.
    #[arg(long)]
    linear: bool,
}

fn main() -> ExitCode {
    command_line::main(|args: Args| {
        if args.known {
            hf::architectures().for_each(|name| println!("{name}"));
        }
        if args.linear {
            let is_linear = |name: &&str| hf::linear_attention_config(&json!({"model_type": name}), 0).is_ok();
            hf::architectures().filter(is_linear).for_each(|name| println!("{name}"));
        }
        for folder in &args.folders {
            let model = Model::open(folder)?;
            for mut line in answers(&model).into_iter().chain(defaults(&model)) {
                line["folder"] = json!(folder);
                writeln!(std::io::stdout(), "{line}").map_err(Error::wrap)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

type Tensors = HashMap<String, Tensor>;

struct Model {
    config: Value,
    /// The config of its class in transformers that is created without any field.
    defaults: Value,
    weights: Tensors,
    modules: Value,
    /// Positions on axes, (A, T) or (A, B, T).
    positions: Option<Tensor>,
    sequences: Option<PackedSequences>,
    /// The calls in their order.
    calls: Vec<Call>,
    /// The masks of attention modules that a model makes by itself: numbers that are added to the scores.
    masks: HashMap<String, Tensor>,
}

/// A recorded call of a module.
struct Call {
    module: String,
    input: Tensor,
    output: Tensor,
}

impl Model {
    fn open(folder: &Path) -> Result<Self> {
        let tensors = |file| candle_core::safetensors::load(folder.join(file), &Device::Cpu);
        let json = |file| -> Result<Value> {
            serde_json::from_str(&std::fs::read_to_string(folder.join(file))?).map_err(Error::wrap)
        };
        let golden = tensors("golden.safetensors")?;
        let mut inputs: Vec<_> = golden.keys().filter(|key| key.contains("|in|")).collect();
        inputs.sort();
        let mut calls = Vec::new();
        for key in inputs {
            if let Some((order, module)) = key.split_once("|in|")
                && let Some(output) = golden.get(&format!("{order}|out|{module}"))
            {
                calls.push(Call { module: module.into(), input: golden[key].clone(), output: output.clone() });
            }
        }
        let masks =
            golden.iter().filter_map(|(key, mask)| Some((key.strip_prefix("mask|")?.to_string(), mask.clone())));
        let mut sequences = None;
        if let Some(lengths) = golden.get("lengths") {
            let lens: Vec<usize> = lengths.to_vec1::<f32>()?.into_iter().map(|len| len as usize).collect();
            sequences = Some(PackedSequences::from_lens(&lens, &lens)?);
        }
        Ok(Self {
            positions: golden.get("positions").cloned(),
            sequences,
            config: json("config.json")?,
            defaults: json("defaults.json")?,
            weights: tensors("model.safetensors")?,
            modules: json("modules.json")?,
            calls,
            masks: masks.collect(),
        })
    }

    /// Returns the calls of the modules whose weights were read.
    fn calls_of(&self, read: &BTreeSet<String>) -> Vec<&Call> {
        let modules: BTreeSet<_> = read.iter().filter_map(|name| self.modules[name].as_str()).collect();
        self.calls.iter().filter(|call| modules.contains(call.module.as_str())).collect()
    }

    /// Returns the mask of the attention module that has the called modules.
    fn mask_of(&self, calls: &[&Call]) -> AttentionMask {
        let is_within = |name: &str| calls.iter().all(|call| call.module.starts_with(name));
        AttentionMask::none().with_bias(self.masks.iter().find(|(name, _)| is_within(name)).map(|(_, mask)| mask))
    }

    /// Returns a builder of the weights, and the names that are read from it.
    fn noted(&self) -> (VarBuilder<'static>, Arc<Mutex<BTreeSet<String>>>) {
        let read = Arc::new(Mutex::new(BTreeSet::new()));
        let noted = Noted { weights: self.weights.clone(), read: read.clone() };
        (VarBuilder::from_backend(Box::new(noted), DType::F32, Device::Cpu), read)
    }

    /// Returns the projected memory of an earlier layer, for a layer without keys and values.
    fn earlier(&self, layer: usize) -> Result<Option<ProjectedMemory>> {
        let Ok(Some(shared)) = hf::kv_shared_layer(&self.config, layer) else { return Ok(None) };
        let (vb, names) = self.noted();
        let earlier = hf::load_attention(&self.config, shared, vb)?;
        let read = names.lock().expect("no panic before").clone();
        let Some(call) = self.calls_of(&read).first().copied() else {
            return Err(Error::msg("the earlier layer was not called"));
        };
        earlier.project_memory(&call.input, &call.input).map(Some)
    }
}

/// Weights that record which of them are read.
struct Noted {
    weights: Tensors,
    read: Arc<Mutex<BTreeSet<String>>>,
}

impl SimpleBackend for Noted {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() == &shape {
            return Ok(tensor);
        }
        Err(Error::UnexpectedShape {
            msg: format!("shape mismatch for {name}"),
            expected: shape,
            got: tensor.shape().clone(),
        })
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let missing = || Error::CannotFindTensor { path: name.to_string() };
        let tensor = self.weights.get(name).ok_or_else(missing)?;
        self.read.lock().expect("no panic before").insert(name.to_string());
        tensor.to_device(device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.weights.contains_key(name)
    }
}

/// A layer of any kind, and its properties.
struct Layer {
    forward: Forward,
    has: Vec<String>,
}

enum Forward {
    Compressed(Box<CompressedKeyAttention>),
    Softmax(Box<dyn Fn(AttentionInput) -> Result<Tensor>>),
    Linear(Box<GatedDeltaNet>),
}

/// A kind of attention of a model.
#[derive(Clone, Copy)]
enum Kind {
    SelfAttention,
    Linear,
    Decoder,
    Cross,
    Named(&'static str),
}

impl Kind {
    /// Returns the kinds of attention that a model may have.
    fn of(json: &Value) -> Vec<Self> {
        let mut kinds = vec![Self::SelfAttention, Self::Linear, Self::Decoder, Self::Cross];
        kinds.extend(hf::attention_names(json).unwrap_or_default().into_iter().map(Self::Named));
        kinds
    }

    fn name(self) -> &'static str {
        match self {
            Self::SelfAttention => "self",
            Self::Linear => "linear",
            Self::Decoder => "decoder",
            Self::Cross => "cross",
            Self::Named(name) => name,
        }
    }

    /// Loads a layer.
    fn load(self, json: &Value, layer: usize, vb: VarBuilder) -> Result<Layer> {
        match self {
            Self::SelfAttention => self_attention(json, layer, vb),
            Self::Linear => linear_attention(json, layer, vb),
            Self::Decoder => hf::load_decoder_attention(json, layer, vb).map(Layer::from),
            Self::Cross => hf::load_cross_attention(json, layer, vb).map(Layer::from),
            Self::Named(name) => hf::load_named_attention(json, name, layer, vb).map(Layer::from),
        }
    }

    /// Returns the configs of a layer as text.
    fn configs(self, json: &Value, layer: usize) -> Vec<Option<String>> {
        let text = |config: Result<MultiHeadAttentionConfig>| config.ok().map(|cfg| format!("{cfg:?}"));
        match self {
            Self::SelfAttention => {
                let latent = hf::latent_attention_config(json, layer).ok().map(|cfg| format!("{cfg:?}"));
                let compressed = hf::compressed_key_attention_config(json, layer).ok().map(|cfg| format!("{cfg:?}"));
                vec![text(hf::attention_config(json, layer)), latent, compressed]
            }
            Self::Linear => vec![hf::linear_attention_config(json, layer).ok().map(|cfg| format!("{cfg:?}"))],
            Self::Decoder => vec![text(hf::decoder_attention_config(json, layer))],
            Self::Cross => vec![text(hf::cross_attention_config(json, layer))],
            Self::Named(name) => vec![text(hf::named_attention_config(json, name, layer))],
        }
    }
}

impl From<MultiHeadAttention> for Layer {
    fn from(layer: MultiHeadAttention) -> Self {
        let has = parts(layer.config());
        Self { forward: Forward::Softmax(Box::new(move |input| layer.forward_with(input))), has }
    }
}

fn self_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<Layer> {
    if let Ok(cfg) = hf::compressed_key_attention_config(json, layer) {
        let mut has = vec!["window".to_string(), "sinks".to_string()];
        if let Some(compression) = cfg.compression {
            has.push("compressed keys".to_string());
            has.extend(compression.indexer.map(|_| "keys chosen by an indexer".to_string()));
        }
        let own = hf::load_compressed_key_attention(json, layer, vb)?;
        return Ok(Layer { forward: Forward::Compressed(Box::new(own)), has });
    }
    if hf::latent_attention_config(json, layer).is_ok() {
        let latent = hf::load_latent_attention(json, layer, vb)?;
        let cfg = latent.config();
        let mut has = vec!["latent".to_string()];
        let mut add = |is_there: bool, part: &str| {
            if is_there {
                has.push(part.to_string());
            }
        };
        add(cfg.window().is_some(), "window");
        add(cfg.output_gate().is_some(), "output gate");
        add(cfg.sinks(), "sinks");
        add(cfg.learned_temperature(), "queries scaled by position");
        add(cfg.indexer().is_some(), "keys chosen by an indexer");
        return Ok(Layer { forward: Forward::Softmax(Box::new(move |input| latent.forward_with(input))), has });
    }
    hf::load_attention(json, layer, vb).map(Layer::from)
}

fn linear_attention(json: &Value, layer: usize, vb: VarBuilder) -> Result<Layer> {
    let net = hf::load_linear_attention(json, layer, vb)?;
    let cfg = net.config();
    let mut has = Vec::new();
    if cfg.num_key_heads() < cfg.num_value_heads() {
        has.push("grouped heads".to_string());
    }
    if cfg.decay_per_channel() {
        has.push("decays of channels".to_string());
    }
    if cfg.decay_lower_bound().is_some() {
        has.push("bounded decays".to_string());
    }
    if cfg.allow_neg_eigval() {
        has.push("betas up to 2".to_string());
    }
    if cfg.gate_activation() == GateActivation::Sigmoid {
        has.push("a gate by sigmoid".to_string());
    }
    Ok(Layer { forward: Forward::Linear(Box::new(net)), has })
}

/// Returns the properties of a layer besides its projections, in the words of the documentation.
fn parts(cfg: &MultiHeadAttentionConfig) -> Vec<String> {
    let mut parts = Vec::new();
    let mut add = |has: bool, part: &str| {
        if has {
            parts.push(part.to_string());
        }
    };
    add(cfg.causal(), "causal");
    add(cfg.num_kv_heads() < cfg.num_heads(), "grouped heads");
    add(cfg.window().is_some(), "window");
    add(cfg.local_window().is_some(), "local window");
    add(cfg.chunk().is_some(), "chunks");
    add(cfg.qk_norm().is_some() && !cfg.norm_after_rope(), "norms of queries and keys");
    add(cfg.norm_after_rope(), "norms after rotary positions");
    if let Some(rope) = cfg.rope() {
        add(rope.style() == RopeStyle::RotateHalf, "rotary");
        add(rope.style() == RopeStyle::Interleaved, "interleaved rotary");
        add(rope.rotary_dim(cfg.head_dim()) < cfg.head_dim(), "partial rotary");
        add(*rope.scaling() != RopeScaling::None, "scaled rotary");
        add(rope.axes().is_some(), "rotary on several axes");
    }
    add(cfg.attention_temperature().is_some(), "queries scaled by position");
    add(cfg.value_norm().is_some(), "norms of values");
    add(cfg.output_norm().is_some(), "a norm of the attention output");
    add(cfg.kv_sharing() == KvSharing::KeysAsValues, "keys as values");
    add(cfg.kv_sharing() == KvSharing::EarlierLayer, "keys and values of an earlier layer");
    add(cfg.output_gate().is_some(), "output gate");
    add(cfg.alibi().is_some(), "ALiBi");
    add(cfg.relative_bias().is_some(), "relative bias");
    match cfg.content_positions() {
        None => {}
        Some(ContentPositions::Window { .. }) => add(true, "a bias by place in a window"),
        Some(ContentPositions::CosineWindow { .. }) => add(true, "cosine scores in a window"),
        Some(ContentPositions::Grid { .. }) => add(true, "decomposed relative positions"),
        Some(_) => add(true, "relative positions by content"),
    }
    add(cfg.softcap().is_some(), "softcap");
    add(cfg.sinks(), "sinks");
    add(cfg.scale().is_some(), "scale");
    add(cfg.clip_qkv().is_some(), "clip");
    add(cfg.indexer().is_some(), "blocks of keys chosen by an indexer");
    parts
}

/// Loads the layers of every kind, and returns a line for each.
fn answers(model: &Model) -> Vec<Value> {
    let mut lines = Vec::new();
    for kind in Kind::of(&model.config) {
        for layer in 0..64 {
            let (vb, names) = model.noted();
            let loaded = kind.load(&model.config, layer, vb);
            if loaded.as_ref().is_err_and(|error| one_line(error).contains("there is no layer")) {
                break;
            }
            let read = names.lock().expect("no panic before").clone();
            let mut line = match loaded {
                Ok(own) => {
                    let earlier = if matches!(kind, Kind::SelfAttention) { model.earlier(layer) } else { Ok(None) };
                    let compared = earlier.and_then(|memory| compare(model, &read, &own, kind.name(), memory.as_ref()));
                    compared.unwrap_or_else(|error| json!({"failed": one_line(&error)}))
                }
                Err(error) => json!({"refused": one_line(&error)}),
            };
            line["kind"] = json!(kind.name());
            line["layer"] = json!(layer);
            line["modules"] = model.calls_of(&read).iter().map(|call| call.module.as_str()).collect();
            // A layer of another kind.
            let is_other = line["refused"].as_str().is_some_and(|text| text.contains("has no linear attention"));
            if !is_other {
                lines.push(line);
            }
        }
    }
    lines
}

/// Returns the fields whose absence gives another layer than their default value written out.
fn defaults(model: &Model) -> Vec<Value> {
    let sparse = json!({"model_type": model.defaults["model_type"]});
    let mut lines = Vec::new();
    for kind in Kind::of(&model.config) {
        for layer in 0..8 {
            let bare = kind.configs(&sparse, layer);
            let full = kind.configs(&model.defaults, layer);
            if bare != full {
                lines.push(json!({"kind": "defaults", "layer": layer, "differs": [bare, full]}));
                break;
            }
        }
    }
    lines
}

/// Compares a layer's output with the recorded one.
fn compare(
    model: &Model,
    read: &BTreeSet<String>,
    layer: &Layer,
    kind: &str,
    earlier: Option<&ProjectedMemory>,
) -> Result<Value> {
    let calls = model.calls_of(read);
    let largest = |tensor: &Tensor| tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let (Some(first), Some(last)) = (calls.first(), calls.last()) else {
        return Ok(json!({"failed": format!("the weights read are of no module that was called: {read:?}")}));
    };
    let expected = &last.output;
    let input_of = |name: &str, other: &str| {
        let call = calls.iter().find(|call| call.module.ends_with(name) || call.module.ends_with(other))?;
        Some(&call.input)
    };
    let xs = input_of("q_proj", "query").unwrap_or(&first.input);
    let differs = |keys: &Tensor| Ok::<_, Error>(keys.dims() != xs.dims() || largest(&(keys - xs)?)? > 0.0);
    // Positions may be added to queries and keys alone.
    let key_value = match (input_of("k_proj", "key"), input_of("v_proj", "value")) {
        (Some(keys), Some(values)) if differs(keys)? || differs(values)? => Some((keys, values)),
        (Some(_), Some(_)) => None,
        // Projections of other names are called in this order: queries, then keys and values.
        _ if kind == "cross" => calls.get(1).map(|call| (&call.input, &call.input)),
        _ => None,
    };
    let mask = model.mask_of(&calls);
    let mut error = 0f32;
    let packed = match &model.sequences {
        Some(_) if xs.rank() == 3 => xs.squeeze(0)?,
        _ => xs.clone(),
    };
    for backend in [Backend::Auto, Backend::Reference] {
        let input = AttentionInput::new(&packed).with_backend(backend).with_axis_positions(&model.positions);
        let mut input = input.with_packed(&model.sequences).with_memory(earlier).with_mask(&mask);
        if let Some((keys, values)) = key_value {
            input = input.with_key_value(keys, values);
        }
        let mut ys = match &layer.forward {
            Forward::Compressed(own) => own.forward_with(CompressedKeyInput::new(&packed).with_backend(backend))?,
            Forward::Softmax(forward) => forward(input)?,
            Forward::Linear(net) => net.forward_with(DeltaInput::new(&packed).with_backend(backend))?,
        };
        if ys.elem_count() == expected.elem_count() {
            ys = ys.reshape(expected.shape())?;
        }
        let off = largest(&(ys - expected)?)? / largest(expected)?;
        // JSON has no infinity.
        error = error.max(if off.is_finite() { off } else { f32::MAX });
    }
    Ok(json!({"error": error, "has": layer.has}))
}
