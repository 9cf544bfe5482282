//! The places of parts of memory.

use crate::program::Define;

/// Parts of memory, one after the other: the shared memory of a block in bytes, or a tile in numbers. The place of each
/// is a macro of the source, counted from the beginning.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryLayout {
    places: Vec<Define>,
    size: usize,
}

impl MemoryLayout {
    /// Adds a part after the others. The macro `place` is its place.
    pub fn add(&mut self, place: &'static str, size: usize) {
        self.places.push(Define { name: place, value: self.size as i64 });
        self.size += size;
    }

    /// Returns the size of all parts.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the macros of the places, and the macro `all` with the size of all parts.
    pub fn defines(mut self, all: &'static str) -> Vec<Define> {
        self.places.push(Define { name: all, value: self.size as i64 });
        self.places
    }
}
