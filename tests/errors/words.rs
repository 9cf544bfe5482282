//! The words in which a call is written as JSON.

use std::cell::RefCell;
use std::collections::BTreeSet;

use candle_core::Var;
use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

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
                let fields = fields.into_iter().map(|(key, field)| (key, Json(field)));
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

/// Reads a config, or a number, from JSON.
pub fn read<T: DeserializeOwned>(json: &Value) -> Result<T> {
    T::deserialize(Json(json.clone())).map_err(Error::wrap)
}

/// A call, or a part of one: what its fields say. Null says nothing.
pub struct Fields<'a> {
    json: &'a Value,
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    /// Calls `read` with an object. If that is no error, `read` must have read every field.
    pub fn all<T>(json: &'a Value, read: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let fields = Self { json, asked: RefCell::default() };
        let found = read(&fields)?;
        let asked = fields.asked.into_inner();
        let more = json.as_object().into_iter().flatten().find(|(name, _)| !asked.contains(*name));
        assert_eq!(more, None, "nobody asks for a field of {json}");
        Ok(found)
    }

    /// Lists all fields, for names that are not known here.
    pub fn each(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        let fields = self.json.as_object().expect("an object");
        self.asked.borrow_mut().extend(fields.keys().cloned());
        fields.iter()
    }

    /// Reads all fields as one value.
    pub fn whole<T: DeserializeOwned>(&self) -> Result<T> {
        self.each().for_each(drop);
        read(self.json)
    }

    pub fn json(&self, name: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(name.into());
        self.json.get(name).filter(|json| !json.is_null())
    }

    pub fn read<T>(&self, name: &str, read: impl FnOnce(&'a Value) -> Result<T>) -> Result<Option<T>> {
        self.json(name).map(read).transpose()
    }

    pub fn part<T>(&self, name: &str, read: impl FnOnce(&Self) -> Result<T>) -> Result<Option<T>> {
        self.read(name, |json| Fields::all(json, read))
    }

    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        self.read(name, read)
    }

    /// Reads a field that must be present.
    pub fn need<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        self.get(name).map(|found| found.unwrap_or_else(|| panic!("{} has no {name}", self.json)))
    }

    pub fn is(&self, name: &str) -> bool {
        self.json(name).is_some_and(|json| json.as_bool().expect("true or false"))
    }

    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        self.tensors([name]).map(|[tensor]| tensor.unwrap_or_else(|| panic!("{} has no {name}", self.json)))
    }

    pub fn tensors<const N: usize>(&self, names: [&str; N]) -> Result<[Option<Tensor>; N]> {
        let tensors = names.iter().map(|name| self.read(name, tensor)).collect::<Result<Vec<_>>>()?;
        Ok(tensors.try_into().expect("one for each name"))
    }

    pub fn dtype(&self) -> Option<DType> {
        self.json("dtype").map(|name| name.as_str().and_then(|name| name.parse().ok()).expect("a dtype"))
    }

    pub fn backend(&self) -> Backend {
        match self.json("backend").and_then(Value::as_str) {
            None => Backend::Auto,
            Some("reference") => Backend::Reference,
            Some("fused") => Backend::Fused,
            Some(other) => panic!("no backend {other}"),
        }
    }

    /// Returns a builder of weights: a tensor of zeros for every name, given names and shapes, a seed, variables, or a
    /// file of `models/`. The dtype is f32 by default.
    pub fn builder(&self, unless_said: &str) -> Result<VarBuilder<'static>> {
        let dtype = self.dtype().unwrap_or(DType::F32);
        let weights = self.json("weights");
        match weights.map_or(Some(unless_said), Value::as_str) {
            Some("zeros") => Ok(VarBuilder::zeros(dtype, &CPU)),
            Some("seed") => Ok(TorchSeed::new(3).var_builder(dtype, &CPU)),
            Some("variables") => Ok(VarBuilder::from_varmap(&VarMap::new(), dtype, &CPU)),
            Some(path) => weights::open(models().join(path), dtype, &CPU),
            None => Ok(VarBuilder::from_tensors(named(weights.expect("names and shapes"))?, dtype, &CPU)),
        }
    }
}

/// Reads a tensor: of zeros by its dtype, f32 by default, and its shape, as `"f16 2 3"`; a variable if `var` comes
/// first; or a list of numbers, in i64, or in another dtype as `{"u8": [1, 0]}`.
pub fn tensor(json: &Value) -> Result<Tensor> {
    match json {
        Value::String(text) => {
            let (is_var, text) = text.strip_prefix("var ").map_or((false, text.as_str()), |text| (true, text));
            let Some((dtype, shape)) = dtype_and_shape(text) else { bail!("{text} is no tensor") };
            let zeros = of(dtype, shape);
            if is_var { Ok(Var::from_tensor(&zeros)?.into_inner()) } else { Ok(zeros) }
        }
        Value::Object(of) => {
            let (dtype, list) = of.iter().next().expect("a dtype");
            numbers(list)?.to_dtype(dtype.parse().map_err(Error::wrap)?)
        }
        list => numbers(list)?.to_dtype(DType::I64),
    }
}

/// Reads tensors by name, in the order of their names.
pub fn named<C: FromIterator<(String, Tensor)>>(json: &Value) -> Result<C> {
    let tensors = json.as_object().expect("names and tensors").iter();
    tensors.map(|(name, entry)| Ok((name.clone(), tensor(entry)?))).collect()
}

/// Returns the dtype and the shape in a text, if it has no other words.
pub fn dtype_and_shape(text: &str) -> Option<(DType, Vec<usize>)> {
    let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
    let (dtype, dims) = first.parse().map_or((DType::F32, text), |dtype| (dtype, rest));
    Some((dtype, dims.split_whitespace().map(|size| size.parse().ok()).collect::<Option<_>>()?))
}

fn numbers(list: &Value) -> Result<Tensor> {
    fn read(list: &Value, found: &mut Vec<f64>) {
        match list {
            Value::Array(list) => list.iter().for_each(|entry| read(entry, found)),
            Value::String(text) => found.push(text.parse().expect("a number")),
            number => found.push(number.as_f64().expect("a number")),
        }
    }
    let mut found = Vec::new();
    let mut dims = Vec::new();
    let mut first = Some(list);
    while let Some(Value::Array(nested)) = first {
        dims.push(nested.len());
        first = nested.first();
    }
    read(list, &mut found);
    Tensor::from_vec(found, dims, &CPU)
}

/// Sets what is given.
pub fn with<I, P>(input: I, part: Option<P>, set: impl FnOnce(I, P) -> I) -> I {
    match part {
        Some(part) => set(input, part),
        None => input,
    }
}

/// Reads lengths per sequence, per query, or as a tensor.
pub fn lens(json: &Value) -> Result<ValidLens> {
    match (read::<Vec<usize>>(json), read::<Vec<Vec<usize>>>(json)) {
        (Ok(each), _) => Ok(each.into()),
        (_, Ok(rows)) => Ok(rows.into()),
        _ => ValidLens::from_tensor(&tensor(json)?),
    }
}

pub fn mask(of: &Fields) -> Result<AttentionMask> {
    let [attention_mask, bool_mask, bias] = of.tensors(["attention_mask", "bool_mask", "bias"])?;
    let mask = match (attention_mask, of.get::<Vec<i64>>("offsets")?) {
        (Some(mask), _) => AttentionMask::from_attention_mask(&mask)?,
        (None, Some(offsets)) => AttentionMask::causal_with_offsets(offsets),
        _ if of.is("causal_upper_left") => AttentionMask::causal_upper_left(),
        _ if of.is("causal") => AttentionMask::causal(),
        _ => AttentionMask::none(),
    };
    let mask = with(mask, of.read("valid_lens", lens)?, AttentionMask::with_valid_lens);
    let mask = with(mask, of.read("starts", lens)?, AttentionMask::with_starts);
    let mask = with(mask, of.read("prefix", lens)?, AttentionMask::with_prefix);
    let mask = with(mask, of.get("window")?, AttentionMask::with_window);
    let mask = with(mask, of.get("chunk")?, AttentionMask::with_chunk);
    let mask = mask.with_bool_mask(bool_mask.as_ref());
    let mask = mask.with_bias(bias.as_ref());
    let mask = with(mask, of.is("uniform").then_some(FullyMaskedRows::Uniform), AttentionMask::with_fully_masked_rows);
    Ok(with(mask, of.part("and", self::mask)?, |mask, other| mask.and(&other)))
}

/// Reads packed sequences: the sums of their lengths or the lengths, of queries and keys or of both, as lists or in a
/// tensor.
pub fn packed(of: &Fields) -> Result<PackedSequences> {
    type Two = [Vec<usize>; 2];
    match (of.get::<Two>("sums")?, of.get::<Two>("lens")?, of.tensors(["in"])?) {
        (Some([q, kv]), ..) => PackedSequences::new(q, kv),
        (_, Some([q, kv]), _) => PackedSequences::from_lens(&q, &kv),
        (.., [Some(sums)]) => PackedSequences::from_tensors(&sums, &sums),
        _ => PackedSequences::self_attention(of.need("own")?),
    }
}

/// Reads sequences in pages: the sums of the numbers of queries, the lengths and the pages, as lists or in tensors, and
/// the first stored positions.
pub fn paged(of: &Fields) -> Result<PagedSequences> {
    let sequences = match of.tensors(["queries_in", "lens_in", "table_in"])? {
        [Some(queries), Some(lens), Some(table)] => PagedSequences::from_tensors(&queries, &lens, &table)?,
        _ => PagedSequences::new(of.need("queries")?, of.need("lens")?, of.need("pages")?)?,
    };
    match of.get("first")? {
        Some(first) => sequences.with_first_positions(first),
        None => Ok(sequences),
    }
}
