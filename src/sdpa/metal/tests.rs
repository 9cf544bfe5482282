//! The decisions, a row for each trap, and the adapter around the emulated operation.

use candle_core::{DType, Device, Result, Tensor};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::super::drawn::{Arguments, Constraint, Drawn, Layout, drawn};
use super::super::facts::{Copies, Facts, Place, Span};
use super::super::plan::Wanted;
use super::super::validate::Dims;
use super::decide::{Masking, causal_rest};
use super::emulated::Emulated;
use super::{Inputs, Kernel, Plan, attend, decide};
use crate::{AttentionMask, OutputOrder};

/// A plain call in f16: B 2, H 4 and 4, T_q and T_kv as given, D 64, contiguous, under a mask.
fn masked(mask: &AttentionMask, t_q: usize, t_kv: usize) -> Facts {
    let bound = mask.resolve(2, t_q, t_kv).expect("the mask fits");
    let span = |b| Ok(Span { t_q, t_kv, outline: bound.outline(b)? });
    Facts {
        dtype: DType::F16,
        dims: Dims { b: 2, h: 4, t_q, t_kv, d: 64, d_v: 64 },
        h_kv: 4,
        scale: 0.125,
        softcap: None,
        alibi: false,
        sinks: false,
        keep: mask.has_keep(),
        bias: mask.has_bias(),
        lse: false,
        places: [[2, 4, t_q, 64], [2, 4, t_kv, 64], [2, 4, t_kv, 64]].map(Place::contiguous),
        packed: false,
        spans: (0..2).map(span).collect::<std::result::Result<_, &str>>().map_err(String::from),
    }
}

fn taken(keys: std::ops::Range<usize>, masking: Masking) -> Plan {
    Plan { keys, masking, rest: 0, copies: Copies::default() }
}

#[test]
fn what_is_computed_wrongly_is_refused() -> Result<()> {
    let changed = |(t_q, t_kv): (usize, usize), change: fn(&mut Facts)| {
        let mut facts = masked(&AttentionMask::none(), t_q, t_kv);
        change(&mut facts);
        facts
    };
    let several = |change| changed((5, 9), change);
    let one = |change| changed((1, 9), change);
    let keep = Tensor::ones((1, 9), DType::U8, &Device::Cpu)?;
    let rows = [
        (
            several(|f| f.dtype = DType::F64),
            "candle_nn::ops::sdpa computes in F32, F16 and BF16, and the inputs are F64",
        ),
        (several(|f| f.packed = true), "candle_nn::ops::sdpa has no packed sequences"),
        (several(|f| f.lse = true), "candle_nn::ops::sdpa has no log-sum-exp"),
        (several(|f| f.sinks = true), "candle_nn::ops::sdpa has no sinks"),
        (several(|f| f.alibi = true), "candle_nn::ops::sdpa has no ALiBi"),
        // The least f32, with which masks are filled, becomes -inf when it is multiplied by log2 e.
        (several(|f| f.bias = true), "candle_nn::ops::sdpa has no bias that is exact"),
        (several(|f| f.dims.b = 0), "there is nothing to attend to"),
        (one(|f| f.dims.t_kv = 0), "there is nothing to attend to"),
        (several(|f| f.dims.d_v = 32), "candle_nn::ops::sdpa writes rows of D, and D_v is 32 where D is 64"),
        (
            several(|f| (f.dims.d, f.dims.d_v) = (48, 48)),
            "candle_nn::ops::sdpa has no kernel for D of 48 and several queries",
        ),
        // Checked for, and then not found among the kernels of one query.
        (one(|f| (f.dims.d, f.dims.d_v) = (72, 72)), "candle_nn::ops::sdpa has no kernel for D of 72 and one query"),
        (one(|f| (f.dims.d, f.dims.d_v) = (80, 80)), "candle_nn::ops::sdpa has no kernel for D of 80 and one query"),
        (
            several(|f| (f.dims.d, f.dims.d_v, f.dtype) = (512, 512, DType::F32)),
            "candle_nn::ops::sdpa has no kernel for D of 512 in F32 and several queries",
        ),
        (several(|f| f.softcap = Some(30.0)), "candle_nn::ops::sdpa has a softcap for one query only"),
        // 1.0 means none.
        (one(|f| f.softcap = Some(1.0)), "candle_nn::ops::sdpa ignores a softcap of 1.0 at a scale of 0.125"),
        (several(|f| f.scale = 1e-6), "candle_nn::ops::sdpa scales queries in F16, where 1e-6 is out of range"),
        (several(|f| f.scale = 12.0), "candle_nn::ops::sdpa scales queries in F16, where 12.0 is out of range"),
        // One query: masks are ignored in silence.
        (
            masked(&AttentionMask::none().with_keep(&keep), 1, 9),
            "candle_nn::ops::sdpa ignores masks with one query, and there is a keep tensor",
        ),
        (
            masked(&AttentionMask::none().with_valid_lens(vec![3, 4]), 1, 9),
            "candle_nn::ops::sdpa ignores masks with one query, and the sequences see different keys",
        ),
        (masked(&AttentionMask::none().with_valid_lens(vec![0, 0]), 1, 9), "no query sees a key"),
        // More queries than keys.
        (
            masked(&AttentionMask::causal(), 9, 5),
            "candle_nn::ops::sdpa masks 5 keys for at most as many queries, and there are 9",
        ),
        (
            Facts { h_kv: 2, ..masked(&AttentionMask::none().with_window(2), 5, 9) },
            "candle_nn::ops::sdpa gives NaN for grouped heads under a mask that is not square (#3388)",
        ),
    ];
    for (facts, reason) in rows {
        assert_eq!(decide(&facts), Err(reason.to_string()));
    }
    Ok(())
}

#[test]
fn what_it_can_express_is_taken() -> Result<()> {
    let written = |empty_rows| taken(0..9, Masking::Written { empty_rows });
    let keep = Tensor::ones((1, 9), DType::U8, &Device::Cpu)?;
    for (mask, (t_q, t_kv), expected) in [
        (AttentionMask::none(), (9, 9), taken(0..9, Masking::None)),
        (AttentionMask::none(), (9, 5), taken(0..5, Masking::None)),
        (AttentionMask::causal(), (9, 9), taken(0..9, Masking::Causal)),
        // One query sees all that a causal mask leaves, and a cache is given no further than it is filled.
        (AttentionMask::causal(), (1, 9), taken(0..9, Masking::None)),
        (AttentionMask::causal().with_window(4), (1, 9), taken(5..9, Masking::None)),
        (AttentionMask::none().with_valid_lens(vec![7, 7]), (1, 9), taken(0..7, Masking::None)),
        (
            AttentionMask::none().with_valid_lens(vec![7, 7]),
            (4, 9),
            Plan { copies: Copies([false, true, true]), ..taken(0..7, Masking::None) },
        ),
        // Everything else is a tensor; a query that may see nothing would be NaN (#3690).
        (AttentionMask::causal().with_window(4), (9, 9), written(false)),
        (AttentionMask::none().with_valid_lens(vec![3, 9]), (9, 9), written(false)),
        (AttentionMask::none().with_valid_lens(vec![0, 9]), (9, 9), written(true)),
        (AttentionMask::causal().with_starts(vec![2, 0]), (9, 9), written(true)),
        (AttentionMask::causal_with_offset(1).with_starts(vec![1, 0]).with_window(2), (9, 9), written(false)),
        (AttentionMask::none().with_window(2).with_valid_lens(vec![7, 9]), (9, 9), written(true)),
        (AttentionMask::causal().with_prefix(vec![2, 2]), (9, 9), written(true)),
        (AttentionMask::none().with_keep(&keep), (9, 9), written(true)),
    ] {
        assert_eq!(decide(&masked(&mask, t_q, t_kv)), Ok(expected), "{mask:?} {t_q} {t_kv}");
    }
    let square = Facts { h_kv: 2, ..masked(&AttentionMask::causal().with_window(4), 9, 9) };
    assert_eq!(decide(&square), Ok(written(false)));
    let plan = Plan { copies: Copies([false, true, true]), ..written(true) };
    assert_eq!(plan.to_string(), "candle_nn::ops::sdpa with a mask written out, with a copy of k, v");
    Ok(())
}

/// #3703: one query reads rows one after the other, from heads that lie at one distance; views into a cache do.
#[test]
fn only_what_the_op_would_misread_is_copied() {
    let strides = |(t_q, t_kv), strides| {
        let mut facts = masked(&AttentionMask::none(), t_q, t_kv);
        facts.places[1].strides = strides;
        decide(&facts).map(|plan| plan.copies.0)
    };
    for (layout, of_one, of_several) in [
        ([4 * 9 * 64, 9 * 64, 64, 1], false, false),
        // The first positions of a longer buffer.
        ([4 * 4096, 4096, 64, 1], false, true),
        // A transposed projection, a batch of which each entry is a part of something larger, one head for all.
        ([4 * 9 * 64, 64, 4 * 64, 1], true, true),
        ([8 * 9 * 64, 9 * 64, 64, 1], true, true),
        ([9 * 64, 0, 64, 1], true, true),
        ([4 * 9 * 64, 9 * 64, 1, 9], true, true),
    ] {
        assert_eq!(strides((1, 9), layout), Ok([false, of_one, false]), "{layout:?}");
        assert_eq!(strides((5, 9), layout), Ok([false, of_several, false]), "{layout:?}");
    }
}

/// Counts the calls that it passes on.
struct Counting<'a>(&'a std::cell::Cell<usize>);

impl Kernel for Counting<'_> {
    fn sdpa(&self, inputs: &Inputs) -> Result<Tensor> {
        self.0.set(self.0.get() + 1);
        Emulated.sdpa(inputs)
    }
}

fn holds(arguments: &Arguments, kernel: &impl Kernel) -> std::result::Result<(), String> {
    let run = || -> Result<Option<Tensor>> {
        let call = arguments.call()?;
        let Ok(plan) = decide(&Facts::new(&call, Wanted::Context)?) else { return Ok(None) };
        attend(&call, &plan, kernel).map(Some)
    };
    match run().map_err(|error| error.to_string())? {
        Some(context) => arguments.check(&context),
        None => Ok(()),
    }
}

/// Whatever is taken has the numbers of the reference path, from an operation with all the traps of the real one.
#[test]
fn what_is_taken_has_the_reference_paths_numbers() {
    const DTYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16];
    let taken = std::cell::Cell::new(0);
    let config = Config { cases: 1_200, rng_seed: RngSeed::Fixed(7), failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&drawn(12, DTYPES, &[32, 64, 72]), |drawn| {
        let arguments = drawn.arguments().map_err(|error| TestCaseError::fail(error.to_string()))?;
        for order in [OutputOrder::Bhtd, OutputOrder::Bthd] {
            holds(&arguments.clone().in_order(order), &Counting(&taken)).map_err(TestCaseError::fail)?;
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(taken.get() > 800, "{}", taken.get());
}

fn causal(t_q: usize, t_kv: usize, d: usize, order: OutputOrder) -> Arguments {
    let drawn = Drawn {
        b: 1,
        h_kv: 1,
        group: 1,
        t_q,
        t_kv,
        d,
        d_v: d,
        layouts: [Layout::HeadsTransposed; 3],
        masks: vec![Constraint::Causal],
        scale: None,
        softcap: None,
        alibi: false,
        sinks: false,
        placed: None,
        dtype: DType::F16,
    };
    drawn.arguments().expect("the call becomes tensors").in_order(order)
}

/// The kernel's own causal mask at lengths around its blocks: where it is taken it is right, and where the emulated
/// kernel is wrong, what is left to the reference path begins before.
#[test]
fn causal_masks_are_right_around_blocks() -> Result<()> {
    const QUERIES: [usize; 18] = [2, 3, 15, 16, 17, 23, 30, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 66];
    const BEFORE: [usize; 8] = [0, 1, 5, 15, 16, 31, 32, 40];
    let (mut wrong, mut split) = (0, 0);
    for d in [64, 128] {
        for (n, (t_q, before)) in QUERIES.into_iter().flat_map(|t_q| BEFORE.map(|n| (t_q, n))).enumerate() {
            let arguments =
                causal(t_q, t_q + before, d, if n % 2 == 0 { OutputOrder::Bhtd } else { OutputOrder::Bthd });
            holds(&arguments, &Emulated).unwrap_or_else(|error| panic!("{t_q} after {before}, D {d}: {error}"));
            let whole = Plan { copies: Copies([true; 3]), ..taken(0..t_q + before, Masking::Causal) };
            let exact = arguments.check(&attend(&arguments.call()?, &whole, &Emulated)?).is_ok();
            assert_eq!(causal_rest(t_q, t_q + before, d) == 0, exact, "{t_q} after {before}, D {d}");
            wrong += u32::from(!exact);
            split += u32::from((1..t_q).contains(&causal_rest(t_q, t_q + before, d)));
        }
    }
    assert!(wrong > 80 && split > 40, "{wrong} {split}");
    Ok(())
}

/// The emulated operation is wrong where the real one is: what the decision refuses for numbers would be wrong.
#[test]
fn the_traps_are_real() -> Result<()> {
    let base = Drawn {
        b: 2,
        h_kv: 2,
        group: 1,
        t_q: 1,
        t_kv: 6,
        d: 32,
        d_v: 32,
        layouts: [Layout::Contiguous; 3],
        masks: vec![],
        scale: None,
        softcap: None,
        alibi: false,
        sinks: false,
        placed: None,
        dtype: DType::F32,
    };
    let wrong = |drawn: &Drawn, masking: Masking| -> Result<bool> {
        let arguments = drawn.arguments()?;
        let plan = taken(0..drawn.t_kv, masking);
        Ok(attend(&arguments.call()?, &plan, &Emulated).map_or(true, |context| arguments.check(&context).is_err()))
    };
    let several = Drawn { t_q: 6, ..base.clone() };
    let written = Masking::Written { empty_rows: false };
    assert!(!wrong(&base, Masking::None)? && !wrong(&several, Masking::None)? && !wrong(&several, written)?);
    for (drawn, masking) in [
        (Drawn { masks: vec![Constraint::Window(2)], ..base.clone() }, written),
        (Drawn { softcap: Some(1.0), scale: Some(2.0), ..base.clone() }, Masking::None),
        (Drawn { sinks: true, ..base.clone() }, Masking::None),
        (Drawn { alibi: true, ..base.clone() }, Masking::None),
        (Drawn { d: 72, d_v: 72, ..base.clone() }, Masking::None),
        (Drawn { d_v: 64, ..base.clone() }, Masking::None),
        (Drawn { layouts: [Layout::Contiguous, Layout::HeadsTransposed, Layout::Contiguous], ..base }, Masking::None),
        (Drawn { softcap: Some(3.0), ..several.clone() }, Masking::None),
        (Drawn { masks: vec![Constraint::OneLength(0)], ..several.clone() }, written),
        (Drawn { group: 2, t_q: 4, masks: vec![Constraint::Causal], ..several.clone() }, written),
        (Drawn { t_q: 9, masks: vec![Constraint::Window(2)], ..several }, written),
    ] {
        assert!(wrong(&drawn, masking)?, "{drawn:?}");
    }
    Ok(())
}
