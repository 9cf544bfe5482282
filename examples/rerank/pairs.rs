//! How a question and a passage become the tokens of one text.

use std::path::Path;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Result, bail};
use serde_json::Value;

use crate::common::{EXAMPLE, read_optional};
use crate::embedding::template::{ChatTemplate, End, Message, cut, encode_plain, encode_rendered};
use crate::embedding::transformer::{TemplateSettings, TransformerSettings};
use crate::model::Encoder;
use crate::settings::{ScoreKind, Settings};
use crate::texts::{TOKENIZER, cutting, max_tokens, tokenizer};

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

/// The way in which pairs of a checkpoint become tokens.
pub struct Pairs<'a> {
    pub tokenizer: SimpleTokenizer,
    /// The kind of the head that scores pairs.
    pub kind: ScoreKind,
    method: Method,
    settings: &'a TransformerSettings,
    /// The most tokens of a pair; longer passages are cut.
    pub most: Option<usize>,
    /// Whether the model reads the two texts as segments.
    has_segments: bool,
}

/// A question, which is put together with passages.
pub struct Question<'a> {
    pairs: &'a Pairs<'a>,
    parts: Parts<'a>,
}

/// The texts and tokens that all pairs of a question have.
enum Parts<'a> {
    /// The text before the passage's.
    Tokenizer { first: String },
    Template {
        template: &'a ChatTemplate,
        prompt: Option<&'a str>,
        question: String,
        /// The last tokens of a pair that is cut.
        end: Option<End>,
    },
    /// The fixed tokens before and after a pair, and the text between them up to the passage.
    Card { before: Encoding, start: String, after: Encoding },
}

impl<'a> Pairs<'a> {
    /// Reads the tokenizer in the folder of a model with this `config.json`.
    pub fn read(folder: &Path, config: &Value, settings: &'a Settings, model: &Encoder) -> Result<Self> {
        let own = &settings.transformer;
        let most = max_tokens(own.max_tokens, folder, model.max_tokens)?;
        let mut tokenizer = tokenizer(folder)?;
        let kind = settings.kind(config, &tokenizer)?;
        let method = method(folder, config, settings, kind)?;
        // Texts by a template are cut here, since they have no tokens that the tokenizer adds.
        if matches!(method, Method::Tokenizer) {
            tokenizer = cutting(tokenizer, most)?;
        }
        let has_segments = model.num_segments() > 1 && names_segments(&read_optional(&folder.join(TOKENIZER))?);
        Ok(Self { tokenizer, kind, method, settings: own, most, has_segments })
    }

    /// Returns the description of the method in reports; `None` if the tokenizer makes pairs.
    pub fn shown(&self) -> Option<&'static str> {
        match self.method {
            Method::Tokenizer => None,
            Method::Template(_) => Some("the checkpoint's chat template"),
            Method::Card => Some("that of Qwen3-Reranker's card"),
        }
    }

    /// Prepares the pairs of a question, after a prompt if there is one.
    ///
    /// # Errors
    /// As the tokenizer and the template, and if texts are cut before the passage of a card.
    pub fn of<'q>(&'q self, question: &str, prompt: Option<&'q str>) -> Result<Question<'q>> {
        let question = self.settings.letters(question);
        let parts = match &self.method {
            Method::Tokenizer => {
                let prompt = self.settings.letters(prompt.unwrap_or_default());
                Parts::Tokenizer { first: format!("{prompt}{question}") }
            }
            Method::Template(template) => {
                let render = |filler: &str| template.render(prompt, &pair(filler, filler));
                let end = End::find(template, &self.tokenizer, self.most, render)?;
                Parts::Template { template, prompt, question, end }
            }
            Method::Card => {
                let before = encode_plain(&self.tokenizer, CARD_BEFORE)?;
                let after = encode_plain(&self.tokenizer, CARD_AFTER)?;
                let fixed = before.ids.len() + after.ids.len();
                if let Some(most) = self.most.filter(|&most| most <= fixed) {
                    bail!("[{EXAMPLE}] texts are cut at {most} tokens, expected more than the {fixed} of the template")
                }
                let prompt = prompt.unwrap_or(CARD_PROMPT);
                let start = format!("<Instruct>: {prompt}\n<Query>: {question}\n<Document>: ");
                Parts::Card { before, start, after }
            }
        };
        Ok(Question { pairs: self, parts })
    }
}

impl Question<'_> {
    /// Returns the tokens of the question with a passage.
    ///
    /// # Errors
    /// As the tokenizer and the template.
    pub fn encode(&self, passage: &str) -> Result<Encoding> {
        let Pairs { tokenizer, settings, has_segments, .. } = self.pairs;
        let letters = settings.letters(passage);
        let mut encoding = match &self.parts {
            Parts::Tokenizer { first } => tokenizer.encode_pair(first, &letters)?,
            Parts::Template { template, prompt, question, end } => {
                let text = template.render(*prompt, &pair(question, &letters))?;
                encode_rendered(tokenizer, &text, self.pairs.most, end.as_ref())?
            }
            Parts::Card { before, start, after } => self.encode_between(before, &format!("{start}{letters}"), after)?,
        };
        if !has_segments {
            encoding.type_ids.fill(0);
        }
        Ok(encoding)
    }

    /// Returns the tokens of a text between fixed tokens; only the text is cut.
    fn encode_between(&self, before: &Encoding, text: &str, after: &Encoding) -> Result<Encoding> {
        let mut middle = encode_plain(&self.pairs.tokenizer, text)?;
        if let Some(most) = self.pairs.most {
            cut(&mut middle, most - before.ids.len() - after.ids.len());
        }
        let mut encoding = before.clone();
        encoding.num_truncated = middle.num_truncated;
        for part in [&middle, after] {
            encoding.ids.extend_from_slice(&part.ids);
            encoding.tokens.extend_from_slice(&part.tokens);
            encoding.type_ids.extend_from_slice(&part.type_ids);
        }
        Ok(encoding)
    }
}

/// Returns the messages of a pair.
fn pair<'a>(question: &'a str, passage: &'a str) -> [Message<'a>; 2] {
    [Message { role: "query", text: question }, Message { role: "document", text: passage }]
}

/// Checks that a template's text of a pair has the question and the passage.
///
/// # Errors
/// If it has not, such as that of a template of chats, which reads messages of the user alone.
fn check_pairs(template: &ChatTemplate) -> Result<()> {
    let text = |question, passage| template.render(None, &pair(question, passage));
    let first = text("0", "0")?;
    if text("1 2", "0")? == first || text("0", "1 2")? == first {
        bail!(
            "[{EXAMPLE}] the chat template ignores a question or a passage, expected one with the roles \"query\" and \
             \"document\""
        )
    }
    Ok(())
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
        Some(template) => match check_pairs(&template) {
            Ok(()) => Ok(Method::Template(Box::new(template))),
            Err(_) if can_be_card => Ok(Method::Card),
            Err(error) => Err(error),
        },
    }
}
