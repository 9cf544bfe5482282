//! Model types of transformers that are refused, and why. `crates/compare/census` copies the reasons into
//! `docs/architectures.md`.

/// Model types that are refused for one reason.
struct Refused {
    /// The part of their attention that this crate does not have.
    missing: &'static str,
    model_types: &'static [&'static str],
}

const fn of(missing: &'static str, model_types: &'static [&'static str]) -> Refused {
    Refused { missing, model_types }
}

/// Returns why a model type is refused; `None` for one that is not in these tables.
pub(super) fn reason(model_type: &str) -> Option<String> {
    if let Some(refused) = MISSING.iter().find(|refused| refused.model_types.contains(&model_type)) {
        return Some(format!("it needs {}", refused.missing));
    }
    if NO_SOFTMAX.contains(&model_type) {
        return Some("the model has no softmax attention".into());
    }
    if COMBINED.contains(&model_type) {
        return Some("it combines models of other types, expected the config of one of them".into());
    }
    if NAMES_ALONE.contains(&model_type) {
        return Some("transformers registers the name and has no code for it".into());
    }
    if NOT_COMPARED.contains(&model_type) {
        return Some("its attention was not compared with that of transformers".into());
    }
    None
}

/// Model types by what is missing.
#[rustfmt::skip]
const MISSING: &[Refused] = &[
    of("a bias for pairs of tokens", &["bros", "cpmant"]),
    of("a mask that the model computes", &["canine", "doge", "groupvit", "groupvit_vision_model"]),
    of("a norm of the output of each head", &["muse_spark_text"]),
    of("a projection for each codebook", &["moshi_depth"]),
    of("a relative bias with a gate by content", &["wavlm"]),
    of("a scale for each dimension of the queries", &["timesfm", "timesfm2_5"]),
    of("a scale of the values", &["mimo_v2_flash"]),
    of("a window that keeps the prompt", &["unlimited_ocr_text"]),
    of("an approximation of softmax attention", &["informer", "mra", "nystromformer", "reformer", "yoso"]),
    of("an output gate with a bias for each head", &["beam"]),
    of("attention inside of a mixture of experts", &["jetmoe"]),
    of("attention that several layers share", &["zamba", "zamba2"]),
    of("autocorrelation in place of scores", &["autoformer"]),
    of("biases or projections by layout or by kind of token", &["layoutlmv2", "lilt", "luke", "speecht5"]),
    of("blocks of keys chosen at random", &["big_bird", "bigbird_pegasus"]),
    of("convolutions around or inside of the projections", &[
        "convbert", "cvt", "emu3_vqgan", "fun_asr_nano_encoder", "levit", "squeezebert", "swiftformer", "zaya",
    ]),
    of("differential attention: the difference of two softmaxes", &["diffllama"]),
    of("global tokens with separate projections", &["led", "longformer", "pegasus_x"]),
    of("keys and values from other inputs than the queries", &[
        "idefics_perciever", "muse_glimmer_assistant", "perceiver",
    ]),
    of("keys and values of another model", &["gemma4_assistant"]),
    of("keys of a coarser grid", &["efficientloftr", "hiera", "sam2_hiera_det_model"]),
    of("keys of a neighbourhood in an image", &["dinat"]),
    of("keys sampled at learned positions", &[
        "d_fine", "deformable_detr", "grounding-dino", "lw_detr", "mask2former", "mm-grounding-dino",
        "omdet-turbo", "oneformer", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "rf_detr",
        "rt_detr", "rt_detr_v2",
    ]),
    of("latent attention whose queries are scaled by position", &["mistral4"]),
    of("models of the package timm", &["gemma3n_vision", "timm_backbone"]),
    of("n-grams that are predicted together", &["prophetnet"]),
    of("layers that a list of their kinds counts", &["superglue"]),
    of("one softmax over the keys of the decoder and of the encoder", &["diffusion_gemma", "t5gemma2_decoder"]),
    of("outputs without their part along the values", &["neomme"]),
    of("relative positions by content", &[
        "funnel", "gemma3n_audio", "gemma4_audio", "granite_speech_encoder", "granite_speech_plus_encoder",
        "inkling2_text", "inkling_text", "layoutlmv3", "longt5", "nemotron3_5_transcribe_asr_audio",
        "nemotron3_diarization_audio", "nemotron_asr_streaming_encoder", "phi4_multimodal_audio", "udop",
        "vits", "xlnet",
    ]),
    of("relative positions by content (DeBERTa)", &["deberta"]),
    of("rotary positions by learned frequencies", &["lightglue", "mlcd_vision_model"]),
    of("rotary positions of another input's keys, on two axes", &["edgetam_video", "sam2_video", "sam3_tracker_video"]),
    of("rotary positions of the values", &["clvp_encoder"]),
    of("rotary positions of the first head alone", &["qwen2_5_omni_dit"]),
    of("rotary positions on three axes, two of which take turns", &["ernie4_5_vl_moe_text"]),
    of("rotary positions with two angles for the entries of a pair", &["hunyuan_vl_text", "vjepa2"]),
    of("several stacks of layers", &[
        "clvp", "evolla", "hrm_text", "lxmert", "mobilevit", "seamless_m4t", "seamless_m4t_v2",
        "timesformer",
    ]),
    of("rows of queries, values and keys in four groups", &["codegen"]),
];

/// Model types whose models have no softmax attention.
#[rustfmt::skip]
const NO_SOFTMAX: &[&str] = &[
    "align_vision_model", "bit", "chameleon_vqgan", "convnext", "convnextv2", "dac", "dinov3_convnext",
    "edgetam_prompt_encoder", "edgetam_video_prompt_encoder", "efficientnet", "encodec", "falcon_mamba",
    "fastspeech2_conformer_hifigan", "flava_image_codebook", "fnet", "focalnet", "gemma4_unified_audio",
    "gemma4_unified_vision", "glm_image_vqmodel", "hgnet_v2", "inkling_audio", "inkling_vision", "janus_vqgan",
    "mamba", "mamba2", "mobilenet_v1", "mobilenet_v2", "mobilevitv2", "patchtsmixer", "poolformer", "pp_lcnet",
    "pp_lcnet_v3", "pp_lcnet_v4", "qwen2_5_omni_bigvgan", "rag", "regnet", "resnet", "rt_detr_resnet", "rwkv",
    "sam2_prompt_encoder", "sam2_video_prompt_encoder", "sam3_tracker_prompt_encoder",
    "sam3_tracker_video_prompt_encoder", "sam_hq_prompt_encoder", "sam_prompt_encoder", "sapiens2_head",
    "speecht5_hifigan", "superpoint", "textnet", "timm_wrapper", "univnet", "uvdoc_backbone",
    "vibevoice_acoustic_tokenizer", "vibevoice_acoustic_tokenizer_decoder",
    "vibevoice_acoustic_tokenizer_encoder", "vibevoice_diffusion", "xlstm",
];

/// Model types that only combine models of other types.
#[rustfmt::skip]
const COMBINED: &[&str] = &[
    "aimv2", "align", "altclip", "aria", "audioflamingo3", "aya_vision", "bark", "blip", "blip-2", "blt",
    "canary", "chinese_clip", "chmv2", "clap", "clip", "clipseg", "cohere2_vision", "colmodernvbert", "colpali",
    "colqwen2", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2_vision", "deepseek_vl", "deepseek_vl_hybrid",
    "deimv2", "depth_anything", "depth_pro", "dia", "embedding_gemma2", "encoder-decoder", "exaone4_5",
    "fastspeech2_conformer_with_hifigan", "flava", "florence2", "fuyu", "gemma4_unified_assistant", "glm46v",
    "glm4v", "glm4v_moe", "glm5_next", "glm_image", "glm_ocr", "glmasr", "got_ocr2", "granite_docling",
    "granite_speech", "granite_speech_plus", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3",
    "inkling2", "inkling_mm_model", "instructblip", "instructblipvideo", "internvl", "janus", "jev", "kimi_k25",
    "kosmos-2.5", "lasr_ctc", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava", "llava_next",
    "llava_next_video", "llava_onevision", "metaclip_2", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
    "minimax_m3_vl", "mistral3", "mistral_large4", "mllama", "modernvbert", "moss_transcribe_diarize",
    "muse_glimmer", "musicflamingo", "musicgen", "musicgen_melody", "nemotron3_5_asr", "nemotron_asr_streaming",
    "ovis2", "owlv2", "owlvit", "paddleocr_vl", "paligemma", "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt",
    "pe_audio", "pe_audio_video", "pe_video", "pi0", "pix2struct", "pp_formulanet", "pp_ocrv5_mobile_det",
    "pp_ocrv5_mobile_rec", "pp_ocrv5_server_rec", "pp_ocrv6_small_det", "pp_ocrv6_small_rec",
    "pp_ocrv6_tiny_rec", "prompt_depth_anything", "qianfan_ocr", "qwen2_5_omni", "qwen2_5_omni_thinker",
    "qwen2_5_omni_token2wav", "qwen2_audio", "qwen3_asr", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe",
    "qwen4_exp", "sam2_vision_model", "sam3_video", "sam3_vision_model", "shieldgemma2", "siglip", "siglip2",
    "slanet", "slanext", "smolvlm", "speech-encoder-decoder", "step3p7", "t5gemma", "t5gemma2", "tipsv2",
    "tipsv2_dpt", "ultravbert", "unlimited_ocr", "unlimited_ocr_vision", "uvdoc", "vibevoice", "vibevoice_asr",
    "video_llama_3", "video_llava", "videoprism", "vipllava", "vision-encoder-decoder",
    "vision-text-dual-encoder", "voxtral", "voxtral_realtime", "xcodec", "zoedepth",
];

/// Model types that transformers registers without any code.
#[rustfmt::skip]
const NAMES_ALONE: &[&str] = &[
    "glmga", "internlm3", "iquestcoder", "layoutxlm", "nougat", "pp_chart2table", "pp_chart2table_vision",
];

/// Model types of which the census makes no tiny model.
#[rustfmt::skip]
const NOT_COMPARED: &[&str] = &[
    "bridgetower", "bridgetower_vision_model", "cohere_compass", "cohere_compass_text", "deepseek_ocr2",
    "dots3_note", "dots3_note_audio_encoder", "dots3_note_vision_encoder", "edgetam", "edgetam_vision_model",
    "emu3", "ernie4_5_vl_moe", "esmfold2", "fast_vlm", "fun_asr_nano", "gradium_phonon_tts", "granite4_vision",
    "granite_speech5_ctc", "granite_speech5_encoder", "higgs_audio_v2_tokenizer", "idefics_vision",
    "lw_detr_vit", "mimi", "molmo2", "moonshine_streaming", "muse_spark", "muse_spark_audio", "nemo_speechlm",
    "nemotron3_5_transcribe_audio", "nemotron3_5_transcribe_word_timestamp", "nemotron3_diarization",
    "nemotron_h_omni", "neucodec", "perception_lm", "pocket_tts", "pocket_tts_audio_tokenizer",
    "pp_ocrv5_server_det", "pp_ocrv6_medium_det", "qwen3_omni_moe", "qwen3_omni_moe_talker_text",
    "t5_gemma_module", "time_series_transformer", "upernet", "vitmatte", "vitpose", "xcodec2",
];

#[cfg(test)]
mod tests {
    use super::super::entry::model_types;
    use super::*;

    #[test]
    fn refused_model_types_are_listed_once_and_have_no_row() {
        let missing = MISSING.iter().flat_map(|refused| refused.model_types);
        let refused = missing.chain(NO_SOFTMAX).chain(COMBINED).chain(NAMES_ALONE).chain(NOT_COMPARED).copied();
        let mut listed: Vec<_> = refused.chain(model_types()).collect();
        listed.sort_unstable();
        let twice: Vec<_> = listed.windows(2).filter(|pair| pair[0] == pair[1]).collect();
        assert!(twice.is_empty(), "listed twice: {twice:?}");
    }
}
