#![no_main]

#[path = "../../tests/fuzz/tokenizer_json.rs"]
mod tokenizer_json;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tokenizer_json::run(bytes));
