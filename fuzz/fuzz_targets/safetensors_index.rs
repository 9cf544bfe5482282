#![no_main]

#[path = "../../tests/fuzz/safetensors_index.rs"]
mod safetensors_index;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| safetensors_index::run(bytes));
