//! The names of norms in files.

/// The name of a norm in files, and that of its weight there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormName {
    /// The module of the norm.
    pub module: &'static str,
    /// The parameter that is the weight.
    pub weight: &'static str,
}

const fn norm_name(module: &'static str) -> NormName {
    NormName { module, weight: "weight" }
}

impl NormName {
    /// Returns the name of the weight below the module of the attention.
    #[must_use]
    pub fn weight_name(self) -> String {
        format!("{}.{}", self.module, self.weight)
    }

    /// Returns the name of the first weight of a list with one norm for each head.
    pub(super) fn first_of_list(self) -> String {
        format!("{}.norms.0.{}", self.module, self.weight)
    }

    /// Returns the names of the norm's parameters, of which a file has some.
    pub(super) fn parameters(self) -> [String; 3] {
        [self.weight_name(), format!("{}.bias", self.module), self.first_of_list()]
    }
}

/// The names of the norm of queries in files. The first one is the crate's own, the last two are torchtune's and flax'.
pub const QUERY_NORM_NAMES: &[NormName] = &[
    norm_name("q_norm"),
    norm_name("q_layernorm"),
    norm_name("query_layernorm"),
    NormName { module: "q_norm", weight: "scale" },
    NormName { module: "query_ln", weight: "scale" },
];

/// The names of the norm of keys in files, in the order of [`QUERY_NORM_NAMES`].
pub const KEY_NORM_NAMES: &[NormName] = &[
    norm_name("k_norm"),
    norm_name("k_layernorm"),
    norm_name("key_layernorm"),
    NormName { module: "k_norm", weight: "scale" },
    NormName { module: "key_ln", weight: "scale" },
];

/// The names of the norm of values in files.
pub const VALUE_NORM_NAMES: &[NormName] = &[norm_name("v_norm")];

/// The names of the norm of the attention output in files. The first one is the crate's own.
pub const OUTPUT_NORM_NAMES: &[NormName] =
    &[norm_name("output_norm"), norm_name("attn_sub_norm"), norm_name("inner_attn_ln")];
