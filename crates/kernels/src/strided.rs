//! Views of what a caller has in memory.

use crate::error::Error;

/// A strided view of a slice. A dimension whose stride is 0 is one entry, repeated.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a, T, const N: usize> {
    /// The elements, the first of which is entry (0, .., 0).
    pub data: &'a [T],
    /// The elements from one entry to the next along each dimension.
    pub strides: [usize; N],
}

impl<T, const N: usize> Strided<'_, T, N> {
    /// That the slice holds every entry within `dims`, each of `width` elements.
    pub(crate) fn check(&self, what: &str, dims: [usize; N], width: usize) -> Result<(), Error> {
        let last = dims
            .iter()
            .zip(&self.strides)
            .try_fold(0usize, |last, (&dim, &stride)| last.checked_add(dim.saturating_sub(1).checked_mul(stride)?));
        let end = last.and_then(|last| last.checked_add(width));
        // Entries of nothing may stand anywhere.
        if width == 0 || dims.contains(&0) || end.is_some_and(|end| end <= self.data.len()) {
            return Ok(());
        }
        let (strides, found) = (self.strides, self.data.len());
        Err(Error::Shape(format!(
            "{what} of {dims:?} entries of {width} elements with strides {strides:?} ends past the {found} elements of its slice"
        )))
    }

    /// The elements from an entry on, which lies within the dimensions that were checked.
    #[inline(always)]
    pub(crate) fn at(&self, index: [usize; N]) -> *const T {
        let offset: usize = (0..N).map(|n| index[n] * self.strides[n]).sum();
        self.data.as_ptr().wrapping_add(offset)
    }
}
