#![no_main]

#[path = "../../tests/fuzz/gguf.rs"]
mod gguf;

libfuzzer_sys::fuzz_target!(
    // As in `tokenizer_json`.
    init: drop(std::panic::take_hook()),
    |bytes: &[u8]| gguf::run(bytes)
);
