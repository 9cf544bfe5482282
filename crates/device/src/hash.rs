//! A hash that is the same on every machine and in every version of the program.

/// Computes the 128-bit FNV-1a hash of bytes (Fowler, Noll and Vo). Texts are hashed with their lengths, so that no two
/// lists of texts are equal for the hash.
pub struct Fnv {
    state: u128,
}

impl Default for Fnv {
    fn default() -> Self {
        Self::new()
    }
}

impl Fnv {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

    /// Begins a hash.
    pub fn new() -> Self {
        Self { state: Self::OFFSET }
    }

    /// Adds bytes.
    pub fn add_bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.state = (self.state ^ u128::from(byte)).wrapping_mul(Self::PRIME);
        }
    }

    /// Adds a text and its length.
    pub fn add_text(&mut self, text: &str) {
        self.add_bytes(&(text.len() as u64).to_le_bytes());
        self.add_bytes(text.as_bytes());
    }

    /// Returns the hash of everything that was added.
    pub fn value(&self) -> u128 {
        self.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the test vectors of the reference implementation.
    #[test]
    fn fnv_hashes_match_published_ones() {
        let hash = |text: &str| {
            let mut hash = Fnv::new();
            hash.add_bytes(text.as_bytes());
            hash.value()
        };
        assert_eq!(hash(""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hash("a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(hash("foobar"), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }

    #[test]
    fn fnv_hash_of_texts_depends_on_where_they_are_split() {
        let hash = |texts: [&str; 2]| {
            let mut hash = Fnv::new();
            for text in texts {
                hash.add_text(text);
            }
            hash.value()
        };
        assert_ne!(hash(["ab", "c"]), hash(["a", "bc"]));
    }
}
