//! The text side of a loaded model: from a request to tokens, and from tokens to text.

use std::sync::Arc;

use super::{
    answer::{AnswerStyle, THOUGHT, Thoughts},
    chat::{ChatError, ChatTemplate},
    constraint::Vocabulary,
    generate::{GenerateRequest, Prompt, PromptError},
    gguf::Header,
    sampling::TokenMask,
    tokenizer::{Tokenizer, TokenizerError},
};
use crate::units::Tokens;

/// Tokenizer, chat template and the limits of prompts. Shared by handles and thread; never changes.
pub struct TextSide {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    context_max: Tokens,
    vocabulary: Arc<Vocabulary>,
}

/// A request whose prompt is tokens and whose form is a mask.
pub struct Prepared {
    /// The prompt, complete with what begins a sequence.
    pub tokens: Vec<u32>,
    /// How the answer is to be read.
    pub style: AnswerStyle,
    /// What holds the answer to its form.
    pub(super) mask: Option<Box<dyn TokenMask>>,
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
            vocabulary: Arc::default(),
        })
    }

    /// The tokens of a request's prompt, and what holds its answer to its form.
    ///
    /// # Errors
    ///
    /// When it can never be answered as it is.
    pub fn prepare(&self, request: &GenerateRequest) -> Result<Prepared, PromptError> {
        request.sampling.validate().map_err(PromptError::Sampling)?;
        let (tokens, style) = self.encode(&request.prompt)?;
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
        let mask = match &request.constraint {
            None => None,
            Some(constraint) => {
                let tools = match &request.prompt {
                    Prompt::Chat(conversation) => conversation.tools.as_slice(),
                    Prompt::Text(_) | Prompt::Tokens(_) => &[],
                };
                let after = (style.thoughts == Thoughts::Open).then_some(THOUGHT);
                let mask = self
                    .vocabulary
                    .mask(&self.tokenizer, constraint, tools, self.template.tool_format(), after)
                    .map_err(|source| {
                        let (field, value) = constraint.place();
                        PromptError::Constraint { field, value, source }
                    })?;
                Some(mask)
            }
        };
        Ok(Prepared { tokens, style, mask })
    }

    /// What grammars need of the vocabulary, and what it occupies now.
    pub(super) fn vocabulary(&self) -> Arc<Vocabulary> {
        Arc::clone(&self.vocabulary)
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

    fn encode(&self, prompt: &Prompt) -> Result<(Vec<u32>, AnswerStyle), PromptError> {
        let mut style = AnswerStyle::default();
        let mut tokens = match prompt {
            Prompt::Chat(conversation) => {
                let rendered = self
                    .template
                    .render(conversation, &self.tokenizer)
                    .map_err(PromptError::Chat)?;
                style = rendered.style;
                self.tokenizer
                    .encode_rendered(&rendered.text, Some(rendered.mark))
                    .map_err(PromptError::Encode)?
            }
            Prompt::Text(text) if text.is_empty() => return Err(PromptError::Empty),
            Prompt::Text(text) => self.tokenizer.encode(text).map_err(PromptError::Encode)?,
            Prompt::Tokens(tokens) => return Ok((tokens.clone(), style)),
        };
        self.tokenizer.begin(&mut tokens);
        Ok((tokens, style))
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
