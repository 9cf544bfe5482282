//! Tests of conversions of f32 from and to bf16 and f16, against the `half` crate, and from u8.

use half::{bf16, f16};

use super::on_every_instruction_set;
use crate::cpu::{Kernel, SimdTask, Vector};
use crate::number::{Number, load_first, store_first};

/// A number of 16 bits, with the `half` crate's conversions.
trait Half: Number + std::fmt::Debug {
    fn of(bits: u16) -> Self;
    fn bits(self) -> u16;
    fn wide(self) -> f32;
}

macro_rules! half {
    ($type:ty) => {
        impl Half for $type {
            fn of(bits: u16) -> Self {
                Self::from_bits(bits)
            }
            fn bits(self) -> u16 {
                self.to_bits()
            }
            fn wide(self) -> f32 {
                self.to_f32()
            }
        }
    };
}

half!(bf16);
half!(f16);

/// Returns every number of the type, the middle between it and the next one, which is a tie, and the f32 on either side
/// of the tie.
fn around<E: Half>() -> impl Iterator<Item = f32> {
    (0..=u16::MAX).flat_map(|bits| {
        let this = E::of(bits).wide();
        let next = E::of(bits.wrapping_add(1)).wide();
        let tie = ((f64::from(this) + f64::from(next)) / 2.0) as f32;
        [this, tie, tie.next_up(), tie.next_down()]
    })
}

struct Load<E>(std::marker::PhantomData<E>);

impl<E: Half> SimdTask for Load<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        let all: Vec<E> = (0..=u16::MAX).map(E::of).collect();
        let mut loaded = vec![0f32; lanes];
        for chunk in all.chunks_exact(lanes) {
            // SAFETY: the processor has the instruction set of K; a chunk is a vector.
            unsafe { E::load::<K::Vector>(chunk.as_ptr()).store(loaded.as_mut_ptr()) };
            for (got, element) in loaded.iter().zip(chunk) {
                let expected = element.wide();
                assert!(
                    if expected.is_nan() { got.is_nan() } else { got.to_bits() == expected.to_bits() },
                    "{element:?} became {got:e}, expected {expected:e}"
                );
            }
        }
    }
}

#[test]
fn load_of_bf16_and_f16_is_exact() {
    on_every_instruction_set(|| Load::<bf16>(std::marker::PhantomData));
    on_every_instruction_set(|| Load::<f16>(std::marker::PhantomData));
}

struct LoadU8;

impl SimdTask for LoadU8 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let all: Vec<u8> = (0..=u8::MAX).collect();
        let mut got = vec![0f32; K::Vector::LANES];
        for chunk in all.chunks_exact(K::Vector::LANES) {
            // SAFETY: the processor has the instruction set of K; a chunk is a vector.
            unsafe { K::Vector::load_u8(chunk.as_ptr()).store(got.as_mut_ptr()) };
            assert!(got.iter().zip(chunk).all(|(&got, &byte)| got == f32::from(byte)), "{chunk:?} became {got:?}");
        }
    }
}

#[test]
fn load_of_u8_is_exact() {
    on_every_instruction_set(|| LoadU8);
}

struct LoadNibbles;

impl SimdTask for LoadNibbles {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let all: Vec<u8> = (0..=u8::MAX).collect();
        let mut got = vec![0f32; K::Vector::LANES];
        for chunk in all.chunks_exact(K::Vector::LANES) {
            for shift in [0, 4] {
                // SAFETY: the processor has the instruction set of K; a chunk is a vector.
                unsafe { K::Vector::load_nibbles(chunk.as_ptr(), shift).store(got.as_mut_ptr()) };
                let expected = chunk.iter().map(|&byte| f32::from(byte >> shift & 15) - 7.5);
                assert!(got.iter().copied().eq(expected), "{chunk:?} from bit {shift} on became {got:?}");
            }
        }
    }
}

#[test]
fn load_of_codes_of_4_bits_is_exact() {
    on_every_instruction_set(|| LoadNibbles);
}

struct Store<E>(std::marker::PhantomData<E>);

impl<E: Half> SimdTask for Store<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        let all: Vec<f32> = around::<E>().collect();
        let mut stored = vec![E::default(); lanes];
        for chunk in all.chunks_exact(lanes) {
            // SAFETY: the processor has the instruction set of K; a chunk is a vector.
            unsafe { E::store(K::Vector::load(chunk.as_ptr()), stored.as_mut_ptr()) };
            for (&got, &number) in stored.iter().zip(chunk) {
                let expected = E::from_f32(number);
                assert!(
                    if number.is_nan() { got.wide().is_nan() } else { got.bits() == expected.bits() },
                    "{number:e} became {got:?}, expected {expected:?}"
                );
            }
        }
    }
}

#[test]
fn store_of_bf16_and_f16_rounds_to_nearest_even() {
    on_every_instruction_set(|| Store::<bf16>(std::marker::PhantomData));
    on_every_instruction_set(|| Store::<f16>(std::marker::PhantomData));
}

struct Pairs;

impl SimdTask for Pairs {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        if K::ELEMENTS != 2 {
            return;
        }
        let lanes = K::Vector::LANES;
        // Dot products may treat subnormal numbers as zero.
        let all: Vec<f32> = around::<bf16>().filter(|x| !x.is_subnormal()).collect();
        let mut words = vec![0f32; lanes];
        for (low, high) in all.chunks_exact(lanes).zip(all.chunks_exact(lanes).rev()) {
            // SAFETY: the processor has the instruction set of K; chunks and words are vectors.
            unsafe {
                let low_vector = K::Vector::load(low.as_ptr());
                low_vector.store_pairs(K::Vector::load(high.as_ptr()), words.as_mut_ptr());
            }
            for (lane, word) in words.iter().enumerate() {
                let bits = word.to_bits();
                for (number, half) in [(low[lane], bits as u16), (high[lane], (bits >> 16) as u16)] {
                    let got = bf16::from_bits(half);
                    let expected = bf16::from_f32(number);
                    assert!(
                        if number.is_nan() { got.is_nan() } else { got.to_bits() == expected.to_bits() },
                        "{number:e} became {got:e}, expected {expected:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn store_of_pairs_rounds_to_nearest_bf16() {
    on_every_instruction_set(|| Pairs);
}

struct First<E>(std::marker::PhantomData<E>);

impl<E: Half> SimdTask for First<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        let from: Vec<E> = (0..lanes).map(|lane| E::from_f32(lane as f32 + 1.0)).collect();
        for n in 0..=lanes {
            let mut loaded = vec![f32::NAN; lanes];
            let mut stored = vec![E::from_f32(-1.0); lanes];
            // SAFETY: the processor has the instruction set of K; `n` elements are read and written.
            unsafe {
                // A separate vector, so that a tool finds a read past its end.
                let vector: K::Vector = load_first(from[..n].to_vec().as_ptr(), n);
                vector.store(loaded.as_mut_ptr());
                store_first(vector, stored.as_mut_ptr(), n);
            }
            for lane in 0..lanes {
                let expected = if lane < n { lane as f32 + 1.0 } else { 0.0 };
                assert_eq!(loaded[lane], expected, "lane {lane} of the first {n}");
                assert_eq!(stored[lane].wide(), if lane < n { expected } else { -1.0 }, "lane {lane} of the first {n}");
            }
        }
    }
}

#[test]
fn load_and_store_of_first_lanes_touch_no_others() {
    on_every_instruction_set(|| First::<bf16>(std::marker::PhantomData));
    on_every_instruction_set(|| First::<f16>(std::marker::PhantomData));
}
