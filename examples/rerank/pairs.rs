//! How a question and a passage become the tokens of one text.

use std::path::Path;

use candle_attention::text::{Encoding, SimpleTokenizer, SpecialTokens};
use candle_core::{Result, bail};
use serde_json::Value;

use crate::common::{EXAMPLE, read_optional};
use crate::embedding::transformer::{TemplateSettings, TransformerSettings};
use crate::model::Encoder;
use crate::settings::{ScoreKind, Settings};
use crate::template::{ChatTemplate, PairTexts};
use crate::texts::{TOKENIZER, max_tokens, tokenizer};

/// The texts before and after a pair on the card of Qwen3-Reranker, and its instruction.
const CARD_BEFORE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and \
                           the Instruct provided. Note that the answer can only be \"yes\" or \
                           \"no\".<|im_end|>\n<|im_start|>user\n";
const CARD_AFTER: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
const CARD_PROMPT: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// The way in which the two texts of a pair are put together.
enum Method {
    /// The tokenizer, with the prompt before the question.
    Tokenizer,
    /// A chat template, with the prompt as the message of the system.
    Template(Box<ChatTemplate>),
    /// The texts of Qwen3-Reranker's card, whose checkpoints have a template of chats.
    Card,
}

/// A question, which is put together with passages.
pub struct Pairs<'a> {
    tokenizer: SimpleTokenizer,
    method: Method,
    settings: &'a TransformerSettings,
    question: &'a str,
    prompt: Option<&'a str>,
    /// The most tokens of a pair; longer passages are cut.
    pub most: Option<usize>,
    /// Whether the model reads the two texts as segments.
    has_segments: bool,
}

impl<'a> Pairs<'a> {
    /// Reads the tokenizer in the folder of a model with this `config.json`.
    pub fn read(folder: &Path, config: &Value, settings: &'a Settings, model: &Encoder) -> Result<Self> {
        let own = &settings.transformer;
        let most = match own.max_tokens {
            None => max_tokens(folder, model.max_tokens)?,
            most => most,
        };
        // Texts by a template are cut here, since they have no tokens that the tokenizer adds.
        let whole = tokenizer(folder, None)?;
        let method = method(folder, config, settings, settings.kind(config, &whole)?)?;
        let cutting = if matches!(method, Method::Tokenizer) { tokenizer(folder, most)? } else { whole };
        let has_segments = model.num_segments() > 1 && names_segments(&read_optional(&folder.join(TOKENIZER))?);
        Ok(Self { tokenizer: cutting, method, settings: own, question: "", prompt: None, most, has_segments })
    }

    /// Returns pairs of this question, after a prompt if there is one.
    pub fn of(self, question: &'a str, prompt: Option<&'a str>) -> Self {
        Self { question, prompt, ..self }
    }

    pub fn tokenizer(&self) -> &SimpleTokenizer {
        &self.tokenizer
    }

    /// Returns the description of the method in reports; `None` if the tokenizer makes pairs.
    pub fn shown(&self) -> Option<&'static str> {
        match self.method {
            Method::Tokenizer => None,
            Method::Template(_) => Some("the checkpoint's chat template"),
            Method::Card => Some("that of Qwen3-Reranker's card"),
        }
    }

    /// Returns the tokens of the question with a passage.
    ///
    /// # Errors
    /// As the tokenizer and the template.
    pub fn encode(&self, passage: &str) -> Result<Encoding> {
        let mut encoding = self.encode_texts(passage)?;
        if !self.has_segments {
            encoding.type_ids.fill(0);
        }
        Ok(encoding)
    }

    /// Returns the tokens of the question with a passage, with the tokenizer's segments.
    fn encode_texts(&self, passage: &str) -> Result<Encoding> {
        let question = self.settings.letters(self.question);
        let letters = self.settings.letters(passage);
        match &self.method {
            Method::Tokenizer => {
                let prompt = self.settings.letters(self.prompt.unwrap_or_default());
                Ok(self.tokenizer.encode_pair(&format!("{prompt}{question}"), &letters)?)
            }
            Method::Template(template) => {
                self.encode_by(template, PairTexts { prompt: self.prompt, question: &question, passage: &letters })
            }
            Method::Card => self.encode_as_card(&question, &letters),
        }
    }

    /// Returns the tokens of a pair by a template. One that is cut ends with the tokens that the template puts after
    /// every text, as in sentence-transformers.
    fn encode_by(&self, template: &ChatTemplate, pair: PairTexts) -> Result<Encoding> {
        let mut encoding = self.encode_plain(&template.render(pair)?)?;
        let Some(most) = self.most.filter(|&most| encoding.ids.len() > most) else { return Ok(encoding) };
        cut(&mut encoding, most);
        if template.settings.restores_suffix {
            let PairTexts { prompt, .. } = pair;
            let text = |filler| template.render(PairTexts { prompt, question: filler, passage: filler });
            let one = self.encode_plain(&text("0")?)?;
            let other = self.encode_plain(&text("1 2 3 4")?)?;
            // The common end of pairs of different texts is the template's.
            let ends = one.ids.iter().rev().zip(other.ids.iter().rev());
            let common = ends.take_while(|(a, b)| a == b).count();
            if common < one.ids.len().min(other.ids.len()) {
                restore(&mut encoding, &one, common.min(most));
            }
        }
        Ok(encoding)
    }

    /// Returns the tokens of a pair as Qwen3-Reranker's card makes them: what is cut is the text between the two fixed
    /// ones.
    fn encode_as_card(&self, question: &str, passage: &str) -> Result<Encoding> {
        let mut encoding = self.encode_plain(CARD_BEFORE)?;
        let after = self.encode_plain(CARD_AFTER)?;
        let prompt = self.prompt.unwrap_or(CARD_PROMPT);
        let mut middle =
            self.encode_plain(&format!("<Instruct>: {prompt}\n<Query>: {question}\n<Document>: {passage}"))?;
        let fixed = encoding.ids.len() + after.ids.len();
        if let Some(most) = self.most {
            if most <= fixed {
                bail!("[{EXAMPLE}] texts are cut at {most} tokens, expected more than the {fixed} of the template")
            }
            cut(&mut middle, most - fixed);
        }
        encoding.num_truncated = middle.num_truncated;
        for part in [middle, after] {
            encoding.ids.extend(part.ids);
            encoding.tokens.extend(part.tokens);
            encoding.type_ids.extend(part.type_ids);
        }
        Ok(encoding)
    }

    /// Returns the tokens of a text; the tokenizer adds none.
    fn encode_plain(&self, text: &str) -> Result<Encoding> {
        Ok(self.tokenizer.encode_with(text, SpecialTokens::Without)?)
    }
}

/// Returns whether a model is called with segments in transformers, by the tokenizer's settings: its class for any
/// tokenizer has none unless the settings name them.
fn names_segments(tokenizer: &Value) -> bool {
    match tokenizer["model_input_names"].as_array() {
        Some(names) => names.iter().any(|name| name == "token_type_ids"),
        None => tokenizer["tokenizer_class"] != "TokenizersBackend",
    }
}

/// Returns the way in which the texts of a pair are put together.
///
/// # Errors
/// If a template is needed and there is none, or if its texts lack the question or the passage.
fn method(folder: &Path, config: &Value, settings: &Settings, kind: ScoreKind) -> Result<Method> {
    let by_settings = settings.transformer.template.clone();
    // Without a list of modules, sentence-transformers takes the template if there is one.
    if by_settings.is_none() && settings.has_modules {
        return Ok(Method::Tokenizer);
    }
    let arguments = by_settings.clone().unwrap_or(TemplateSettings { restores_suffix: true, ..Default::default() });
    let template = ChatTemplate::read(folder, arguments)?;
    let makes_text = matches!(kind, ScoreKind::Tokens { .. });
    let can_be_card = by_settings.is_none() && makes_text && config["model_type"] == "qwen3";
    match template {
        None if can_be_card => Ok(Method::Card),
        None if by_settings.is_some() || makes_text => {
            bail!("[{EXAMPLE}] the checkpoint has no chat template, expected one for a question and a passage")
        }
        None => Ok(Method::Tokenizer),
        Some(template) => match template.check_pairs() {
            Ok(()) => Ok(Method::Template(Box::new(template))),
            Err(_) if can_be_card => Ok(Method::Card),
            Err(error) => Err(error),
        },
    }
}

/// Cuts the end of a text that has more than `most` tokens.
fn cut(encoding: &mut Encoding, most: usize) {
    encoding.num_truncated += encoding.ids.len().saturating_sub(most);
    encoding.ids.truncate(most);
    encoding.tokens.truncate(most);
    encoding.type_ids.truncate(most);
}

/// Replaces the last `count` tokens of a text by the last ones of another.
fn restore(encoding: &mut Encoding, other: &Encoding, count: usize) {
    let start = encoding.ids.len() - count;
    let from = other.ids.len() - count;
    encoding.ids.splice(start.., other.ids[from..].iter().copied());
    encoding.tokens.splice(start.., other.tokens[from..].iter().cloned());
}
