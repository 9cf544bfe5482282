#![no_main]

#[path = "../../tests/fuzz/tokenizer_json.rs"]
mod tokenizer_json;

libfuzzer_sys::fuzz_target!(
    // libFuzzer's hook ends the process at a panic of `tokenizers` that this crate turns into an error. One that
    // nothing catches ends it without the hook.
    init: drop(std::panic::take_hook()),
    |bytes: &[u8]| tokenizer_json::run(bytes)
);
