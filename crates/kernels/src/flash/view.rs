//! Tensors of a call as slices, whose type of numbers is known when the program runs.

use crate::error::Error;
use crate::number::{Numbers, Stored, Strided};

/// A strided view of the numbers of a tensor (B, H, T, D), or of one that is broadcast to it: a dimension whose stride
/// is 0 repeats one entry. The rows of queries, keys and values are contiguous.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The numbers, the first of which is entry (0, 0, 0, 0).
    pub numbers: Numbers<'a>,
    /// The distance between neighbouring entries along each dimension, in numbers.
    pub strides: [usize; 4],
}

impl<'a> View<'a> {
    /// Returns a view of a list: of a number for each head, or of bits.
    pub fn list<S: Stored>(numbers: &'a [S]) -> Self {
        Self { numbers: S::numbers(numbers), strides: [0, 0, 0, 1] }
    }

    /// Returns the numbers of a list of some type.
    pub(super) fn typed_list<S: Stored>(&self, name: &str) -> Result<&'a [S], Error> {
        self.numbers.typed(name)
    }

    /// Returns rows of `width` contiguous numbers of some type.
    pub(super) fn rows<S: Stored>(&self, name: &str, width: usize) -> Result<Strided<'a, S, 3>, Error> {
        let [sequence, head, position, column] = self.strides;
        if width > 1 && column != 1 {
            return Err(Error::Shape(format!("expected contiguous rows of {name}, found numbers {column} apart")));
        }
        Ok(Strided { data: self.numbers.typed(name)?, strides: [sequence, head, position] })
    }

    /// Returns rows of contiguous numbers, one for each head.
    pub(super) fn head_rows<S: Stored>(&self, name: &str) -> Result<Strided<'a, S, 2>, Error> {
        let [sequence, head, _, _] = self.strides;
        Ok(Strided { data: self.numbers.typed(name)?, strides: [sequence, head] })
    }

    /// Returns a table of pages: sequences along the first dimension, key heads along the second, pages along the last.
    pub(super) fn page_table(&self, name: &str) -> Result<Strided<'a, u32, 3>, Error> {
        let [sequence, head, _, page] = self.strides;
        match self.numbers {
            Numbers::U32(data) => Ok(Strided { data, strides: [sequence, head, page] }),
            other => Err(Error::Shape(format!("expected {name} in u32, found numbers in {}", other.type_name()))),
        }
    }

    /// Returns a number of some type for each score.
    pub(super) fn entries<S: Stored>(&self, name: &str) -> Result<Strided<'a, S, 4>, Error> {
        Ok(Strided { data: self.numbers.typed(name)?, strides: self.strides })
    }
}

/// Rows of contiguous numbers.
impl<'a, S: Stored> From<Strided<'a, S, 3>> for View<'a> {
    fn from(rows: Strided<'a, S, 3>) -> Self {
        let [sequence, head, position] = rows.strides;
        Self { numbers: S::numbers(rows.data), strides: [sequence, head, position, 1] }
    }
}

/// The pages of each sequence.
impl<'a> From<Strided<'a, u32, 2>> for View<'a> {
    fn from(table: Strided<'a, u32, 2>) -> Self {
        let [sequence, page] = table.strides;
        Self { numbers: Numbers::U32(table.data), strides: [sequence, 0, 0, page] }
    }
}

/// Rows of contiguous numbers, one for each head.
impl<'a, S: Stored> From<Strided<'a, S, 2>> for View<'a> {
    fn from(rows: Strided<'a, S, 2>) -> Self {
        let [sequence, head] = rows.strides;
        Self { numbers: S::numbers(rows.data), strides: [sequence, head, 0, 1] }
    }
}

/// An entry for each score.
impl<'a, S: Stored> From<Strided<'a, S, 4>> for View<'a> {
    fn from(entries: Strided<'a, S, 4>) -> Self {
        Self { numbers: S::numbers(entries.data), strides: entries.strides }
    }
}
