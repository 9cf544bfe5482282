//! Texts that a checkpoint's chat template makes: each is a message of the user, after the prompt as one of the system.

use std::path::Path;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Result, bail};

use crate::common::EXAMPLE;
use crate::embedding::template::{ChatTemplate, End, Message, encode_rendered};
use crate::embedding::transformer::TransformerSettings;

/// The variable in which templates get the task.
const TASK: &str = "task";

/// A chat template with what all texts have.
pub struct ChatTexts<'a> {
    template: &'a ChatTemplate,
    /// The text of the system's message, if there is one.
    prompt: Option<&'a str>,
    tokenizer: SimpleTokenizer,
    /// The most tokens of a text.
    most: Option<usize>,
    /// The last tokens of a text that is cut.
    end: Option<End>,
}

/// Reads the chat template in the folder of a model; `None` if the model's settings say that it reads plain texts.
/// `task` is a variable of the template, unless the settings have one.
///
/// # Errors
/// If there is no template, and for settings that change letters.
pub fn read(folder: &Path, settings: &TransformerSettings, task: Option<&str>) -> Result<Option<ChatTemplate>> {
    let Some(own) = settings.template.clone() else { return Ok(None) };
    if settings.lowercase {
        bail!("[{EXAMPLE}] do_lower_case is true, which is not supported with a chat template, expected false")
    }
    let Some(mut template) = ChatTemplate::read(folder, own)? else {
        bail!("[{EXAMPLE}] the checkpoint has no chat template, expected one for the messages of its settings")
    };
    if let Some(task) = task
        && template.reads(TASK)?
    {
        template.settings.variables.entry(TASK).or_insert(task.into());
    }
    Ok(Some(template))
}

/// Returns whether the template reads the task.
pub fn reads_task(template: Option<&ChatTemplate>) -> Result<bool> {
    template.map_or(Ok(false), |template| template.reads(TASK))
}

impl<'a> ChatTexts<'a> {
    /// Prepares the texts of a template, after a prompt unless it is empty.
    ///
    /// # Errors
    /// If the template ignores the text or the prompt.
    pub fn new(
        template: &'a ChatTemplate,
        tokenizer: &SimpleTokenizer,
        prompt: Option<&'a str>,
        most: Option<usize>,
    ) -> Result<Self> {
        let prompt = prompt.filter(|prompt| !prompt.is_empty());
        let first = template.render(prompt, &[user("0")])?;
        if template.render(prompt, &[user("1 2")])? == first {
            bail!("[{EXAMPLE}] the chat template ignores the text, expected one with the role \"user\"")
        }
        if prompt.is_some() && template.render(None, &[user("0")])? == first {
            bail!("[{EXAMPLE}] the chat template ignores the prompt, expected one with the role \"system\"")
        }
        let end = End::find(template, tokenizer, most, |filler| template.render(prompt, &[user(filler)]))?;
        Ok(Self { template, prompt, tokenizer: tokenizer.clone(), most, end })
    }

    /// Returns the tokens of a text.
    ///
    /// # Errors
    /// As the tokenizer and the template, and if there is no token.
    pub fn encode(&self, text: &str) -> Result<Encoding> {
        let whole = self.template.render(self.prompt, &[user(text)])?;
        let encoding = encode_rendered(&self.tokenizer, &whole, self.most, self.end.as_ref())?;
        if encoding.ids.is_empty() {
            bail!("[{EXAMPLE}] {text:?} has no token")
        }
        Ok(encoding)
    }
}

/// Returns a message of the user.
fn user(text: &str) -> Message<'_> {
    Message { role: "user", text }
}
