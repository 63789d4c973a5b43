//! Public chat templates, compared with transformers' rendering.

use std::{fs, path::PathBuf};

use serde::Deserialize;

use super::{
    super::{test_vocabulary::TestVocabulary, tokenizer::Tokenizer},
    *,
};

#[derive(Deserialize)]
struct Case {
    template: String,
    name: String,
    bos: String,
    eos: String,
    variables: Map<String, Value>,
    messages: Vec<Said>,
    tools: Vec<Value>,
    /// The rendered text, unless the template refuses.
    text: Option<String>,
    refused: Option<String>,
    /// Why Python cannot render it; the wording is free.
    failed: Option<String>,
}

#[derive(Deserialize)]
struct Said {
    role: String,
    content: String,
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Vec<Called>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

#[derive(Deserialize)]
struct Called {
    id: String,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    arguments: Value,
}

impl Said {
    fn message(self) -> ChatMessage {
        let role = match self.role.as_str() {
            "assistant" => Role::Assistant,
            "system" => Role::System,
            "tool" => Role::Tool,
            _ => Role::User,
        };
        let calls = self.tool_calls.into_iter().map(|call| ToolCall {
            id: call.id,
            name: call.function.name,
            arguments: call.function.arguments.to_string(),
        });
        ChatMessage {
            reasoning: self.reasoning_content,
            tool_calls: calls.collect(),
            tool_call_id: self.tool_call_id,
            name: self.name,
            ..ChatMessage::new(role, self.content)
        }
    }
}

/// Templates without a free licence are read from llama.cpp's folder, if there is one.
#[test]
fn templates_of_public_models_are_rendered_as_transformers_does() {
    let folder =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/chat-templates");
    let llama = std::env::var_os("COTENANT_LLAMA_VOCABULARIES")
        .map(|models| PathBuf::from(models).join("templates"));
    let tokenizer = Tokenizer::from_header(&TestVocabulary::chatml().header()).unwrap();
    // Further cases, as produced by `render.py` from a folder of templates.
    let more = std::env::var_os("COTENANT_RENDERED").map(PathBuf::from);
    let files = std::iter::once(folder.join("rendered.json")).chain(more);
    let cases = files.flat_map(|file| -> Vec<Case> {
        serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
    });
    let (mut compared, mut absent, mut different) = (0, 0, Vec::new());
    for case in cases {
        let what = format!("{}: {}, {:?}", case.template, case.name, case.variables);
        let found = std::iter::once(&folder)
            .chain(&llama)
            .find_map(|folder| fs::read_to_string(folder.join(&case.template)).ok());
        let Some(source) = found else {
            absent += 1;
            continue;
        };
        let template = ChatTemplate::new(Some(&source), &tokenizer, &case.bos, &case.eos);
        let conversation = Conversation {
            messages: case.messages.into_iter().map(Said::message).collect(),
            tools: case.tools,
            variables: case.variables,
            continues: false,
            before: Vec::new(),
        };
        let rendered = tests::render(&template, &conversation, &tokenizer);
        let same = match (&rendered, case.text, case.refused) {
            (Ok(rendered), Some(text), _) => {
                undated(&rendered.text.replace(rendered.mark, "")) == undated(&text)
            }
            (Err(ChatError::Refused { message }), None, Some(refused)) => *message == refused,
            // If the template refuses the system role or results of tools, their text becomes the user's.
            (Ok(_), None, Some(_)) => conversation
                .messages
                .iter()
                .any(|message| matches!(message.role, Role::System | Role::Tool)),
            // A failure in Python may render here.
            _ => case.failed.is_some(),
        };
        // There jinja2 escapes texts for HTML, because of a neighbouring filter `safe`; see the fixtures' README.
        let escaped = case.template == "meetkai-functionary-medium-v3.1.jinja"
            && !conversation.tools.is_empty();
        if !(same || escaped) {
            different.push(format!("{what}: {rendered:?}"));
        }
        compared += 1;
    }
    if absent > 0 {
        println!(
            "left out: {absent} renderings: COTENANT_LLAMA_VOCABULARIES names no folder with their templates"
        );
    }
    assert!(compared >= 70, "{compared}");
    assert!(
        different.is_empty(),
        "{} of {compared}:\n{}",
        different.len(),
        different.join("\n")
    );
}

/// A text without the day that gpt-oss's template writes.
fn undated(text: &str) -> String {
    match text.split_once("Current date: ") {
        Some((before, rest)) => format!("{before}{}", rest.get(10..).unwrap_or_default()),
        None => text.to_owned(),
    }
}
