#![no_main]

#[path = "../../tests/fuzz/config_json.rs"]
mod config_json;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| config_json::run(bytes));
