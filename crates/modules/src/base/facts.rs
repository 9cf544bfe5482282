//! Facts about the files of a builder. A builder answers whether it has a tensor of a name, and nothing else; the one
//! that `weights::open` makes answers with yes to these names too, where the fact is true.

use candle_nn::VarBuilder;

/// A fact about the files of a builder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fact {
    /// `weights::open` made the builder, so that the dtypes and scales of its weights are known to it.
    Opened,
    /// MLX converted the model and wrote the file.
    WrittenByMlx,
    /// Norms are as PyTorch stores them: as they were in the file, or made so.
    NormsAsInPyTorch,
}

/// The beginning of a name that a builder has if the tensor of the rest of the name has integers in the file.
const INTEGERS: &str = "fact: integers in ";

/// The beginning of a name that a builder has if it can return the codes of the weight of the rest of the name.
const CODES: &str = "fact: codes of ";

/// Returns the name under which a builder has the codes of a weight, by the weight's name from the root.
pub(super) fn name_of_codes(weight: &str) -> String {
    format!("{CODES}{weight}")
}

/// Returns whether a tensor, by its name from the root, is known to have integers in the file, or other numbers that
/// are codes of floats.
pub(super) fn has_integers(vb: &VarBuilder, name: &str) -> bool {
    let root = vb.root();
    root.contains_tensor(&format!("{INTEGERS}{name}")) && !is_claimed_by_all(&root)
}

impl Fact {
    /// All facts.
    pub const ALL: [Self; 3] = [Self::Opened, Self::WrittenByMlx, Self::NormsAsInPyTorch];

    /// Returns the name that a builder has if the fact is true. No file has a tensor of that name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Opened => "fact: opened by candle-attention",
            Self::WrittenByMlx => "fact: written by MLX",
            Self::NormsAsInPyTorch => "fact: norms as in PyTorch",
        }
    }

    /// Returns the name of a tensor from the name of the fact that it has integers; `None` for another name.
    #[must_use]
    pub fn tensor_of_integers(name: &str) -> Option<&str> {
        name.strip_prefix(INTEGERS)
    }

    /// Returns the name of a weight from the name of the fact that a builder can return its codes; `None` for
    /// another name.
    #[must_use]
    pub fn weight_of_codes(name: &str) -> Option<&str> {
        name.strip_prefix(CODES)
    }

    /// Returns whether the fact is known to be true of the files of a builder.
    #[must_use]
    pub fn is_known_of(self, vb: &VarBuilder) -> bool {
        let root = vb.root();
        root.contains_tensor(self.name()) && !is_claimed_by_all(&root)
    }
}

/// Returns whether a builder claims to have a tensor of every name.
pub(super) fn is_claimed_by_all(vb: &VarBuilder) -> bool {
    vb.contains_tensor("no parameter has this name")
}
