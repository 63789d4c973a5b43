//! Text side of a loaded model: requests to tokens, tokens to text.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
};

use serde_json::{Map, Value};

use super::{
    answer::{AnswerStyle, Thoughts},
    chat::{ChatError, ChatTemplate, KEY_TEMPLATE},
    constraint::{self, After, Client, ConstraintError},
    error::LoadErrorKind,
    generate::{GenerateRequest, Prompt, PromptError},
    gguf::Header,
    helper::{FormPlace, Helper, JobError, Kind, Setup, most},
    sampling::{TokenMask, recommended},
    tokenizer::{Pieces, Tokenizer, TokenizerError},
};
use cotenant_conversation::SamplingWish;
use cotenant_units::{Bytes, Tokens, causes::in_one_line, lock::locked};

/// Tokenizer, chat template and the limits of prompts. Shared by handles and the engine thread; immutable.
pub struct TextSide {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    context_max: Tokens,
    helper: Arc<Helper>,
    sampling: SamplingWish,
    /// Held while a conversation is rendered: each rendering copies the conversation, and one copy at a time is enough.
    rendering: Mutex<()>,
}

/// A request with its prompt as tokens and its form as a mask.
pub struct Prepared {
    /// The prompt, including the tokens that begin a sequence.
    pub tokens: Vec<u32>,
    /// Parsing style of the answer.
    pub style: AnswerStyle,
    /// Mask that constrains the answer to its form.
    pub mask: Option<Box<dyn TokenMask>>,
}

impl TextSide {
    /// The text side of the model with this header and context.
    ///
    /// # Errors
    /// The tokenizer or the chat template cannot be used.
    pub fn new(header: &Header, context_max: Tokens) -> Result<Self, TextError> {
        Self::with_helper(header, context_max, None)
    }

    /// The same, with templates and grammars computed in a helper process of the `cotenant` program, with bounded
    /// memory and time.
    ///
    /// # Errors
    /// The tokenizer or the chat template cannot be used.
    pub fn with_helper(
        header: &Header,
        context_max: Tokens,
        program: Option<PathBuf>,
    ) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_header(header)?;
        let template = ChatTemplate::from_header(header, &tokenizer);
        let sampling = recommended(header);
        let side = Self {
            tokenizer,
            template,
            context_max,
            helper: Arc::new(Helper::new(program)),
            sampling,
            rendering: Mutex::default(),
        };
        compile(&side.helper, side.template.source(), || side.setup())?;
        Ok(side)
    }

    /// Rejects a tokenizer or a chat template that would fail every load, without building the tokenizer.
    ///
    /// # Errors
    /// As [`Self::new`], except for rejections by the tokenizer library.
    pub fn check(header: &Header) -> Result<(), TextError> {
        Tokenizer::check(header)?;
        let template = header.string(KEY_TEMPLATE).unwrap_or_default();
        let setup = || Setup {
            words: Pieces::default(),
            ends: Vec::new(),
            template: Some(template.to_owned()),
        };
        Ok(compile(&Helper::new(None), template, setup)?)
    }

    /// Upper bound of the text side's memory for the model with this header, the helper included: in whole pages, like
    /// everything in the ledger.
    pub fn bytes_max(header: &Header) -> Bytes {
        Tokenizer::heap_bytes(header)
            .saturating_add(Self::helper_bytes_max(header))
            .round_up(Bytes::from_kib(4))
    }

    /// The helper process's share of it, while forms and templates are in use.
    pub fn helper_bytes_max(header: &Header) -> Bytes {
        let texts = header.strings("tokenizer.ggml.tokens");
        let (tokens, bytes) = texts.map_or((0, 0), |texts| {
            (texts.len(), texts.iter().map(str::len).sum())
        });
        most(tokens, bytes)
    }

    /// The position in a prompt where its last message begins: templates begin each message, as they begin the answer,
    /// with the same control token. `None` for a prompt without messages.
    pub(super) fn last_message(&self, prompt: &[u32]) -> Option<u32> {
        let is_control = |token: &u32| self.tokenizer.bytes(*token).is_empty();
        let answer = prompt.iter().rposition(is_control)?;
        let begins = prompt.get(answer)?;
        let message = prompt
            .iter()
            .take(answer)
            .rposition(|token| token == begins);
        message.and_then(|message| u32::try_from(message).ok())
    }

    /// The tokens of a request's prompt, and the mask of its answer.
    ///
    /// # Errors
    /// It can never be answered in this form.
    pub fn prepare(
        &self,
        request: &GenerateRequest,
        client: Client<'_>,
    ) -> Result<Prepared, PromptError> {
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
        let mask = match &request.form {
            None => None,
            Some(form) => {
                let tools = request.prompt.tools();
                let after = match style.thoughts {
                    Thoughts::Channels { in_text: false } => After::Channels,
                    Thoughts::Open(tags) => After::Text(tags.end),
                    Thoughts::Channels { in_text: true }
                    | Thoughts::None
                    | Thoughts::Perhaps(_) => After::Nothing,
                };
                let tools = (tools, self.template.tool_format());
                let setup = || self.setup();
                let mask = constraint::mask(
                    &self.helper,
                    &self.tokenizer,
                    setup,
                    form,
                    tools,
                    after,
                    client,
                );
                Some(mask.map_err(|source| match source {
                    ConstraintError::Helper { message } => PromptError::Helper { message },
                    source => {
                        let (field, value) = constraint::place(form);
                        PromptError::Constraint {
                            field,
                            value,
                            source,
                        }
                    }
                })?)
            }
        };
        Ok(Prepared {
            tokens,
            style,
            mask,
        })
    }

    /// The process that computes templates and grammars.
    pub(super) fn helper(&self) -> Arc<Helper> {
        Arc::clone(&self.helper)
    }

    /// Waits for a slot for the grammar of a request's answer; `None` if the answer has no form.
    pub(super) async fn form_place(&self, request: &GenerateRequest) -> Option<FormPlace> {
        let form = request.form.as_ref()?;
        let answer = request
            .max_tokens
            .unwrap_or(self.context_max)
            .min(self.context_max);
        Some(
            self.helper
                .form_place(constraint::bytes(form, request.prompt.tools(), answer))
                .await,
        )
    }

    fn setup(&self) -> Setup {
        Setup {
            words: self.tokenizer.pieces().clone(),
            ends: self.tokenizer.ends().collect(),
            template: Some(self.template.source().to_owned()).filter(|source| !source.is_empty()),
        }
    }

    /// Renders the template for a context.
    fn render(&self, context: &Map<String, Value>) -> Result<String, ChatError> {
        let failed = |message: String| ChatError::Render { message };
        let context = serde_json::to_vec(context).map_err(|error| failed(error.to_string()))?;
        let text = |bytes| String::from_utf8(bytes).map_err(|error| failed(error.to_string()));
        match self
            .helper
            .template(Kind::Render, &context, || self.setup())
        {
            Ok((Kind::Text, bytes)) => text(bytes),
            Ok((Kind::Refused, bytes)) => Err(ChatError::Refused {
                message: text(bytes)?,
            }),
            Ok((_, bytes)) => Err(failed(text(bytes)?)),
            Err(JobError::Bound) => Err(ChatError::Bound),
            Err(fault) => Err(ChatError::Helper {
                message: in_one_line(&fault),
            }),
        }
    }

    /// The tokenizer.
    pub const fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template; empty if there is none.
    pub(super) fn template(&self) -> &str {
        self.template.source()
    }

    /// The model file's recommended sampling settings.
    pub(super) const fn sampling(&self) -> SamplingWish {
        self.sampling
    }

    /// The longest context.
    pub const fn context_max(&self) -> Tokens {
        self.context_max
    }

    /// The tokens of a prompt, and the parsing style of its answer.
    ///
    /// # Errors
    /// The prompt is empty, or the template or the tokenizer fails.
    pub fn encode(&self, prompt: &Prompt) -> Result<(Vec<u32>, AnswerStyle), PromptError> {
        let mut style = AnswerStyle::default();
        let mut tokens = match prompt {
            Prompt::Chat(conversation) => {
                let _one_at_a_time = locked(&self.rendering);
                let rendered = self
                    .template
                    .render(conversation, &self.tokenizer, |context| {
                        self.render(context)
                    })
                    .map_err(|error| match error {
                        ChatError::Helper { message } => PromptError::Helper { message },
                        error => PromptError::Chat(error),
                    })?;
                style = rendered.style;
                let encoded = self
                    .tokenizer
                    .encode_rendered(&rendered.text, Some(rendered.mark));
                let mut tokens = conversation.before.clone();
                tokens.extend(encoded.map_err(PromptError::Encode)?);
                tokens
            }
            Prompt::Raw(text) | Prompt::Text(text) if text.is_empty() => {
                return Err(PromptError::Empty);
            }
            Prompt::Raw(text) => self
                .tokenizer
                .encode_rendered(text, None)
                .map_err(PromptError::Encode)?,
            Prompt::Text(text) => self.tokenizer.encode(text).map_err(PromptError::Encode)?,
            Prompt::Tokens(tokens) => return Ok((tokens.clone(), style)),
        };
        self.tokenizer.begin(&mut tokens);
        Ok((tokens, style))
    }
}

/// Compiles a chat template, if there is one.
fn compile(helper: &Helper, template: &str, setup: impl Fn() -> Setup) -> Result<(), ChatError> {
    if template.is_empty() {
        return Ok(());
    }
    let compiled = helper.template(Kind::Compile, &[], setup);
    helper.end();
    let message = match compiled {
        Ok((Kind::Text, _)) => return Ok(()),
        Ok((_, message)) => String::from_utf8_lossy(&message).into_owned(),
        Err(error) => in_one_line(&error),
    };
    Err(ChatError::Compile { message })
}

/// Fault of a model file's text side.
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
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Chat(_) => "convert the model again, or use another file of it",
            Self::Tokenizer(error) => error.hint(),
        }
    }
}

impl From<TextError> for LoadErrorKind {
    fn from(error: TextError) -> Self {
        Self::Text {
            message: in_one_line(&error),
            hint: error.hint(),
        }
    }
}
