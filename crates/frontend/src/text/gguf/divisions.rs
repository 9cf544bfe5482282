//! The divisions of a text into words before its bytes are merged, by the values of `tokenizer.ggml.pre`.
//!
//! The models' own tokenizers have these expressions. `llama-vocab.cpp` of llama.cpp lists them by name, some of them
//! in forms that its regular expressions can express.

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As [`QWEN2`], with marks as letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words of upper case and then lower case, with an English ending.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As [`GPT4O`], with Chinese characters as words.
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const THREE_DIGITS: &str = r"\p{N}{1,3}";
/// Groups of three digits, counted from the last one.
const DIGITS_FROM_THE_END: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))";
const LINES: &str = r"[^\n]+|[\n]+";
const CHINESE_AND_KANA: &str = r"[一-龥぀-ゟ゠-ヿ]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
/// The letters of DeepSeek LLM, with a blank before them.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As [`QWEN2`], without English endings.
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
/// As [`LLAMA3`], with digits of any number, which an earlier expression divides.
const MINICPM5: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU_SCRIPTS: &str = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+";
/// As [`GPT4O`], with each digit by itself.
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const AFMOE_SCRIPTS: &str = r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+";

/// The division of a text before its bytes are merged.
pub(super) struct Division {
    /// The values of `tokenizer.ggml.pre` that name it.
    pub names: &'static [&'static str],
    /// Regular expressions, applied one after the other. Each divides the pieces of the one before it: a match is a
    /// piece, and so is the text between two matches.
    pub steps: &'static [&'static str],
    /// Whether words are looked up whole before they are merged.
    pub looks_up_words: bool,
    /// Whether a text begins with its first token, unless the file says otherwise.
    pub adds_bos: bool,
    /// Whether texts are composed (NFC).
    pub composes: bool,
    /// Whether blanks are U+2581 and other characters are themselves, as in SentencePiece, instead of bytes.
    pub is_raw: bool,
}

impl Division {
    const fn new(names: &'static [&'static str], steps: &'static [&'static str]) -> Self {
        Self { names, steps, looks_up_words: false, adds_bos: false, composes: false, is_raw: false }
    }

    const fn looks_up_words(self) -> Self {
        Self { looks_up_words: true, ..self }
    }

    const fn adds_bos(self) -> Self {
        Self { adds_bos: true, ..self }
    }

    const fn composes(self) -> Self {
        Self { composes: true, ..self }
    }

    const fn raw(self) -> Self {
        Self { is_raw: true, ..self }
    }

    /// Finds the division of a name.
    pub fn find(name: &str) -> Option<&'static Self> {
        DIVISIONS.iter().find(|division| division.names.contains(&name))
    }

    /// Returns the names of all divisions, in alphabetical order.
    pub fn names() -> Vec<&'static str> {
        let mut names: Vec<_> = DIVISIONS.iter().flat_map(|division| division.names).copied().collect();
        names.sort_unstable();
        names
    }
}

const DIVISIONS: &[Division] = &[
    Division::new(
        &[
            "a.x-4.0",
            "exaone4",
            "gigachat",
            "gpt-2",
            "granite-docling",
            "jais",
            "jina-de",
            "jina-es",
            "jina-v1-en",
            "jina-v2-code",
            "jina-v2-de",
            "jina-v2-es",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "phi-2",
            "roberta-bpe",
            "trillion",
        ],
        &[GPT2],
    ),
    Division::new(
        &["codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder"],
        &[DIGIT, GPT2],
    ),
    Division::new(
        &["falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral"],
        &[LLAMA3],
    )
    .looks_up_words()
    .adds_bos(),
    Division::new(&["chatglm-bpe", "dbrx", "smaug-bpe"], &[LLAMA3]),
    Division::new(&["glm4", "glm5"], &[LLAMA3]).looks_up_words(),
    Division::new(&["grok-2", "hunyuan", "kormo", "megrez", "solar-open", "stablelm2"], &[QWEN2]),
    Division::new(&["deepseek-r1-qwen", "f2llmv2", "qwen2"], &[QWEN2]).composes(),
    Division::new(&["qwen35"], &[QWEN35]).composes(),
    Division::new(
        &["deepseek-llm"],
        &[r"[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+"],
    ),
    Division::new(&["deepseek-coder"], &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", DIGIT]),
    Division::new(
        &["deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"],
        &[THREE_DIGITS, CHINESE_AND_KANA, DEEPSEEK3],
    ),
    Division::new(&["spark2_5"], &[THREE_DIGITS, CHINESE_AND_KANA, SPARK, DIGIT]),
    Division::new(&["youtu"], &[YOUTU_SCRIPTS, YOUTU]).looks_up_words(),
    Division::new(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    Division::new(&["bloom", "gpt3-finnish", "poro-chat"], &[BLOOM]),
    Division::new(&["viking"], &[BLOOM, DIGIT]),
    Division::new(&["tekken"], &[TEKKEN]).looks_up_words().adds_bos(),
    Division::new(&["gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"], &[GPT4O]),
    Division::new(&["granite-embed-multi-97m"], &[GPT4O]).looks_up_words(),
    Division::new(&["cohere2moe", "tiny_aya"], &[DIGITS_FROM_THE_END, GPT4O]),
    Division::new(&["kimi-k2"], &[KIMI]),
    Division::new(&["superbpe"], &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
    Division::new(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    Division::new(&["seed-coder"], &[SEED]),
    Division::new(&["ufakzeka"], &[UFAKZEKA]),
    Division::new(&["afmoe"], &[DIGITS_FROM_THE_END, AFMOE_SCRIPTS, DEEPSEEK3]),
    Division::new(&["laguna"], &[LINES, QWEN2]),
    Division::new(&["exaone-moe"], &[EXAONE_MOE]),
    Division::new(&["minicpm5"], &[THREE_DIGITS, MINICPM5]).looks_up_words(),
    Division::new(&["jais-2"], &[JAIS2]),
    Division::new(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    Division::new(&["gemma4", "granite-embed-multi-311m"], &[LINES]).adds_bos().raw(),
    Division::new(&["sarvam-moe"], &[LINES]).raw(),
];
