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
    /// What comes out, unless the template refuses.
    text: Option<String>,
    refused: Option<String>,
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

/// Those whose licence is not free are read from llama.cpp's folder, where there is one.
#[test]
fn templates_of_public_models_are_rendered_as_transformers_does() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat-templates");
    let llama = std::env::var_os("COTENANT_LLAMA_VOCABULARIES").map(|models| PathBuf::from(models).join("templates"));
    let tokenizer = Tokenizer::from_header(&TestVocabulary::chatml().header()).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&fs::read_to_string(folder.join("rendered.json")).unwrap()).unwrap();
    let mut compared = 0;
    for case in cases {
        let what = format!("{}: {}, {:?}", case.template, case.name, case.variables);
        let found = std::iter::once(&folder)
            .chain(&llama)
            .find_map(|folder| fs::read_to_string(folder.join(&case.template)).ok());
        let Some(source) = found else {
            println!("left out: {what}");
            continue;
        };
        let template = ChatTemplate::new(Some(&source), &tokenizer, &case.bos, &case.eos).unwrap();
        let conversation = Conversation {
            messages: case.messages.into_iter().map(Said::message).collect(),
            tools: case.tools,
            variables: case.variables,
        };
        match (
            tests::render(&template, &conversation, &tokenizer),
            case.text,
            case.refused,
        ) {
            (Ok(rendered), Some(text), None) => assert_eq!(rendered.text.replace(rendered.mark, ""), text, "{what}"),
            (Err(ChatError::Refused { message }), None, Some(refused)) => assert_eq!(message, refused, "{what}"),
            (found, text, refused) => panic!("{what}: {found:?} beside {text:?} {refused:?}"),
        }
        compared += 1;
    }
    assert!(compared >= 56, "{compared}");
}
