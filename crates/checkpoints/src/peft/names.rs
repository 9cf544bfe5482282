//! The names of tensors in PEFT's files.

use candle_core::{Result, bail};

use super::OP;

/// The prefix of the model's names in an adapter's files.
pub(super) const PREFIX: &str = "base_model.model.";

/// PEFT's usual name of an adapter, which is not in the names of the adapter's own files.
pub(super) const DEFAULT_NAME: &str = "default";

/// A low-rank matrix of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LoraMatrix {
    /// A, (r, in).
    A,
    /// B, (out, r).
    B,
}

impl LoraMatrix {
    pub fn name(self) -> &'static str {
        match self {
            Self::A => "lora_A",
            Self::B => "lora_B",
        }
    }

    /// Returns the name of the matrix of an embedding.
    pub fn embedding_name(self) -> &'static str {
        match self {
            Self::A => "lora_embedding_A",
            Self::B => "lora_embedding_B",
        }
    }
}

/// The meaning of a tensor in an adapter's file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StoredName {
    /// A matrix of a linear layer.
    Matrix {
        /// The full name of the layer in the model.
        module: String,
        matrix: LoraMatrix,
    },
    /// A matrix of an embedding.
    Embedding {
        /// The full name of the embedding in the model.
        module: String,
        matrix: LoraMatrix,
    },
    /// The adapter's value of a parameter of the model: a trained bias, or a parameter of a saved module.
    Parameter {
        /// The full name of the parameter in the model.
        name: String,
    },
    /// A weight of the model itself, in the state dict of a whole PEFT model.
    Base,
}

/// Returns the meaning of a tensor by its name in an adapter's file.
///
/// # Errors
/// For a tensor of an option that is not supported, such as DoRA, and for an adapter of another name.
pub(super) fn parse(name: &str) -> Result<StoredName> {
    let own = name.strip_prefix(PREFIX).unwrap_or(name);
    let parts: Vec<_> = own.split('.').collect();
    let is_marker = |part: &&str| part.starts_with("lora_") || ["modules_to_save", "token_adapter"].contains(part);
    let Some(at) = parts.iter().position(is_marker) else { return Ok(parameter(&parts)) };
    let module = parts[..at].join(".");
    let rest = &parts[at + 1..];
    let refused = |option: &str| -> Result<StoredName> {
        bail!("[{OP}] {name} is in the file, which is of {option}, expected LoRA without it")
    };
    for matrix in [LoraMatrix::A, LoraMatrix::B] {
        if parts[at] == matrix.name() {
            return match rest {
                ["weight"] | [DEFAULT_NAME, "weight"] => Ok(StoredName::Matrix { module, matrix }),
                [.., "bias"] => refused("lora_bias"),
                _ => bail!(
                    "[{OP}] {name} is in the file, expected {}.weight, with {DEFAULT_NAME:?} as the name of the \
                     adapter or without a name",
                    matrix.name()
                ),
            };
        }
        if parts[at] == matrix.embedding_name() && matches!(rest, [] | [DEFAULT_NAME]) {
            return Ok(StoredName::Embedding { module, matrix });
        }
    }
    match (parts[at], rest) {
        ("lora_magnitude_vector", _) => refused("DoRA (use_dora)"),
        ("token_adapter", _) => refused("trainable_token_indices"),
        ("modules_to_save", [DEFAULT_NAME, leaf @ ..]) if !leaf.is_empty() => {
            Ok(StoredName::Parameter { name: format!("{module}.{}", leaf.join(".")) })
        }
        _ => bail!("[{OP}] {name} is in the file, expected the tensors of LoRA, as lora_A and lora_B"),
    }
}

/// Returns the meaning of a tensor without low-rank matrices.
fn parameter(parts: &[&str]) -> StoredName {
    match parts {
        [.., "original_module", _] => StoredName::Base,
        [module @ .., "base_layer", leaf] => StoredName::Parameter { name: format!("{}.{leaf}", module.join(".")) },
        all => StoredName::Parameter { name: all.join(".") },
    }
}

/// Returns whether two names are equal but for their numbers, as the names of one module in two layers.
pub(super) fn is_equal_but_for_numbers(one: &str, other: &str) -> bool {
    let is_number = |part: &str| part.parse::<usize>().is_ok();
    let ones: Vec<_> = one.split('.').collect();
    let others: Vec<_> = other.split('.').collect();
    let is_same = |(a, b): (&&str, &&str)| a == b || (is_number(a) && is_number(b));
    ones.len() == others.len() && ones.iter().zip(&others).all(is_same)
}

/// Returns the number of parts that the ends of two names have in common.
pub(super) fn common_end(one: &str, other: &str) -> usize {
    one.rsplit('.').zip(other.rsplit('.')).take_while(|(a, b)| a == b).count()
}

/// Returns whether a name is another or ends with it, in whole parts between dots.
pub(super) fn is_end(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Returns whether a name is below a module; every name is below the root, "".
pub(super) fn is_below(name: &str, module: &str) -> bool {
    module.is_empty() || name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}

/// Returns the full name of a module or a parameter below another module.
pub(super) fn join(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_string() } else { format!("{module}.{name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_adapter_files_have_their_meaning() -> Result<()> {
        let matrix = |module: &str, matrix| StoredName::Matrix { module: module.to_string(), matrix };
        let parameter = |name: &str| StoredName::Parameter { name: name.to_string() };
        for (name, expected) in [
            ("base_model.model.a.0.q_proj.lora_A.weight", matrix("a.0.q_proj", LoraMatrix::A)),
            ("a.0.q_proj.lora_B.default.weight", matrix("a.0.q_proj", LoraMatrix::B)),
            ("base_model.model.a.q_proj.base_layer.bias", parameter("a.q_proj.bias")),
            ("base_model.model.head.modules_to_save.default.weight", parameter("head.weight")),
            ("head.weight", parameter("head.weight")),
            ("base_model.model.head.original_module.weight", StoredName::Base),
            (
                "base_model.model.wte.lora_embedding_B",
                StoredName::Embedding { module: "wte".to_string(), matrix: LoraMatrix::B },
            ),
        ] {
            assert_eq!(parse(name)?, expected, "{name}");
        }
        for name in [
            "a.q_proj.lora_magnitude_vector",
            "a.q_proj.lora_magnitude_vector.default.weight",
            "a.q_proj.lora_B.bias",
            "a.q_proj.lora_A.mine.weight",
            "a.q_proj.lora_diag",
            "wte.token_adapter.trainable_tokens_delta",
        ] {
            assert!(parse(name).is_err_and(|error| error.to_string().contains(name)), "{name}");
        }
        assert!(is_equal_but_for_numbers("m.layers.0.q", "m.layers.11.q"));
        assert!(!is_equal_but_for_numbers("m.layers.0.q", "m.l.layers.0.q"));
        Ok(())
    }
}
