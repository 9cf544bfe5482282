//! The words in which a call is written as JSON.

use std::ops::Deref;

use candle_core::{Error, Var};
use candle_nn::VarMap;
use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::Value;

use crate::common::models;
use crate::*;

/// JSON in which the texts `NaN`, `inf` and `-inf` are numbers.
struct Json(Value);

impl<'de> Deserializer<'de> for Json {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> serde_json::Result<V::Value> {
        match self.0 {
            Value::String(text) if ["NaN", "inf", "-inf"].contains(&text.as_str()) => {
                visitor.visit_f64(text.parse().expect("a number"))
            }
            Value::Array(list) => visitor.visit_seq(SeqDeserializer::new(list.into_iter().map(Json))),
            Value::Object(fields) => {
                visitor.visit_map(MapDeserializer::new(fields.into_iter().map(|(name, field)| (name, Json(field)))))
            }
            other => other.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> serde_json::Result<V::Value> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> serde_json::Result<V::Value> {
        match self.0 {
            Value::Object(fields) => {
                let fields = fields.into_iter().map(|(name, field)| (name, Json(field)));
                visitor.visit_enum(MapAccessDeserializer::new(MapDeserializer::new(fields)))
            }
            other => other.deserialize_enum(name, variants, visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

impl IntoDeserializer<'_, serde_json::Error> for Json {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// A config, or a number, of such JSON.
pub struct Of<T>(pub T);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Of<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        T::deserialize(Json(Value::deserialize(deserializer)?)).map(Self).map_err(D::Error::custom)
    }
}

/// A tensor of zeros by its dtype, f32 unless said, and its shape, as `"f16 2 3"`; a variable where `var` stands before
/// them. Or a list of numbers, in i64, or in another dtype as `{"u8": [1, 0]}`.
pub struct Tensors(Tensor);

impl Deref for Tensors {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Tensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let tensor = match Value::deserialize(deserializer)? {
            Value::String(text) => zeros_of(&text),
            Value::Object(of) => {
                let (dtype, list) = of.iter().next().expect("a dtype");
                numbers(list).and_then(|tensor| tensor.to_dtype(dtype.parse().map_err(Error::wrap)?))
            }
            list => numbers(&list).and_then(|tensor| tensor.to_dtype(DType::I64)),
        };
        tensor.map(Self).map_err(D::Error::custom)
    }
}

/// The dtype and the shape in a text, if they are what is in it.
pub fn dtype_and_shape(text: &str) -> Option<(DType, Vec<usize>)> {
    let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
    let (dtype, dims) = first.parse().map_or((DType::F32, text), |dtype| (dtype, rest));
    Some((dtype, dims.split_whitespace().map(|size| size.parse().ok()).collect::<Option<_>>()?))
}

fn zeros_of(text: &str) -> Result<Tensor> {
    let (is_var, text) = text.strip_prefix("var ").map_or((false, text), |text| (true, text));
    let Some((dtype, shape)) = dtype_and_shape(text) else { candle_core::bail!("{text} is no tensor") };
    let zeros = of(dtype, shape);
    if is_var { Ok(Var::from_tensor(&zeros)?.into_inner()) } else { Ok(zeros) }
}

fn numbers(list: &Value) -> Result<Tensor> {
    fn read(list: &Value, found: &mut Vec<f64>) {
        match list {
            Value::Array(list) => list.iter().for_each(|entry| read(entry, found)),
            Value::String(text) => found.push(text.parse().expect("a number")),
            number => found.push(number.as_f64().expect("a number")),
        }
    }
    let (mut found, mut dims, mut first) = (Vec::new(), Vec::new(), Some(list));
    while let Some(Value::Array(list)) = first {
        dims.push(list.len());
        first = list.first();
    }
    read(list, &mut found);
    Tensor::from_vec(found, dims, &CPU)
}

/// Where weights come from: a tensor of zeros for every name unless said, those of names and shapes, `seed`,
/// `variables`, or a file of `models/`.
pub fn builder(weights: &Value, dtype: DType) -> Result<VarBuilder<'static>> {
    match weights {
        Value::String(kind) if kind == "seed" => Ok(TorchSeed::new(3).var_builder(dtype, &CPU)),
        Value::String(kind) if kind == "variables" => Ok(VarBuilder::from_varmap(&VarMap::new(), dtype, &CPU)),
        Value::String(path) => candle_attention::weights::open(models().join(path), dtype, &CPU),
        Value::Object(tensors) => {
            let tensors =
                tensors.iter().map(|(name, text)| Ok((name.clone(), zeros_of(text.as_str().expect("a shape"))?)));
            Ok(VarBuilder::from_tensors(tensors.collect::<Result<_>>()?, dtype, &CPU))
        }
        _ => Ok(VarBuilder::zeros(dtype, &CPU)),
    }
}

/// F32 unless said.
pub fn dtype(name: &Option<String>) -> DType {
    name.as_ref().map_or(DType::F32, |name| name.parse().expect("a dtype"))
}

pub fn backend(name: &Option<String>) -> Backend {
    match name.as_deref() {
        None => Backend::Auto,
        Some("reference") => Backend::Reference,
        Some("fused") => Backend::Fused,
        Some(other) => panic!("no backend {other}"),
    }
}

/// Sets what is given.
pub fn with<I, P>(input: I, part: Option<P>, set: impl FnOnce(I, P) -> I) -> I {
    match part {
        Some(part) => set(input, part),
        None => input,
    }
}

/// Of each sequence, of each query, or in a tensor.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Lens {
    Each(Vec<usize>),
    Rows(Vec<Vec<usize>>),
    In(Tensors),
}

impl Lens {
    pub fn get(&self) -> Result<ValidLens> {
        match self {
            Self::Each(lens) => Ok(lens.clone().into()),
            Self::Rows(rows) => Ok(rows.clone().into()),
            Self::In(tensor) => ValidLens::from_tensor(tensor),
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct Mask {
    causal: bool,
    offsets: Option<Vec<i64>>,
    attention_mask: Option<Tensors>,
    valid_lens: Option<Lens>,
    starts: Option<Lens>,
    prefix: Option<Lens>,
    window: Option<usize>,
    chunk: Option<usize>,
    keep: Option<Tensors>,
    bias: Option<Tensors>,
    uniform: bool,
    and: Option<Box<Mask>>,
}

impl Mask {
    pub fn build(&self) -> Result<AttentionMask> {
        let mask = match (&self.attention_mask, &self.offsets) {
            (Some(mask), _) => AttentionMask::from_attention_mask(mask)?,
            (None, Some(offsets)) => AttentionMask::causal_with_offsets(offsets.clone()),
            _ if self.causal => AttentionMask::causal(),
            _ => AttentionMask::none(),
        };
        let lens = |lens: &Option<Lens>| lens.as_ref().map(Lens::get).transpose();
        let mask = with(mask, lens(&self.valid_lens)?, AttentionMask::with_valid_lens);
        let mask = with(mask, lens(&self.starts)?, AttentionMask::with_starts);
        let mask = with(mask, lens(&self.prefix)?, AttentionMask::with_prefix);
        let mask = with(mask, self.window, AttentionMask::with_window);
        let mask = with(mask, self.chunk, AttentionMask::with_chunk);
        let mask = with(mask, self.keep.as_deref(), AttentionMask::with_keep);
        let mask = with(mask, self.bias.as_deref(), AttentionMask::with_bias);
        let mask = with(mask, self.uniform.then_some(EmptyRows::Uniform), AttentionMask::with_empty_rows);
        let other = self.and.as_ref().map(|other| other.build()).transpose()?;
        Ok(with(mask, other, |mask, other| mask.and(&other)))
    }
}

/// Sequences one after the other: the sums of their lengths or the lengths, of queries and keys or of both, as lists or
/// in a tensor.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packed {
    Sums([Vec<usize>; 2]),
    Lens([Vec<usize>; 2]),
    Own(Vec<usize>),
    In(Tensors),
}

impl Packed {
    pub fn build(&self) -> Result<PackedSequences> {
        match self {
            Self::Sums([q, kv]) => PackedSequences::new(q.clone(), kv.clone()),
            Self::Lens([q, kv]) => PackedSequences::from_lens(q, kv),
            Self::Own(sums) => PackedSequences::self_attention(sums.clone()),
            Self::In(sums) => PackedSequences::from_tensors(sums, sums),
        }
    }
}
