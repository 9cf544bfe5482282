//! The decisions, a row for each trap, and the adapter around the emulated operation.

use candle_core::{DType, Device, Result, Tensor};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::super::band::Window;
use super::super::drawn::{Constraint, Drawn, Layout, close, drawn};
use super::super::facts::{Copies, Facts, Place, Span};
use super::super::plan::Wanted;
use super::super::validate::{Call, Dims};
use super::super::varlen::one_by_one;
use super::emulated::Emulated;
use super::{Plan, attend, decide};
use crate::mask::Outline;
use crate::{AttentionMask, OutputOrder, PackedSequences, SdpaOptions};

/// A plain call in bf16: B 2, H 4 and 2, T_q 5, T_kv 9, D 64, contiguous, without a mask.
fn facts() -> Facts {
    let dims = Dims { b: 2, h: 4, t_q: 5, t_kv: 9, d: 64, d_v: 64 };
    let outline = Outline { queries: 0..5, keys: 0..9, first: None, last: None, position: 4 };
    Facts {
        dtype: DType::BF16,
        dims,
        h_kv: 2,
        scale: 0.125,
        softcap: None,
        alibi: false,
        sinks: false,
        keep: false,
        bias: false,
        lse: false,
        places: [[2, 4, 5, 64], [2, 2, 9, 64], [2, 2, 9, 64]].map(Place::contiguous),
        packed: false,
        spans: Ok(vec![Span { t_q: 5, t_kv: 9, outline }; 2]),
    }
}

fn taken(keys: std::ops::Range<usize>) -> Plan {
    Plan { keys, lengths: None, window: Window::default(), copies: Copies::default() }
}

fn changed(change: impl FnOnce(&mut Facts)) -> Facts {
    let mut facts = facts();
    change(&mut facts);
    facts
}

/// The facts of a mask over B 2, T_q and T_kv.
fn masked(mask: &AttentionMask, t_q: usize, t_kv: usize) -> Facts {
    changed(|facts| {
        (facts.dims.t_q, facts.dims.t_kv) = (t_q, t_kv);
        facts.places = [[2, 4, t_q, 64], [2, 2, t_kv, 64], [2, 2, t_kv, 64]].map(Place::contiguous);
        let bound = mask.resolve(2, t_q, t_kv).expect("the mask fits");
        let span = |b| Ok(Span { t_q, t_kv, outline: bound.outline(b)? });
        facts.spans = (0..2).map(span).collect::<std::result::Result<_, &str>>().map_err(String::from);
    })
}

#[test]
fn what_is_computed_wrongly_is_refused() {
    let with_mask = |mask: AttentionMask| masked(&mask, 5, 9);
    let alibi = |mut facts: Facts| {
        facts.alibi = true;
        facts
    };
    // One query that stands before keys that it sees.
    let mut before = alibi(masked(&AttentionMask::none(), 1, 9));
    before.spans.iter_mut().flatten().for_each(|span| span.outline.position = 4);
    let rows = [
        (changed(|f| f.dtype = DType::F32), "candle-flash-attn computes in F16 and BF16, and the inputs are F32"),
        (changed(|f| f.lse = true), "candle-flash-attn has no log-sum-exp"),
        (changed(|f| f.sinks = true), "candle-flash-attn has no sinks"),
        (changed(|f| f.keep = true), "candle-flash-attn has no keep tensor"),
        (changed(|f| f.bias = true), "candle-flash-attn has no bias tensor"),
        // The maximum is taken before scaling, so that a negative scale makes infinities.
        (changed(|f| f.scale = -0.5), "candle-flash-attn takes finite scales above zero, and this one is -0.5"),
        (changed(|f| f.scale = 0.0), "candle-flash-attn takes finite scales above zero, and this one is 0.0"),
        (changed(|f| f.scale = 1e-40), "candle-flash-attn takes finite scales above zero, and this one is 1e-40"),
        // A softcap of which the scale is nothing in f32 is taken for none.
        (
            changed(|f| (f.scale, f.softcap) = (1e-20, Some(1e30))),
            "candle-flash-attn drops a softcap of 1e30 at a scale of 1e-20",
        ),
        (changed(|f| f.dims.d_v = 32), "candle-flash-attn takes values as wide as keys, and D_v is 32 where D is 64"),
        (
            changed(|f| (f.dims.d, f.dims.d_v) = (60, 60)),
            "candle-flash-attn takes D in multiples of 8 up to 512, and D is 60",
        ),
        (
            changed(|f| (f.dims.d, f.dims.d_v) = (520, 520)),
            "candle-flash-attn takes D in multiples of 8 up to 512, and D is 520",
        ),
        (changed(|f| f.dims.b = 0), "there is nothing to attend to"),
        (changed(|f| f.dims.t_kv = 0), "there is nothing to attend to"),
        // A launch that fails is not noticed: the result is whatever lay in memory.
        (changed(|f| f.dims.b = 65_536), "CUDA launches 65535 sequences and heads at most, and there are 65536 and 4"),
        (changed(|f| f.dims.h = 65_536), "CUDA launches 65535 sequences and heads at most, and there are 2 and 65536"),
        (changed(|f| f.dims.t_kv = 1 << 26), "candle-flash-attn counts in 32 bits, and the call is larger"),
        (changed(|f| f.dims.t_q = 1 << 31), "candle-flash-attn counts in 32 bits, and the call is larger"),
        (
            changed(|f| (f.dims.t_q, f.dims.h) = (1 << 20, 64)),
            "candle-flash-attn counts in 32 bits, and the call is larger",
        ),
        (
            with_mask(AttentionMask::causal().with_prefix(vec![2, 3])),
            "candle-flash-attn takes bands only, and the mask has a prefix",
        ),
        (
            with_mask(AttentionMask::none().with_valid_lens(vec![vec![1, 2, 3, 4, 5]; 2])),
            "candle-flash-attn takes bands only, and the mask has a length for each query",
        ),
        (with_mask(AttentionMask::none().with_valid_lens(vec![0, 0])), "no query sees a key"),
        // Right padding moves the key from which the kernel counts, in each sequence to another place.
        (
            masked(&AttentionMask::causal().with_valid_lens(vec![3, 5]), 5, 5),
            "candle-flash-attn cannot express the mask: its band lies at another distance from the last key in each sequence",
        ),
        (
            with_mask(AttentionMask::none().with_window(2).with_valid_lens(vec![9, 5])),
            "candle-flash-attn cannot express the mask: its window ends before the keys from which the kernel counts",
        ),
        // A window that is larger than T_kv is dropped, and one side alone hides what lies T_kv after the query.
        (
            masked(&AttentionMask::none().with_band(99, 4), 9, 3),
            "candle-flash-attn cannot express the mask: its window is dropped or hides too much with 9 queries to 3 keys",
        ),
        (
            masked(&AttentionMask::none().with_window(2), 9, 3),
            "candle-flash-attn cannot express the mask: its window is dropped or hides too much with 9 queries to 3 keys",
        ),
        // ALiBi counts from the end of the keys.
        (before, "ALiBi counts from the last key in candle-flash-attn, and from elsewhere in the call"),
        (
            alibi(with_mask(AttentionMask::none().with_valid_lens(vec![7, 7]))),
            "ALiBi counts from the last key in candle-flash-attn, and from elsewhere in the call",
        ),
    ];
    for (facts, reason) in rows {
        assert_eq!(decide(&facts), Err(reason.to_string()));
    }
}

#[test]
fn what_it_can_express_is_taken() {
    let window = |keys, left, right| Plan { window: Window { left, right }, ..taken(keys) };
    let causal = window(0..9, None, Some(0));
    for (mask, expected) in [
        (AttentionMask::none(), taken(0..9)),
        (AttentionMask::causal(), causal.clone()),
        (AttentionMask::causal().with_window(3), window(2..9, Some(2), Some(0))),
        (AttentionMask::none().with_window(3), window(2..9, Some(2), None)),
        (AttentionMask::none().with_band(1, 2), window(3..9, Some(1), Some(2))),
        // Bounds that hide nothing are none.
        (AttentionMask::none().with_band(8, 4), taken(0..9)),
        (AttentionMask::causal_with_offset(8), taken(0..9)),
        // An offset beyond the end is a band, and one before it leaves out the keys that nothing sees.
        (AttentionMask::causal_with_offset(6), window(0..9, None, Some(2))),
        (AttentionMask::causal_upper_left(), Plan { keys: 0..5, ..causal.clone() }),
        // All lengths alike, from a cache that is longer, say.
        (AttentionMask::none().with_valid_lens(vec![7, 7]), taken(0..7)),
        (AttentionMask::none().with_starts(vec![2, 2]).with_valid_lens(vec![7, 7]), taken(2..7)),
        (AttentionMask::causal_with_offset(2).with_valid_lens(vec![7, 7]), Plan { keys: 0..7, ..causal }),
    ] {
        assert_eq!(decide(&masked(&mask, 5, 9)), Ok(expected), "{mask:?}");
    }
}

#[test]
fn sequences_of_different_lengths_are_cumulative_lengths() {
    let lens = |mask: &AttentionMask, t_q, t_kv| {
        let plan = decide(&masked(mask, t_q, t_kv)).expect("a band");
        let lengths = plan.lengths.expect("they differ");
        (plan.keys, plan.window, lengths.cu_seqlens_q, lengths.cu_seqlens_kv, (lengths.max_q, lengths.max_kv))
    };
    let (plain, causal) = (Window::default(), Window { left: None, right: Some(0) });
    // Keys that nothing sees belong to a sequence without queries.
    let right_padded = AttentionMask::none().with_valid_lens(vec![3, 7]);
    assert_eq!(lens(&right_padded, 5, 9), (0..7, plain, vec![0, 5, 5, 10], vec![0, 3, 7, 14], (5, 7)));
    let left_padded = AttentionMask::causal().with_starts(vec![4, 1]);
    assert_eq!(lens(&left_padded, 9, 9), (1..9, causal, vec![0, 0, 9, 18], vec![0, 3, 8, 16], (9, 8)));
    // One query against caches that are filled differently; what is seen of one of them is nothing.
    let filled = AttentionMask::none().with_valid_lens(vec![0, 6]);
    assert_eq!(lens(&filled, 1, 9), (0..6, plain, vec![0, 1, 1, 2], vec![0, 0, 6, 12], (1, 6)));
    // A prompt with padding on the right, beside one with padding on the left: its queries see nothing.
    let of_tokens = AttentionMask::none().with_valid_lens(vec![vec![4, 4, 0, 0, 0], vec![0, 3, 3, 3, 3]]);
    assert_eq!(lens(&of_tokens, 5, 9), (0..4, plain, vec![0, 2, 5, 6, 10], vec![0, 4, 4, 4, 7], (4, 4)));
}

#[test]
fn only_what_lies_at_odd_addresses_is_copied() {
    let place = |strides, offset| Place { strides, offset, ..facts().places[1] };
    for (place, copied) in [
        // A transposed projection, a view into a cache, a part of a packed projection, a head for all.
        (place([1152, 64, 128, 1], 0), false),
        (place([8192, 4096, 64, 1], 512), false),
        (place([3456, 64, 384, 1], 128), false),
        (place([576, 0, 64, 1], 0), false),
        // 16 bytes are loaded at a time.
        (place([1152, 576, 64, 1], 4), true),
        (place([1188, 594, 66, 1], 0), true),
        (place([1152, 576, 1, 9], 0), true),
        // Strides are cut to 32 bits.
        (place([1 << 32, 576, 64, 1], 0), true),
    ] {
        let copies = decide(&changed(|facts| facts.places[1] = place)).map(|plan| plan.copies.0);
        assert_eq!(copies, Ok([false, copied, false]), "{place:?}");
    }
    // Rows of different sequences have to follow one another where lengths differ.
    let lens = masked(&AttentionMask::none().with_valid_lens(vec![3, 9]), 5, 9);
    let plan = decide(&lens).expect("lengths");
    assert_eq!(plan.copies, Copies([true; 3]));
    assert_eq!(plan.to_string(), "candle-flash-attn on sequences of different lengths, with a copy of q, k, v");
    let mut sequence_first = lens;
    sequence_first.places[1].strides = [1152, 64, 128, 1];
    assert_eq!(decide(&sequence_first).map(|plan| plan.copies.0), Ok([true, false, true]));
}

const HALVES: &[DType] = &[DType::BF16, DType::F16];

fn run<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value) -> std::result::Result<(), String>) {
    let config = Config { cases, rng_seed: RngSeed::Fixed(6), failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&strategy, |value| test(value).map_err(TestCaseError::fail));
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Whatever is taken has the numbers of the reference path, from an operation with all the traps of the real one.
#[test]
fn what_is_taken_has_the_reference_paths_numbers() {
    let taken = std::cell::Cell::new((0, 0, 0));
    run(800, drawn(12, HALVES, &[8, 16, 40]), |drawn| {
        let arguments = drawn.arguments().map_err(|error| error.to_string())?;
        for order in [OutputOrder::Bhtd, OutputOrder::Bthd] {
            let arguments = arguments.clone().in_order(order);
            let check = || -> Result<Option<Tensor>> {
                let call = arguments.call()?;
                let Ok(plan) = decide(&Facts::new(&call, Wanted::Context)?) else { return Ok(None) };
                let (dense, lengths, copies) = taken.get();
                let lens = u32::from(plan.lengths.is_some());
                taken.set((dense + 1 - lens, lengths + lens, copies + u32::from(plan.copies != Copies::default())));
                attend(&call, &plan, &Emulated).map(Some)
            };
            if let Some(context) = check().map_err(|error| error.to_string())? {
                arguments.check(&context)?;
            }
        }
        Ok(())
    });
    let (dense, lengths, copies) = taken.get();
    assert!(dense > 400 && lengths > 80 && copies > 250, "{:?}", taken.get());
}

/// The emulated operation is wrong where the real one is: what the decision refuses for numbers would be wrong.
#[test]
fn the_traps_are_real() -> Result<()> {
    let base = Drawn {
        b: 1,
        h_kv: 1,
        group: 2,
        t_q: 5,
        t_kv: 5,
        d: 8,
        d_v: 8,
        layouts: [Layout::Contiguous; 3],
        masks: vec![],
        scale: None,
        softcap: None,
        alibi: false,
        sinks: false,
        placed: None,
        dtype: DType::F16,
    };
    let plan = Plan { window: Window::default(), ..taken(0..5) };
    let wrong = |drawn: &Drawn, plan: &Plan| -> Result<bool> {
        let arguments = drawn.arguments()?;
        Ok(attend(&arguments.call()?, plan, &Emulated).map_or(true, |context| arguments.check(&context).is_err()))
    };
    assert!(!wrong(&base, &plan)?);
    for drawn in [
        Drawn { scale: Some(-40.0), ..base.clone() },
        Drawn { softcap: Some(0.5), scale: Some(-1.0), ..base.clone() },
        Drawn { layouts: [Layout::OddRows, Layout::Contiguous, Layout::Contiguous], ..base.clone() },
        Drawn { sinks: true, ..base.clone() },
        Drawn { masks: vec![Constraint::Keep(3)], ..base.clone() },
    ] {
        assert!(wrong(&drawn, &plan)?, "{drawn:?}");
    }
    // 9 queries to 3 keys: the window is dropped.
    let drawn = Drawn { t_q: 9, t_kv: 3, masks: vec![Constraint::Band(99, 4)], ..base };
    assert!(wrong(&drawn, &Plan { window: Window { left: None, right: Some(4) }, ..taken(0..3) })?);
    Ok(())
}

/// Packed sequences with masks of their own, against each by itself.
#[test]
fn packed_sequences_are_taken_as_they_lie() {
    let lens = || proptest::collection::vec((0..6usize, 0..6usize), 1..5);
    let masks = || {
        let masks = [
            AttentionMask::none(),
            AttentionMask::causal(),
            AttentionMask::causal_upper_left(),
            AttentionMask::causal().with_window(2),
            AttentionMask::none().with_band(1, 1),
            AttentionMask::causal_with_offset(1),
        ];
        proptest::sample::select(masks.to_vec())
    };
    let counted = std::cell::Cell::new(0);
    run(600, (lens(), masks(), any::<bool>(), any::<bool>()), |(lens, mask, square, alibi)| {
        let (queries, keys): (Vec<_>, Vec<_>) = lens.iter().map(|&(q, k)| (if square { k } else { q }, k)).unzip();
        let check = || -> Result<Option<(Tensor, Tensor)>> {
            let sequences = PackedSequences::from_lens(&queries, &keys)?;
            let draw = |t: usize, h: usize| -> Result<Tensor> {
                let packed = Tensor::randn(0f32, 1., (t, h, 8), &Device::Cpu)?.to_dtype(DType::F16)?;
                packed.unsqueeze(0)?.transpose(1, 2)
            };
            let (q, kv) = (draw(queries.iter().sum(), 4)?, draw(keys.iter().sum(), 2)?);
            let mut options = SdpaOptions::default().with_output_order(OutputOrder::Bthd);
            if alibi {
                options = options.with_alibi_slopes(&Tensor::new(&[0.1f32, 0.5, 1.0, 0.0], &Device::Cpu)?);
            }
            let call = Call::packed("test", (&q, &kv, &kv), &mask, &options)?;
            let Ok(plan) = decide(&Facts::packed(&call, &sequences, Wanted::Context)?) else { return Ok(None) };
            assert_eq!(plan.copies, Copies::default());
            counted.set(counted.get() + 1);
            let context = attend(&call, &plan, &Emulated)?.transpose(1, 2)?.squeeze(0)?;
            Ok(Some((context, one_by_one(&call, &sequences)?.0)))
        };
        match check().map_err(|error| error.to_string())? {
            Some((context, expected)) => close(&context, &expected),
            None => Ok(()),
        }
    });
    assert!(counted.get() > 300, "{}", counted.get());
}
