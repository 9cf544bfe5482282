//! Chat templates, which make one text of a question and a passage: Jinja, as transformers renders it.

use std::path::Path;

use candle_core::{Error, Result, bail};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::common::{EXAMPLE, read_optional, read_text};
use crate::embedding::transformer::TemplateSettings;
use crate::texts::{TOKENIZER, special_token};

/// The file of a template; older folders have it in the tokenizer's settings.
pub const TEMPLATE: &str = "chat_template.jinja";

/// The texts that make up a pair.
#[derive(Debug, Clone, Copy)]
pub struct PairTexts<'a> {
    /// The instruction to the model, if there is one.
    pub prompt: Option<&'a str>,
    pub question: &'a str,
    pub passage: &'a str,
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

#[derive(Serialize)]
struct Message {
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

    /// Returns the text of a pair.
    ///
    /// # Errors
    /// If the template has a mistake, or raises an error.
    pub fn render(&self, pair: PairTexts) -> Result<String> {
        let content =
            |text: &str| if self.is_structured { json!([{"type": "text", "text": text}]) } else { text.into() };
        let system = pair.prompt.map(|prompt| Message { role: "system", content: content(prompt) });
        let question = Message { role: "query", content: content(pair.question) };
        let passage = Message { role: "document", content: content(pair.passage) };
        let messages: Vec<_> = system.into_iter().chain([question, passage]).collect();
        let mut variables = self.tokens.clone();
        variables.extend(self.settings.variables.clone());
        variables.entry("add_generation_prompt").or_insert(false.into());
        variables.insert("messages".into(), serde_json::to_value(messages).map_err(Error::wrap)?);
        self.environment.render_str(&self.source, Serde(&variables)).map_err(unusable)
    }

    /// Checks that the text of a pair has the question and the passage.
    ///
    /// # Errors
    /// If it has not, such as a template of chats, which reads messages of the user alone.
    pub fn check_pairs(&self) -> Result<()> {
        let text = |question, passage| self.render(PairTexts { prompt: None, question, passage });
        let first = text("0", "0")?;
        if text("1 2", "0")? == first || text("0", "1 2")? == first {
            bail!(
                "[{EXAMPLE}] the chat template ignores a question or a passage, expected one with the roles \
                 \"query\" and \"document\""
            )
        }
        Ok(())
    }
}

/// Returns the template in a tokenizer's settings: a text, or the default one in a list.
fn template_of(setting: &Value) -> Option<&str> {
    let default = setting.as_array().into_iter().flatten().find(|template| template["name"] == "default");
    setting.as_str().or(default.and_then(|template| template["template"].as_str()))
}

/// Makes the environment in which transformers renders templates.
fn environment() -> Result<Environment<'static>> {
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
