//! What is logged of a layer that is not causal, in processes of their own: it is logged once in each.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::*;

/// Tells a process that it is a child, and the layer that it tries.
const ASKED: &str = "CACHE_TEST_WARNINGS";

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

struct Counter;

impl log::Log for Counter {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() == log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            assert!(record.args().to_string().contains("a layer that is not causal continues a cache"), "{record:?}");
            WARNINGS.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

/// The warnings so far after two calls of two tokens each, under a mask.
fn warnings(layer: &dyn Layer, mask: &AttentionMask) -> Result<usize> {
    let (mut cache, xs) = (AttentionCache::default(), Tensor::randn(0f32, 1., (1, 2, 8), &Device::Cpu)?);
    for _ in 0..2 {
        layer.run(AttentionInput::new(&xs).with_mask(mask).with_cache(&mut cache))?;
    }
    Ok(WARNINGS.load(Ordering::Relaxed))
}

#[test]
#[ignore = "runs in a process that another test starts"]
fn child_counts_warnings_of_layers_that_are_not_causal() -> Result<()> {
    let asked = std::env::var(ASKED).expect("a test that starts this one");
    log::set_logger(&Counter).expect("no other test has a logger");
    log::set_max_level(log::LevelFilter::Warn);
    let layer = |causal: bool| -> Result<Box<dyn Layer>> {
        let latent = || LatentConfig::new(8, 2).with_kv_lora_rank(4).with_rope_head_dim(2).with_causal(causal);
        let is_latent = asked == "latent";
        let kind =
            if is_latent { Kind::Latent(latent()) } else { Kind::MultiHead(Config::new(8, 2).with_causal(causal)) };
        kind.layer(TorchSeed::new(1).var_builder(DType::F32, &Device::Cpu))
    };
    let none = AttentionMask::none();
    assert_eq!(warnings(&*layer(true)?, &none)?, 0, "a causal layer");
    let layer = layer(false)?;
    let xs = Tensor::randn(0f32, 1., (1, 4, 8), &Device::Cpu)?;
    layer.run(AttentionInput::new(&xs).with_cache(&mut AttentionCache::default()))?;
    assert_eq!(warnings(&*layer, &AttentionMask::causal())?, 0, "a causal mask");
    assert_eq!(warnings(&*layer, &none.clone().with_local_window(3, 0))?, 0, "a band that ends at the query");
    let bias = Tensor::zeros((1, 1, 1, 1), DType::F32, &Device::Cpu)?;
    assert_eq!(warnings(&*layer, &none.clone().with_bias(&bias))?, 0, "a bias, which may hide");
    assert_eq!(warnings(&*layer, &none)?, 1, "no mask");
    assert_eq!(warnings(&*layer, &none.with_local_window(3, 1))?, 1, "once");
    Ok(())
}

#[test]
fn a_layer_that_is_not_causal_is_named_once_where_it_continues_a_cache() {
    for asked in ["multi-head", "latent"] {
        let mut child = Command::new(std::env::current_exe().expect("a path to this test"));
        let output = child
            .args(["warnings::child_counts_warnings_of_layers_that_are_not_causal", "--exact", "--ignored"])
            .env(ASKED, asked)
            .output()
            .expect("the child runs");
        assert!(output.status.success(), "{asked}: {output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }
}
