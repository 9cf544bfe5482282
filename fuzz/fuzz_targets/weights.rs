#![no_main]

#[path = "../../tests/fuzz/weights.rs"]
mod weights;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    weights::run(bytes);
});
