//! Chat templates, which make one text of several messages: Jinja, as transformers renders it. Their texts have all
//! special tokens, so that the tokenizer adds none.

use std::path::Path;

use candle_attention::text::{Encoding, SimpleTokenizer, SpecialTokens};
use candle_core::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::transformer::TemplateSettings;
use crate::common::{EXAMPLE, read_optional, read_text};
use crate::texts::{TOKENIZER, special_token};

/// The file of a template; older folders have it in the tokenizer's settings.
pub const TEMPLATE: &str = "chat_template.jinja";

/// A message, whose sender is "system" for instructions to the model.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    pub role: &'static str,
    pub text: &'a str,
}

/// A chat template with its settings.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    pub settings: TemplateSettings,
    is_structured: bool,
    /// The tokenizer's special tokens by their names in templates, such as `eos_token`.
    tokens: Map<String, Value>,
}

/// A message as templates read it.
#[derive(Serialize)]
struct RenderedMessage {
    role: &'static str,
    content: Value,
}

impl ChatTemplate {
    /// Reads the template of a tokenizer's folder; `None` if there is none.
    pub fn read(folder: &Path, settings: TemplateSettings) -> Result<Option<Self>> {
        let file = folder.join(TEMPLATE);
        let tokenizer = read_optional(&folder.join(TOKENIZER))?;
        let source = if file.is_file() {
            read_text(&file)?
        } else {
            match template_of(&tokenizer["chat_template"]) {
                Some(text) => text.to_string(),
                None => return Ok(None),
            }
        };
        let mut tokens = Map::new();
        for (name, token) in tokenizer.as_object().into_iter().flatten() {
            if let Some(text) = special_token(token).filter(|_| name.ends_with("_token")) {
                tokens.insert(name.clone(), text.into());
            }
        }
        // As sentence-transformers decides.
        let parts = ["content[0]", ".type", "'type'", "\"type\"", "message.content["];
        let has_parts = parts.iter().any(|part| source.contains(part));
        let is_structured = settings.is_structured.unwrap_or(has_parts);
        Ok(Some(Self { environment: environment()?, source, settings, is_structured, tokens }))
    }

    /// Returns whether the template reads a variable.
    ///
    /// # Errors
    /// If the template has a mistake.
    pub fn reads(&self, variable: &str) -> Result<bool> {
        let environment = environment()?;
        let template = environment.template_from_str(&self.source).map_err(unusable)?;
        Ok(template.undeclared_variables(false).contains(variable))
    }

    /// Returns the text of messages, after a prompt as the message of the system if there is one.
    ///
    /// # Errors
    /// If the template has a mistake, or raises an error.
    pub fn render(&self, prompt: Option<&str>, messages: &[Message]) -> Result<String> {
        let content =
            |text: &str| if self.is_structured { json!([{"type": "text", "text": text}]) } else { text.into() };
        let system = prompt.map(|text| Message { role: "system", text });
        let rendered: Vec<_> = system
            .iter()
            .chain(messages)
            .map(|message| RenderedMessage { role: message.role, content: content(message.text) })
            .collect();
        let mut variables = self.tokens.clone();
        variables.extend(self.settings.variables.clone());
        variables.entry("add_generation_prompt").or_insert(false.into());
        variables.insert("messages".into(), serde_json::to_value(rendered).map_err(Error::wrap)?);
        self.environment.render_str(&self.source, Serde(&variables)).map_err(unusable)
    }
}

/// The last tokens of a template's text, which it puts after every text.
pub struct End {
    ids: Vec<u32>,
    tokens: Vec<String>,
}

impl End {
    /// Finds the tokens that a template puts after every text, if texts that are cut at `most` tokens have to end with
    /// them; `None` otherwise, or if there are none. `render` returns what the template makes of a text.
    ///
    /// # Errors
    /// As the tokenizer and `render`.
    pub fn find(
        template: &ChatTemplate,
        tokenizer: &SimpleTokenizer,
        most: Option<usize>,
        render: impl Fn(&str) -> Result<String>,
    ) -> Result<Option<Self>> {
        if most.is_none() || !template.settings.restores_suffix {
            return Ok(None);
        }
        let mut one = encode_plain(tokenizer, &render("0")?)?;
        let other = encode_plain(tokenizer, &render("1 2 3 4")?)?;
        // The common end of different texts is the template's, as in sentence-transformers.
        let ends = one.ids.iter().rev().zip(other.ids.iter().rev());
        let common = ends.take_while(|(a, b)| a == b).count();
        if common == one.ids.len().min(other.ids.len()) {
            return Ok(None);
        }
        let start = one.ids.len() - common;
        Ok(Some(Self { ids: one.ids.split_off(start), tokens: one.tokens.split_off(start) }))
    }

    /// Replaces the last tokens of a text by these.
    fn restore(&self, encoding: &mut Encoding) {
        let count = self.ids.len().min(encoding.ids.len());
        let start = encoding.ids.len() - count;
        let from = self.ids.len() - count;
        encoding.ids.splice(start.., self.ids[from..].iter().copied());
        encoding.tokens.splice(start.., self.tokens[from..].iter().cloned());
    }
}

/// Returns the tokens of a template's text, at most `most` of them. If they are cut, they end with `end`.
///
/// # Errors
/// As the tokenizer.
pub fn encode_rendered(
    tokenizer: &SimpleTokenizer,
    text: &str,
    most: Option<usize>,
    end: Option<&End>,
) -> Result<Encoding> {
    let mut encoding = encode_plain(tokenizer, text)?;
    let Some(most) = most.filter(|&most| encoding.ids.len() > most) else { return Ok(encoding) };
    cut(&mut encoding, most);
    if let Some(end) = end {
        end.restore(&mut encoding);
    }
    Ok(encoding)
}

/// Returns the tokens of a text; the tokenizer adds none.
pub fn encode_plain(tokenizer: &SimpleTokenizer, text: &str) -> Result<Encoding> {
    Ok(tokenizer.encode_with(text, SpecialTokens::Without)?)
}

/// Cuts the end of a text that has more than `most` tokens.
pub fn cut(encoding: &mut Encoding, most: usize) {
    encoding.num_truncated += encoding.ids.len().saturating_sub(most);
    encoding.ids.truncate(most);
    encoding.tokens.truncate(most);
    encoding.type_ids.truncate(most);
}

/// Returns the template in a tokenizer's settings: a text, or the default one in a list.
fn template_of(setting: &Value) -> Option<&str> {
    let default = setting.as_array().into_iter().flatten().find(|template| template["name"] == "default");
    setting.as_str().or(default.and_then(|template| template["template"].as_str()))
}

/// Makes the environment in which transformers renders templates.
fn environment<'s>() -> Result<Environment<'s>> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(unusable)?);
    environment.add_function("raise_exception", |text: String| -> std::result::Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
    });
    Ok(environment)
}

fn unusable(error: minijinja::Error) -> Error {
    Error::Msg(format!("[{EXAMPLE}] the chat template cannot be rendered: {error}"))
}
