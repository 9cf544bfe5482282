//! Numbers at the ends of their range.

use crate::*;

const DIMS: Dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 35, t_kv: 67, d: 16, d_v: 24 };

/// A change of plain numbers after which results are still finite.
type Change = Box<dyn Fn(&mut Case, DType)>;

fn set(array: &mut Array, dtype: DType, value: impl Fn(f64) -> f64) {
    array.data.iter_mut().for_each(|x| *x = round(value(*x), dtype));
}

/// Adds a bias of `first` to the first key, and of `step` more to each next key.
fn add_bias(case: &mut Case, first: f64, step: f64) {
    let mut keys = 0..DIMS.t_kv;
    let bias = Array::new(&[DIMS.t_kv]).filled(|| first + step * keys.next().expect("a number for each") as f64);
    case.masks.push(Mask::of(Part::Bias(bias)));
}

fn changes() -> Vec<Change> {
    let largest = |dtype| if dtype == DType::F16 { 30_000.0 } else { 1e36 };
    let mut all: Vec<Change> = vec![Box::new(move |case, dtype| set(&mut case.v, dtype, |x| x * largest(dtype)))];
    // Every number of queries and keys is a size or its negative: scores of ten thousand, and biases as large.
    let sizes = [(25.0, 1.0), (25.0, -1.0), (1.0, 625.0), (0.01, -6e6)];
    for ((size, scale), bias) in sizes.into_iter().flat_map(|size| [0.0, 1e4, -1e4].map(|bias| (size, bias))) {
        all.push(Box::new(move |case, dtype| {
            [&mut case.q, &mut case.k].into_iter().for_each(|array| set(array, dtype, |x| x.signum() * size));
            case.options.scale = Some(scale);
            add_bias(case, bias, 0.0);
        }));
    }
    // Products of up to 1e36 under a scale that reduces them to a few units, and the reverse. They exceed f16.
    let large = [(1e15, 1e15, 1e-30), (1e30, 1.0, 1e-30), (1.0, 1e30, -1e-30), (1e18, 1e17, 1e-35)];
    let small = [(1e-15, 1e-15, 1e30), (1e-30, 1.0, 1e30), (1.0, 1e-30, 1e30), (1e15, 1e-15, 1.0)];
    for (of_q, of_k, scale) in large.into_iter().chain(small) {
        all.push(Box::new(move |case, dtype| {
            let held = |factor: f64| if dtype == DType::F16 { 1.0 } else { factor };
            set(&mut case.q, dtype, |x| x * held(of_q));
            set(&mut case.k, dtype, |x| x * held(of_k));
            case.options.scale = Some(held(scale));
        }));
    }
    // Scores that rise or fall by hundreds from one key to the next: the running maximum moves in every tile, or never.
    for slope in [30.0, -30.0, 0.3, -0.3] {
        all.push(Box::new(move |case, _| {
            case.options.scale = Some(1.0);
            add_bias(case, slope, slope);
        }));
    }
    // Caps far below and far above the scores.
    for (softcap, scale) in [(1e-3, 1.0), (30.0, 10.0), (50.0, 1e-3), (1e4, 1.0), (1e-20, 1e10), (1.0, 1e30)] {
        all.push(Box::new(move |case, _| {
            case.options.softcap = Some(softcap);
            case.options.scale = Some(scale);
        }));
    }
    // A sink of -inf is no sink; one of 1e4 takes all.
    for sinks in [[f64::NEG_INFINITY, 0.0, 1e4, -1e4], [f64::NEG_INFINITY; 4]] {
        all.push(Box::new(move |case, _| case.options.sinks = Some(sinks.into())));
    }
    all
}

crate::on_each_device!(extreme_inputs_match_oracle_without_overflow);

/// Compares the sums of weights too, since tolerances grow with the numbers: with values of one, the sums are the
/// output.
fn extreme_inputs_match_oracle_without_overflow(device: &Device) {
    let masks: [&[Kind]; 4] = [&[], &[Kind::Causal], &[Kind::ValidLens], &[Kind::LocalWindow]];
    for (n, change) in changes().into_iter().enumerate() {
        for (m, dtype) in DTYPES.into_iter().enumerate() {
            for kinds in [masks[(n + m) % 4], masks[(n + m + 2) % 4]] {
                let mut case = Recipe::of_kernel(DIMS, kinds.to_vec(), dtype).case();
                change(&mut case, dtype);
                let what = format!("change {n} with {:?} in {dtype:?} under {kinds:?}", case.options);
                check(&case, dtype, device).unwrap_or_else(|difference| panic!("{difference}: {what}"));
                set(&mut case.v, dtype, |_| 1.0);
                let expected = case.attend().context;
                let call = Call::fused(&case, dtype).expect("tensors");
                let most = if dtype == DType::BF16 { 2f64.powi(-7) } else { 1e-3 };
                for instruction_set in InstructionSet::available() {
                    let context = values(&call.on_instruction_set(instruction_set).context().expect("the call runs"));
                    let close = context.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() <= most);
                    assert!(close, "{what} on {instruction_set}: the weights of a row sum to something else");
                }
            }
        }
    }
}

/// Checks that f32 and f16 keep subnormal values, and subnormal keys that the scale makes larger. Dot products in bf16
/// may read subnormal numbers as zero.
#[test]
fn subnormal_inputs_keep_their_values() -> Result<()> {
    for (dtype, t_kv, exponent) in [(DType::F32, -149), (DType::F16, -24), (DType::BF16, -133)]
        .into_iter()
        .flat_map(|(dtype, exponent)| [1, 9, 40].map(|t_kv| (dtype, t_kv, exponent)))
    {
        let q = Tensor::ones((1, 1, 5, 8), dtype, &CPU)?;
        let k = Tensor::ones((1, 1, t_kv, 8), dtype, &CPU)?;
        let smallest = 2f64.powi(exponent);
        let value = 100.0 * 2f64.powi(exponent);
        let v = Tensor::full(value, (1, 1, t_kv, 20), &CPU)?.to_dtype(dtype)?;
        for instruction_set in InstructionSet::available() {
            for x in
                values(&Call::plain(&q, &k, &v, &AttentionMask::none()).on_instruction_set(instruction_set).context()?)
            {
                let near = (x - value).abs() <= smallest * (t_kv as f64 + 1.0);
                let flushed = dtype == DType::BF16 && x == 0.0;
                assert!(
                    near || flushed,
                    "{instruction_set}: a mean of {value:e} is {x:e} in {dtype:?} over {t_kv} keys"
                );
            }
        }
    }
    for (dtype, key, scale, most) in [(DType::F32, -128, 125, 1e-6), (DType::F16, -20, 17, 4e-4)] {
        let key = 2f64.powi(key);
        let scale = 2f64.powi(scale);
        let q = (Tensor::ones((1, 1, 3, 1), dtype, &CPU)? * 4.0)?;
        let k = Tensor::new(&[[[[key], [0.0], [-key]]]], &CPU)?.to_dtype(dtype)?;
        let v = Tensor::new(&[[[[1f32], [0.], [0.]]]], &CPU)?.to_dtype(dtype)?;
        let expected = 0.5f64.exp() / (0.5f64.exp() + 1.0 + (-0.5f64).exp());
        let call = Call::plain(&q, &k, &v, &AttentionMask::none()).with(|options| options.with_scale(scale));
        for instruction_set in InstructionSet::available() {
            let got = values(&call.on_instruction_set(instruction_set).context()?);
            assert!(
                got.iter().all(|x| (x - expected).abs() <= most),
                "{instruction_set}: {got:?} of {expected} in {dtype:?}"
            );
        }
    }
    Ok(())
}

/// Checks that `torch.finfo(dtype).min`, which masks of Hugging Face contain, is a number: a row of nothing else
/// returns the mean, as in PyTorch and on the reference path, and the larger of two such numbers wins.
#[test]
fn bias_of_smallest_finite_number_does_not_mask() -> Result<()> {
    for (dtype, t_q) in DTYPES.into_iter().flat_map(|dtype| [(dtype, 1), (dtype, 30)]) {
        let q = Tensor::ones((1, 1, t_q, 8), dtype, &CPU)?;
        let k = Tensor::ones((1, 1, 3, 8), dtype, &CPU)?;
        let v = Tensor::new(&[[[[1f32], [2.], [6.]]]], &CPU)?.to_dtype(dtype)?;
        for (bias, expected, most) in [
            ([f32::MIN; 3], 3.0, f32::MIN),
            ([-3.389_531_4e38; 3], 3.0, -3.389_531_4e38),
            ([-3.4e38, -3.0e38, -3.4e38], 2.0, -3.0e38),
            ([0.0, 3e38, 0.0], 2.0, 3e38),
        ] {
            let mask = AttentionMask::none().with_bias(&Tensor::new(&[[[bias]]], &CPU)?);
            let call = Call::plain(&q, &k, &v, &mask);
            for path in Path::kernels().into_iter().chain([Path::REFERENCE]) {
                let (context, lse) = call.by(path).with_lse()?;
                let context_agrees = values(&context).iter().all(|x| (x - expected).abs() < 0.02);
                let lse_agrees = values(&lse).iter().all(|x| (x / f64::from(most) - 1.0).abs() < 1e-6);
                assert!(context_agrees && lse_agrees, "{path:?}, {dtype:?}, bias {bias:?}: {context} {lse}");
            }
        }
    }
    Ok(())
}
