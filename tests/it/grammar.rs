//! Grammars on vocabularies of published sizes.

use std::{
    collections::HashSet,
    fs::{self, File},
    path::PathBuf,
    process,
    time::Duration,
};

use candle_core::quantized::gguf_file::{self, Value as Entry};
use cotenant::{
    engine::{
        AnswerForm, ChatMessage, Client, Conversation, GenerateRequest, Header, Prompt,
        PromptError, RequestId, Role, Sampling,
        sampling::{Sampler, TokenMask},
        text::TextSide,
        tokenizer::byte_symbol,
    },
    units::{Bytes, Tokens},
};
use serde_json::{Value, json};

use crate::support::children;

/// Vocabulary sizes of SmolLM, Llama 2, SmolLM2, Llama 3, Qwen 2.5, gpt-oss, Qwen 3.5 and Gemma 3.
#[test]
fn forms_are_kept_with_16_384_tokens() {
    forms_are_kept(16_384);
}

#[test]
fn forms_are_kept_with_32_000_tokens() {
    forms_are_kept(32_000);
}

#[test]
fn forms_are_kept_with_49_152_tokens() {
    forms_are_kept(49_152);
}

#[test]
fn forms_are_kept_with_128_256_tokens() {
    forms_are_kept(128_256);
}

#[test]
fn forms_are_kept_with_151_936_tokens() {
    forms_are_kept(151_936);
}

#[test]
fn forms_are_kept_with_201_088_tokens() {
    forms_are_kept(201_088);
}

#[test]
fn forms_are_kept_with_248_320_tokens() {
    forms_are_kept(248_320);
}

#[test]
fn forms_are_kept_with_262_144_tokens() {
    forms_are_kept(262_144);
}

fn forms_are_kept(tokens: usize) {
    let header = header(tokens);
    let program = Some(PathBuf::from(env!("CARGO_BIN_EXE_cotenant")));
    // Each byte of the prompt is a token.
    let side = TextSide::with_helper(&header, Tokens::new(1 << 20), program).unwrap();
    let schema = |schema: Value| AnswerForm::JsonSchema {
        schema,
        field: "response_format",
    };
    let object = json!({
        "type": "object",
        "properties": {
            "room": {"enum": ["kitchen", "hall"]},
            "level": {"type": "integer", "minimum": 0, "maximum": 100},
            "share": {"type": "number"},
            "note": {"type": "string", "maxLength": 60},
            "when": {"type": "string", "format": "date-time"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
            "other": {"anyOf": [{"$ref": "#/$defs/other"}, {"type": "null"}]},
        },
        "required": ["room", "level", "share", "note", "when", "tags", "other"],
        "additionalProperties": false,
        "$defs": {"other": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}},
    });
    let forms = [
        schema(json!({"type": "boolean"})),
        schema(json!({"type": "string", "enum": ["red", "green"]})),
        schema(json!({"type": "string"})),
        schema(object),
        AnswerForm::JsonObject,
        AnswerForm::ToolCall { name: None },
        AnswerForm::ToolCall {
            name: Some("light".to_owned()),
        },
    ];
    for form in forms {
        let what = format!("{form:?}");
        for seed in 0..3 {
            let mask = prepare(&side, form.clone(), &tools(2))
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            let Some(text) = babble(&side, mask, seed, 150) else {
                continue;
            };
            let json = text
                .trim_start_matches("<tool_call>\n")
                .trim_end_matches("\n</tool_call>");
            assert!(
                serde_json::from_str::<Value>(json).is_ok(),
                "{what}: {text:?}"
            );
        }
    }
    drop(prepare(&side, AnswerForm::ToolCall { name: None }, &tools(40)).unwrap());
    // The helper's peak memory is within its share of the ledger.
    let (peak, most) = (peak_bytes(helper_pid()), TextSide::bytes_max(&header));
    println!("{tokens} tokens: {peak} of {most}");
    assert!(peak <= most, "{peak} of {most}");
}

/// Returns functions with schemas similar to those of products, some 1.5 KB each.
pub(crate) fn tools(count: usize) -> Vec<Value> {
    let text = "Turns the device on or off, or sets how bright it is, by the name of the room that it is in.";
    let function = |number: usize| {
        let parameters = json!({
            "type": "object",
            "title": format!("Arguments{number}"),
            "properties": {
                "room": {"type": "string", "description": text, "examples": ["kitchen", "hall"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 100, "default": 50, "description": text},
                "mode": {"type": "string", "enum": ["heat", "cool", "auto", "off"], "description": text},
                "names": {"type": "array", "items": {"type": "string"}, "description": text},
                "target": {
                    "type": "object",
                    "properties": {
                        "area_id": {"type": "string", "description": text},
                        "entity_id": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": text},
                        "share": {"type": "number", "description": text},
                    },
                    "required": ["area_id"],
                    "description": text,
                },
            },
            "required": ["room"],
        });
        let name = if number == 0 {
            "light".to_owned()
        } else {
            format!("function_{number}")
        };
        json!({"type": "function", "function": {"name": name, "description": text, "parameters": parameters}})
    };
    (0..count).map(function).collect()
}

fn prepare(
    side: &TextSide,
    form: AnswerForm,
    tools: &[Value],
) -> Result<Box<dyn TokenMask>, PromptError> {
    let messages = vec![ChatMessage::new(Role::User, "x")];
    let conversation = Conversation {
        messages,
        tools: tools.to_vec(),
        ..Conversation::default()
    };
    let request = GenerateRequest {
        form: Some(form),
        ..GenerateRequest::new(RequestId::new(1), Prompt::Chat(conversation))
    };
    Ok(side.prepare(&request, Client::PATIENT)?.mask.unwrap())
}

/// Returns an answer of a model without preferences: random tokens allowed by the form; `None` if it does not end.
fn babble(side: &TextSide, mut mask: Box<dyn TokenMask>, seed: u64, most: usize) -> Option<String> {
    let tokenizer = side.tokenizer();
    let mut sampler = Sampler::new(Sampling {
        temperature: 1.0,
        seed,
        ..Sampling::GREEDY
    })
    .unwrap();
    let mut said = Vec::new();
    let mut logits = vec![0.0; tokenizer.vocabulary() as usize];
    for _ in 0..most {
        logits.fill(0.0);
        while !mask.is_ready(Duration::from_secs(1)).unwrap() {}
        mask.apply(&mut logits).unwrap();
        let token = sampler.next(&logits, &[]).unwrap();
        if tokenizer.is_end(token) {
            return Some(tokenizer.decode(&said));
        }
        said.push(token);
        mask.accept(token, tokenizer.bytes(token)).unwrap();
        if mask.is_complete().unwrap() {
            return Some(tokenizer.decode(&said));
        }
    }
    None
}

fn helper_pid() -> u32 {
    let mine = children(process::id());
    let is_helper = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains("text-helper"))
    };
    mine.into_iter().find(is_helper).expect("the helper runs")
}

/// Returns the peak anonymous memory of a process, as far as the kernel reports it: its peak without file pages.
fn peak_bytes(pid: u32) -> Bytes {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib = |key: &str| -> u64 {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    Bytes::from_kib(kib("VmHWM:").saturating_sub(kib("RssFile:")))
}

/// Returns a byte-level BPE vocabulary: bytes, white space, code punctuation, numbers, word parts of several scripts
/// with and without a preceding space, and a few long ones.
fn header(count: usize) -> Header {
    let mut seen = HashSet::with_capacity(count);
    let mut texts: Vec<Vec<u8>> = Vec::with_capacity(count);
    let mut add = |text: Vec<u8>| {
        if texts.len() < count - CONTROL.len() && seen.insert(text.clone()) {
            texts.push(text);
        }
        texts.len() < count - CONTROL.len()
    };
    for byte in 0..=u8::MAX {
        add(vec![byte]);
    }
    for run in 2..=81 {
        add(vec![b' '; run]);
    }
    for mark in [
        "{\"", "\":", "\": ", "\",", "\", \"", "\"},", "\"}", "[]", "{}", "],", "},", "\\n",
        "\\\"", "\"\"", ".\"", "---",
    ] {
        add(mark.as_bytes().to_vec());
    }
    for number in 0..1000 {
        add(number.to_string().into_bytes());
    }
    for character in ('\u{4e00}'..'\u{5e00}').step_by(3) {
        add(character.to_string().into_bytes());
    }
    // First bytes of characters, which real vocabularies contain as well.
    for lead in 0xe4..=0xe9u8 {
        for next in 0x80..0xb0u8 {
            add(vec![lead, next]);
        }
    }
    let syllables = [
        "ing", "er", "ti", "on", "al", "re", "st", "en", "Ma", "the", "ge", "con", "ví", "ação",
        "ung", "schl", "для", "про", "ста", "ние", "کار", "の", "して", "ed", "ly", "un", "ist",
        "Be", "or", "ki", "ta", "mo", "lu", "s", "e", "a", "y", "o", "n", "t", "d", "r", "i",
    ];
    let mut state = 1u64;
    let mut draw = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    loop {
        let mut text = if draw(2) == 0 {
            " ".to_owned()
        } else {
            String::new()
        };
        let parts = if draw(400) == 0 {
            4 + draw(12)
        } else {
            1 + draw(4)
        };
        for _ in 0..parts {
            text.push_str(syllables[draw(syllables.len())]);
        }
        if !add(text.into_bytes()) {
            break;
        }
    }
    let symbols = |text: &[u8]| {
        text.iter()
            .map(|&byte| byte_symbol(byte))
            .collect::<String>()
    };
    let string = |text: &str| Entry::String(text.to_owned());
    let plain = texts.len();
    let mut tokens: Vec<Entry> = texts
        .iter()
        .map(|text| Entry::String(symbols(text)))
        .collect();
    tokens.extend(CONTROL.map(string));
    let types = (0..tokens.len())
        .map(|at| Entry::I32(if at < plain { 1 } else { 3 }))
        .collect();
    let end = u32::try_from(count - 1).unwrap();
    let entries = [
        ("tokenizer.ggml.model", string("gpt2")),
        ("tokenizer.ggml.pre", string("qwen2")),
        ("tokenizer.ggml.tokens", Entry::Array(tokens)),
        ("tokenizer.ggml.token_type", Entry::Array(types)),
        ("tokenizer.ggml.merges", Entry::Array(vec![string("i n")])),
        ("tokenizer.ggml.eos_token_id", Entry::U32(end)),
        ("tokenizer.chat_template", string(TEMPLATE)),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("header.gguf");
    let entries: Vec<_> = entries.iter().map(|(key, value)| (*key, value)).collect();
    gguf_file::write(&mut File::create(&path).unwrap(), &entries, &[]).unwrap();
    Header::read(&path).unwrap()
}

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}<|im_start|>assistant\n";

const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
