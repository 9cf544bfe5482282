//! Any tokenizer.json, and texts through it.

use candle_attention::SimpleTokenizer;

pub fn run(file: &[u8]) {
    let Ok(tokenizer) = SimpleTokenizer::from_bytes(file) else { return };
    for text in ["", "hello world", "don't stop\n\n  3.14 naïve 漢字 🙂", "[PAD] [UNK] <s>"] {
        if let Ok(encoding) = tokenizer.encode(text) {
            let _ = tokenizer.decode(&encoding.ids);
        }
    }
    let _ = tokenizer.encode_batch(&["hello", "", "hello world"]);
    let _ = tokenizer.words();
}
