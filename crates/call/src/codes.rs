//! The codes in which a cache stores keys and values.

use std::fmt;

/// The numbers that share a scale in [`KvCodeFormat::Q4`], where rows have a multiple of them.
const GROUP: usize = 64;

/// The numbers that [`KvCodeFormat::Q4`] stores together.
const BLOCK: usize = 32;

/// The format of keys and values that are stored as codes, with f32 scales: a number is the number of its code times
/// the scale of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvCodeFormat {
    /// Bytes: code c is the number c - 128. A row has one scale.
    Q8,
    /// Floats of 8 bits with 4 bits of exponent and 3 of mantissa. The codes of NaN are not used. A row has one scale.
    E4M3,
    /// 4 bits: code c is the number c - 7.5. Byte i of each 16 bytes has the codes of numbers i and i + 16 of 32, the
    /// first in its lower bits. Each 64 numbers have a scale; a row whose width is no multiple of 64 has one scale.
    Q4,
}

impl KvCodeFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Q8, Self::E4M3, Self::Q4];

    /// Returns the name of the format: "q8", "e4m3" or "q4".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q8 => "q8",
            Self::E4M3 => "e4m3",
            Self::Q4 => "q4",
        }
    }

    /// Returns the format with a name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Returns the number that the width of a row has to be a multiple of.
    pub const fn block(self) -> usize {
        match self {
            Self::Q8 | Self::E4M3 => 1,
            Self::Q4 => BLOCK,
        }
    }

    /// Returns the bytes of the codes of a row of `width` numbers, a multiple of [`block`](Self::block).
    pub const fn bytes(self, width: usize) -> usize {
        match self {
            Self::Q8 | Self::E4M3 => width,
            Self::Q4 => width / 2,
        }
    }

    /// Returns the numbers in the codes of a row of `bytes`.
    pub const fn numbers(self, bytes: usize) -> usize {
        match self {
            Self::Q8 | Self::E4M3 => bytes,
            Self::Q4 => bytes.saturating_mul(2),
        }
    }

    /// Returns the numbers that share a scale in a row of `width` numbers.
    pub const fn group(self, width: usize) -> usize {
        match self {
            Self::Q4 if width.is_multiple_of(GROUP) => GROUP,
            Self::Q8 | Self::E4M3 | Self::Q4 => width,
        }
    }

    /// Returns the number of scales of a row of `width` numbers.
    pub const fn scales(self, width: usize) -> usize {
        // A row without numbers has a scale too.
        if width == 0 { 1 } else { width / self.group(width) }
    }
}

impl fmt::Display for KvCodeFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q8 => "8 bits",
            Self::E4M3 => "E4M3",
            Self::Q4 => "4 bits",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::KvCodeFormat;

    #[test]
    fn formats_are_found_by_their_names() {
        for format in KvCodeFormat::ALL {
            assert_eq!(KvCodeFormat::of_name(format.name()), Some(format));
        }
        assert_eq!(KvCodeFormat::of_name("f32"), None);
    }

    #[test]
    fn q4_rows_have_a_scale_for_each_64_numbers_or_one() {
        for (width, scales) in [(0, 1), (32, 1), (64, 1), (96, 1), (128, 2), (160, 1), (576, 9)] {
            assert_eq!(KvCodeFormat::Q4.scales(width), scales, "{width}");
            assert_eq!(KvCodeFormat::Q8.scales(width), 1, "{width}");
        }
        assert_eq!((KvCodeFormat::Q4.bytes(96), KvCodeFormat::Q4.numbers(48)), (48, 96));
        assert_eq!((KvCodeFormat::E4M3.bytes(96), KvCodeFormat::E4M3.numbers(96)), (96, 96));
    }
}
