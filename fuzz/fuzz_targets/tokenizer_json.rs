//! Any tokenizer.json, and texts through it.
#![no_main]

use candle_attention::SimpleTokenizer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let Ok(tokenizer) = SimpleTokenizer::from_bytes(file) else { return };
    for text in ["", "hello world", "don't stop\n\n  3.14 naïve 漢字 🙂", "[PAD] [UNK] <s>"] {
        if let Ok(encoding) = tokenizer.encode(text) {
            let _ = tokenizer.decode(&encoding.ids);
        }
    }
    let _ = tokenizer.encode_batch(&["hello", "", "hello world"]);
    let _ = tokenizer.words();
});
