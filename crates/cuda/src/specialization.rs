//! The constants that attention kernels are compiled for, besides their tiles.

use candle_attention_call::KvCodeFormat;

use crate::element::ElementType;
use crate::given::Given;
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
    /// The format of keys and values that are codes. The widths of rows are multiples of its blocks.
    pub key_codes: Option<KvCodeFormat>,
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

/// A constant that is 0 or 1.
struct Flag<'a> {
    name: &'static str,
    is_set: &'a mut bool,
}

/// A specialisation with the name of its modifiers, for the list of programs.
pub(crate) struct NamedSpecialization {
    pub name: &'static str,
    pub specialization: Specialization,
}

/// The gradients of score modifiers that a backward pass computes, besides the gradients of q, k and v.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ModifierGradients {
    /// The gradient of a bias (B, H, T_q, T_kv).
    pub bias: bool,
    /// The gradient of the slopes of ALiBi.
    pub slopes: bool,
    /// The gradient of a relative bias.
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

/// Returns the number of columns of a tile for rows of `dim` elements: matrices of 16.
fn columns(dim: usize) -> usize {
    dim.next_multiple_of(16)
}

/// Returns the number of a format of codes, as `code_format.cuh` has it.
fn code_format_number(format: KvCodeFormat) -> i64 {
    match format {
        KvCodeFormat::Q8 => 0,
        KvCodeFormat::E4M3 => 1,
        KvCodeFormat::Q4 => 2,
    }
}

/// Returns the format of codes of constants that are given by name, if keys and values are codes.
///
/// # Errors
/// For a number that no format has, and for a format without codes.
fn code_format(given: &mut Given) -> Result<Option<KvCodeFormat>, String> {
    let number = given.take("CODE_FORMAT", 0);
    if !given.flag("KEY_CODES", false) {
        return if number == 0 {
            Ok(None)
        } else {
            Err(format!("CODE_FORMAT is {number}, expected KEY_CODES 1 with it"))
        };
    }
    let found = KvCodeFormat::ALL.into_iter().find(|&format| code_format_number(format) == number as i64);
    found.map(Some).ok_or_else(|| format!("CODE_FORMAT is {number}, expected 0, 1 or 2"))
}

impl Specialization {
    /// Returns the specialisation of a call without score modifiers.
    pub fn plain(element: ElementType, head_dim: usize, value_dim: usize) -> Self {
        Self {
            element,
            head_dim,
            value_dim,
            key_codes: None,
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

    /// Returns the constants that are 0 or 1, with the names that kernels have for them.
    fn flags(&mut self) -> [Flag<'_>; 12] {
        let Self {
            element: _,
            head_dim: _,
            value_dim: _,
            key_codes: _,
            key_pages,
            softcap,
            alibi,
            relative_bias,
            bias: _,
            boolean_mask,
            dropout,
            positive_scale: _,
            gradients,
            alignment,
        } = self;
        let ModifierGradients { bias: bias_gradient, slopes, relative_bias: relative_bias_gradient } = gradients;
        [
            Flag { name: "KEY_PAGES", is_set: key_pages },
            Flag { name: "HAS_SOFTCAP", is_set: softcap },
            Flag { name: "HAS_ALIBI", is_set: alibi },
            Flag { name: "HAS_RELATIVE_BIAS", is_set: relative_bias },
            Flag { name: "HAS_BOOLEAN_MASK", is_set: boolean_mask },
            Flag { name: "HAS_DROPOUT", is_set: dropout },
            Flag { name: "BIAS_GRADIENT", is_set: bias_gradient },
            Flag { name: "SLOPE_GRADIENT", is_set: slopes },
            Flag { name: "RELATIVE_BIAS_GRADIENT", is_set: relative_bias_gradient },
            Flag { name: "ALIGNED_ROWS", is_set: &mut alignment.rows },
            Flag { name: "ALIGNED_BIAS", is_set: &mut alignment.bias },
            Flag { name: "ALIGNED_BOOLEAN_MASK", is_set: &mut alignment.boolean_mask },
        ]
    }

    /// Returns the specialisation of constants that are given by name; the others are as in a plain call.
    ///
    /// # Errors
    /// For a number that a constant cannot be.
    pub fn of_constants(given: &mut Given) -> Result<Self, String> {
        let element = given.element()?;
        let head_dim = given.take("HEAD_DIM", 128);
        let value_dim = given.take("VALUE_DIM", head_dim);
        let mut own = Self::plain(element, head_dim, value_dim);
        for Flag { name, is_set } in own.flags() {
            *is_set = given.flag(name, *is_set);
        }
        own.key_codes = code_format(given)?;
        if let Some(format) = own.key_codes
            && ![head_dim, value_dim].iter().all(|width| width.is_multiple_of(format.block()))
        {
            return Err(format!("the widths are {head_dim} and {value_dim}, expected multiples of {}", format.block()));
        }
        own.bias = match given.take("HAS_BIAS", 0) {
            0 => None,
            1 => Some(BiasElement::Element),
            2 => Some(BiasElement::F32),
            other => return Err(format!("HAS_BIAS is {other}, expected 0, 1 or 2")),
        };
        own.positive_scale = !given.flag("MODIFIES_SCORES", false);
        Ok(own)
    }

    /// Returns the specialisations of calls with one score modifier, and of calls with all of them, of which the last
    /// has no dropout.
    pub fn with_modifiers(self) -> Vec<NamedSpecialization> {
        let named = |name, specialization| NamedSpecialization { name, specialization };
        let gradients = self.gradients;
        let slopes = ModifierGradients { slopes: true, ..gradients };
        let relative_bias = ModifierGradients { relative_bias: true, ..gradients };
        let bias = ModifierGradients { bias: true, ..gradients };
        let biased = Self { bias: Some(BiasElement::F32), ..self };
        let all = Self {
            softcap: true,
            alibi: true,
            relative_bias: true,
            boolean_mask: true,
            dropout: true,
            gradients: ModifierGradients { bias: true, slopes: true, relative_bias: true },
            ..biased
        };
        vec![
            named("softcap", Self { softcap: true, ..self }),
            named("alibi", Self { alibi: true, gradients: slopes, ..self }),
            named("relative bias", Self { relative_bias: true, gradients: relative_bias, ..self }),
            named("bias", Self { bias: Some(BiasElement::Element), ..self }),
            named("f32 bias", Self { gradients: bias, ..biased }),
            named("boolean mask", Self { boolean_mask: true, ..self }),
            named("bias and boolean mask", Self { boolean_mask: true, ..biased }),
            named("dropout", Self { dropout: true, ..self }),
            named("scale below 0", Self { positive_scale: false, ..self }),
            named("all modifiers", all),
            named("all modifiers but dropout", Self { dropout: false, ..all }),
        ]
    }

    /// Returns the number of columns of tiles of queries and keys.
    pub fn head_columns(&self) -> usize {
        columns(self.head_dim)
    }

    /// Returns the number of columns of tiles of values.
    pub fn value_columns(&self) -> usize {
        columns(self.value_dim)
    }

    /// Returns the number of bytes from row to row of queries or keys in shared memory.
    pub fn head_pitch(&self) -> usize {
        self.head_columns() * self.element.bytes() + self.row_padding()
    }

    /// Returns the number of bytes from row to row of values in shared memory.
    pub fn value_pitch(&self) -> usize {
        self.value_columns() * self.element.bytes() + self.row_padding()
    }

    /// Returns the number of bytes behind a row, which keep rows that are read together in different banks.
    pub fn row_padding(&self) -> usize {
        if self.element == ElementType::F32 { 32 } else { 16 }
    }

    /// Returns the bytes of the codes of some columns; 0 without codes.
    pub fn code_bytes(&self, columns: usize) -> usize {
        self.key_codes.map_or(0, |format| format.bytes(columns))
    }

    /// Returns the scales of a row of keys; 0 without codes.
    pub fn key_scales(&self) -> usize {
        self.key_codes.map_or(0, |format| format.scales(self.head_dim))
    }

    /// Returns the scales of a row of values; 0 without codes.
    pub fn value_scales(&self) -> usize {
        self.key_codes.map_or(0, |format| format.scales(self.value_dim))
    }

    /// Returns whether scores are natural logarithms, so that the statistics of a row are two numbers.
    pub fn has_natural_scores(&self) -> bool {
        self.element == ElementType::F32 || self.bias.is_some() || self.relative_bias
    }

    /// Returns whether more is done to a product than a multiplication by a scale above 0.
    fn modifies_scores(&self) -> bool {
        let has_modifier = self.softcap || self.alibi || self.relative_bias || self.bias.is_some();
        has_modifier || self.key_codes.is_some() || !self.positive_scale
    }

    /// Returns whether the derivative of a score with respect to its product depends on the score, as with a softcap,
    /// instead of being the scale.
    pub fn has_product_derivative(&self) -> bool {
        self.softcap
    }

    /// Returns the size in bytes of an element of the bias; without a bias, that of an element of the queries.
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
        let mut own = *self;
        let mut defines = vec![
            self.element.define(),
            define("HEAD_DIM", self.head_dim as i64),
            define("VALUE_DIM", self.value_dim as i64),
        ];
        defines.extend(own.flags().map(|Flag { name, is_set }| flag(name, *is_set)));
        defines.extend([
            flag("KEY_CODES", self.key_codes.is_some()),
            define("CODE_FORMAT", self.key_codes.map_or(0, code_format_number)),
            define("HAS_BIAS", bias),
            flag("MODIFIES_SCORES", self.modifies_scores()),
            flag("HAS_PRODUCT_DERIVATIVE", self.has_product_derivative()),
            flag("NATURAL_SCORES", self.has_natural_scores()),
            define("ELEMENT_BYTES", self.element.bytes() as i64),
            define("BIAS_BYTES", self.bias_bytes() as i64),
            define("HEAD_COLUMNS", self.head_columns() as i64),
            define("VALUE_COLUMNS", self.value_columns() as i64),
            define("HEAD_PITCH", self.head_pitch() as i64),
            define("VALUE_PITCH", self.value_pitch() as i64),
        ]);
        defines
    }
}
