//! llama.cpp's architectures that are refused, and the reasons. `docs/architectures.md` has the same list.

const NO_MODEL: &str = "transformers has no model of this kind, by whose config.json its attention would be known";
const NO_ATTENTION: &str = "the model has no softmax attention";
const DRAFTS: &str = "the model drafts tokens for another model, whose keys or outputs it reads";
const INDEXED: &str = "an indexer chooses the keys";
const NOT_COMPARED: &str = "no file of it was compared with llama.cpp yet";

/// An architecture that is refused.
pub(super) struct RefusedArchitecture {
    pub name: &'static str,
    pub reason: &'static str,
}

const fn of(name: &'static str, reason: &'static str) -> RefusedArchitecture {
    RefusedArchitecture { name, reason }
}

/// The refused architectures, in alphabetical order.
pub(super) const REFUSED: &[RefusedArchitecture] = &[
    of("arctic", NO_MODEL),
    of("arwkv7", NO_ATTENTION),
    of("baichuan", NO_MODEL),
    of("bailingmoe", NO_MODEL),
    of("bailingmoe2", NO_MODEL),
    of("bailingmoe3", "its latent attention has a gate"),
    of("bitnet", NOT_COMPARED),
    of("chameleon", NOT_COMPARED),
    of("clip", "the file has an encoder of images alone"),
    of("codeshell", NO_MODEL),
    of("cogvlm", NO_MODEL),
    of("deci", NO_MODEL),
    of("deepseek", NO_MODEL),
    of("deepseek2-ocr", NO_MODEL),
    of("deepseek32", INDEXED),
    of("deepseek4", INDEXED),
    of("dflash", DRAFTS),
    of("dots3note", INDEXED),
    of("dream", NO_MODEL),
    of("eagle3", DRAFTS),
    of("exaone", NO_MODEL),
    of("gemma4-assistant", DRAFTS),
    of("glm-dsa", INDEXED),
    of("glm5-next", INDEXED),
    of("gptj", "llama.cpp names it and does not load it"),
    of("graniteswitch", NO_MODEL),
    of("grok", NO_MODEL),
    of("grovemoe", NO_MODEL),
    of("hrm_text", "its output gate is of another kind"),
    of("hunyuan_vl", "its rotary positions on several axes are of another kind"),
    of("hy_v4", INDEXED),
    of("internlm2", NO_MODEL),
    of("jais", NO_MODEL),
    of("jina-bert-v2", NO_MODEL),
    of("kimi-k3", NO_MODEL),
    of("llada", NO_MODEL),
    of("llada-moe", NO_MODEL),
    of("llama-embed", NOT_COMPARED),
    of("maincoder", NO_MODEL),
    of("mamba", NO_ATTENTION),
    of("mamba2", NO_ATTENTION),
    of("maple", NO_MODEL),
    of("mimo2", "its sinks are of another kind"),
    of("minicpm", NO_MODEL),
    of("minimax-01", "its linear attention is of another kind, and its softmax attention was not compared"),
    of("minimax-m3", INDEXED),
    of("mistral4", "its latent attention is of another kind"),
    of("muse-glimmer", NOT_COMPARED),
    of("nanbeige", NO_MODEL),
    of("neo-bert", NO_MODEL),
    of("nomic-bert-moe", NO_MODEL),
    of("openelm", NO_MODEL),
    of("orion", NO_MODEL),
    of("paddleocr", NOT_COMPARED),
    of("pangu-embedded", NO_MODEL),
    of("phimoe", "its rotary positions are scaled in another way"),
    of("plamo", NO_MODEL),
    of("plamo2", NO_MODEL),
    of("plamo3", NO_MODEL),
    of("plm", NO_MODEL),
    of("pockettts", NO_MODEL),
    of("qwen", NO_MODEL),
    of("qwen3tts", NO_MODEL),
    of("qwen4exp", INDEXED),
    of("refact", NO_MODEL),
    of("rnd1", NO_MODEL),
    of("rwkv6", NO_ATTENTION),
    of("rwkv6qwen2", NO_ATTENTION),
    of("rwkv7", NO_ATTENTION),
    of("smallthinker", NO_MODEL),
    of("spark2_5", NO_MODEL),
    of("step35", NOT_COMPARED),
    of("talkie", NO_MODEL),
    of("wavtokenizer-dec", NO_ATTENTION),
    of("xverse", NO_MODEL),
];
