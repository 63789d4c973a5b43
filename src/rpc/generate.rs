//! `LlmService`: generation over gRPC.

use std::sync::Arc;

use futures_util::stream::BoxStream;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use super::{
    call::{Call, Context},
    convert,
    llm::{GenerateEvent, GenerateRequest, Generator, Input, Times},
    outlet::{Outlet, Unsent},
    roles::Permission,
    slots::Slot,
    status::{CallError, refused},
    v1::{
        self, GenerateResponse, generate_request, generate_response, llm_service_server::LlmService,
    },
};
use cotenant_conversation::{
    ChatMessage, FinishReason, Role, SamplingWish, Usage,
    refusal::{RETRY_AFTER_DEFAULT, Refusal},
    sinks::Sinks,
};
use cotenant_units::Tokens;

pub(super) struct Llm {
    context: Context,
    generator: Arc<dyn Generator>,
}

impl Llm {
    pub(super) fn new(context: Context, generator: Arc<dyn Generator>) -> Self {
        Self { context, generator }
    }
}

#[tonic::async_trait]
impl LlmService for Llm {
    type GenerateStream = BoxStream<'static, Result<GenerateResponse, Status>>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let call = self
            .context
            .admit("Generate", &request, Permission::Generate)?;
        let slot = self.context.stream_slot(&call)?;
        let mut request = request_of(request.into_inner())?;
        request.time_left = call.time_left();
        let events = tokio::select! {
            events = self.generator.generate(request) => events.map_err(refused)?,
            allowed = call.expired() => return Err(CallError::DeadlinePassed { allowed }.into()),
            () = self.context.stop.cancelled() => return Err(CallError::Stopping.into()),
        };
        let (outlet, responses) = Outlet::new(OUTBOUND_MAX, self.context.patience);
        tokio::spawn(relay(self.context.clone(), call, slot, events, outlet));
        Ok(Response::new(responses))
    }
}

/// Forwards events to the client. Returning drops `events`, which stops the generation: when the client disconnects,
/// does not read, or reaches its deadline, and at the end.
async fn relay(
    context: Context,
    call: Call,
    _slot: Slot,
    mut events: mpsc::Receiver<GenerateEvent>,
    outlet: Outlet<GenerateResponse>,
) {
    let error: Status = loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = outlet.closed() => return,
            allowed = call.expired() => break CallError::DeadlinePassed { allowed }.into(),
            () = context.stop.cancelled() => break CallError::Stopping.into(),
        };
        let (message, is_last) = match event {
            Some(GenerateEvent::Started {
                model,
                prompt,
                seed,
            }) => {
                let started = v1::GenerateStarted {
                    model,
                    prompt_tokens: prompt.get(),
                    seed,
                };
                (generate_response::Message::Started(started), false)
            }
            Some(GenerateEvent::Delta { text }) => (
                generate_response::Message::Delta(v1::TextDelta { text }),
                false,
            ),
            Some(GenerateEvent::Finished {
                reason,
                usage,
                times,
            }) => (
                generate_response::Message::Finished(finished(reason, &usage, times)),
                true,
            ),
            Some(GenerateEvent::Failed(error)) => break refused(error),
            None => {
                break refused(Refusal::EngineLost {
                    reason: "it ended without a result".to_owned(),
                    retry_after: RETRY_AFTER_DEFAULT,
                });
            }
        };
        let response = GenerateResponse {
            message: Some(message),
        };
        match outlet.send(response).await {
            Ok(()) if is_last => return,
            Ok(()) => {}
            Err(Unsent::Gone) => return,
            Err(Unsent::Stalled(error)) => break error.into(),
        }
    };
    drop(events);
    outlet.fail(error);
}

fn finished(reason: FinishReason, usage: &Usage, times: Times) -> v1::GenerateFinished {
    v1::GenerateFinished {
        finish_reason: match reason {
            FinishReason::Length => v1::FinishReason::Length,
            FinishReason::Stop | FinishReason::StopText(_) | FinishReason::ToolCalls => {
                v1::FinishReason::Stop
            }
        }
        .into(),
        usage: Some(v1::Usage {
            prompt_tokens: usage.prompt_tokens.get(),
            completion_tokens: usage.completion_tokens.get(),
            time_to_first_token: Some(convert::duration(times.to_first_token)),
            total_time: Some(convert::duration(times.total)),
            kv_type: convert::kv_type(usage.kv_type).into(),
            dropped_tokens: usage.dropped_tokens.get(),
        }),
    }
}

fn request_of(request: v1::GenerateRequest) -> Result<GenerateRequest, CallError> {
    let input = match request.input {
        Some(generate_request::Input::Prompt(prompt)) if prompt.is_empty() => {
            return convert::refuse("prompt", "", "is empty");
        }
        Some(generate_request::Input::Prompt(prompt)) => Input::Prompt(prompt),
        Some(generate_request::Input::Conversation(conversation)) => {
            if conversation.messages.is_empty() {
                return convert::refuse("conversation.messages", "", "is empty");
            }
            if conversation.messages.len() > MESSAGES_MAX {
                let count = format!("{} messages", conversation.messages.len());
                let problem = format!("is above the limit of {MESSAGES_MAX}");
                return convert::refuse("conversation.messages", &count, &problem);
            }
            let messages: Result<Vec<_>, _> =
                conversation.messages.into_iter().map(message_of).collect();
            Input::Messages(messages?)
        }
        None => return convert::refuse("input", "", "is not set: set `conversation` or `prompt`"),
    };
    if request.max_tokens == Some(0) {
        return convert::refuse("max_tokens", "0", "is not above zero");
    }
    if request.stop.len() > STOPS_MAX {
        let count = request.stop.len().to_string();
        return convert::refuse(
            "stop",
            &count,
            &format!("texts are above the limit of {STOPS_MAX}"),
        );
    }
    if let Some(stop) = request
        .stop
        .iter()
        .find(|stop| stop.is_empty() || stop.len() > STOP_LENGTH_MAX)
    {
        return convert::refuse(
            "stop",
            stop,
            &format!("has not 1 to {STOP_LENGTH_MAX} bytes"),
        );
    }
    Ok(GenerateRequest {
        input,
        sampling: sampling_of(request.sampling.unwrap_or_default())?,
        max_tokens: request.max_tokens.map(Tokens::new),
        stop: request.stop,
        sinks: request.context_shift.map(|shift| match shift.sinks {
            Some(v1::context_shift::Sinks::Tokens(tokens)) => Sinks::Tokens(Tokens::new(tokens)),
            Some(v1::context_shift::Sinks::Prompt(true)) => Sinks::Prompt,
            Some(v1::context_shift::Sinks::Prompt(false)) | None => Sinks::DEFAULT,
        }),
        time_left: None,
    })
}

fn message_of(message: v1::ChatMessage) -> Result<ChatMessage, CallError> {
    let role = match v1::ChatRole::try_from(message.role) {
        Ok(v1::ChatRole::Assistant) => Role::Assistant,
        Ok(v1::ChatRole::System) => Role::System,
        Ok(v1::ChatRole::User) => Role::User,
        Ok(v1::ChatRole::Unspecified) | Err(_) => {
            let number = message.role.to_string();
            return convert::refuse("conversation.messages.role", &number, "is not a known role");
        }
    };
    Ok(ChatMessage::new(role, message.content))
}

fn sampling_of(options: v1::SamplingOptions) -> Result<SamplingWish, CallError> {
    // Negated so that NaN is refused too.
    if let Some(temperature) = options.temperature
        && !(0.0..=2.0).contains(&temperature)
    {
        let value = temperature.to_string();
        return convert::refuse("sampling.temperature", &value, "is not within 0 to 2");
    }
    if let Some(top_p) = options.top_p
        && !(top_p > 0.0 && top_p <= 1.0)
    {
        let value = top_p.to_string();
        return convert::refuse("sampling.top_p", &value, "is not above 0 and at most 1");
    }
    if options.top_k == Some(0) {
        return convert::refuse("sampling.top_k", "0", "is not above zero");
    }
    Ok(SamplingWish {
        temperature: options.temperature,
        top_p: options.top_p,
        top_k: options.top_k,
        seed: options.seed,
        ..SamplingWish::NONE
    })
}

/// Pieces of text in the queue of a client, besides HTTP/2's buffers.
const OUTBOUND_MAX: usize = 16;

/// Messages of one conversation (our choice, more than any context holds): an empty one takes two bytes on the wire and
/// 200 in memory.
const MESSAGES_MAX: usize = 4096;

/// Stop texts of one request; OpenAI allows 4, llama.cpp any number.
const STOPS_MAX: usize = 16;

/// Longest stop text, in bytes (our choice: a sentence).
const STOP_LENGTH_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(text: &str) -> v1::GenerateRequest {
        v1::GenerateRequest {
            input: Some(generate_request::Input::Prompt(text.into())),
            ..v1::GenerateRequest::default()
        }
    }

    fn sampled(sampling: v1::SamplingOptions) -> v1::GenerateRequest {
        v1::GenerateRequest {
            sampling: Some(sampling),
            ..prompt("hello")
        }
    }

    #[test]
    fn what_is_not_given_is_left_open() {
        let request = request_of(prompt("hello")).unwrap();
        assert_eq!(request.input, Input::Prompt("hello".into()));
        assert_eq!(request.sampling, SamplingWish::NONE);
        assert_eq!(request.max_tokens, None);
    }

    #[test]
    fn figures_out_of_range_are_refused_by_name() {
        let with = v1::SamplingOptions::default;
        for (request, field) in [
            (prompt(""), "prompt"),
            (v1::GenerateRequest::default(), "input"),
            (
                v1::GenerateRequest {
                    input: Some(generate_request::Input::Conversation(
                        v1::Conversation::default(),
                    )),
                    ..v1::GenerateRequest::default()
                },
                "conversation.messages",
            ),
            (
                v1::GenerateRequest {
                    max_tokens: Some(0),
                    ..prompt("a")
                },
                "max_tokens",
            ),
            (
                v1::GenerateRequest {
                    stop: vec!["x".into(); 17],
                    ..prompt("a")
                },
                "stop",
            ),
            (
                v1::GenerateRequest {
                    stop: vec![String::new()],
                    ..prompt("a")
                },
                "stop",
            ),
            (
                sampled(v1::SamplingOptions {
                    temperature: Some(f64::NAN),
                    ..with()
                }),
                "sampling.temperature",
            ),
            (
                sampled(v1::SamplingOptions {
                    temperature: Some(-0.1),
                    ..with()
                }),
                "sampling.temperature",
            ),
            (
                sampled(v1::SamplingOptions {
                    top_p: Some(0.0),
                    ..with()
                }),
                "sampling.top_p",
            ),
            (
                sampled(v1::SamplingOptions {
                    top_p: Some(f64::INFINITY),
                    ..with()
                }),
                "sampling.top_p",
            ),
            (
                sampled(v1::SamplingOptions {
                    top_k: Some(0),
                    ..with()
                }),
                "sampling.top_k",
            ),
        ] {
            match request_of(request).unwrap_err() {
                CallError::InvalidField { field: found, .. } => assert_eq!(found, field),
                other => panic!("{other}"),
            }
        }
    }
}
