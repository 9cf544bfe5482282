//! The shared memory of a block.

use crate::program::Define;

/// The parts of the shared memory of a block, one after the other. The place of each is a macro of the source: the
/// bytes from the beginning.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedLayout {
    places: Vec<Define>,
    bytes: usize,
}

impl SharedLayout {
    /// Adds a part after the others. The macro `place` is its place.
    pub fn add(&mut self, place: &'static str, bytes: usize) {
        self.places.push(Define { name: place, value: self.bytes as i64 });
        self.bytes += bytes;
    }

    /// Returns the bytes of all parts.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the macros of the places, and the macro `all` with the bytes of all parts.
    pub fn defines(mut self, all: &'static str) -> Vec<Define> {
        self.places.push(Define { name: all, value: self.bytes as i64 });
        self.places
    }
}
