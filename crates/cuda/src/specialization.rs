//! The constants that attention kernels are compiled for, besides their tiles.

use crate::element::ElementType;
use crate::program::Define;

/// The type of a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum BiasElement {
    /// The type of the queries.
    Element,
    F32,
}

/// The computation that the kernels of a program are compiled for, and the alignment of its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Specialization {
    pub element: ElementType,
    /// D, from 1 to 256.
    pub head_dim: usize,
    /// D_v, from 1 to 256.
    pub value_dim: usize,
    /// Whether keys and values are codes of 8 bits.
    pub key_codes: bool,
    /// Whether keys and values are in pages.
    pub key_pages: bool,
    pub softcap: bool,
    pub alibi: bool,
    pub relative_bias: bool,
    pub bias: Option<BiasElement>,
    pub boolean_mask: bool,
    pub dropout: bool,
    /// Whether the factor of products is above 0, so that the largest product has the largest score.
    pub positive_scale: bool,
    pub gradients: ModifierGradients,
    pub alignment: Alignment,
}

/// The gradients of score modifiers that a backward pass computes, besides the gradients of q, k and v.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct ModifierGradients {
    pub bias: bool,
    pub slopes: bool,
    pub relative_bias: bool,
}

/// The tensors whose rows begin at multiples of 16 bytes. Other tensors are read one element at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Alignment {
    /// Queries, keys, values, output and their gradients.
    pub rows: bool,
    /// The bias.
    pub bias: bool,
    /// The boolean mask.
    pub boolean_mask: bool,
}

impl Alignment {
    /// The alignment of tensors that Candle has allocated, with sizes that are multiples of 16 bytes.
    pub const FULL: Self = Self { rows: true, bias: true, boolean_mask: true };
}

/// Returns the columns of a tile for rows of `dim` elements: matrices of 16.
fn columns(dim: usize) -> usize {
    dim.next_multiple_of(16)
}

impl Specialization {
    /// Returns the specialisation of a call without score modifiers.
    pub fn plain(element: ElementType, head_dim: usize, value_dim: usize) -> Self {
        Self {
            element,
            head_dim,
            value_dim,
            key_codes: false,
            key_pages: false,
            softcap: false,
            alibi: false,
            relative_bias: false,
            bias: None,
            boolean_mask: false,
            dropout: false,
            positive_scale: true,
            gradients: ModifierGradients::default(),
            alignment: Alignment::FULL,
        }
    }

    /// Returns the columns of tiles of queries and keys.
    pub fn head_columns(&self) -> usize {
        columns(self.head_dim)
    }

    /// Returns the columns of tiles of values.
    pub fn value_columns(&self) -> usize {
        columns(self.value_dim)
    }

    /// Returns the bytes from row to row of queries or keys in shared memory.
    pub fn head_pitch(&self) -> usize {
        self.head_columns() * self.element.bytes() + self.row_padding()
    }

    /// Returns the bytes from row to row of values in shared memory.
    pub fn value_pitch(&self) -> usize {
        self.value_columns() * self.element.bytes() + self.row_padding()
    }

    /// Returns the bytes behind a row, which keep rows that are read together in different banks.
    pub fn row_padding(&self) -> usize {
        if self.element == ElementType::F32 { 32 } else { 16 }
    }

    /// Returns whether scores are natural logarithms, so that the statistics of a row are two numbers.
    pub fn has_natural_scores(&self) -> bool {
        self.element == ElementType::F32 || self.bias.is_some() || self.relative_bias
    }

    /// Returns whether more is done to a product than a multiplication by a scale above 0.
    fn modifies_scores(&self) -> bool {
        let has_modifier = self.softcap || self.alibi || self.relative_bias || self.bias.is_some();
        has_modifier || self.key_codes || !self.positive_scale
    }

    /// Returns the bytes of an element of the bias, or of the queries without a bias.
    pub fn bias_bytes(&self) -> usize {
        match self.bias {
            None | Some(BiasElement::Element) => self.element.bytes(),
            Some(BiasElement::F32) => 4,
        }
    }

    /// Returns the values of the macros.
    pub fn defines(&self) -> Vec<Define> {
        let define = |name, value| Define { name, value };
        let flag = |name, is_set: bool| Define { name, value: is_set.into() };
        let bias = match self.bias {
            None => 0,
            Some(BiasElement::Element) => 1,
            Some(BiasElement::F32) => 2,
        };
        vec![
            self.element.define(),
            define("HEAD_DIM", self.head_dim as i64),
            define("VALUE_DIM", self.value_dim as i64),
            flag("KEY_CODES", self.key_codes),
            flag("KEY_PAGES", self.key_pages),
            flag("HAS_SOFTCAP", self.softcap),
            flag("HAS_ALIBI", self.alibi),
            flag("HAS_RELATIVE_BIAS", self.relative_bias),
            define("HAS_BIAS", bias),
            flag("HAS_BOOLEAN_MASK", self.boolean_mask),
            flag("HAS_DROPOUT", self.dropout),
            flag("BIAS_GRADIENT", self.gradients.bias),
            flag("SLOPE_GRADIENT", self.gradients.slopes),
            flag("RELATIVE_BIAS_GRADIENT", self.gradients.relative_bias),
            flag("ALIGNED_ROWS", self.alignment.rows),
            flag("ALIGNED_BIAS", self.alignment.bias),
            flag("ALIGNED_BOOLEAN_MASK", self.alignment.boolean_mask),
            flag("MODIFIES_SCORES", self.modifies_scores()),
            flag("NATURAL_SCORES", self.has_natural_scores()),
            define("ELEMENT_BYTES", self.element.bytes() as i64),
            define("BIAS_BYTES", self.bias_bytes() as i64),
            define("HEAD_COLUMNS", self.head_columns() as i64),
            define("VALUE_COLUMNS", self.value_columns() as i64),
            define("HEAD_PITCH", self.head_pitch() as i64),
            define("VALUE_PITCH", self.value_pitch() as i64),
        ]
    }
}
