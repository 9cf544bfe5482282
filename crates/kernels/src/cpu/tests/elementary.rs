//! Tests of arithmetic and elementary functions of one vector, lane by lane.

use super::{Sequence, erfc as exact_erfc, on_every_instruction_set};
use crate::cpu::{Kernel, SimdTask, Vector, erfc, sigmoid, tanh};
use crate::linear::Activation;

/// Numbers with which operations often go wrong.
const SPECIAL: [f32; 12] = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    3.25,
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    -f32::NAN,
];

/// Returns the distance between neighbouring f32 at a normal number.
fn ulp(exact: f64) -> f64 {
    2f64.powi(exact.abs().log2().floor() as i32 - 23)
}

/// Applies a function of a vector to any number of f32.
macro_rules! mapped {
    ($V:ty, $from:expr, |$x:ident| $value:expr) => {{
        let lanes: usize = <$V>::LANES;
        let from: &[f32] = $from;
        let mut to = from.to_vec();
        to.resize(from.len().next_multiple_of(lanes), 0.0);
        for chunk in to.chunks_exact_mut(lanes) {
            // SAFETY: the processor has the instruction set of K; a chunk is a vector.
            unsafe {
                let $x = <$V>::load(chunk.as_ptr());
                $value.store(chunk.as_mut_ptr());
            }
        }
        to.truncate(from.len());
        to
    }};
}

struct Exp2;

/// The largest error of 2^x in ulp. Four ulp just below a power of two are two above it.
const EXP2_ULP: f64 = 4.0;
/// The largest error of 2^x relative to the result. The polynomial errs by 9.1e-8, and the rest is rounding, twice a
/// step where there is no fused multiply-add.
const EXP2_PART: f64 = 3e-7;

impl SimdTask for Exp2 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // Every 4,099th f32 from -130 to 0 and from 0 to 127, and numbers about the middle between two integers.
        let bits = |x: f32| x.to_bits();
        let stepped = (bits(-0.0)..=bits(-130.0)).chain(0..=bits(127.0)).step_by(4_099).map(f32::from_bits);
        let middles = (-130..127).flat_map(|n| {
            let middle = n as f32 + 0.5;
            [n as f32, middle, middle.next_up(), middle.next_down()]
        });
        let numbers: Vec<f32> = stepped.chain(middles).collect();
        let powers = mapped!(K::Vector, &numbers, |x| x.exp2());
        let mut most_ulp = 0f64;
        let mut most_part = 0f64;
        for (&x, &got) in numbers.iter().zip(&powers) {
            if x < -126.0 {
                assert_eq!(got, 0.0, "2^{x}");
                continue;
            }
            let exact = f64::from(x).exp2();
            let error = (f64::from(got) - exact).abs() / ulp(exact);
            let part = (f64::from(got) - exact).abs() / exact;
            assert!(error <= EXP2_ULP && part <= EXP2_PART, "2^{x:?} is {exact:e}, got {got:e}: {error} ulp");
            most_ulp = error.max(most_ulp);
            most_part = part.max(most_part);
        }
        println!("{} powers err by at most {most_ulp:.2} ulp, {most_part:.2e} of the result", numbers.len());
        let special = [0.0, -0.0, -126.0, f32::NEG_INFINITY, f32::MIN, f32::NAN, 1.0, -1.0];
        let special_powers = mapped!(K::Vector, &special, |x| x.exp2());
        for ((x, got), expected) in
            special.into_iter().zip(special_powers).zip([1.0, 1.0, f32::MIN_POSITIVE, 0.0, 0.0, f32::NAN, 2.0, 0.5])
        {
            let near = (got - expected).abs() <= expected * f32::EPSILON;
            assert!(near || (expected.is_nan() && got.is_nan()), "2^{x} is {got}, expected {expected}");
        }
    }
}

#[test]
fn exp2_errs_by_at_most_four_ulp() {
    on_every_instruction_set(|| Exp2);
}

struct Tanh;

impl SimdTask for Tanh {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let mut sequence = Sequence(1);
        let numbers: Vec<f32> = (0..200_000).map(|n| sequence.fraction() * [0.01, 1.0, 12.0, 200.0][n % 4]).collect();
        let tangents = mapped!(K::Vector, &numbers, |x| tanh(x));
        for (&x, &got) in numbers.iter().zip(&tangents) {
            let exact = f64::from(x).tanh();
            let error = (f64::from(got) - exact).abs();
            assert!(error <= 4.0 * ulp(exact), "tanh({x:?}) is {exact:e}, got {got:e}");
        }
        let special = [0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN];
        assert_eq!(mapped!(K::Vector, &special, |x| tanh(x)), [0.0, 1.0, -1.0, 1.0, -1.0]);
        assert!(mapped!(K::Vector, &[f32::NAN], |x| tanh(x))[0].is_nan());
    }
}

#[test]
fn tanh_errs_by_at_most_four_ulp() {
    on_every_instruction_set(|| Tanh);
}

/// Returns every 40,009th f32 of both signs, subnormal ones included, and more of them where functions bend.
fn dense() -> impl Iterator<Item = f32> {
    let stepped = (0..f32::INFINITY.to_bits()).step_by(40_009).map(f32::from_bits);
    stepped.chain((0..60_000).map(|n| n as f32 / 4096.0)).flat_map(|x| [x, -x])
}

struct Activations;

impl SimdTask for Activations {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let numbers: Vec<f32> = dense().collect();
        let compare = |name: &str, results: &[f32], exact_at: &dyn Fn(f64) -> f64, bound: &dyn Fn(f64, f64) -> f64| {
            let mut worst_part = 0f64;
            let mut worst_at = 0f32;
            for (&x, &got) in numbers.iter().zip(results) {
                let exact = exact_at(f64::from(x));
                let part = (f64::from(got) - exact).abs() / bound(f64::from(x), exact);
                assert!(part <= 1.0, "{name}({x:e}) is {exact:e}, got {got:e}: {part} times its bound");
                if part > worst_part {
                    worst_part = part;
                    worst_at = x;
                }
            }
            println!("{name} errs by {worst_part:.2} of its bound, at {worst_at:e}");
        };
        let least = f64::from(f32::MIN_POSITIVE);
        compare("erfc", &mapped!(K::Vector, &numbers, |x| erfc(x)), &exact_erfc, &|x, exact| {
            if x < 4.0 { (1e-4 * exact).min(2.4e-7) } else { 1e-8 }
        });
        let exact_sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        compare("sigmoid", &mapped!(K::Vector, &numbers, |x| sigmoid(x)), &exact_sigmoid, &|x, exact| {
            (3e-7 + 1e-7 * x.abs()) * exact + 2.0 * least
        });
        compare(
            "gelu",
            &mapped!(K::Vector, &numbers, |x| Activation::Gelu.apply(x)),
            &|x| 0.5 * x * exact_erfc(-x / 2f64.sqrt()),
            &|x, _| 3e-7 * x.abs() + least,
        );
        compare(
            "gelu_tanh",
            &mapped!(K::Vector, &numbers, |x| Activation::GeluTanh.apply(x)),
            &|x| x * exact_sigmoid(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))),
            &|x, _| 5e-7 * x.abs() + least,
        );
        compare(
            "silu",
            &mapped!(K::Vector, &numbers, |x| Activation::Silu.apply(x)),
            &|x| x * exact_sigmoid(x),
            &|x, _| 3e-7 * x.abs() + least,
        );
        let relu = mapped!(K::Vector, &numbers, |x| Activation::Relu.apply(x));
        assert!(relu.iter().zip(&numbers).all(|(&y, &x)| y == x.max(0.0)));

        let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0];
        let text = |got: Vec<f32>| got.iter().map(f32::to_string).collect::<Vec<_>>().join(" ");
        assert_eq!(text(mapped!(K::Vector, &special, |x| erfc(x))), "0 2 NaN 1 1");
        assert_eq!(text(mapped!(K::Vector, &special, |x| sigmoid(x))), "1 0 NaN 0.5 0.5");
        for activation in [Activation::Gelu, Activation::GeluTanh, Activation::Silu] {
            assert_eq!(text(mapped!(K::Vector, &special, |x| activation.apply(x))), "inf NaN NaN 0 -0");
        }
        assert_eq!(text(mapped!(K::Vector, &special[..4], |x| Activation::Relu.apply(x))), "inf 0 NaN 0");
    }
}

#[test]
fn activations_and_erfc_err_within_documented_bounds() {
    on_every_instruction_set(|| Activations);
}

struct Nans;

impl SimdTask for Nans {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // Quiet and signalling NaNs of both signs, with any lowest bits that a rounded exponent may have.
        let of_sign = |sign: u32| [0x7fc0_0000, 0x7fa0_0000].map(|bits: u32| sign | bits);
        let bits = [0, 1 << 31].into_iter().flat_map(of_sign).flat_map(|bits| bits..bits + 512);
        let nans: Vec<f32> = bits.map(f32::from_bits).collect();
        let check = |name: &str, results: Vec<f32>| {
            for (nan, got) in nans.iter().zip(results) {
                assert!(got.is_nan(), "{name} of the NaN {:#010x} is {got:e}", nan.to_bits());
            }
        };
        check("exp2", mapped!(K::Vector, &nans, |x| x.exp2()));
        check("tanh", mapped!(K::Vector, &nans, |x| tanh(x)));
        check("sigmoid", mapped!(K::Vector, &nans, |x| sigmoid(x)));
        check("erfc", mapped!(K::Vector, &nans, |x| erfc(x)));
        for activation in [Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Relu] {
            check(&format!("{activation:?}"), mapped!(K::Vector, &nans, |x| activation.apply(x)));
        }
    }
}

#[test]
fn elementary_functions_of_nan_are_nan() {
    on_every_instruction_set(|| Nans);
}

struct Arithmetic;

impl SimdTask for Arithmetic {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        // Each number is combined with each other one, in every lane.
        for (turn, &b) in SPECIAL.iter().enumerate() {
            let numbers: Vec<f32> = (0..lanes * SPECIAL.len()).map(|n| SPECIAL[(n + turn) % SPECIAL.len()]).collect();
            // SAFETY: the processor has the instruction set of K.
            let other = unsafe { K::Vector::splat(b) };
            // SAFETY: as above.
            let one = unsafe { K::Vector::splat(1.0) };
            let check = |name: &str, results: Vec<f32>, expected_of: &dyn Fn(f32) -> f32| {
                for (&a, &got) in numbers.iter().zip(&results) {
                    let expected = expected_of(a);
                    let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
                    assert!(same, "{name} of {a:e} and {b:e} is {got:e}, expected {expected:e}");
                }
            };
            check("sum", mapped!(K::Vector, &numbers, |x| x.add(other)), &|a| a + b);
            check("difference", mapped!(K::Vector, &numbers, |x| x.sub(other)), &|a| a - b);
            check("product", mapped!(K::Vector, &numbers, |x| x.mul(other)), &|a| a * b);
            check("quotient", mapped!(K::Vector, &numbers, |x| x.div(other)), &|a| a / b);
            check("magnitude", mapped!(K::Vector, &numbers, |x| x.abs()), &|a| a.abs());
            check("larger", mapped!(K::Vector, &numbers, |x| x.max(other)), &|a| if a > b { a } else { b });
            check("larger, turned", mapped!(K::Vector, &numbers, |x| other.max(x)), &|a| if b > a { b } else { a });
            check("smaller", mapped!(K::Vector, &numbers, |x| K::Vector::select(x.less_than(other), x, other)), &|a| {
                if a < b { a } else { b }
            });
            check("mul_add", mapped!(K::Vector, &numbers, |x| x.mul_add(other, one)), &|a| a * b + 1.0);
        }
    }
}

#[test]
fn arithmetic_with_infinities_and_nan_matches_f32() {
    on_every_instruction_set(|| Arithmetic);
}

struct SumsAndTransposes;

impl SimdTask for SumsAndTransposes {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        let mut sequence = Sequence(2);
        let numbers: Vec<f32> = (0..lanes).map(|_| sequence.whole(1000)).collect();
        // Two different strides, and numbers outside of the square that no transpose may touch.
        let from_stride = lanes + 3;
        let to_stride = lanes + 5;
        let from: Vec<f32> = (0..lanes * from_stride).map(|n| n as f32).collect();
        let mut to = vec![-1.0; lanes * to_stride];
        // SAFETY: the processor has the instruction set of K; both are squares of vectors.
        unsafe {
            assert_eq!(K::Vector::load(numbers.as_ptr()).sum(), numbers.iter().sum::<f32>());
            let vectors = std::array::from_fn(|n| K::Vector::load(numbers.as_ptr()).mul(K::Vector::splat(n as f32)));
            let mut sums = vec![0f32; lanes];
            K::Vector::sum_each(&vectors).store(sums.as_mut_ptr());
            let expected = |n: usize| numbers.iter().map(|x| x * n as f32).sum::<f32>();
            assert!(sums.iter().enumerate().all(|(n, &sum)| sum == expected(n)), "{sums:?}");
            K::Vector::transpose(from.as_ptr(), from_stride, to.as_mut_ptr(), to_stride);
            K::Vector::prefetch(std::ptr::null());
            K::Vector::prefetch(from.as_ptr().wrapping_add(1 << 40).cast());
        }
        for (n, &got) in to.iter().enumerate() {
            let column = n / to_stride;
            let row = n % to_stride;
            let expected = if row < lanes { (row * from_stride + column) as f32 } else { -1.0 };
            assert_eq!(got, expected, "row {row}, column {column}");
        }
    }
}

#[test]
fn vector_sums_and_transposes_match_plain_loops() {
    on_every_instruction_set(|| SumsAndTransposes);
}
