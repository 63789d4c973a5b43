//! Tests of the streaming answer parser.

use proptest::prelude::*;

use super::*;

fn read(style: AnswerStyle, pieces: &[&str]) -> Vec<AnswerPart> {
    let tool = serde_json::json!({"type": "function", "function": {
        "name": "set_light",
        "parameters": {"type": "object", "properties": {"room": {"type": "string"}, "level": {"type": "integer"}}},
    }});
    let mut reader = AnswerReader::new(&[tool]);
    reader.set_style(style);
    let mut parts: Vec<AnswerPart> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    parts.extend(reader.finish(false));
    let mut joined: Vec<AnswerPart> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(AnswerPart::Text(before)), AnswerPart::Text(text))
            | (Some(AnswerPart::Reasoning(before)), AnswerPart::Reasoning(text)) => {
                before.push_str(&text);
            }
            (_, part) => joined.push(part),
        }
    }
    joined
}

fn text(text: &str) -> AnswerPart {
    AnswerPart::Text(text.to_owned())
}

fn reasoning(text: &str) -> AnswerPart {
    AnswerPart::Reasoning(text.to_owned())
}

fn call(name: &str, arguments: &str) -> AnswerPart {
    AnswerPart::ToolCall {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    }
}

const THINK: ThoughtTags = ThoughtTags::ALL[0];
const CHANNEL: ThoughtTags = ThoughtTags::ALL[2];

const TAGGED: AnswerStyle = AnswerStyle {
    thoughts: Thoughts::Perhaps(THINK),
    tools: Some(ToolFormat::Tagged),
};

#[test]
fn thoughts_text_and_calls_are_reported_apart_however_they_are_cut() {
    let answer = "<think>hm\n</think>\n\nI will look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": \
                      \"<b>\"}}\n</tool_call>\n<tool_call>{\"name\": \"wait\", \"arguments\": {}}</tool_call>";
    let expected = [
        reasoning("hm\n"),
        text("I will look."),
        call("look", r#"{"at":"<b>"}"#),
        call("wait", "{}"),
    ];
    assert_eq!(read(TAGGED, &[answer]), expected);
    let pieces: Vec<String> = answer.chars().map(String::from).collect();
    let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
    assert_eq!(read(TAGGED, &pieces), expected);
}

#[test]
fn a_call_with_which_thoughts_end_is_one() {
    let style = AnswerStyle {
        thoughts: Thoughts::Open(THINK),
        tools: Some(ToolFormat::Parameters),
    };
    let of_function = "<tool_call>\n<function=set_light>\n<parameter=room>\nhall\n</parameter>\n</function>\n</tool_call>";
    let of_json = r#"<tool_call>{"name": "set_light", "arguments": {"room": "hall"}}</tool_call>"#;
    let hall = || call("set_light", r#"{"room":"hall"}"#);
    for written in [of_function, of_json] {
        let answer = format!("It is dark, so <tool_call> is due.\n{written}\n");
        let pieces: Vec<String> = answer.chars().map(String::from).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        for pieces in [pieces.as_slice(), &[answer.as_str()]] {
            assert_eq!(
                read(style, pieces),
                [reasoning("It is dark, so <tool_call> is due.\n"), hall()]
            );
        }
        // A call inside the thoughts is executed once or not at all.
        let answer = format!("Like {written}?</think>{written}");
        let thought = format!("Like {written}?");
        assert_eq!(read(style, &[&answer]), [reasoning(&thought), hall()]);
        let answer = format!("Like {written}? No.");
        assert_eq!(read(style, &[&answer]), [reasoning(&answer)]);
    }
}

#[test]
fn thoughts_of_mistrals_models_have_tags_of_their_own() {
    let mistral = ThoughtTags::of("[THINK]{{ thoughts }}[/THINK]").unwrap();
    let style = AnswerStyle {
        thoughts: Thoughts::Perhaps(mistral),
        tools: Some(ToolFormat::Mistral),
    };
    assert_eq!(
        read(
            style,
            &["[TH", "INK]so[/THINK]It is. [TOOL_CALLS]set_light[ARGS]{}"]
        ),
        [reasoning("so"), text("It is."), call("set_light", "{}")]
    );
    assert_eq!(read(style, &["[THIS]"]), [text("[THIS]")]);
}

#[test]
fn thoughts_of_gemma_4_may_follow_text_and_calls() {
    let tags = ThoughtTags::of("{{ '<|channel>thought\\n<channel|>' }}").unwrap();
    let call_of =
        |room: &str| format!("<|tool_call>call:set_light{{room:<|\"|>{room}<|\"|>}}<tool_call|>");
    for tools in [None, Some(ToolFormat::Gemma)] {
        let style = |thoughts| AnswerStyle { thoughts, tools };
        for (thoughts, answer, mut expected) in [
            (
                Thoughts::Perhaps(tags),
                "<|channel>thought\nhm\n<channel|>On it.<|channel>thought\nDone?<channel|>\nYes.",
                vec![
                    reasoning("hm\n"),
                    text("On it."),
                    reasoning("Done?"),
                    text("Yes."),
                ],
            ),
            // Without thoughts, larger models still write their tags.
            (
                Thoughts::Perhaps(tags),
                "<|channel>thought\n<channel|>Yes.<|channel>thought\n<channel|>",
                vec![text("Yes.")],
            ),
            (
                Thoughts::Open(tags),
                "so<channel|><|channel>thought\n<channel|>Yes.<channel|>",
                vec![reasoning("so"), text("Yes.")],
            ),
            (
                Thoughts::Perhaps(tags),
                "<|channel>final",
                vec![text("<|channel>final")],
            ),
        ] {
            let mut answer = answer.to_owned();
            if tools.is_some() && answer.ends_with('>') {
                answer.push_str(&call_of("hall"));
                expected.push(call("set_light", r#"{"room":"hall"}"#));
            }
            assert_eq!(read(style(thoughts), &[&answer]), expected, "{answer}");
            let pieces: Vec<String> = answer.chars().map(String::from).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(read(style(thoughts), &pieces), expected, "{answer}");
        }
    }
}

#[test]
fn messages_of_gpt_oss_are_thoughts_text_and_calls_by_their_headers() {
    let channels = |in_text, tools| AnswerStyle {
        thoughts: Thoughts::Channels { in_text },
        tools,
    };
    assert_eq!(
        read(channels(false, None), &["<<|message|>"]),
        [text("<<|message|>")]
    );
    let with_tools = channels(false, Some(ToolFormat::Channels));
    let hall = || call("set_light", r#"{"room":"hall"}"#);
    let thought = "<|channel|>analysis<|message|>It is dark.<|end|><|start|>assistant";
    let message = r#"<|message|>{"room": "hall"}"#;
    for (style, answer, expected) in [
        (
            channels(false, None),
            format!("{thought}<|channel|>final<|message|>On *it* <b>."),
            vec![reasoning("It is dark."), text("On *it* <b>.")],
        ),
        (
            with_tools,
            format!(
                "{thought}<|channel|>commentary to=functions.set_light <|constrain|>json{message}"
            ),
            vec![reasoning("It is dark."), hall()],
        ),
        // As the template writes earlier calls.
        (
            with_tools,
            format!("{thought} to=functions.set_light<|channel|>commentary json{message}"),
            vec![reasoning("It is dark."), hall()],
        ),
        (
            with_tools,
            format!(
                "{thought}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary \
                 to=functions.set_light{message}<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>1+1"
            ),
            vec![
                reasoning("It is dark."),
                text("I look."),
                hall(),
                call("python", "1+1"),
            ],
        ),
        // A small model leaves out the end of its thoughts, or the last bracket.
        (
            with_tools,
            "<|channel|>analysis<|message|>So.<|channel|>commentary to=functions.set_light<|message|>{\"room\": \"hall\"".to_owned(),
            vec![reasoning("So."), hall()],
        ),
        (
            with_tools,
            "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>".to_owned(),
            vec![call("stop", "{}")],
        ),
        // Nothing can be called without tools.
        (
            channels(false, None),
            format!("<|channel|>commentary to=functions.set_light{message}"),
            vec![text(r#"{"room": "hall"}"#)],
        ),
        (
            channels(true, None),
            "ly so.<|end|><|start|>assistant<|channel|>analysis<|message|>Done".to_owned(),
            vec![text("ly so."), reasoning("Done")],
        ),
        (channels(false, None), "Plain <|".to_owned(), vec![text("Plain <|")]),
        (channels(false, None), "<|channel|>final".to_owned(), vec![]),
    ] {
        assert_eq!(read(style, &[&answer]), expected, "{answer}");
        let pieces: Vec<String> = answer.chars().map(String::from).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        assert_eq!(read(style, &pieces), expected, "{answer}");
    }
    let mut reader = AnswerReader::new(&[]);
    reader.set_style(with_tools);
    let begun =
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"x\", \"b";
    assert_eq!(reader.push(begun), []);
    let expected = call("f", "{\"a\": \"x\", \"b");
    assert_eq!(reader.finish(true), [expected]);
}

#[test]
fn thoughts_that_the_prompt_began_are_reported_apart() {
    let style = AnswerStyle {
        thoughts: Thoughts::Open(THINK),
        tools: None,
    };
    assert_eq!(
        read(style, &["so</th", "ink>\n\n on it "]),
        [reasoning("so"), text("on it ")]
    );
    assert_eq!(read(style, &["never done"]), [reasoning("never done")]);
    // Thoughts occur once; later look-alikes are text.
    assert_eq!(
        read(style, &["a</think>b<think>c</think>"]),
        [reasoning("a"), text("b<think>c</think>")]
    );
}

#[test]
fn a_call_of_functions_and_parameters_becomes_json() {
    let answer = "<tool_call>\n<function=set_light>\n<parameter=room>\n12\n</parameter>\n<parameter=level>\n7\n\
                      </parameter>\n</function>\n</tool_call>";
    assert_eq!(
        read(TAGGED, &[answer]),
        [call("set_light", r#"{"room":"12","level":7}"#)]
    );
}

#[test]
fn values_between_tags_have_the_types_that_their_schema_allows() {
    let tool = serde_json::json!({"type": "function", "function": {"name": "f", "parameters": {
        "type": "object",
        "properties": {
            "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "day": {"$ref": "#/$defs/Day"},
            "either": {"type": ["number", "string"]},
            "level": {"type": "integer"},
            "list": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "loop": {"$ref": "#/$defs/Loop"},
            "open": {},
        },
        "$defs": {"Day": {"enum": ["1", "2"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}},
    }}});
    let read = |parameter: &str, value: &str| {
        let mut reader = AnswerReader::new(std::slice::from_ref(&tool));
        reader.set_style(TAGGED);
        let answer = format!(
            "<tool_call>\n<function=f>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        match reader.push(&answer).as_slice() {
            [AnswerPart::ToolCall { arguments, .. }] => arguments.clone(),
            parts => panic!("{parts:?}"),
        }
    };
    for (parameter, value, expected) in [
        ("code", "02134", r#"{"code":"02134"}"#),
        ("code", "true", r#"{"code":"true"}"#),
        ("code", "null", r#"{"code":null}"#),
        ("code", r#""quoted""#, r#"{"code":"quoted"}"#),
        ("code", "", r#"{"code":""}"#),
        ("day", "1", r#"{"day":"1"}"#),
        ("either", "7", r#"{"either":7}"#),
        ("either", "7 and more", r#"{"either":"7 and more"}"#),
        ("level", "7", r#"{"level":7}"#),
        ("level", "high", r#"{"level":"high"}"#),
        // Models leave the tags empty to mean no value.
        ("level", "", "{}"),
        ("list", "", "{}"),
        ("list", "['a', None]", r#"{"list":["a",null]}"#),
        ("loop", "7", r#"{"loop":7}"#),
        ("open", "7", r#"{"open":7}"#),
        ("unknown", "", r#"{"unknown":""}"#),
    ] {
        assert_eq!(read(parameter, value), expected, "{parameter}: {value}");
    }
}

#[test]
fn a_bare_call_is_one_only_if_it_is_the_whole_answer() {
    let style = AnswerStyle {
        thoughts: Thoughts::None,
        tools: Some(ToolFormat::Bare),
    };
    assert_eq!(
        read(
            style,
            &["{\"name\": \"f\", ", "\"parameters\": {\"a\": 1}}"]
        ),
        [call("f", r#"{"a":1}"#)]
    );
    assert_eq!(
        read(style, &["{\"a\": 1} is JSON"]),
        [text("{\"a\": 1} is JSON")]
    );
    assert_eq!(read(style, &["no {call}"]), [text("no {call}")]);
}

#[test]
fn calls_are_read_however_models_write_them() {
    let both = |arguments: &str| vec![call("set_light", arguments)];
    let hall = r#"{"room":"hall"}"#;
    for (answer, expected) in [
        // without arguments, and with arguments as a text
        (
            "<tool_call>\n{\"name\": \"set_light\"}\n</tool_call>",
            both("{}"),
        ),
        (
            "<tool_call>{\"name\": \"set_light\", \"arguments\": null}</tool_call>",
            both("{}"),
        ),
        (
            r#"<tool_call>{"name": "set_light", "arguments": "{\"room\": \"hall\"}"}</tool_call>"#,
            both(hall),
        ),
        (
            r#"{"type": "function", "function": {"name": "set_light", "arguments": {"room": "hall"}}}"#,
            both(hall),
        ),
        (
            r#"{"function": "set_light", "parameters": {"room": "hall"}}"#,
            both(hall),
        ),
        // one bracket too many, a module before the name, arguments beside it
        (
            r#"<tool_call>{"name": "set_light", "arguments": {"room": "hall"}}}</tool_call>"#,
            both(hall),
        ),
        (
            "{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}}\n",
            both(hall),
        ),
        (
            r#"<tool_call>{"name": "functions.set_light", "arguments": {"room": "hall"}}</tool_call>"#,
            both(hall),
        ),
        (
            r#"<tool_call>{"tool_name": "set_light", "tool_args": {"room": "hall"}}</tool_call>"#,
            both(hall),
        ),
        (
            r#"<tool_call>{"name": "set_light", "room": "hall"}</tool_call>"#,
            both(hall),
        ),
        // tags inside of values
        (
            r#"<tool_call>{"name": "set_light", "arguments": {"room": "a </tool_call> b"}}</tool_call>"#,
            both(r#"{"room":"a </tool_call> b"}"#),
        ),
        (
            "<tool_call><function=set_light>\n<parameter=room>\na </tool_call> </parameter> b\n</parameter>\n</function></tool_call>",
            both(r#"{"room":"a </tool_call> </parameter> b"}"#),
        ),
        // brackets and end tags forgotten
        (
            r#"<tool_call>{"name": "set_light", "arguments": {"room": "hall"}</tool_call>"#,
            both(hall),
        ),
        (
            r#"<tool_call>{"name": "set_light", "arguments": {"room": "hall"}}"#,
            both(hall),
        ),
        (
            r#"{"name": "set_light", "parameters": {"room": "hall"}"#,
            both(hall),
        ),
        (
            "<function=set_light>\n<parameter=room>\nhall\n<parameter=level>\n2\n</function>",
            both(r#"{"room":"hall","level":2}"#),
        ),
        (
            "<function=set_light><parameter=room>hall</parameter>",
            both(hall),
        ),
        // Qwen 3 Coder and Llama 3.1 without the outer tags
        (
            "<function=set_light>\n<parameter=room>\nhall\n</parameter>\n</function>\n</tool_call>",
            both(hall),
        ),
        (
            "<function=set_light>{\"room\": \"hall\"}</function>",
            both(hall),
        ),
        // Mistral
        (
            "[TOOL_CALLS]set_light[ARGS]{\"room\": \"hall\"}",
            both(hall),
        ),
        (
            "[TOOL_CALLS]set_light[CALL_ID]abcdefghi[ARGS]{\"room\": \"hall\"}",
            both(hall),
        ),
        (
            "[TOOL_CALLS] [{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}, \"id\": \"abc\"}]",
            both(hall),
        ),
        ("set_light[ARGS]{\"room\": \"hall\"}", both(hall)),
        ("[TOOL_CALLS]set_light{\"room\": \"hall\"}", both(hall)),
        // Granite, Phi 4, SmolLM 2, Qwen 2.5 Coder, LFM 2
        (
            "<|tool_call|>[{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}]<|/tool_call|>",
            both(hall),
        ),
        (
            "functools[{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}]",
            both(hall),
        ),
        (
            "<tool_call>[{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}]</tool_call>",
            both(hall),
        ),
        (
            "<tools>\n{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}\n</tools>",
            both(hall),
        ),
        (
            "<|tool_call_start|>[set_light(room=\"hall\")]<|tool_call_end|>",
            both(hall),
        ),
        // Llama and Gemma: in a fence, behind a tag, as Python
        (
            "```json\n{\"name\": \"set_light\", \"parameters\": {\"room\": \"hall\"}}\n```",
            both(hall),
        ),
        (
            "```\n[{\"name\": \"set_light\", \"parameters\": {\"room\": \"hall\"}}]\n```\n",
            both(hall),
        ),
        (
            "<|python_tag|>{\"name\": \"set_light\", \"parameters\": {\"room\": \"hall\"}}",
            both(hall),
        ),
        ("<|python_tag|>set_light.call(room=\"hall\")", both(hall)),
        ("[set_light(room='hall')]", both(hall)),
        (
            "```tool_code\nprint(default_api.set_light('hall', level = 2))\n```",
            both(r#"{"level":2,"room":"hall"}"#),
        ),
        (
            "{'name': 'set_light', 'arguments': {'room': 'hall'}}",
            both(hall),
        ),
        (
            "{\"name\": \"set_light\", \"arguments\": {\"room\": \"a\nb\"}}",
            both(r#"{"room":"a\nb"}"#),
        ),
        // families with tags of their own
        (
            "<start_function_call>call:set_light{level:2,room:<escape>hall, {no}<escape>}<end_function_call>",
            both(r#"{"level":2,"room":"hall, {no}"}"#),
        ),
        (
            "<start_function_call>call:set_light{room:<escape>hall<escape>}<end_function_call><start_function_call>call:set_light{}<end_function_call>",
            vec![call("set_light", hall), call("set_light", "{}")],
        ),
        (
            "<|tool_call>call:set_light{level:2,room:<|\"|>hall, {no}<tool_call|><|\"|>}<tool_call|>",
            both(r#"{"level":2,"room":"hall, {no}<tool_call|>"}"#),
        ),
        (
            "<|tool_call>call:set_light{ <|\"|>room<|\"|>: \"hall\" }<tool_call|><|tool_call>call:set_light{room:hall}<tool_call|>",
            vec![call("set_light", hall), call("set_light", hall)],
        ),
        (
            "<|tool_call>call:other{list:[{a:null},<|\"|>b<|\"|>,[1.5]]}<tool_call|>",
            vec![call("other", r#"{"list":[{"a":null},"b",[1.5]]}"#)],
        ),
        (
            "<|tool_call>call:default_api.set_light{room:<|\"|>hall<|\"|>}",
            both(hall),
        ),
        ("call:set_light{room:<|\"|>hall<|\"|>}", both(hall)),
        (
            "<TOOLCALL>[{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}]</TOOLCALL>",
            both(hall),
        ),
        (
            "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"set_light\", \"parameters\": {\"room\": \"hall\"}}\n]<|END_ACTION|>",
            both(hall),
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>set_light\n```json\n{\"room\": \"hall\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>set_light\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            vec![call("set_light", hall), call("set_light", "{}")],
        ),
        (
            "<｜tool▁call▁begin｜>set_light<｜tool▁sep｜>{\"room\": \"hall\"}<｜tool▁call▁end｜>",
            both(hall),
        ),
        (">>>set_light\n{\"room\": \"hall\"}", both(hall)),
        (
            "<tool_call>\nset_light\n{\"room\": \"hall\"}\n</tool_call>",
            both(hall),
        ),
        (
            "```json\n[{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}]```",
            both(hall),
        ),
        // other keys
        (
            r#"{"type": "function", "name": "set_light", "parameters": {"room": "hall"}}"#,
            both(hall),
        ),
        (
            r#"{"function_call": {"name": "set_light", "arguments": {"room": "hall"}}}"#,
            both(hall),
        ),
        (
            r#"{"tool_call": {"name": "set_light", "arguments": {"room": "hall"}}}"#,
            both(hall),
        ),
        (
            r#"{"action": "set_light", "action_input": {"room": "hall"}}"#,
            both(hall),
        ),
        (
            r#"{"tool": "set_light", "tool_input": {"room": "hall"}}"#,
            both(hall),
        ),
        (
            r#"{"function_name": "set_light", "params": {"room": "hall"}}"#,
            both(hall),
        ),
        (r#"{"set_light": {"room": "hall"}}"#, both(hall)),
        (
            "<tool_call>\n{\"set_light\": {\"room\": \"hall\"}}\n</tool_call>",
            both(hall),
        ),
        // several, and text before
        (
            "<tool_call>{\"name\": \"set_light\", \"arguments\": {}}\n{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}</tool_call>",
            vec![call("set_light", "{}"), call("set_light", hall)],
        ),
        (
            "[TOOL_CALLS]set_light[ARGS]{}[TOOL_CALLS]set_light[ARGS]{\"room\": \"hall\"}",
            vec![call("set_light", "{}"), call("set_light", hall)],
        ),
        (
            "{\"name\": \"set_light\", \"parameters\": {}}; {\"name\": \"set_light\", \"parameters\": {\"room\": \"hall\"}}",
            vec![call("set_light", "{}"), call("set_light", hall)],
        ),
        (
            "I will.\n{\"name\": \"set_light\", \"arguments\": {\"room\": \"hall\"}}\nDone.",
            vec![text("I will."), call("set_light", hall), text("Done.")],
        ),
    ] {
        for format in [ToolFormat::Bare, ToolFormat::Parameters, ToolFormat::Tagged] {
            let style = AnswerStyle {
                thoughts: Thoughts::None,
                tools: Some(format),
            };
            assert_eq!(read(style, &[answer]), expected, "{format:?}: {answer}");
            let pieces: Vec<String> = answer.chars().map(String::from).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(read(style, &pieces), expected, "{format:?}: {answer}");
        }
    }
}

#[test]
fn prose_and_data_are_not_calls() {
    for answer in [
        "{\"name\": \"Bob\", \"age\": 7}",
        "[1, 2, 3]",
        "[a link](https://example.com)",
        "```python\nprint(\"hello\")\n```",
        "```json\n{\"name\": \"Bob\"}\n```",
        "```\nset the light\n```",
        "The function <function=other>{}</function> is not there.",
        "Lights (all of them):\n{\"a\": 1}",
        "set_light is a function",
        "set_light(s) are on",
        "\"set_light\"",
        "other(room='hall')",
        "print(1)",
        "I use functools[0] and [ARGS].",
        ">>> print(1)",
        "{\"other\": {\"room\": \"hall\"}}",
        "{\"set_light\": \"on\"}",
        "{\"action\": \"wait\"}",
    ] {
        let style = AnswerStyle {
            thoughts: Thoughts::None,
            tools: Some(ToolFormat::Tagged),
        };
        assert_eq!(read(style, &[answer]), [text(answer)], "{answer}");
    }
}

#[test]
fn thoughts_that_are_white_space_are_none() {
    assert_eq!(
        read(TAGGED, &["<think>\n", "\n</think>\n\nHello."]),
        [text("Hello.")]
    );
    assert_eq!(
        read(TAGGED, &["<think>\n", "\n hm </think>Hello."]),
        [reasoning("\n\n hm "), text("Hello.")]
    );
}

#[test]
fn a_call_that_the_length_cuts_is_a_cut_call_and_never_text() {
    let cut = |format: ToolFormat, answer: &str| {
        let style = AnswerStyle {
            thoughts: Thoughts::None,
            tools: Some(format),
        };
        let tool = serde_json::json!({"type": "function", "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
        }});
        let mut reader = AnswerReader::new(&[tool]);
        reader.set_style(style);
        let mut parts = reader.push(answer);
        parts.extend(reader.finish(true));
        parts
    };
    let whole = "{\"name\": \"f\", \"arguments\": {\"a\": \"x\", \"b\": 12}}";
    for length in 0..whole.len() {
        let begun = &whole[..length];
        for (format, answer) in [
            (ToolFormat::Tagged, format!("<tool_call>\n{begun}")),
            (ToolFormat::Bare, begun.to_owned()),
        ] {
            let parts = cut(format, &answer);
            let expected = match length {
                0..12 => vec![],
                12..27 => vec![call("f", "")],
                _ => vec![call("f", &begun[27..length.min(whole.len() - 1)])],
            };
            assert_eq!(parts, expected, "{format:?}: {answer}");
        }
    }
    assert_eq!(
        cut(ToolFormat::Tagged, "I will. <tool_c"),
        [text("I will.")],
        "the beginning of a tag is no text"
    );
    assert_eq!(
        cut(
            ToolFormat::Parameters,
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n1"
        ),
        [call("f", r#"{"a":"x""#)]
    );
    assert_eq!(cut(ToolFormat::Parameters, "<tool_call>\n<functio"), []);
    let gemma = "<|tool_call>call:f{a:<|\"|>x<|\"|>,b:12}";
    for (begun, expected) in [
        ("<|tool_call>ca", vec![]),
        ("<|tool_call>call:f", vec![]),
        ("<|tool_call>call:f{a:<|\"|>", vec![call("f", "{")]),
        (
            "<|tool_call>call:f{a:<|\"|>x<|\"|>,b:1",
            vec![call("f", r#"{"a":"x""#)],
        ),
        (gemma, vec![call("f", r#"{"a":"x","b":12}"#)]),
    ] {
        assert_eq!(cut(ToolFormat::Gemma, begun), expected, "{begun}");
    }
    // Complete calls stay complete, and truncated text stays text.
    assert_eq!(
        cut(ToolFormat::Tagged, &format!("<tool_call>{whole}")),
        [call("f", r#"{"a":"x","b":12}"#)]
    );
    for tag in ["\n<", "\n</tool_", "</tool_call>\n<tool_c", "\n"] {
        let answer = format!("<tool_call>{whole}{tag}");
        assert_eq!(
            cut(ToolFormat::Tagged, &answer),
            [call("f", r#"{"a":"x","b":12}"#)],
            "{answer}"
        );
    }
    assert_eq!(cut(ToolFormat::Tagged, "a < b"), [text("a < b")]);
}

#[test]
fn what_is_no_call_stays_text() {
    for answer in [
        "<tool_call>{broken</tool_call>",
        "<tool_call>[1]</tool_call>",
        "a <tool_call>{\"name\": \"f\"",
        "a < b, <tool",
        "<tool_call><function=f></tool_call><parameter=x>",
    ] {
        let parts = read(TAGGED, &[answer]);
        let said: String = parts
            .iter()
            .map(|part| match part {
                AnswerPart::Text(text) => text.as_str(),
                _ => "",
            })
            .collect();
        if !answer.contains("<function=f>") {
            assert_eq!(said, answer);
        }
    }
    // Without tools, nothing is parsed.
    assert_eq!(
        read(AnswerStyle::default(), &[" <tool_call>"]),
        [text(" <tool_call>")]
    );
}

proptest! {
    #[test]
    fn cutting_changes_nothing(
        pieces in prop::collection::vec("(<think>|</think>|<tool_call>|</tool_call>|<\\|tool_call>|<tool_call\\|>|<\\|channel\\|>(analysis|final|commentary to=functions.f)|<\\|message\\|>|<\\|end\\|>|<\\|start\\|>assistant|<\\|channel>thought\n|<channel\\|>|call:set_light\\{|<\\|\"\\|>|\\{\"name\": \"f\", \"arguments\": \\{\\}\\}|\"name\": |\"set_light\"|set_light|<function=|<parameter=a>|</parameter>|</function>|\\[TOOL_CALLS\\]|\\[ARGS\\]|```|```json\n|functools\\[|print|<|[a-z \\n{}(),='\"\\[\\]ü])", 0..14),
        tools in prop::option::of(prop::sample::select(vec![ToolFormat::Bare, ToolFormat::Gemma, ToolFormat::Parameters, ToolFormat::Tagged])),
        thoughts in prop::sample::select(vec![
            Thoughts::None, Thoughts::Open(THINK), Thoughts::Perhaps(THINK), Thoughts::Open(CHANNEL), Thoughts::Perhaps(CHANNEL),
            Thoughts::Channels { in_text: false }, Thoughts::Channels { in_text: true },
        ]),
    ) {
        let style = AnswerStyle { thoughts, tools };
        let whole = pieces.concat();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let chars: Vec<String> = whole.chars().map(String::from).collect();
        let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
        let expected = read(style, &[&whole]);
        prop_assert_eq!(read(style, &pieces), expected.clone());
        prop_assert_eq!(read(style, &chars), expected);
    }
}
