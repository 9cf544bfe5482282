//! The specification of a parameter before it is read.

use candle_nn::Init;

use super::shard::{Heads, Share};

/// The reason why a file may not have a bias that its config does not mention.
pub const NO_BIAS: &str = "the config says there is no such bias";

/// The specification of a parameter: its name, shape and initialisation, and its division among ranks.
#[derive(Debug, Clone)]
pub struct ParameterSpec {
    /// This crate's name of the parameter.
    pub name: String,
    /// The shape of the whole parameter, as stored.
    pub shape: Vec<usize>,
    /// The initialisation of a new parameter.
    pub init: Init,
    /// The division among ranks; `None` where each rank has the whole parameter.
    pub share: Option<Share>,
    /// The name in a file. Where a file stores each entry of the first dimension as a tensor, the name has `{}` for the
    /// number of the entry.
    pub stored: String,
    /// The reason why a file may not have the parameter, where the config does not ask for it: the parameter would
    /// change the output if it were used.
    pub refused: Option<&'static str>,
}

impl ParameterSpec {
    /// Returns the specification of a parameter that has the same name in files, and is whole in each rank.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        let name = name.into();
        Self { stored: name.clone(), name, shape: shape.into(), init, share: None, refused: None }
    }

    /// Divides dimension `dim` by heads.
    pub fn by_head(self, heads: Heads, dim: usize) -> Self {
        Self { share: Some(Share::Heads { heads, dim }), ..self }
    }

    /// Sets the name in files.
    pub fn stored(self, stored: impl Into<String>) -> Self {
        Self { stored: stored.into(), ..self }
    }

    /// Refuses files that have the parameter, for the reason `why`, unless the config asks for it.
    pub fn only_if(self, is_requested: bool, why: &'static str) -> Self {
        Self { refused: (!is_requested).then_some(why), ..self }
    }
}
