//! The draws themselves: `torch.rand`, `torch.randn`, dropout masks, and the seed.

use candle_nn::Init;

use super::{STANDARD_NORMAL, sha256, sha256_of_bytes};
use crate::*;

#[test]
fn torch_seed_randn_matches_torch_randn_bit_for_bit() -> Result<()> {
    // for n in sizes:
    //     torch.manual_seed(42)
    //     print(n, hashlib.sha256(torch.randn(n).numpy().tobytes()).hexdigest())
    for (size, expected) in [
        (1, "f4e1275c6e3dd10f9eaf03324168a5b262fb4765f2edb5d05e6ffdc514d2c326"),
        (5, "af33577995d9ae23a3bed3a80bfb2c79db2803eb7e55c090eca9e39fafc79a60"),
        (15, "8db9a5331024e1ef6641fb105e2cef40e44a0fc808368674795ee3b09096fe02"),
        (16, "fc34b516db1204ac5504e9a714274f1068e6342fdddd0b2cde67221932271d34"),
        (17, "2ae700cddb7c7bef2727381a13feed04c35ad67793a9695d51da507ac5c359f2"),
        (31, "7f2252163c2b02a8096e490dd6230b7ce3a8556f689552a8e6e4d7bfc285dac4"),
        (33, "e6ebc861c02eae81435365a6cb5b21a87a659ebb31e847bf5a1be1361b2def40"),
        (100, "6cf7236205c5dc8d364395645d540c46afd7b7fb6fae49cdc6fa67f7830e8fd3"),
        (1_000_003, "4085738930147ae4776e55a12e44b11fdba68b8177133b5cb4a009527b48baf6"),
    ] {
        assert_eq!(sha256(&TorchSeed::new(42).randn(size)?)?, expected, "{size} elements");
    }
    Ok(())
}

#[test]
fn torch_seed_clones_and_builders_share_one_stream() -> Result<()> {
    // torch.manual_seed(123); print(torch.rand(3, 2).tolist())
    let printed = [[0.29611194f32, 0.5165623], [0.25167072, 0.6885568], [0.07397246, 0.86652195]];
    // PyTorch's generator takes the low 32 bits of a seed.
    for seed in [123, 123 + (1 << 32)] {
        assert_eq!(TorchSeed::new(seed).rand((3, 2))?.to_vec2::<f32>()?, printed);
    }
    // torch.manual_seed(42)
    // print(torch.randn(5), torch.rand(1), torch.randn(40)[:1], torch.randn(2))
    let seed = TorchSeed::new(42);
    assert_eq!(seed.randn(5)?.to_vec1::<f32>()?, [0.33669037, 0.1288094, 0.23446237, 0.23033303, -1.1228564]);
    assert_eq!(seed.rand(1)?.to_vec1::<f32>()?, [0.86940444], "the spare of a small normal waits");
    assert_eq!(seed.randn(40)?.to_vec1::<f32>()?[0], -1.2082148);
    assert_eq!(seed.randn(2)?.to_vec1::<f32>()?, [-0.18632829, -0.6778203]);
    // Clones and builders are handles to the one stream, which starts again without the spare; a name is drawn once.
    // torch.manual_seed(42); torch.randn(1); torch.manual_seed(42); print(torch.randn(1))
    let draw =
        |name: &str, hint, n: usize| seed.var_builder(DType::F32, &CPU).get_with_hints(n, name, hint)?.to_vec1::<f32>();
    seed.manual_seed(42);
    let parameter = draw("w", STANDARD_NORMAL, 1)?;
    seed.clone().manual_seed(42);
    assert_eq!(seed.randn(1)?.to_vec1::<f32>()?, [0.33669037]);
    assert_eq!(draw("w", STANDARD_NORMAL, 1)?, parameter);
    seed.manual_seed(8);
    let uniform = Init::Uniform { lo: 0.0, up: 1.0 };
    let drawn = [seed.rand(2)?.to_vec1::<f32>()?, seed.clone().rand(2)?.to_vec1()?, draw("u", uniform, 2)?].concat();
    assert_eq!(drawn, TorchSeed::new(8).rand(6)?.to_vec1::<f32>()?);
    Ok(())
}

#[test]
fn dropout_mask_of_torch_seed_matches_pytorch_and_rejects_invalid_p() -> Result<()> {
    for p in [-0.1, 1.5, f64::NAN, f64::INFINITY] {
        let error = error_text(TorchSeed::new(1).dropout_keep(4, p));
        assert!(error.starts_with("[dropout_keep]") && error.contains(&p.to_string()), "{error}");
    }
    // torch.manual_seed(1); torch.nn.functional.dropout(torch.ones(10), p, True); print(torch.rand(1))
    for (p, kept, next) in [(0.0, 10, 0.7576316f32), (1.0, 0, 0.7576316)] {
        let seed = TorchSeed::new(1);
        let keep = seed.dropout_keep(10, p)?.to_vec1::<u8>()?;
        assert_eq!(keep.iter().filter(|&&flag| flag == 1).count(), kept, "p {p}");
        assert_eq!(seed.rand(1)?.to_vec1::<f32>()?, [next], "p {p}");
    }
    // torch.manual_seed(9); keep = torch.nn.functional.dropout(torch.ones(1000), 0.1) != 0
    // print(hashlib.sha256(keep.numpy().tobytes()).hexdigest())
    let keep = TorchSeed::new(9).dropout_keep(1000, 0.1)?.to_vec1::<u8>()?;
    assert_eq!(sha256_of_bytes(&keep), "c2459e3b3eeb4e1dafc4b0c46784aac7622ebb141cb00f9895d79d180e03529f");
    Ok(())
}
