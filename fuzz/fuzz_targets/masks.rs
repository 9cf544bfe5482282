#![no_main]

#[path = "../../tests/fuzz/masks.rs"]
mod masks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| masks::run(bytes));
