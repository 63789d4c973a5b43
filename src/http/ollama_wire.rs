//! Parser of Ollama's requests.
//!
//! `num_ctx` and `keep_alive` are hints; the last line of an answer states the granted context. `shift` and `num_keep`
//! have Ollama's meaning but another default: context is dropped only on request. `truncate` omits the oldest messages
//! of a conversation longer than the context, as in Ollama. Errors are 400 and name the field, its value and the limit.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    admission::RETENTION,
    backend::{
        AnswerForm, ChatMessage, ChatRequest, Conversation, Prompt, RequestMeta, Retention, Role,
        ToolCall,
    },
    chat_wire::{
        STOP_TEXTS_MAX, arguments_text, at_least_one, checked_tools, role_of, sinks, stop_texts,
    },
    effort,
    fault::{Fault, invalid},
    fields::{IGNORED_MAX, not_honoured, refuse_unsupported},
    numbers::Whole,
    sampling::{SamplingDialect, SamplingFields},
};
use cotenant_units::Tokens;

/// The body of `POST /api/chat` and of `POST /api/generate`: one flat struct, because serde does not name the field of
/// a fault in a flattened one.
#[derive(Debug, Deserialize)]
pub(super) struct WireRequest {
    pub(super) model: String,
    // of chat
    messages: Option<Vec<WireMessage>>,
    tools: Option<Value>,
    // of generate
    prompt: Option<String>,
    system: Option<String>,
    raw: Option<bool>,
    context: Option<Vec<Whole>>,
    images: Option<Vec<Value>>,
    // of both
    stream: Option<bool>,
    format: Option<Value>,
    options: Option<WireOptions>,
    keep_alive: Option<Value>,
    think: Option<Value>,
    shift: Option<bool>,
    truncate: Option<bool>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
struct WireOptions {
    temperature: Option<f64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    top_k: Option<Whole>,
    seed: Option<Whole>,
    num_predict: Option<Whole>,
    num_ctx: Option<Whole>,
    num_keep: Option<Whole>,
    stop: Option<Value>,
    repeat_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct WireMessage {
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    images: Option<Vec<Value>>,
    tool_calls: Option<Vec<WireToolCall>>,
    tool_name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct WireToolCall {
    function: WireFunction,
}

#[derive(Debug, Deserialize)]
struct WireFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

/// A parsed request, with Ollama's own fields.
#[derive(Debug)]
pub(super) struct Asked {
    /// `None` when the request only loads or unloads the model.
    pub(super) request: Option<ChatRequest>,
    /// Whether unloading is requested.
    pub(super) unload: bool,
    /// Set fields that are ignored.
    pub(super) ignored: Vec<String>,
}

impl WireRequest {
    /// Converts a chat request to plain values.
    pub(super) fn into_chat(mut self, meta: RequestMeta, model: String) -> Result<Asked, Fault> {
        let messages = self
            .messages
            .take()
            .unwrap_or_default()
            .into_iter()
            .enumerate()
            .map(|(index, message)| message.into_message(index))
            .collect::<Result<Vec<_>, Fault>>()?;
        let tools = checked_tools("tools", self.tools.take())?;
        let conversation = Conversation {
            messages,
            tools,
            ..Conversation::default()
        };
        self.into_asked(
            meta,
            model,
            (!conversation.messages.is_empty()).then_some(Prompt::Chat(conversation)),
        )
    }

    /// Converts a text request to plain values: a conversation of one message.
    pub(super) fn into_generate(
        mut self,
        meta: RequestMeta,
        model: String,
    ) -> Result<Asked, Fault> {
        refuse_images("images", self.images.as_deref())?;
        let system = self.system.take().filter(|text| !text.is_empty());
        let prompt = self.prompt.take().filter(|text| !text.is_empty());
        let token = |token: Whole| {
            token
                .to()
                .ok_or_else(|| Fault::invalid("context", token, "is not a token"))
        };
        let before = self
            .context
            .take()
            .unwrap_or_default()
            .into_iter()
            .map(token);
        let before = before.collect::<Result<Vec<u32>, Fault>>()?;
        if self.raw == Some(true) {
            if !before.is_empty() {
                let count = format!("{} tokens", before.len());
                return invalid(
                    "context",
                    count,
                    "cannot be set beside `raw`, which has no template",
                );
            }
            if let Some(system) = system {
                return invalid(
                    "system",
                    system,
                    "cannot be set beside `raw`, which has no template",
                );
            }
            return self.into_asked(meta, model, prompt.map(Prompt::Raw));
        }
        let prompt = prompt.map(|prompt| {
            let system = system.map(|text| ChatMessage::new(Role::System, text));
            let messages: Vec<_> = system
                .into_iter()
                .chain([ChatMessage::new(Role::User, prompt)])
                .collect();
            Prompt::Chat(Conversation {
                before,
                ..messages.into()
            })
        });
        let mut asked = self.into_asked(meta, model, prompt)?;
        if let Some(request) = &mut asked.request {
            request.context_reported = true;
        }
        Ok(asked)
    }

    fn into_asked(
        self,
        meta: RequestMeta,
        model: String,
        prompt: Option<Prompt>,
    ) -> Result<Asked, Fault> {
        refuse_unsupported(&self.unknown)?;
        let options = self.options.unwrap_or_default();
        let unknown = [("", &self.unknown), ("options.", &options.unknown)];
        let mut ignored: Vec<String> = unknown
            .iter()
            .flat_map(|(place, fields)| not_honoured(place, fields))
            .collect();
        let streamed = self.stream.unwrap_or(true);
        let form = answer_form(self.format)?;
        let unload = keep_alive(self.keep_alive.as_ref())?;
        if unload {
            // The arbiter decides about the engine's memory.
            ignored.insert(0, "keep_alive".to_owned());
        }
        ignored.truncate(IGNORED_MAX);
        let mut variables = Map::new();
        match self.think {
            Some(Value::Bool(think)) => {
                variables.insert("enable_thinking".to_owned(), Value::Bool(think));
            }
            effort => effort::request("think", effort.as_ref(), &mut variables)?,
        }
        let context = at_least_one("options.num_ctx", options.num_ctx)?;
        let nothing_asked = prompt.is_none();
        let mut prompt = prompt.unwrap_or_default();
        if let Prompt::Chat(conversation) = &mut prompt {
            conversation.variables = variables;
            // Like most of Ollama's templates.
            conversation.continues = form.is_none() && conversation.ends_with_words_of_the_model();
        }
        let sampling = SamplingFields {
            temperature: options.temperature,
            top_p: options.top_p,
            top_k: options.top_k,
            min_p: options.min_p,
            frequency_penalty: options.frequency_penalty,
            presence_penalty: options.presence_penalty,
            repeat_penalty: options.repeat_penalty,
            seed: options.seed,
        };
        let request = ChatRequest {
            meta,
            model,
            prompt,
            // -1 and -2 mean no limit
            max_tokens: options
                .num_predict
                .and_then(Whole::to)
                .filter(|tokens| *tokens > 0)
                .map(Tokens::new),
            sampling: SamplingDialect::OLLAMA.read(&sampling)?,
            stop: stop_texts("options.stop", options.stop, STOP_TEXTS_MAX)?,
            form,
            context_wanted: context,
            // Naming tokens to keep permits dropping the rest.
            sinks: sinks(
                self.shift.unwrap_or(options.num_keep.is_some()),
                "options.num_keep",
                options.num_keep,
            )?,
            context_reported: false,
            retention: (self.truncate != Some(false)).then_some(Retention::Text(RETENTION)),
            streamed,
        };
        Ok(Asked {
            request: (!nothing_asked).then_some(request),
            unload,
            ignored,
        })
    }
}

impl WireMessage {
    fn into_message(self, index: usize) -> Result<ChatMessage, Fault> {
        // Ollama compares roles in lower case.
        let known = ["system", "user", "assistant", "tool"];
        let role = match self.role.to_ascii_lowercase().as_str() {
            "developer" => Role::System,
            role => role_of(&format!("messages[{index}].role"), role, &known)?,
        };
        refuse_images(&format!("messages[{index}].images"), self.images.as_deref())?;
        let calls = self.tool_calls.unwrap_or_default().into_iter().zip(0..);
        Ok(ChatMessage {
            role,
            content: self.content.unwrap_or_default(),
            reasoning: self.thinking,
            tool_calls: calls
                .map(|(call, at): (WireToolCall, u32)| ToolCall {
                    // Ollama's calls have no ids, but templates need them
                    id: format!("call_{index}_{at}"),
                    name: call.function.name,
                    arguments: arguments_text(call.function.arguments),
                })
                .collect(),
            tool_call_id: None,
            name: self.tool_name,
        })
    }
}

fn refuse_images(field: &str, images: Option<&[Value]>) -> Result<(), Fault> {
    match images {
        Some(images) if !images.is_empty() => invalid(
            field,
            format!("{} images", images.len()),
            "is not supported: this model takes text",
        ),
        _ => Ok(()),
    }
}

fn answer_form(format: Option<Value>) -> Result<Option<AnswerForm>, Fault> {
    match format {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) if name.is_empty() => Ok(None),
        Some(Value::String(name)) if name == "json" => Ok(Some(AnswerForm::JsonObject)),
        Some(schema @ Value::Object(_)) => Ok(Some(AnswerForm::JsonSchema {
            schema,
            field: "format",
        })),
        Some(other) => invalid("format", other, "is neither `json` nor a JSON schema"),
    }
}

/// Whether unloading is requested: seconds, or a number with a unit; negative means forever.
fn keep_alive(wish: Option<&Value>) -> Result<bool, Fault> {
    let wrong = |value: &Value| {
        Fault::invalid(
            "keep_alive",
            value,
            "is neither a number of seconds nor such as `5m`",
        )
    };
    match wish {
        None | Some(Value::Null) => Ok(false),
        Some(value @ Value::Number(seconds)) => {
            Ok(seconds.as_f64().ok_or_else(|| wrong(value))? == 0.0)
        }
        Some(value @ Value::String(text)) => {
            let text = text.trim();
            let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == 'µ');
            // Ollama also accepts compound durations such as `1h30m`; only zero matters
            let parts: Vec<&str> = number
                .split(|c: char| c.is_ascii_alphabetic() || c == 'µ')
                .filter(|part| !part.is_empty())
                .collect();
            let numbers: Option<Vec<f64>> = parts.iter().map(|part| part.parse().ok()).collect();
            match numbers {
                Some(numbers) if !numbers.is_empty() => {
                    Ok(numbers.iter().all(|number| *number == 0.0))
                }
                _ => Err(wrong(value)),
            }
        }
        Some(other) => Err(wrong(other)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::body::parse_json;
    use cotenant_conversation::sinks::Sinks;

    fn asked(body: &Value) -> Result<Asked, String> {
        parse_json::<WireRequest>(body.to_string().as_bytes())
            .and_then(|wire| wire.into_chat(RequestMeta::default(), "m".to_owned()))
            .map_err(|fault| fault.message().to_owned())
    }

    #[test]
    fn roles_and_tools_are_read_as_ollama_reads_them() {
        let asked = asked(&json!({
            "model": "m",
            "messages": [{"role": "Developer", "content": "x"}, {"role": "USER", "content": "hi"}],
            "tools": [{"function": {"name": "f"}}],
        }))
        .unwrap();
        let request = asked.request.unwrap();
        let roles: Vec<Role> = request
            .prompt
            .messages()
            .iter()
            .map(|message| message.role)
            .collect();
        assert_eq!(roles, [Role::System, Role::User]);
        assert_eq!(request.retention, Some(Retention::Text(RETENTION)));
    }

    #[test]
    fn a_request_is_read_with_its_wishes() {
        let asked = asked(&json!({
            "model": "m", "keep_alive": -1, "think": false, "format": "json", "tools": [],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
                {"role": "tool", "content": "done", "tool_name": "f"},
            ],
            "options": {"num_ctx": 8192, "num_predict": -1, "top_k": 40, "temperature": 0.5, "mirostat": 1, "stop": ["."]},
        }))
        .unwrap();
        let request = asked.request.unwrap();
        assert!(request.streamed);
        assert_eq!(asked.ignored, ["options.mirostat"]);
        assert_eq!(request.context_wanted, Some(Tokens::new(8192)));
        let sampling = request.sampling.asked;
        assert_eq!(
            (request.max_tokens, sampling.top_k, sampling.temperature),
            (None, Some(40), Some(0.5))
        );
        assert_eq!(request.form, Some(AnswerForm::JsonObject));
        let Prompt::Chat(conversation) = &request.prompt else {
            panic!("{request:?}")
        };
        assert_eq!(
            conversation.variables.get("enable_thinking"),
            Some(&json!(false))
        );
        let calls: Vec<_> = conversation
            .messages
            .iter()
            .flat_map(|message| &message.tool_calls)
            .collect();
        assert_eq!(
            (calls[0].name.as_str(), calls[0].arguments.as_str()),
            ("f", r#"{"a":1}"#)
        );
        assert_eq!(request.prompt.messages()[2].name.as_deref(), Some("f"));
    }

    #[test]
    fn many_texts_may_end_an_answer() {
        let stops = |count: usize| {
            let stop: Vec<String> = (0..count).map(|at| format!("stop {at}")).collect();
            asked(
                &json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "options": {"stop": stop}}),
            )
        };
        assert_eq!(
            stops(STOP_TEXTS_MAX).unwrap().request.unwrap().stop.len(),
            STOP_TEXTS_MAX
        );
        assert!(
            stops(STOP_TEXTS_MAX + 1)
                .unwrap_err()
                .starts_with("options.stop")
        );
    }

    #[test]
    fn a_context_loses_its_oldest_only_where_that_is_asked_for() {
        let sinks = |more: Value| {
            let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
            body.as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            asked(&body).map(|asked| asked.request.unwrap().sinks)
        };
        for (more, expected) in [
            (json!({}), None),
            (json!({"options": {"num_ctx": 8}}), None),
            (json!({"shift": true}), Some(Sinks::DEFAULT)),
            (
                json!({"options": {"num_keep": 7}}),
                Some(Sinks::Tokens(Tokens::new(7))),
            ),
            (
                json!({"options": {"num_keep": -1}, "shift": true}),
                Some(Sinks::Prompt),
            ),
            (json!({"options": {"num_keep": 7}, "shift": false}), None),
        ] {
            assert_eq!(sinks(more.clone()), Ok(expected), "{more}");
        }
        let wrong = sinks(json!({"options": {"num_keep": -2}})).unwrap_err();
        assert!(wrong.starts_with("options.num_keep"), "{wrong}");
    }

    #[test]
    fn what_is_not_honoured_is_named_as_far_as_a_header_carries_it() {
        let asked = |body: &Value| asked(body).unwrap().ignored;
        let options = json!({
            "mirostat": 1, "mirostat_eta": 0.1, "mirostat_tau": 5, "num_gpu": 9, "repeat_last_n": 64,
            "tfs_z": 1, "typical_p": 1, "numa": null, "stop": ["."], "seed": 1,
        });
        let named = [
            "options.mirostat",
            "options.mirostat_eta",
            "options.mirostat_tau",
            "options.num_gpu",
            "options.repeat_last_n",
            "options.tfs_z",
            "options.typical_p",
        ];
        assert_eq!(
            asked(&json!({"model": "m", "options": options, "logprobs": false, "context": []})),
            named
        );
        let many: Map<String, Value> = (0..500)
            .map(|at| (format!("option_{at}"), json!(1)))
            .collect();
        assert_eq!(
            asked(&json!({"model": "m", "options": many})).len(),
            IGNORED_MAX
        );
        let odd = json!({"model": "m", "a, b": 1, "c\r\nd": 1, "\u{e9}": 1, "a_name_of_more_than_forty_characters_altogether": 1});
        assert_eq!(asked(&odd), Vec::<String>::new());
    }

    #[test]
    fn a_wish_for_the_models_life_is_read_in_all_its_spellings() {
        for (wish, unload) in [
            (json!(0), true),
            (json!("0"), true),
            (json!("0s"), true),
            (json!(-1), false),
            (json!("-1m"), false),
            (json!("5m"), false),
            (json!("1h30m"), false),
            (json!("1.5h"), false),
            (json!(null), false),
        ] {
            let asked = asked(&json!({"model": "m", "keep_alive": wish})).unwrap();
            assert_eq!(asked.ignored == ["keep_alive"], unload, "{wish}");
            assert!(asked.request.is_none(), "nothing is asked");
        }
        for wrong in [json!("soon"), json!([]), json!(""), json!("m")] {
            assert!(
                asked(&json!({"model": "m", "keep_alive": wrong}))
                    .unwrap_err()
                    .starts_with("keep_alive")
            );
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let user = json!([{"role": "user", "content": "hi"}]);
        for (more, field) in [
            (json!({"options": {"num_ctx": 0}}), "options.num_ctx"),
            (json!({"options": {"num_ctx": 8192.5}}), "options.num_ctx"),
            (json!({"options": {"top_k": 0.5}}), "options.top_k"),
            (
                json!({"messages": [{"role": "user", "content": 7}]}),
                "messages[0].content",
            ),
            (
                json!({"options": {"temperature": 9}}),
                "options.temperature",
            ),
            (json!({"options": {"stop": 7}}), "options.stop"),
            (json!({"format": "xml"}), "format"),
            (json!({"think": 7}), "think"),
            (json!({"logprobs": true}), "logprobs"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"suffix": "x"}), "suffix"),
            (json!({"tools": [{}]}), "tools[0]"),
            (json!({"messages": [{"role": "robot"}]}), "messages[0].role"),
            (
                json!({"messages": [{"role": "user", "images": ["x"]}]}),
                "messages[0].images",
            ),
        ] {
            let mut body = json!({"model": "m", "messages": user});
            body.as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            let message = asked(&body).unwrap_err();
            assert!(message.starts_with(field), "{message}");
        }
    }
}
