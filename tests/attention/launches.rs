//! The kernels of a token on Metal, counted on the stand-in for Metal (`ci/metal_standin.sh`): each costs some
//! microseconds on a device, which is most of the time of a token.

use crate::seeded::layer;
use crate::*;

/// The number of kernels of a call.
#[derive(Debug, PartialEq, Eq)]
struct Launches {
    /// Operations and copies of Candle.
    of_candle: usize,
    /// Kernels of this crate.
    of_this_crate: u64,
}

impl Launches {
    fn of_thread() -> Self {
        Self {
            of_candle: candle_core::MetalDevice::launches_of_thread(),
            of_this_crate: candle_attention_metal::launches_of_thread(),
        }
    }

    /// Returns the kernels since an earlier count.
    fn since(self, earlier: Self) -> Self {
        Self {
            of_candle: self.of_candle - earlier.of_candle,
            of_this_crate: self.of_this_crate - earlier.of_this_crate,
        }
    }
}

/// Returns the kernels of the second token after a prompt of 40.
fn of_token(cfg: &Config, cache: &AttentionCacheConfig, backend: Backend, device: &Device) -> Result<Launches> {
    let attention = layer(cfg, DType::F32, device)?;
    let mut cache = AttentionCache::new(cache)?;
    let mut call = |tokens: usize| -> Result<Tensor> {
        let xs = Tensor::zeros((1, tokens, cfg.embed_dim()), DType::F32, device)?;
        attention.forward_with(AttentionInput::new(&xs).with_cache(&mut cache).with_backend(backend))
    };
    call(40)?;
    call(1)?;
    let before = Launches::of_thread();
    call(1)?;
    Ok(Launches::of_thread().since(before))
}

mod metal {
    use super::*;

    #[test]
    fn token_with_cache_on_metal_launches_fewer_kernels_than_on_the_reference_path() -> Result<()> {
        let device = found("Metal", Device::new_metal(0));
        let cfg = Config::new(64, 4).with_num_kv_heads(2).with_head_dim(16).with_causal(true);
        let windowed = cfg.clone().with_rope(RopeConfig::new(100.0)).with_window(16);
        let plain = AttentionCacheConfig::new().with_capacity(64);
        let codes = AttentionCacheConfig::new().with_capacity(64).with_q8();
        let mut found = Vec::new();
        for (own, cache) in [(&cfg, &plain), (&windowed, &plain), (&windowed, &codes)] {
            found.push(of_token(own, cache, Backend::Reference, &device)?);
            found.push(of_token(own, cache, Backend::Auto, &device)?);
        }
        let expected =
            [launches(23, 2), launches(2, 3), launches(26, 4), launches(2, 5), launches(68, 4), launches(40, 5)];
        assert_eq!(found, expected);
        Ok(())
    }

    #[test]
    fn layer_of_codes_and_norm_with_gate_on_metal_launch_one_kernel_each() -> Result<()> {
        let device = found("Metal", Device::new_metal(0));
        let weight = Tensor::ones((48, 64), DType::F32, &CPU)?;
        let codes = QuantizedWeight::quantize(&weight, QuantizationFormat::Int4 { group: 32 })?;
        let layer = || PackedLinear::from_quantized_on(&codes, None, DType::F32, &device);
        let gated = PackedGatedLinear::new(layer()?, layer()?, Activation::Silu)?;
        let (plain, xs) = (layer()?, Tensor::ones((1, 1, 64), DType::F32, &device)?);
        let residual = Tensor::ones((1, 1, 48), DType::F32, &device)?;
        let norm = RmsNorm::new(Tensor::ones(16, DType::F32, &device)?, 1e-6)?;
        let heads = Tensor::ones((1, 1, 4, 16), DType::F32, &device)?;
        let counted = |call: &dyn Fn() -> Result<Tensor>| -> Result<Launches> {
            call()?;
            let before = Launches::of_thread();
            call()?;
            Ok(Launches::of_thread().since(before))
        };
        assert_eq!(counted(&|| plain.forward_with_residual(&xs, &residual))?, launches(0, 1));
        assert_eq!(counted(&|| gated.forward(&xs))?, launches(0, 1));
        assert_eq!(counted(&|| norm.forward_gated(&heads, &heads, GateActivation::Silu))?, launches(0, 1));
        Ok(())
    }

    fn launches(of_candle: usize, of_this_crate: u64) -> Launches {
        Launches { of_candle, of_this_crate }
    }
}
