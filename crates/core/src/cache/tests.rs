//! Tests of the buffers of a cache.

mod codes;

use candle_core::{DType, Device, Result, Storage, Tensor};

use super::staged::StagedCall;
use super::storage::KvFloats;
use super::{AttentionCache, AttentionCacheConfig, Padding};
use crate::mask::AttentionMask;
use crate::sdpa::SdpaOptions;

const B: usize = 2;
const H_KV: usize = 3;
const D: usize = 4;
const D_V: usize = 5;

/// Returns keys and values of `t` positions, all of whose numbers differ.
fn keys_and_values(t: usize, first: usize) -> Result<KvFloats> {
    let numbers = |width: usize| {
        let end = (B * H_KV * t * width) as f32;
        let numbers = (Tensor::arange(0f32, end, &Device::Cpu)? + 1000.0 * first as f64)?;
        // As a layer projects them: heads second in memory.
        numbers.reshape((B, t, H_KV, width))?.transpose(1, 2)
    };
    Ok(KvFloats { k: numbers(D)?, v: numbers(D_V)? })
}

/// The address of a view's buffer, and the view's strides.
#[derive(Debug, Clone, PartialEq)]
struct Location {
    address: usize,
    strides: Vec<usize>,
}

impl Location {
    fn of(tensor: &Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { panic!("a CPU tensor") };
        assert_eq!(layout.start_offset(), 0);
        let address = storage.as_slice::<f32>().expect("f32").as_ptr() as usize;
        Self { address, strides: layout.stride().to_vec() }
    }
}

/// Stages a call, without committing it.
fn stage(cache: &AttentionCache, k: &Tensor, v: &Tensor, padding: Padding) -> Result<StagedCall<'static>> {
    let new = cache.new_tokens((B, k.dim(2)?), padding)?;
    cache.stage(&new, k, Some(v), v.dim(3)?)
}

/// Returns the keys and values that a call attends to, after it was committed.
fn append(cache: &mut AttentionCache, t: usize, first: usize, padding: Padding) -> Result<KvFloats> {
    let KvFloats { k, v } = keys_and_values(t, first)?;
    let staged = stage(cache, &k, &v, padding)?;
    // A mask that allows no key that a sliding cache has dropped.
    let mask = AttentionMask::causal().with_window(1);
    let rows = staged.call.all_rows(&k, &mask, &SdpaOptions::default())?;
    let attended = staged.call.read(&rows.buffers)?;
    *cache = staged.cache;
    Ok(attended)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

#[test]
fn cache_appends_keys_and_values_in_one_buffer() -> Result<()> {
    let cfg = AttentionCacheConfig::new().with_capacity(8);
    let mut cache = AttentionCache::new(&cfg)?;
    let mut appended_keys = Vec::new();
    let mut appended_values = Vec::new();
    let mut key_location = None;
    let mut value_location = None;
    for (n, t) in [3, 1, 0, 2, 1, 1].into_iter().enumerate() {
        let new = keys_and_values(t, n)?;
        if t > 0 {
            appended_keys.push(new.k);
            appended_values.push(new.v);
        }
        let KvFloats { k, v } = append(&mut cache, t, n, Padding::default())?;
        assert_eq!(k.dims(), [B, H_KV, cache.len(), D]);
        assert_eq!(v.dims(), [B, H_KV, cache.len(), D_V]);
        assert_eq!(numbers(&k)?, numbers(&Tensor::cat(&appended_keys, 2)?)?);
        assert_eq!(numbers(&v)?, numbers(&Tensor::cat(&appended_values, 2)?)?);
        assert_eq!(Location::of(&k).strides, [H_KV * 8 * D, 8 * D, D, 1]);
        assert_eq!(Location::of(&v).strides, [H_KV * 8 * D_V, 8 * D_V, D_V, 1]);
        assert_eq!(*key_location.get_or_insert(Location::of(&k)), Location::of(&k), "keys are not moved");
        assert_eq!(*value_location.get_or_insert(Location::of(&v)), Location::of(&v), "values are not moved");
    }
    let before = key_location.expect("calls");
    let memory = cache.memory();
    let KvFloats { k, .. } = append(&mut cache, 1, 6, Padding::default())?;
    assert_ne!(Location::of(&k).address, before.address);
    assert_eq!((cache.capacity(), cache.memory()), (16, 2 * memory), "doubled");
    assert_eq!(memory, B * H_KV * 8 * (D + D_V) * 4);
    Ok(())
}

/// Checks that a buffer is allocated once every `capacity - window` positions, and that keys are in the order of their
/// positions.
#[test]
fn sliding_cache_allocates_a_buffer_once_in_capacity_less_window_positions() -> Result<()> {
    let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_window(4))?;
    let mut moves = 0;
    let mut address = 0;
    for n in 0..41 {
        let KvFloats { k, .. } = append(&mut cache, 1, n, Padding::default())?;
        assert!(cache.capacity() <= 8 && k.dim(2)? >= 4.min(n + 1), "{:?}", k.dims());
        // The first number of each position is that of its call.
        let firsts = numbers(&k.narrow(0, 0, 1)?.narrow(1, 0, 1)?.narrow(3, 0, 1)?)?;
        let expected: Vec<_> = (n + 1 - k.dim(2)?..=n).map(|n| 1000.0 * n as f32).collect();
        assert_eq!(firsts, expected, "call {n}");
        let current = Location::of(&k).address;
        moves += usize::from(current != address);
        address = current;
    }
    assert!(moves <= 10, "{moves} buffers in 41 calls");
    assert_eq!((cache.len(), cache.capacity()), (41, 8));
    Ok(())
}

#[test]
fn cache_is_unchanged_by_a_call_that_was_not_committed() -> Result<()> {
    for cfg in [
        AttentionCacheConfig::new().with_capacity(16),
        AttentionCacheConfig::new().with_capacity(3),
        AttentionCacheConfig::new().with_window(2),
    ] {
        let mut cache = AttentionCache::new(&cfg)?;
        append(&mut cache, 3, 0, Padding::default())?;
        let stored_numbers = |source: &AttentionCache| -> Result<Vec<f32>> {
            let rows = source.buffers.as_ref().expect("buffers").rows(&(0..source.stored[0].len()))?;
            let KvFloats { k, v } = rows.floats(DType::F32)?;
            Ok([numbers(&k)?, numbers(&v)?].concat())
        };
        let before = stored_numbers(&cache)?;
        let capacity = cache.capacity();
        let memory = cache.memory();
        for t in [1, 2, 9] {
            let KvFloats { k, v } = keys_and_values(t, 1)?;
            drop(stage(&cache, &k, &v, Padding::default())?);
            assert_eq!((cache.lens(), cache.capacity(), cache.memory()), (vec![3, 3], capacity, memory));
            assert_eq!(stored_numbers(&cache)?, before);
        }
    }
    Ok(())
}
