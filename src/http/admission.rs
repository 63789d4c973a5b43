//! Admission of a request: held while memory is short, and shortened if permitted.

use std::time::Duration;

use super::{
    backend::{ChatBackend, ChatRequest, ChatStream, Prompt, Retention, Role},
    patience::patiently,
};
use cotenant_conversation::refusal::Refusal;

/// Admits a request; holds it for up to `limit` while `helps` allows a retry. If the request permits it, a conversation
/// longer than the context loses its oldest messages until it fits, with Ollama's API also the beginning of its text.
///
/// # Errors
/// The last refusal.
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
                    retention,
                    f64::from(limit.get()) / f64::from(prompt.get().max(1)),
                ) => {}
            (answered, _) => return answered,
        }
    }
}

/// Shortens a prompt to the part `fits`; returns whether anything could be removed.
fn shorten(request: &mut ChatRequest, retention: Retention, fits: f64) -> bool {
    match retention {
        Retention::Messages(part) => without_oldest(&mut request.prompt, part * fits),
        Retention::Text(part) => {
            let part = part * fits;
            without_oldest(&mut request.prompt, part)
                || without_beginning(&mut request.prompt, part)
        }
    }
}

/// Shortens the text, or the last message, from its beginning to this part. Returns whether anything was removed.
fn without_beginning(prompt: &mut Prompt, part: f64) -> bool {
    let text = match prompt {
        Prompt::Chat(conversation) => match conversation.messages.last_mut() {
            Some(last) => &mut last.content,
            None => return false,
        },
        Prompt::Raw(text) | Prompt::Text(text) => text,
        Prompt::Tokens(_) => return false,
    };
    let all = text.chars().count();
    let part = part.clamp(0.0, 0.9);
    let wanted = f64::from(u32::try_from(all).unwrap_or(u32::MAX)) * part;
    let before = text.len();
    let kept = text
        .char_indices()
        .rev()
        .zip(1u32..)
        .take_while(|(_, count)| *count == 1 || f64::from(*count) <= wanted)
        .last();
    let start = kept.map_or(0, |((at, _), _)| at);
    drop(text.drain(..start));
    text.len() < before
}

/// Removes the oldest messages, at least one, until this part of the text is left. Returns whether any was removed.
fn without_oldest(prompt: &mut Prompt, part: f64) -> bool {
    let Prompt::Chat(conversation) = prompt else {
        return false;
    };
    if !conversation.before.is_empty() {
        conversation.before.clear();
        return true;
    }
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
        // a tool result without its call is useless
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

/// Part of the context that a conversation fills after losing its oldest messages. Our choice: the next turns fit
/// without further losses and reuse the KV cache.
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
        let messages = Retention::Messages(1.0);
        assert!(shorten(&mut request, messages, 0.8));
        assert_eq!(left(&request), [Role::System, Role::User, Role::User]);
        assert!(shorten(&mut request, messages, 1.0));
        assert_eq!(left(&request), [Role::System, Role::User]);
        assert!(!shorten(&mut request, messages, 0.5));
    }

    #[test]
    fn a_text_that_is_too_long_by_itself_keeps_its_end_where_that_is_allowed() {
        let of = |prompt: Prompt| ChatRequest {
            prompt,
            ..ChatRequest::default()
        };
        let mut raw = of(Prompt::Raw("äbcdefghij".to_owned()));
        assert!(!shorten(&mut raw, Retention::Messages(0.8), 0.5));
        assert!(shorten(&mut raw, Retention::Text(1.0), 0.5));
        assert_eq!(raw.prompt, Prompt::Raw("fghij".to_owned()));
        let last = vec![
            ChatMessage::new(Role::System, "word"),
            ChatMessage::new(Role::User, "abcdefghij"),
        ];
        let mut chat = of(Prompt::Chat(last.into()));
        assert!(shorten(&mut chat, Retention::Text(1.0), 0.3));
        assert_eq!(chat.prompt.messages()[0].content, "word");
        assert_eq!(chat.prompt.messages()[1].content, "hij");
        assert!(shorten(&mut chat, Retention::Text(1.0), 0.3));
        assert_eq!(chat.prompt.messages()[1].content, "j");
        assert!(!shorten(&mut chat, Retention::Text(1.0), 0.3));
    }
}
