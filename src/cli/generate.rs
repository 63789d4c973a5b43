//! `cotenant generate`: text from the LLM.

use std::io::{self, Read};

use clap::Args;
use serde_json::json;

use super::{
    Global, Output,
    exit::{self, CliError},
    output, show,
};
use cotenant_rpc::{
    json::word,
    v1::{
        ChatMessage, ChatRole, ContextShift, Conversation, FinishReason, GenerateRequest, KvType,
        SamplingOptions, context_shift, generate_request, generate_response,
        llm_service_client::LlmServiceClient,
    },
};

/// Generates text with the LLM.
#[derive(Debug, Args)]
pub struct Generate {
    /// Prompt; `-` reads it from stdin.
    prompt: String,
    /// System prompt.
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the prompt verbatim, without the chat template.
    #[arg(long)]
    raw: bool,
    /// Maximum number of tokens to generate.
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<u32>,
    /// Sampling temperature, 0 (greedy) to 2. Default: the recommendation of the model's file, else 1.
    #[arg(long, value_name = "RATIO")]
    temperature: Option<f64>,
    /// Sample from the likeliest tokens whose probabilities sum to this value.
    #[arg(long, value_name = "RATIO")]
    top_p: Option<f64>,
    /// Sample from this many of the likeliest tokens.
    #[arg(long, value_name = "COUNT")]
    top_k: Option<u32>,
    /// Seed for reproducible text. Default: random.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Stop generating at this text. Repeatable.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// When the KV capacity is full, drop the oldest tokens after the first --keep, and continue.
    #[arg(long)]
    context_shift: bool,
    /// First tokens to keep in a context shift; -1 keeps the whole prompt. Default: 4.
    #[arg(
        long,
        value_name = "TOKENS",
        requires = "context_shift",
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX))
    )]
    keep: Option<i64>,
}

pub(super) async fn run(global: &Global, generate: Generate) -> Result<(), CliError> {
    let mut prompt = generate.prompt;
    if prompt == "-" {
        prompt.clear();
        io::stdin()
            .read_to_string(&mut prompt)
            .map_err(|error| CliError::failed("cannot read the prompt from stdin", error))?;
    }
    let input = if generate.raw {
        generate_request::Input::Prompt(prompt)
    } else {
        let said = |role: ChatRole, content: String| ChatMessage {
            role: role.into(),
            content,
        };
        let system = generate.system.map(|system| said(ChatRole::System, system));
        generate_request::Input::Conversation(Conversation {
            messages: system
                .into_iter()
                .chain([said(ChatRole::User, prompt)])
                .collect(),
        })
    };
    let request = GenerateRequest {
        input: Some(input),
        sampling: Some(SamplingOptions {
            temperature: generate.temperature,
            top_p: generate.top_p,
            top_k: generate.top_k,
            seed: generate.seed,
        }),
        max_tokens: generate.max_tokens,
        stop: generate.stop,
        context_shift: generate.context_shift.then(|| ContextShift {
            sinks: generate.keep.map(|keep| match u32::try_from(keep) {
                Ok(tokens) => context_shift::Sinks::Tokens(tokens),
                Err(_) => context_shift::Sinks::Prompt(true),
            }),
        }),
    };
    let mut client = LlmServiceClient::new(global.connect().await?);
    // No deadline: the first piece may have to wait for a load, and the duration of the text is unknown.
    let mut stream = client.generate(request).await?.into_inner();
    let (mut answer, mut seed) = (String::new(), 0);
    while let Some(response) = stream.message().await? {
        match response.message {
            Some(generate_response::Message::Started(started)) => {
                seed = started.seed;
                let line = json!({ "model": started.model, "promptTokens": started.prompt_tokens, "seed": seed });
                if global.output == Output::Ndjson {
                    output::write_json(global.output, &json!({ "started": line }))?;
                }
            }
            Some(generate_response::Message::Delta(delta)) => match global.output {
                Output::Table => output::write(&delta.text)?,
                Output::Json => answer.push_str(&delta.text),
                Output::Ndjson => {
                    output::write_json(global.output, &json!({ "delta": { "text": delta.text } }))?;
                }
            },
            Some(generate_response::Message::Finished(finished)) => {
                let reason = finished.finish_reason();
                let usage = finished.usage.unwrap_or_default();
                let first = usage.time_to_first_token.unwrap_or_default();
                let total = usage.total_time.unwrap_or_default();
                let usage_json = json!({
                    "promptTokens": usage.prompt_tokens,
                    "kvType": word(usage.kv_type().as_str_name(), "KV_TYPE_"),
                    "completionTokens": usage.completion_tokens,
                    "droppedTokens": usage.dropped_tokens,
                    "timeToFirstToken": format!("{}.{:06}s", first.seconds, first.nanos / 1000),
                    "totalTime": format!("{}.{:06}s", total.seconds, total.nanos / 1000),
                });
                match global.output {
                    Output::Table => {
                        output::write("\n")?;
                        eprintln!(
                            "{} prompt and {} completion tokens in {}{}{}{}",
                            usage.prompt_tokens,
                            usage.completion_tokens,
                            show::span(&total),
                            if reason == FinishReason::Length {
                                ", truncated at the token limit"
                            } else {
                                ""
                            },
                            match usage.kv_type() {
                                KvType::Q8 => ", KV cache in q8",
                                KvType::Q4 => ", KV cache in q4",
                                KvType::F16 | KvType::Unspecified => "",
                            },
                            match usage.dropped_tokens {
                                0 => String::new(),
                                dropped => format!(", {dropped} tokens of context dropped"),
                            },
                        );
                    }
                    Output::Json => output::write_json(
                        global.output,
                        &json!({ "text": answer, "finishReason": reason.as_str_name(), "seed": seed, "usage": usage_json }),
                    )?,
                    Output::Ndjson => output::write_json(
                        global.output,
                        &json!({ "finished": { "finishReason": reason.as_str_name(), "usage": usage_json } }),
                    )?,
                }
                return Ok(());
            }
            None => {}
        }
    }
    Err(CliError::plain(
        "the stream ended before the answer was complete",
        exit::FAILED,
    ))
}
