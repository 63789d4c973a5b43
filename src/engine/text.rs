//! The text side of a loaded model: from a request to tokens, and from tokens to text.

use super::{
    chat::{ChatError, ChatTemplate},
    generate::{GenerateRequest, Prompt, PromptError},
    gguf::Header,
    tokenizer::{Tokenizer, TokenizerError},
};
use crate::units::Tokens;

/// Tokenizer, chat template and the limits of prompts. Shared by handles and thread; never changes.
pub struct TextSide {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    context_max: Tokens,
}

impl TextSide {
    /// The text side of the model with this header and context.
    ///
    /// # Errors
    ///
    /// When the tokenizer or the chat template cannot be used.
    pub fn new(header: &Header, context_max: Tokens) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_header(header)?;
        let template = ChatTemplate::from_header(header, &tokenizer)?;
        Ok(Self {
            tokenizer,
            template,
            context_max,
        })
    }

    /// The tokens of a request's prompt, complete with what begins a sequence.
    ///
    /// # Errors
    ///
    /// When it can never be answered as it is.
    pub fn prepare(&self, request: &GenerateRequest) -> Result<Vec<u32>, PromptError> {
        request.sampling.validate().map_err(PromptError::Sampling)?;
        let tokens = self.encode(&request.prompt)?;
        if tokens.is_empty() {
            return Err(PromptError::Empty);
        }
        let vocabulary = self.tokenizer.vocabulary();
        if let Some(&token) = tokens.iter().find(|&&token| token >= vocabulary) {
            return Err(PromptError::UnknownToken { token, vocabulary });
        }
        let count = Tokens::new(u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        if count > self.context_max {
            return Err(PromptError::BeyondContext {
                tokens: count,
                limit: self.context_max,
            });
        }
        Ok(tokens)
    }

    /// The tokenizer.
    #[must_use]
    pub const fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The longest context.
    #[must_use]
    pub const fn context_max(&self) -> Tokens {
        self.context_max
    }

    fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, PromptError> {
        let mut tokens = match prompt {
            Prompt::Chat(messages) => {
                let rendered = self
                    .template
                    .render(messages, &self.tokenizer)
                    .map_err(PromptError::Chat)?;
                self.tokenizer
                    .encode_rendered(&rendered.text, Some(rendered.mark))
                    .map_err(PromptError::Encode)?
            }
            Prompt::Text(text) if text.is_empty() => return Err(PromptError::Empty),
            Prompt::Text(text) => self.tokenizer.encode(text).map_err(PromptError::Encode)?,
            Prompt::Tokens(tokens) => return Ok(tokens.clone()),
        };
        self.tokenizer.begin(&mut tokens);
        Ok(tokens)
    }
}

/// Why a model file's text side cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// Its chat template cannot be used.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// Its tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl TextError {
    /// The remedy.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Chat(_) => "convert the model again, or take another file of it",
            Self::Tokenizer(error) => error.hint(),
        }
    }
}
