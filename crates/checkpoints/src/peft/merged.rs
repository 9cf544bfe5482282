//! A builder of a model's weights with an adapter in them.

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use super::OP;
use super::adapter::Adapter;
use super::load::Taken;
use super::names::StoredName;
use super::tensors::MatrixNames;
use candle_attention_modules::base::{Fact, accumulation_dtype, moved_names, root, stored_name};
use candle_attention_modules::warn_once;

/// The modules of transformers that are `Conv1D`, whose weights are (in, out), in GPT-2. Other models have linear
/// layers of the same names.
const CONV1D_NAMES: [&str; 4] = ["c_attn", "c_proj", "c_fc", "q_attn"];

/// The module of a block that has more outputs than inputs, so that the shape of its weight tells its type.
const NOT_SQUARE: &str = "attn.c_attn";

impl Adapter {
    /// Returns a builder of a model's weights with the adapter in them, for layers of any kind: linear and latent
    /// attention, the MLP, the embeddings, the head.
    ///
    /// `vb` is a builder at the root of the model. Each weight is merged when it is read, with the current values of
    /// the adapter, and is not tracked for gradients. A saved module that the model's file does not have, such as the
    /// head of a model with tied embeddings, is read from the adapter. A square weight is (in, out) in a `Conv1D` of
    /// GPT-2 alone; `fan_in_fan_out` does not change that, as with PEFT.
    ///
    /// Reading fails if the adapter's file has matrices of a module that the model does not have, or lacks a bias or a
    /// saved module that its options promise. [`check_all_used`](Self::check_all_used) says whether the whole file was
    /// read.
    ///
    /// ```no_run
    /// use candle_attention::peft::Adapter;
    /// use candle_attention::{hf, weights};
    /// use candle_core::{DType, Device};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let json = serde_json::from_str(&std::fs::read_to_string("model/config.json")?)?;
    /// let vb = weights::open("model/model.safetensors", DType::F32, &Device::Cpu)?;
    /// let adapter = Adapter::open("adapter", DType::F32, &Device::Cpu)?;
    /// let attention = hf::load_linear_attention(&json, 0, adapter.merged_builder(vb))?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn merged_builder(&self, vb: VarBuilder<'static>) -> VarBuilder<'static> {
        let dtype = vb.dtype();
        let device = vb.device().clone();
        let problem = self.problem_with(&vb);
        VarBuilder::from_backend(Box::new(MergedWeights { adapter: self.clone(), vb, problem }), dtype, device)
    }

    /// Returns the reason why a file does not fit a model's weights: it has matrices of a module that the model does
    /// not have.
    fn problem_with(&self, vb: &VarBuilder) -> Option<String> {
        if makes_parameters(vb) {
            return None;
        }
        for (name, stored) in self.tensors.file.as_ref()?.all() {
            let (StoredName::Matrix { module, .. } | StoredName::Embedding { module, .. }) = stored else { continue };
            let weight = format!("{module}.weight");
            if !is_there(vb, &weight) {
                return Some(format!("{name} is in the adapter's file, but {weight} is not in the model's builder"));
            }
        }
        None
    }
}

/// Returns whether a builder has a parameter, perhaps under the name to which PEFT moved it.
fn is_there(vb: &VarBuilder, name: &str) -> bool {
    vb.contains_tensor(name) || moved_names(name).any(|moved| vb.contains_tensor(&moved))
}

/// Returns whether a builder makes each parameter when it is read, so that it has no names yet.
fn makes_parameters(vb: &VarBuilder) -> bool {
    let nothing = vb.get_unchecked("no parameter has this name");
    // A builder that reads files says that it cannot find the tensor; one that makes parameters, that it needs a shape.
    nothing.as_ref().map_err(root).is_err_and(|error| matches!(error, Error::Msg(_)))
}

/// Reads the weights of a model and adds an adapter to them.
struct MergedWeights {
    adapter: Adapter,
    /// The model's weights.
    vb: VarBuilder<'static>,
    /// The reason why the adapter's file does not fit the model.
    problem: Option<String>,
}

impl MergedWeights {
    /// Returns a parameter of the model, or the value that the adapter has instead.
    fn replaced(&self, name: &str, own: Tensor) -> Result<Tensor> {
        let tensors = &self.adapter.tensors;
        // A parameter of a new adapter is that of the model until a layer has made the variable.
        if tensors.is_new() && tensors.parameter_name(name).is_none() {
            return Ok(own);
        }
        let taken = Taken { is_linear: true, takes_all: self.takes_all() };
        match self.adapter.replacement(name, &own, taken)? {
            Some(replacement) => replacement.detach().to_dtype(own.dtype())?.to_device(own.device()),
            None => Ok(own),
        }
    }

    /// Returns a parameter with the low-rank update of the adapter, if there is one.
    fn updated(&self, name: &str, own: Tensor) -> Result<Tensor> {
        let (Some(module), &[rows, columns]) = (name.strip_suffix(".weight"), own.dims()) else { return Ok(own) };
        let update = match self.adapter.embedding_delta(module, rows, columns)? {
            Some(update) => Some(update),
            None => self.linear_delta(module, rows, columns)?,
        };
        let Some(update) = update else {
            let file = &self.adapter.tensors.file;
            // The names of a file were compared with the model's already.
            if let Some(elsewhere) = self.adapter.matrix_elsewhere(module).filter(|_| file.is_none()) {
                bail!("[{OP}] the adapter has {elsewhere}, but the model's name is {name}")
            }
            return Ok(own);
        };
        let dtype = accumulation_dtype(own.dtype());
        let update = update.to_dtype(dtype)?.to_device(own.device())?;
        (own.to_dtype(dtype)? + update)?.to_dtype(own.dtype())
    }

    /// Returns whether all parameters in the adapter's file are its own, and not the model's.
    fn takes_all(&self) -> bool {
        self.adapter.tensors.file.as_ref().is_some_and(|file| !file.is_whole_model)
    }

    /// Returns the update of a linear layer in the shape of its weight (rows, columns), if it has matrices.
    fn linear_delta(&self, module: &str, rows: usize, columns: usize) -> Result<Option<Tensor>> {
        let delta = |is_transposed| -> Result<Option<Tensor>> {
            let (outputs, inputs) = if is_transposed { (columns, rows) } else { (rows, columns) };
            let delta = self.adapter.delta(module, outputs, inputs)?;
            if is_transposed { delta.map(|delta| delta.t()).transpose() } else { Ok(delta) }
        };
        let is_transposed = self.is_conv1d(module)?;
        let found = match delta(is_transposed) {
            // The shape of a weight that is not square tells whether it is (in, out).
            Err(error) if rows != columns => delta(!is_transposed).map_err(|_| error)?,
            found => found?,
        };
        let option = self.adapter.config().fan_in_fan_out();
        if found.is_some() && rows == columns && is_transposed != option {
            warn_once!("[{OP}] fan_in_fan_out is {option}, but not for {module}: the type of the module decides");
        }
        Ok(found)
    }

    /// Returns whether a module is a `Conv1D` of GPT-2, whose weight is (in, out). The weight of the block's `c_attn`
    /// tells it, which has more outputs than inputs; without such a weight, the option `fan_in_fan_out`.
    fn is_conv1d(&self, module: &str) -> Result<bool> {
        let Some((parent, name)) = module.rsplit_once('.') else { return Ok(false) };
        if !CONV1D_NAMES.contains(&name) {
            return Ok(false);
        }
        let block = parent.rsplit_once('.').map_or("", |(block, _)| block);
        for sibling in [format!("{parent}.c_attn.weight"), format!("{block}.{NOT_SQUARE}.weight")] {
            if !is_there(&self.vb, &sibling) {
                continue;
            }
            let weight = self.vb.get_unchecked(&stored_name(&self.vb, &sibling))?;
            if let &[rows, columns] = weight.dims()
                && rows != columns
            {
                return Ok(columns > rows);
            }
        }
        Ok(self.adapter.config().fan_in_fan_out())
    }

    /// Returns whether the adapter may change a weight, so that the codes of the model's own are not its numbers.
    fn may_change(&self, weight: &str) -> bool {
        let tensors = &self.adapter.tensors;
        let Some(module) = weight.strip_suffix(".weight") else { return true };
        let has_matrices = |names: MatrixNames| names.a.is_some() || names.b.is_some();
        // The matrices of a new adapter are there when a layer has made them.
        tensors.file.is_none()
            || has_matrices(tensors.matrix_names(module))
            || has_matrices(tensors.embedding_names(module))
            || tensors.parameter_name(weight).is_some()
    }

    fn check(&self) -> Result<()> {
        match &self.problem {
            Some(problem) => bail!("[{OP}] {problem}"),
            None => Ok(()),
        }
    }

    /// Returns the name of the value that the adapter's file has for a parameter. The model's own value may be of
    /// another shape, as that of an embedding that was made larger, or missing.
    fn name_in_adapter(&self, name: &str) -> Option<String> {
        if self.takes_all() { self.adapter.tensors.parameter_name(name) } else { None }
    }
}

impl SimpleBackend for MergedWeights {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.check()?;
        let own = match self.name_in_adapter(name) {
            Some(stored) => {
                self.adapter.tensors.parameter(&stored, &shape)?.detach().to_dtype(dtype)?.to_device(device)?
            }
            None => {
                let own = self.vb.get_with_hints_dtype(shape, &stored_name(&self.vb, name), init, dtype)?;
                self.replaced(name, own)?
            }
        };
        self.updated(name, own)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.check()?;
        let own = match self.name_in_adapter(name) {
            Some(stored) => {
                self.adapter.tensors.parameter_of_any_shape(&stored)?.detach().to_dtype(dtype)?.to_device(device)?
            }
            None => self.replaced(name, self.vb.get_unchecked_dtype(&stored_name(&self.vb, name), dtype)?)?,
        };
        self.updated(name, own)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        if let Some(weight) = Fact::weight_of_codes(name)
            && self.may_change(weight)
        {
            return false;
        }
        is_there(&self.vb, name) || self.name_in_adapter(name).is_some()
    }
}
