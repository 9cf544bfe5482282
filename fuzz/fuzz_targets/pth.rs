#![no_main]

#[path = "../../tests/fuzz/pth.rs"]
mod pth;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pth::run(bytes));
