//! Gradients through graphs with the largest allowed number of tokens, parts and taps, on a thread with a small stack:
//! Candle walks through a graph by recursion.

use crate::*;

/// Runs `run` on a thread with the stack of 2 MiB that Rust's threads have unless told otherwise.
fn on_small_stack<T: Send + 'static>(run: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let thread = std::thread::Builder::new().stack_size(2 << 20).spawn(run).expect("a thread");
    thread.join().expect("the thread does not panic")
}

/// Returns the sum of each gradient of the rule, for one head over `tokens` tokens, packed or not.
fn gated_delta_rule_gradient_sums(tokens: usize, is_packed: bool) -> Result<Vec<f64>> {
    let wave = |width: usize, by: f64| {
        let numbers: Vec<f64> = (0..tokens * width).map(|n| (n as f64 * by).sin() * 0.5).collect();
        Var::from_tensor(&Tensor::from_vec(numbers, (1, 1, tokens, width), &CPU)?)
    };
    let q = wave(2, 0.3)?;
    let k = wave(2, 0.7)?;
    let v = wave(3, 0.2)?;
    let decay = Var::from_tensor(&(wave(1, 0.11)?.squeeze(3)? - 0.6)?)?;
    let beta = Var::from_tensor(&(wave(1, 0.13)?.squeeze(3)? + 0.6)?)?;
    let options = DeltaOptions::default().with_backend(Backend::Reference).with_qk_norm(1e-6);
    let (y, state) = if is_packed {
        let sequences = PackedSequences::self_attention(vec![0, tokens - 100, tokens])?;
        let token_first = |tensor: &Tensor| tensor.squeeze(0)?.transpose(0, 1);
        let rows = [token_first(&q)?, token_first(&k)?, token_first(&v)?];
        let decay = token_first(&decay)?;
        let beta = token_first(&beta)?;
        let [q_rows, k_rows, v_rows] = &rows;
        gated_delta_rule_varlen(q_rows, k_rows, v_rows, Some(&decay), Some(&beta), None, &sequences, &options)?
    } else {
        gated_delta_rule(&q, &k, &v, Some(&decay), Some(&beta), None, &options)?
    };
    let gradients = (y.sum_all()? + state.sum_all()?)?.backward()?;
    let sum = |var: &Var| {
        let gradient = gradients.get(var).expect("it has a gradient");
        assert_eq!(gradient.dims(), var.dims());
        gradient.sum_all()?.to_scalar::<f64>()
    };
    [&q, &k, &v, &decay, &beta].into_iter().map(sum).collect()
}

#[test]
fn gated_delta_rule_gradients_over_many_tokens_fit_small_stack() -> Result<()> {
    for is_packed in [false, true] {
        let sums = on_small_stack(move || gated_delta_rule_gradient_sums(2_500, is_packed))?;
        assert!(sums.iter().all(|sum| sum.is_finite() && *sum != 0.0), "{sums:?}");
    }
    Ok(())
}

/// Makes each part one key, as where a cache is split over devices.
#[test]
fn merge_attention_gradients_of_many_parts_fit_small_stack() -> Result<()> {
    let found = on_small_stack(|| {
        let numbers = |by: f64| (0..8_000).map(|n| (f64::from(n) * by).sin()).collect::<Vec<_>>();
        let outputs = Var::from_tensor(&Tensor::from_vec(numbers(0.3), (8_000, 1, 1, 1, 1), &CPU)?)?;
        let scores = Tensor::from_vec(numbers(0.7), (8_000, 1, 1, 1), &CPU)?;
        let parts = (0..8_000).map(|n| Ok((outputs.get(n)?, scores.get(n)?))).collect::<Result<Vec<_>>>()?;
        let (output, _) = merge_attention(&parts)?;
        // The gradient of each output is the weight of its key.
        let gradients = output.backward()?;
        let weights = gradients.get(&outputs).expect("it has a gradient").flatten_all()?;
        let expected = candle_nn::ops::softmax(&scores.flatten_all()?, 0)?;
        Ok((values(&weights), values(&expected)))
    })?;
    let (weights, expected) = found;
    assert!(weights.iter().zip(&expected).all(|(weight, expected)| (weight - expected).abs() < 1e-12));
    Ok(())
}

/// Runs a convolution over thousands of tokens in f64, which uses Candle's operations.
#[test]
fn gated_delta_net_gradients_through_many_taps_fit_small_stack() -> Result<()> {
    let largest = on_small_stack(|| {
        let cfg =
            GatedDeltaNetConfig::new(2, 1).with_key_head_dim(2).with_value_head_dim(2).with_conv_kernel_dim(8_000);
        let map = VarMap::new();
        let net = GatedDeltaNet::new(&cfg, VarBuilder::from_varmap(&map, DType::F64, &CPU))?;
        let xs = Tensor::ones((1, 3, 2), DType::F64, &CPU)?;
        let gradients = net.forward(&xs)?.sum_all()?.backward()?;
        let taps = map.data().lock().expect("no thread panicked")["q_conv1d.weight"].clone();
        gradients.get(&taps).expect("it has a gradient").abs()?.max_all()?.to_scalar::<f64>()
    })?;
    assert!(largest.is_finite() && largest > 0.0, "{largest}");
    Ok(())
}
