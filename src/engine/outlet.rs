//! Output channel of one generation: non-blocking, lossless, bounded by reader timeout.

use std::time::Instant;

use tokio::sync::mpsc::{self, OwnedPermit, error::TrySendError};

use super::{
    generate::{FinishReason, GenerateError, GenerateEvent, Usage},
    handle::EngineOptions,
};
use crate::units::Tokens;

/// The sending end of one answer.
///
/// Two places in its channel are taken from the start, for the last delta and the ending, so that both arrive however
/// slow the reader is. In between, deltas that find no room are merged.
pub(super) struct Outlet {
    sender: mpsc::Sender<GenerateEvent>,
    reserved: Option<(OwnedPermit<GenerateEvent>, OwnedPermit<GenerateEvent>)>,
    text: String,
    tokens: Vec<u32>,
    full_since: Option<Instant>,
}

/// How the reader is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// It went away.
    Gone,
    /// It reads.
    Reading,
    /// It has not made room since then.
    Stuck(Instant),
}

impl Outlet {
    /// A channel with room for `stream_buffer` events and an ending.
    pub(super) fn new(options: &EngineOptions) -> (Self, mpsc::Receiver<GenerateEvent>) {
        let (sender, receiver) = mpsc::channel(options.stream_buffer.max(1) + 2);
        let reserved = sender
            .clone()
            .try_reserve_owned()
            .ok()
            .zip(sender.clone().try_reserve_owned().ok());
        let outlet = Self {
            sender,
            reserved,
            text: String::new(),
            tokens: Vec::new(),
            full_since: None,
        };
        (outlet, receiver)
    }

    /// Tells that the request left the queue.
    pub(super) fn started(&self, prompt_tokens: Tokens, cached_tokens: Tokens) {
        // The channel is new, so that there is room; a reader that is gone is noticed at the next command point.
        let _ = self.sender.try_send(GenerateEvent::Started {
            prompt_tokens,
            cached_tokens,
        });
    }

    /// Adds a token and the text that became certain with it, and sends what there is if the channel has room.
    pub(super) fn push(&mut self, token: u32, text: &str, now: Instant) -> Reader {
        self.tokens.push(token);
        self.text.push_str(text);
        if self.text.is_empty() {
            return self.reader();
        }
        let delta = GenerateEvent::Delta {
            text: std::mem::take(&mut self.text),
            tokens: std::mem::take(&mut self.tokens),
        };
        match self.sender.try_send(delta) {
            Ok(()) => self.full_since = None,
            Err(TrySendError::Closed(_)) => return Reader::Gone,
            Err(TrySendError::Full(delta)) => {
                if let GenerateEvent::Delta { text, tokens } = delta {
                    self.text = text;
                    self.tokens = tokens;
                }
                self.full_since.get_or_insert(now);
            }
        }
        self.reader()
    }

    /// How the reader is doing.
    pub(super) fn reader(&self) -> Reader {
        if self.sender.is_closed() {
            return Reader::Gone;
        }
        self.full_since.map_or(Reader::Reading, Reader::Stuck)
    }

    /// Sends the rest of the text and the ending.
    pub(super) fn end(mut self, rest: &str, outcome: Result<FinishReason, GenerateError>, usage: Usage) {
        self.text.push_str(rest);
        let Some((last, ending)) = self.reserved.take() else {
            return;
        };
        if !self.text.is_empty() {
            last.send(GenerateEvent::Delta {
                text: std::mem::take(&mut self.text),
                tokens: std::mem::take(&mut self.tokens),
            });
        }
        ending.send(match outcome {
            Ok(reason) => GenerateEvent::Finished { reason, usage },
            Err(error) => GenerateEvent::Failed(error),
        });
    }
}
