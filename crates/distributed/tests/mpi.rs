//! Tests of the operations of ranks. The test starts the ranks with `mpirun` from its own executable: over MPI on the
//! CPU, and with the feature `nccl` over NCCL if the machine has a GPU.

#[path = "../../../tests/common/mod.rs"]
mod common;

use std::process::{Command, Output};

use candle_attention::{
    AlibiConfig, AttentionInput, AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig, SdpaOptions,
    scaled_dot_product_attention_with_lse,
};
use candle_attention_distributed::mpi::run;
use candle_attention_distributed::{Communicator, ContextCache, RingAttention, SingleProcess, ZigZag, check_same};
use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_nn::VarBuilder;
use common::{assert_close, max_error};

/// Environment variable of the processes that `mpirun` started. Its value is the name of the case.
const STARTED: &str = "CANDLE_ATTENTION_TEST_PROCESS";

/// Runs a case on `processes` ranks.
fn mpirun(processes: usize, case: &str) -> Output {
    Command::new("mpirun")
        .args(["--oversubscribe", "-n", &processes.to_string()])
        .arg(std::env::current_exe().expect("this test has a path"))
        .args(["--exact", "--nocapture", "cases"])
        .env(STARTED, case)
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"), ("RAYON_NUM_THREADS", "1")])
        .output()
        .expect("mpirun is installed: libopenmpi-dev and openmpi-bin on Debian")
}

/// Returns the number of GPUs of this machine that this build can use.
fn gpus() -> usize {
    (0..).take_while(|&n| Device::new_cuda(n).is_ok()).count()
}

/// Returns the world sizes of a test: 1, 2 and 4. On GPUs, each rank needs one GPU unless the environment allows NCCL
/// to run several ranks on one.
fn numbers_of_processes() -> Vec<usize> {
    let most = match gpus() {
        0 => usize::MAX,
        _ if std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some() => usize::MAX,
        gpus => gpus,
    };
    [1, 2, 4].into_iter().filter(|&processes| processes <= most).collect()
}

/// Name, function of each rank, and, for a case that fails, texts of stderr.
type Case = (&'static str, fn(&dyn Communicator, &Device) -> Result<()>, Option<&'static [&'static str]>);

const CASES: [Case; 8] = [
    ("collectives", collectives, None),
    ("ring attention", ring_attention_is_attention_over_all_keys, None),
    ("gradients", gradients_are_right_or_an_error, None),
    ("a layer", a_layer_over_the_ring_decodes_as_on_one_rank, None),
    ("an error", one_fails, Some(&["rank 1 of 3: error: [test] one rank fails"])),
    ("a panic", one_panics, Some(&["rank 2 of 3: error: it panicked"])),
    ("a kill", one_is_killed, Some(&["process rank 1", "exited on signal 9"])),
    (
        "another config",
        one_differs,
        Some(&["expected config.json to be the same on all ranks, found a difference between rank 0 and rank 1, 2"]),
    ),
];

/// Runs each case on 1, 2 and 4 ranks, which all have to succeed, or on 3 ranks if one of them fails.
#[test]
fn cases() {
    if let Ok(started) = std::env::var(STARTED) {
        let (_, case, _) = CASES.iter().find(|(name, ..)| *name == started).expect("a case");
        let ended = run(|mpi| {
            let device = match gpus() {
                0 => Device::Cpu,
                _ => Device::new_cuda(mpi.device_number())?,
            };
            case(&*mpi.for_device(&device)?, &device)
        });
        return assert_eq!(ended, std::process::ExitCode::SUCCESS);
    }
    let numbers = numbers_of_processes();
    for (name, _, failure) in CASES {
        let numbers = match failure {
            Some(_) if !numbers.contains(&4) => &[][..],
            Some(_) => &[3],
            None => &numbers,
        };
        for &processes in numbers {
            let ran = mpirun(processes, name);
            let [out, error] = [&ran.stdout, &ran.stderr].map(|said| String::from_utf8_lossy(said));
            let as_expected = match failure {
                Some(texts) => !ran.status.success() && texts.iter().all(|text| error.contains(text)),
                None => ran.status.success() && out.matches("1 passed").count() == processes,
            };
            assert!(as_expected, "{name} on {processes} ranks: {out}\n{error}");
        }
    }
}

/// Returns random numbers that are the same on every rank.
fn numbers(shape: impl Into<candle_core::Shape>, seed: u32, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let number = |i: u32| {
        let bits = (i.wrapping_add(seed << 20)).wrapping_mul(2_654_435_761) ^ 0x5bd1_e995;
        (bits.wrapping_mul(2_246_822_519) >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    Tensor::from_vec((0..shape.elem_count() as u32).map(number).collect(), shape, device)
}

fn collectives(processes: &dyn Communicator, device: &Device) -> Result<()> {
    let rank = processes.rank();
    let size = processes.size();
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U32, DType::I64] {
        // The tensor is not contiguous.
        let tensor_of = |source: usize| {
            let rows = Tensor::arange(0u32, 12, device)?.reshape((3, 4))?.t()?.contiguous()?.t()?;
            (rows + source as f64)?.to_dtype(dtype)
        };
        let mut expected = tensor_of(0)?;
        for other in 1..size {
            expected = (expected + tensor_of(other)?)?;
        }
        let as_f64 = |xs: &Tensor| xs.to_dtype(DType::F64)?.to_vec2::<f64>();
        assert_eq!(as_f64(&processes.all_reduce_sum(&tensor_of(rank)?)?)?, as_f64(&expected)?);
        for (other, gathered) in processes.all_gather(&tensor_of(rank)?)?.iter().enumerate() {
            assert_eq!((as_f64(gathered)?, gathered.dtype()), (as_f64(&tensor_of(other)?)?, dtype));
        }
        // Rank r sends r + 1 rows.
        let rows = |source: usize| Tensor::full(source as f64, (source + 1, 2), device)?.to_dtype(dtype);
        let before = (rank + size - 1) % size;
        let mut computed = false;
        let received = processes.send_recv(&[rows(rank)?], &[vec![before + 1, 2]], &mut || {
            computed = true;
            Ok(())
        })?;
        assert!(computed && as_f64(&received[0])? == as_f64(&rows(before)?)?);
    }
    let text = processes.all_reduce_sum(&Tensor::zeros(2, DType::U8, device)?).expect_err("bytes").to_string();
    assert!(text.contains("of U8, expected F32"), "{text}");

    let before = processes.bytes_sent();
    processes.all_reduce_sum(&Tensor::zeros((3, 5), DType::F32, device)?)?;
    processes.all_gather(&Tensor::zeros(7, DType::BF16, device)?)?;
    assert_eq!(processes.bytes_sent() - before, if size > 1 { 60 + 14 } else { 0 });
    check_same(processes, "a word", b"word")
}

fn ring_attention_is_attention_over_all_keys(processes: &dyn Communicator, device: &Device) -> Result<()> {
    let [none, causal] = [AttentionMask::none(), AttentionMask::causal()];
    let softcap = SdpaOptions::default().with_scale(0.3).with_softcap(5.0);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], device)?;
    let sinks = Tensor::new(&[0.5f32, -1.0, 2.0, 0.0], device)?;
    let plain = SdpaOptions::default();
    let cases = [
        (256, causal.clone(), softcap.clone()),
        (256, none.clone(), softcap.clone()),
        (131, causal.clone(), softcap.clone()),
        (5, causal.clone(), softcap),
        (64, causal.clone().with_window(9), plain.clone()),
        (67, causal.clone().with_window(40), plain.clone().with_sinks(&sinks)),
        (64, causal.clone().with_chunk(12), plain.clone()),
        (64, none.clone().with_local_window(3, 11), plain.clone()),
        (64, causal.clone().with_valid_lens(vec![64, 33]).with_starts(vec![3, 0]), plain.clone()),
        (64, causal.clone(), plain.clone().with_alibi_slopes(&slopes)),
        (64, none.clone(), plain.clone().with_alibi_slopes(&slopes).with_sinks(&sinks)),
        (64, AttentionMask::causal_with_offset(2), plain.clone()),
        // Sinks count even if a query's own keys are masked, and a rank may have no position.
        (8, none.clone().with_valid_lens(vec![5, 0]), plain.clone().with_sinks(&sinks)),
        (9, causal.clone().with_starts(vec![4, 9]), plain.clone().with_sinks(&sinks)),
        (1, none.clone(), plain.clone().with_sinks(&sinks)),
    ];
    for (seed, (t, mask, options)) in cases.into_iter().enumerate() {
        let seed = seed as u32 + 1;
        let q = numbers((2, 4, t, 16), seed, device)?;
        let k = numbers((2, 2, t, 16), seed + 5, device)?;
        let v = numbers((2, 2, t, 8), seed + 9, device)?;
        let (expected, expected_lse) = scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, &options)?;

        let order = ZigZag::new(t, processes);
        if device.is_cuda() && t < 2 * processes.size() {
            let text = order.split(&q, 2).expect_err("empty parts").to_string();
            let message = format!("[zigzag] expected at least {} positions on CUDA, found {t}", 2 * processes.size());
            assert!(text.starts_with(&message), "{text}");
            continue;
        }
        let [own_q, own_k, own_v] = [order.split(&q, 2)?, order.split(&k, 2)?, order.split(&v, 2)?];
        let ring = RingAttention::new(&mask, &options);
        let before = processes.bytes_sent();
        let (context, lse) = ring.attend(&own_q, &own_k, &own_v, &order, processes)?;
        if t == 256 {
            // The keys and values of a rank's positions are sent once for each of the other ranks.
            let size = processes.size();
            let bytes = (size - 1) * 2 * 2 * t / size * (16 + 8) * 4;
            assert_eq!(processes.bytes_sent() - before, bytes as u64);
        }
        let (again, _) = ring.attend(&own_q, &own_k, &own_v, &order, processes)?;
        assert_close(&again, &context, 0.0, "the same bits every time");

        let context = order.gather(&context, 2, processes)?;
        let lse = order.gather(&lse, 2, processes)?;
        let most = if processes.size() == 1 { 0.0 } else { 1e-5 };
        assert!(max_error(&context, &expected) <= most, "{t}, {mask:?}, {options:?}");
        assert!(max_error(&lse, &expected_lse) <= most, "{t}, {mask:?}, {options:?}");
    }
    let order = ZigZag::new(8, processes);
    let q = Tensor::zeros((1, 1, 9, 4), DType::F32, device)?;
    let biased = RingAttention::new(&AttentionMask::none().with_bias(&Tensor::zeros(1, DType::F32, device)?), &plain);
    let own = order.split(&Tensor::zeros((1, 1, 8, 4), DType::F32, device)?, 2)?;
    let text = biased.attend(&own, &own, &own, &order, processes).expect_err("a bias").to_string();
    assert!(text.starts_with("[attention_mask] the mask has a bias tensor"), "{text}");
    let length = RingAttention::default().attend(&q, &q, &q, &order, processes).expect_err("too long").to_string();
    assert!(length.starts_with("[ring_attention] expected (B, H, "), "{length}");
    Ok(())
}

/// Checks that a tensor whose gradients would be lost is an error, and that gradients within a rank are correct.
fn gradients_are_right_or_an_error(processes: &dyn Communicator, device: &Device) -> Result<()> {
    #[track_caller]
    fn assert_refused<T>(result: Result<T>, op: &str) {
        let text = result.err().expect("a tracked tensor").to_string();
        let expected = format!("[{op}] a tensor [1, 2, ");
        assert!(text.starts_with(&expected) && text.contains("detach()") && text.contains("freeze()"), "{text}");
    }
    let library = if device.is_cuda() { "nccl" } else { "mpi" };
    let order = ZigZag::new(24, processes);
    let sinks = Tensor::new(&[0.5f32, -1.0], device)?;
    let mask = AttentionMask::causal().with_window(5);
    let options = SdpaOptions::default().with_sinks(&sinks);
    let ring = RingAttention::new(&mask, &options);
    let alone = processes.size() == 1;
    let whole = [1, 2, 3].map(|seed| Var::from_tensor(&numbers((1, 2, 24, 4), seed, device)?));
    let [q, k, v] = whole.into_iter().collect::<Result<Vec<_>>>()?.try_into().expect("three");
    let (expected, _) = scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, &options)?;
    let expected = expected.sqr()?.sum_all()?.backward()?;

    let own = |xs: &Tensor| order.split(xs, 2);
    let tracked = [own(&q)?, own(&k)?, own(&v)?];
    let plain = tracked.each_ref().map(Tensor::detach);
    for of in 0..3 {
        let mut qkv = plain.each_ref();
        qkv[of] = &tracked[of];
        let attended = ring.attend(qkv[0], qkv[1], qkv[2], &order, processes);
        if of > 0 && !alone {
            assert_refused(attended, "ring_attention");
            continue;
        }
        let gradients = attended?.0.sqr()?.sum_all()?.backward()?;
        let xs = [&q, &k, &v][of];
        let [found, expected] = [&gradients, &expected].map(|all| all.get(xs).expect("a gradient"));
        assert_close(&own(found)?, &own(expected)?, 1e-5, &of.to_string());
    }

    let xs = &tracked[0];
    assert_refused(processes.all_reduce_sum(xs), library);
    assert_refused(processes.all_reduce_sum(&xs.to_dtype(DType::BF16)?), library);
    assert_refused(processes.all_gather(xs), library);
    let shapes = [xs.dims().to_vec()];
    assert_refused(processes.send_recv(std::slice::from_ref(xs), &shapes, &mut || Ok(())), library);
    assert_refused(order.gather(xs, 2, processes), library);
    // Integers have no gradients.
    assert_eq!(processes.all_gather(&xs.argmax(3)?)?.len(), processes.size());

    let mut cache = ContextCache::new(8);
    assert_refused(cache.append_prompt(&plain[1], &tracked[2], &order), "context_cache");
    assert_refused(cache.append_prompt(&tracked[1], &plain[2], &order), "context_cache");
    cache.append_prompt(&plain[1], &plain[2], &order)?;
    let token = tracked.each_ref().map(|shard| shard.narrow(2, 0, 1));
    let [token_q, token_k, token_v] = token.into_iter().collect::<Result<Vec<_>>>()?.try_into().expect("three");
    assert_refused(cache.decode(&token_q, &token_k.detach(), &token_v.detach(), &ring, processes), "context_cache");
    assert_refused(cache.decode(&token_q.detach(), &token_k, &token_v.detach(), &ring, processes), "context_cache");
    assert_refused(cache.decode(&token_q.detach(), &token_k.detach(), &token_v, &ring, processes), "context_cache");
    cache.decode(&token_q.detach(), &token_k.detach(), &token_v.detach(), &ring, processes)?;
    assert_eq!(SingleProcess.all_reduce_sum(xs)?.id(), xs.id());
    Ok(())
}

/// Checks layers with grouped heads: a prompt through the ring, then single tokens.
fn a_layer_over_the_ring_decodes_as_on_one_rank(processes: &dyn Communicator, device: &Device) -> Result<()> {
    let grouped = || MultiHeadAttentionConfig::new(64, 4).with_num_kv_heads(2).with_causal(true);
    let rotary = || grouped().with_rope(RopeConfig::new(1e4));
    let configs = [
        rotary(),
        rotary().with_window(7),
        rotary().with_chunk(10).with_scale(0.2),
        rotary().with_window(40).with_sinks(true),
        grouped().with_alibi(AlibiConfig::Standard).with_sinks(true),
    ];
    configs.iter().try_for_each(|cfg| prompt_and_tokens(cfg, processes, device))
}

fn prompt_and_tokens(cfg: &MultiHeadAttentionConfig, processes: &dyn Communicator, device: &Device) -> Result<()> {
    let mut weights = std::collections::HashMap::new();
    for (seed, (name, rows)) in [("q", 64), ("k", 32), ("v", 32), ("o", 64)].into_iter().enumerate() {
        weights.insert(format!("{name}_proj.weight"), (numbers((rows, 64), seed as u32, device)? * 0.2)?);
    }
    if cfg.sinks() {
        weights.insert("sinks".into(), numbers(4, 7, device)?);
    }
    let mha = MultiHeadAttention::new(cfg, VarBuilder::from_tensors(weights, DType::F32, device))?;
    let prompt = 53;
    let all = 60;
    let xs = numbers((2, all, 64), 40, device)?;
    let expected = mha.forward(&xs)?;

    let order = ZigZag::new(prompt, processes);
    let cache = std::cell::RefCell::new(ContextCache::new(8));
    let own = order.split(&xs.narrow(1, 0, prompt)?, 1)?;
    let positions = Tensor::new(order.positions().map(|at| at as u32).collect::<Vec<_>>(), device)?;
    let prefill = |q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions| {
        cache.borrow_mut().append_prompt(k, v, &order)?;
        Ok(RingAttention::new(mask, options).attend(q, k, v, &order, processes)?.0)
    };
    let ys = mha.forward_with(AttentionInput::new(&own).with_positions(&positions).with_function(&prefill))?;
    let mut outputs = vec![order.gather(&ys, 1, processes)?];
    for at in prompt..all {
        let token = xs.narrow(1, at, 1)?.contiguous()?;
        let position = Tensor::new(&[at as u32], device)?;
        let decode = |q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions| {
            cache.borrow_mut().decode(q, k, v, &RingAttention::new(mask, options), processes)
        };
        outputs.push(mha.forward_with(AttentionInput::new(&token).with_positions(&position).with_function(&decode))?);
    }
    assert_close(&Tensor::cat(&outputs, 1)?, &expected, 1e-5, &format!("{cfg:?}"));

    // A rank stores its shard of the positions, and all ranks together store every position once.
    let stored = cache.borrow().len();
    assert!(stored <= all / processes.size() + 2, "{stored}");
    let count = Tensor::new(&[stored as i64], device)?;
    assert_eq!(processes.all_reduce_sum(&count)?.to_vec1::<i64>()?, [all as i64]);

    let again = cache.borrow_mut().append_prompt(&own, &own, &order).expect_err("a second prompt").to_string();
    assert!(again.starts_with("[context_cache] expected"), "{again}");
    Ok(())
}

fn one_fails(processes: &dyn Communicator, device: &Device) -> Result<()> {
    if processes.rank() == 1 {
        bail!("[test] one rank fails")
    }
    // The other ranks wait for it.
    processes.all_reduce_sum(&Tensor::zeros(1, DType::F32, device)?).map(drop)
}

fn one_panics(processes: &dyn Communicator, device: &Device) -> Result<()> {
    assert!(processes.rank() != 2);
    processes.all_gather(&Tensor::zeros(1, DType::F32, device)?).map(drop)
}

fn one_is_killed(processes: &dyn Communicator, device: &Device) -> Result<()> {
    if processes.rank() == 1 {
        Command::new("kill").args(["-9", &std::process::id().to_string()]).status()?;
    }
    let zeros = [Tensor::zeros(1, DType::F32, device)?];
    processes.send_recv(&zeros, &[vec![1]], &mut || Ok(())).map(drop)?;
    processes.all_reduce_sum(&zeros[0]).map(drop)
}

fn one_differs(processes: &dyn Communicator, _: &Device) -> Result<()> {
    let config = if processes.rank() == 0 { "{}" } else { "{\"heads\": 2}" };
    check_same(processes, "config.json", config.as_bytes())
}
