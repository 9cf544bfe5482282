//! Products with the projections: one for q, k and v where inputs and weights allow it.

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::Linear;

use super::modules::{Modules, ProjectionPlace};
use super::packed::PackedProjections;
use crate::weights::Projections;

/// The inputs of one call, (B, T, width) each, and which of them are one tensor.
pub(super) struct Inputs {
    pub queries: Tensor,
    pub keys: Tensor,
    pub values: Tensor,
    pub one: One,
}

/// Which inputs of a call are one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum One {
    All,
    KeysAndValues,
    Neither,
}

impl One {
    pub(super) fn of(queries: &Tensor, keys: &Tensor, values: &Tensor) -> Self {
        match (queries.id() == keys.id(), keys.id() == values.id()) {
            (true, true) => Self::All,
            (false, true) => Self::KeysAndValues,
            _ => Self::Neither,
        }
    }
}

/// The projections as a layer multiplies with them.
#[derive(Debug, Clone)]
pub(super) enum Projector {
    Packed(PackedProjections),
    /// Candle's own: over variables, in f64 and on other devices.
    Linear(Projections),
    /// Some or all by modules of any kind.
    Modules(Modules),
}

impl Projector {
    pub(super) fn new(loaded: Projections) -> Result<Self> {
        match PackedProjections::new(&loaded)? {
            Some(packed) => Ok(Self::Packed(packed)),
            None => Ok(Self::Linear(loaded)),
        }
    }

    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::Packed(packed) => packed.dtype(),
            Self::Linear(projections) => projections.q.weight().dtype(),
            Self::Modules(modules) => modules.dtype(),
        }
    }

    pub(super) fn device(&self) -> &Device {
        match self {
            Self::Packed(packed) => packed.device(),
            Self::Linear(projections) => projections.q.weight().device(),
            Self::Modules(modules) => modules.device(),
        }
    }

    /// As linear layers, with what variables hold now.
    pub(super) fn linears(&self) -> Result<Projections> {
        match self {
            Self::Packed(packed) => packed.linears(),
            Self::Linear(projections) => {
                let [q, k, v] = projections.current()?;
                Ok(Projections { q, k, v, parts: None, ..projections.clone() })
            }
            Self::Modules(modules) => bail!(
                "[multi_head_attention] the {} projection is a module of the caller's, whose weights the layer does not know",
                modules.first_changed()
            ),
        }
    }

    /// q (B, T_q, H·D), k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v), as columns of one product where that can be.
    pub(super) fn project_inputs(&self, inputs: &Inputs) -> Result<[Tensor; 3]> {
        match self {
            Self::Packed(packed) => packed.project_inputs(inputs),
            Self::Linear(projections) => project_inputs(projections, inputs),
            Self::Modules(modules) => modules.project_inputs(inputs),
        }
    }

    /// One projection alone, of (B, T, in).
    pub(super) fn project(&self, place: ProjectionPlace, xs: &Tensor) -> Result<Tensor> {
        use ProjectionPlace::{Key, Output, Query, Value};
        match (self, place) {
            (_, Output) => self.project_output(xs.clone()),
            (Self::Modules(modules), _) => modules.project(place, xs),
            (Self::Packed(packed), Query) => packed.project_query(xs),
            (Self::Packed(packed), Key) => packed.project_key(xs),
            (Self::Packed(packed), Value) => packed.project_value(xs),
            (Self::Linear(projections), _) => project(&projections.current()?[place as usize], xs),
        }
    }

    /// k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v) alone, of two inputs that may be `one`.
    pub(super) fn project_keys_and_values(&self, keys: &Tensor, values: &Tensor, one: bool) -> Result<[Tensor; 2]> {
        match self {
            Self::Packed(packed) => packed.project_keys_and_values(keys, values, one),
            Self::Linear(projections) => {
                project_keys_and_values((projections, &projections.current()?), (keys, values), one)
            }
            Self::Modules(modules) => modules.project_keys_and_values(keys, values, one),
        }
    }

    /// The output projection of merged heads (B, T, H·D_v), or the heads as they are.
    pub(super) fn project_output(&self, merged: Tensor) -> Result<Tensor> {
        match self {
            Self::Packed(packed) => packed.project_output(merged),
            Self::Linear(Projections { o: Some(o), .. }) => project(o, &merged),
            Self::Linear(_) => Ok(merged),
            Self::Modules(modules) => modules.project_output(merged),
        }
    }
}

fn project_inputs(projections: &Projections, inputs: &Inputs) -> Result<[Tensor; 3]> {
    let Inputs { queries, keys, values, one } = inputs;
    let [q, k, v] = [&projections.q, &projections.k, &projections.v].map(|linear| linear.weight().dim(0));
    let (q, k, v) = (q?, k?, v?);
    // A column of an empty product would begin past the end of its buffer, where Candle's copies panic.
    let joint = projections.joint.as_ref().filter(|_| keys.elem_count() > 0);
    if let (Some(joint), One::All) = (joint, one)
        && let Some(all) = joint.all()
    {
        let product = project(all, queries)?;
        return Ok([product.narrow(2, 0, q)?, product.narrow(2, q, k)?, product.narrow(2, q + k, v)?]);
    }
    let own = projections.current()?;
    let [k, v] = project_keys_and_values((projections, &own), (keys, values), *one != One::Neither)?;
    Ok([project(&own[0], queries)?, k, v])
}

fn project_keys_and_values(
    (projections, [_, k, v]): (&Projections, &[Linear; 3]),
    (keys, values): (&Tensor, &Tensor),
    one: bool,
) -> Result<[Tensor; 2]> {
    match projections.joint.as_ref().filter(|_| one && keys.elem_count() > 0) {
        Some(joint) => {
            let product = project(&joint.keys_and_values()?, keys)?;
            let (k, v) = (k.weight().dim(0)?, v.weight().dim(0)?);
            Ok([product.narrow(2, 0, k)?, product.narrow(2, k, v)?])
        }
        None => Ok([project(k, keys)?, project(v, values)?]),
    }
}

/// A projection of (B, T, in) to (B, T, out). Candle multiplies no empty matrices on some devices.
fn project(linear: &Linear, xs: &Tensor) -> Result<Tensor> {
    let (b, t, _) = xs.dims3()?;
    if b * t == 0 {
        return Tensor::zeros((b, t, linear.weight().dim(0)?), xs.dtype(), xs.device());
    }
    linear.forward(&xs.contiguous()?)
}

/// (B, T, heads · width) to (B, T, heads, width): a view, also of columns of a wider product.
pub(super) fn split(xs: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, t, columns) = xs.dims3()?;
    let split = [b, t, heads, columns / heads];
    if !xs.is_contiguous() {
        let view = xs.unfold(2, split[3], split[3])?;
        // Candle counts the heads in f32, which holds no more than 2^24 columns.
        if view.dims() == split {
            return Ok(view);
        }
    }
    xs.reshape(&split)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::multi_head::call::Call;
    use crate::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, OutputOrder};
    use candle_core::Storage;
    use candle_nn::{VarBuilder, VarMap};

    const B: usize = 2;
    const T: usize = 3;

    /// 4 heads of width 3 over 2 key heads with values of width 5, columns 12 + 6 + 10.
    fn config() -> MultiHeadAttentionConfig {
        MultiHeadAttentionConfig::new(8, 4).with_num_kv_heads(2).with_head_dim(3).with_value_head_dim(5)
    }

    fn layer(cfg: &MultiHeadAttentionConfig) -> Result<MultiHeadAttention> {
        MultiHeadAttention::new(cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))
    }

    fn xs(width: usize) -> Result<Tensor> {
        Tensor::ones((B, T, width), DType::F32, &Device::Cpu)
    }

    /// Where a tensor's buffer lies, where in it the tensor begins, and its strides.
    fn place(tensor: &Tensor) -> (usize, usize, Vec<usize>) {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { panic!("a CPU tensor") };
        let buffer = storage.as_slice::<f32>().expect("f32").as_ptr() as usize;
        (buffer, layout.start_offset(), layout.stride().to_vec())
    }

    #[test]
    fn self_attention_reads_columns_of_one_product() -> Result<()> {
        for cfg in [config(), config().with_k_bias(true), config().with_sinks(true).with_causal(true)] {
            let xs = xs(8)?;
            let call = Call::new(&layer(&cfg)?, AttentionInput::new(&xs))?;
            let [q, k, v] = [&call.q, &call.k, &call.v].map(place);
            assert_eq!((q.0, q.0), (k.0, v.0), "one buffer");
            assert_eq!((q.1, k.1, v.1), (0, 12, 18));
            assert_eq!((call.q.dims(), q.2), ([B, 4, T, 3].as_slice(), vec![T * 28, 3, 28, 1]));
            assert_eq!((call.k.dims(), k.2), ([B, 2, T, 3].as_slice(), vec![T * 28, 3, 28, 1]));
            assert_eq!((call.v.dims(), v.2), ([B, 2, T, 5].as_slice(), vec![T * 28, 5, 28, 1]));
        }
        Ok(())
    }

    #[test]
    fn keys_and_values_of_one_input_are_columns_of_one_product() -> Result<()> {
        for key_size in [8, 7] {
            let (queries, keys) = (xs(8)?, xs(key_size)?);
            let input = AttentionInput::new(&queries).with_key_value(&keys, &keys);
            let call = Call::new(&layer(&config().with_key_size(key_size))?, input)?;
            let [q, k, v] = [&call.q, &call.k, &call.v].map(place);
            assert!(q.0 != k.0 && k.0 == v.0, "one buffer for two");
            assert_eq!((k.1, v.1), (0, 6));
            assert_eq!((k.2, v.2), (vec![T * 16, 3, 16, 1], vec![T * 16, 5, 16, 1]));
        }
        Ok(())
    }

    #[test]
    fn other_inputs_and_variables_have_a_product_each() -> Result<()> {
        let (queries, keys, values) = (xs(8)?, xs(8)?, xs(8)?);
        let crossed = AttentionInput::new(&queries).with_key_value(&keys, &values);
        let trained =
            MultiHeadAttention::new(&config(), VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
        for call in [Call::new(&layer(&config())?, crossed)?, Call::new(&trained, AttentionInput::new(&queries))?] {
            let [q, k, v] = [&call.q, &call.k, &call.v].map(place);
            assert!(q.0 != k.0 && q.0 != v.0 && k.0 != v.0);
            assert_eq!([q.1, k.1, v.1], [0; 3]);
        }
        Ok(())
    }

    #[test]
    fn heads_are_merged_without_a_copy() -> Result<()> {
        let layer = layer(&config().with_out_proj(false))?;
        let xs = xs(8)?;
        let call = Call::new(&layer, AttentionInput::new(&xs))?;
        assert_eq!(call.options.output_order, OutputOrder::Bthd);
        let context = Tensor::zeros((B, T, 4, 5), DType::F32, &Device::Cpu)?;
        let merged = layer.merge(&context.transpose(1, 2)?, true)?;
        assert_eq!((merged.dims(), place(&merged).0), ([B, T, 20].as_slice(), place(&context).0));
        Ok(())
    }

    /// As a view or not.
    #[test]
    fn columns_split_into_heads_in_their_order() -> Result<()> {
        let product = Tensor::arange(0f32, 84., &Device::Cpu)?.reshape((2, 3, 14))?;
        for (start, heads, width) in [(0, 7, 2), (0, 1, 14), (2, 4, 3), (3, 1, 5), (13, 1, 1), (4, 10, 1)] {
            let columns = product.narrow(2, start, heads * width)?;
            let expected = columns.contiguous()?.reshape((2, 3, heads, width))?;
            assert_eq!(
                split(&columns, heads)?.flatten_all()?.to_vec1::<f32>()?,
                expected.flatten_all()?.to_vec1::<f32>()?
            );
            assert_eq!(place(&split(&columns, heads)?).0, place(&product).0);
        }
        Ok(())
    }
}
