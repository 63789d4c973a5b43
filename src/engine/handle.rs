//! Handle by which other threads give the engine commands and requests.
//!
//! No method waits for the model: commands are taken between two tokens, and their outcome is an event.

use std::{fmt, path::Path, sync::Arc, time::Instant};

use tokio::sync::{mpsc, watch};

use super::{
    constraint::Client,
    generate::{GenerateEvent, GenerateRequest, PromptError, RequestId, SubmitError},
    helper::FormPlace,
    mailbox::{Queued, Reply, Shared},
    protocol::{Command, EngineSnapshot},
    text::Prepared,
};
use crate::{conversation::Prompt, policy::residency::EnginePlan, units::Tokens};

/// A handle to ask the engine. Cheap to clone; all methods return at once.
#[derive(Clone)]
pub struct EngineHandle {
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineHandle").finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Asks for a model; answered by `Ready` or `LoadFailed`. An engine loads one model in its life.
    pub fn load(&self, path: &Path, plan: EnginePlan) {
        self.shared.command(Command::Load {
            path: path.to_owned(),
            plan,
        });
    }

    /// Asks for a plan; answered by `Applied` or `ApplyFailed` with the same revision.
    ///
    /// Taken between two tokens or two layers, and at once when nothing runs. A plan that is still waiting is
    /// superseded. Tokens of a running answer do not depend on it.
    pub fn apply(&self, revision: u64, plan: EnginePlan) {
        self.shared.command(Command::Apply { revision, plan });
    }

    /// Submits a request. Its prompt is rendered and encoded here, on the caller's thread, so that neither a long
    /// prompt nor a fault in a template library holds up the engine.
    ///
    /// # Errors
    ///
    /// The prompt cannot be used, the queue is full, or the engine is not ready.
    pub fn generate(&self, request: GenerateRequest) -> Result<mpsc::Receiver<GenerateEvent>, SubmitError> {
        let prepared = self.prepare(&request, Client::PATIENT)?;
        self.submit(request, prepared)
    }

    /// Renders and encodes the prompt of a request, and compiles the form of its answer.
    ///
    /// # Errors
    ///
    /// One of them cannot be used, or the engine is not ready.
    pub fn prepare(&self, request: &GenerateRequest, client: Client<'_>) -> Result<Prepared, SubmitError> {
        Ok(self.shared.text()?.prepare(request, client)?)
    }

    /// The number of tokens of a prompt, however long it is.
    ///
    /// # Errors
    ///
    /// It cannot be encoded, or the engine is not ready.
    pub fn count(&self, prompt: &Prompt) -> Result<Tokens, SubmitError> {
        let (tokens, _style) = self.shared.text()?.encode(prompt)?;
        Ok(Tokens::new(u32::try_from(tokens.len()).unwrap_or(u32::MAX)))
    }

    /// The tokens of a text: with what begins a sequence or without, with control tokens recognised in it or not.
    ///
    /// # Errors
    ///
    /// It cannot be encoded, or the engine is not ready.
    pub fn tokenize(&self, text: &str, begin: bool, control: bool) -> Result<Vec<u32>, SubmitError> {
        let side = self.shared.text()?;
        let tokenizer = side.tokenizer();
        let encoded = if control {
            tokenizer.encode_rendered(text, None)
        } else {
            tokenizer.encode(text)
        };
        let mut tokens = encoded.map_err(PromptError::Encode)?;
        if begin {
            tokenizer.begin(&mut tokens);
        }
        Ok(tokens)
    }

    /// The bytes that each token stands for; none for a control token.
    ///
    /// # Errors
    ///
    /// A token is not in the vocabulary, or the engine is not ready.
    pub fn pieces(&self, tokens: &[u32]) -> Result<Vec<Vec<u8>>, SubmitError> {
        let side = self.shared.text()?;
        let vocabulary = side.tokenizer().vocabulary();
        if let Some(&token) = tokens.iter().find(|&&token| token >= vocabulary) {
            Err(PromptError::UnknownToken { token, vocabulary })?;
        }
        Ok(tokens
            .iter()
            .map(|&token| side.tokenizer().bytes(token).to_vec())
            .collect())
    }

    /// Waits for place for the grammar of an answer, of which only a few exist at once.
    ///
    /// # Errors
    ///
    /// The engine is not ready.
    pub async fn form_place(&self) -> Result<FormPlace, SubmitError> {
        Ok(self.shared.text()?.form_place().await)
    }

    /// Submits a request with what was [prepared](Self::prepare) of it.
    ///
    /// # Errors
    ///
    /// The queue is full, or the engine is not ready.
    pub fn submit(
        &self,
        request: GenerateRequest,
        prepared: Prepared,
    ) -> Result<mpsc::Receiver<GenerateEvent>, SubmitError> {
        let (reply, receiver) = Reply::new(self.shared.options());
        self.shared.submit(Queued {
            request,
            prompt: prepared.tokens,
            mask: prepared.mask,
            reply,
            submitted: Instant::now(),
        })?;
        Ok(receiver)
    }

    /// Cancels a request, queued or running; it ends with `Finished(Cancelled)`. Unknown names are ignored.
    pub fn cancel(&self, id: RequestId) {
        self.shared.cancel(id);
    }

    /// Takes no more requests; stops when those it has are answered.
    pub fn drain(&self) {
        self.shared.drain();
    }

    /// Stops at the next layer; requests fail with `GenerateError::Stopping`.
    pub fn stop(&self) {
        self.shared.stop();
    }

    /// The state of the engine now.
    #[must_use]
    pub fn snapshot(&self) -> EngineSnapshot {
        self.shared.snapshot()
    }

    /// The state of the engine, to wait for changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<EngineSnapshot> {
        self.shared.watch()
    }
}
