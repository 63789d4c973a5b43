//! Admission of a request: held while memory is short, and shortened where it may be.

use std::time::Duration;

use super::{
    backend::{ChatBackend, ChatRequest, ChatStream, Prompt, Role},
    patience::patiently,
};
use cotenant_policy::refusal::Refusal;

/// Admits a request, which is held for up to `limit` while asking again `helps`. A conversation that is longer than the context
/// loses its oldest messages, where the request allows it, until it fits.
///
/// # Errors
/// The refusal that stays.
pub(super) async fn admitted(
    backend: &dyn ChatBackend,
    mut request: ChatRequest,
    limit: Duration,
    helps: fn(&Refusal, u32) -> bool,
) -> Result<ChatStream, Refusal> {
    loop {
        let answered = patiently(limit, helps, || backend.chat(request.clone())).await;
        match (answered, request.retention) {
            (Err(Refusal::ContextLengthExceeded { prompt, limit, .. }), Some(retention))
                if shorten(
                    &mut request,
                    retention * f64::from(limit.get()) / f64::from(prompt.get().max(1)),
                ) => {}
            (answered, _) => return answered,
        }
    }
}

/// Takes the oldest messages out until this part of the text is left, and at least one; whether any could be taken.
fn shorten(request: &mut ChatRequest, part: f64) -> bool {
    let Prompt::Chat(conversation) = &mut request.prompt else {
        return false;
    };
    let messages = &mut conversation.messages;
    let fixed = usize::from(
        messages
            .first()
            .is_some_and(|message| message.role == Role::System),
    );
    let size = |content: &str| f64::from(u32::try_from(content.len()).unwrap_or(u32::MAX));
    let mut left: f64 = messages.iter().map(|message| size(&message.content)).sum();
    let wanted = left * part.min(0.9);
    let before = messages.len();
    while messages.len() > fixed + 1 && (left > wanted || messages.len() == before) {
        left -= size(&messages.remove(fixed).content);
        // the outcome of a call that is gone says nothing
        while messages.len() > fixed + 1
            && messages
                .get(fixed)
                .is_some_and(|message| message.role == Role::Tool)
        {
            left -= size(&messages.remove(fixed).content);
        }
    }
    messages.len() < before
}

/// Part of the context that a conversation fills again when it has lost its oldest messages. Our choice: the next turns fit
/// without losing more, and find what is left in the KV cache.
pub(super) const RETENTION: f64 = 0.8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ChatMessage;

    #[test]
    fn the_oldest_is_left_out_and_neither_the_instructions_nor_the_last() {
        let roles = [
            Role::System,
            Role::User,
            Role::Assistant,
            Role::Tool,
            Role::User,
            Role::User,
        ];
        let messages: Vec<ChatMessage> =
            roles.map(|role| ChatMessage::new(role, "word word")).into();
        let mut request = ChatRequest {
            prompt: Prompt::Chat(messages.into()),
            ..ChatRequest::default()
        };
        let left = |request: &ChatRequest| {
            request
                .prompt
                .messages()
                .iter()
                .map(|message| message.role)
                .collect::<Vec<_>>()
        };
        assert!(shorten(&mut request, 0.8));
        assert_eq!(left(&request), [Role::System, Role::User, Role::User]);
        assert!(shorten(&mut request, 1.0));
        assert_eq!(left(&request), [Role::System, Role::User]);
        assert!(!shorten(&mut request, 0.5));
    }
}
