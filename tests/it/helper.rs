//! Helper process: grammars and chat templates are bounded, and leave no memory behind.

use std::{
    fs,
    path::PathBuf,
    process,
    time::{Duration, Instant},
};

use cotenant::{
    engine::{
        AnswerForm, ChatMessage, Client, Conversation, GenerateRequest, Prompt, PromptError,
        RequestId, Role,
        chat::ChatError,
        constraint::ConstraintError,
        sampling::MaskError,
        text::{Prepared, TextError, TextSide},
    },
    units::Tokens,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    stage::{header, header_with},
    support::children,
};

fn text_side(template: Option<&str>) -> TextSide {
    let program = Some(PathBuf::from(env!("CARGO_BIN_EXE_cotenant")));
    TextSide::with_helper(&header_with(template), Tokens::new(4096), program).unwrap()
}

fn asked(schema: Value) -> GenerateRequest {
    GenerateRequest {
        form: Some(AnswerForm::JsonSchema {
            schema,
            field: "response_format",
        }),
        ..GenerateRequest::new(RequestId::new(1), Prompt::Text("x".to_owned()))
    }
}

fn prepare(side: &TextSide, schema: Value) -> Result<Prepared, PromptError> {
    side.prepare(&asked(schema), Client::PATIENT)
}

fn helper_pid() -> u32 {
    let mine = children(process::id());
    let helper = mine.into_iter().find(|pid| {
        fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains("text-helper"))
    });
    helper.expect("the helper runs")
}

/// Returns the anonymous memory of a process, in kB.
fn anonymous(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.map_or(0, |line| {
        line.trim().trim_end_matches(" kB").parse().unwrap()
    })
}

fn wait_for_no_jobs(helper: u32) {
    while !children(helper).is_empty() {
        std::thread::yield_now();
    }
}

/// Without limits, each takes seconds and gigabytes, or ends the process.
fn hostile() -> Vec<Value> {
    let mut nested = json!({"type": "string"});
    for _ in 0..120 {
        nested = json!({"type": "array", "items": nested});
    }
    let products: Vec<Value> = (0..12)
        .map(|n| json!({"anyOf": (0..12).map(|m| json!({"multipleOf": 1_000_003 + 2 * n + 30 * m})).collect::<Vec<_>>()}))
        .collect();
    vec![
        json!({"type": "integer", "multipleOf": 62_615_533}),
        json!({"type": "number", "multipleOf": 0.000_000_7, "minimum": 0.000_001}),
        json!({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
        json!({"type": "string", "pattern": "^(.*a.{40}|.*b.{41}|.*c.{42})$"}),
        json!({"type": "string", "allOf": [{"pattern": "(a|b)*a(a|b){18}"}, {"pattern": "(a|b)*b(a|b){17}"}]}),
        json!({"allOf": products}),
        nested,
    ]
}

#[test]
fn hostile_schemas_are_refused_within_their_bounds_and_leave_nothing() {
    let side = text_side(None);
    let small =
        json!({"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]});
    drop(prepare(&side, small.clone()).unwrap());
    let helper = helper_pid();
    wait_for_no_jobs(helper);
    let (before, own) = (anonymous(helper), anonymous(process::id()));
    for round in 0..2 {
        for schema in hostile() {
            let (text, began) = (schema.to_string(), Instant::now());
            let result = prepare(&side, schema).map(drop);
            println!(
                "{round}: {} in {:?}: {}",
                result.as_ref().map_or_else(
                    |error| cotenant::causes::in_one_line(error),
                    |()| "taken".to_owned()
                ),
                began.elapsed(),
                text.chars().take(80).collect::<String>()
            );
        }
    }
    wait_for_no_jobs(helper);
    let grown = anonymous(helper).saturating_sub(before);
    assert!(grown <= 256, "the helper has grown by {grown} kB");
    let grown = anonymous(process::id()).saturating_sub(own);
    assert!(grown <= 8 << 10, "the owner has grown by {grown} kB");
    drop(prepare(&side, small).unwrap());
    assert_eq!(helper_pid(), helper, "it is the same one");
}

/// Refused ones keep no memory, even if many are requested at the same time.
#[test]
fn fourteen_refused_schemas_at_once_leave_nothing() {
    let side = text_side(None);
    drop(prepare(&side, json!({})).unwrap());
    let helper = helper_pid();
    wait_for_no_jobs(helper);
    let (before, own) = (anonymous(helper), anonymous(process::id()));
    std::thread::scope(|scope| {
        for number in 0..14u64 {
            let side = &side;
            scope.spawn(move || {
                let schema = json!({"type": "integer", "multipleOf": 62_615_533 + 2 * number});
                assert!(prepare(side, schema).is_err());
            });
        }
    });
    wait_for_no_jobs(helper);
    let grown = anonymous(helper).saturating_sub(before);
    assert!(grown <= 256, "the helper has grown by {grown} kB");
    let grown = anonymous(process::id()).saturating_sub(own);
    assert!(grown <= 16 << 10, "the owner has grown by {grown} kB");
    drop(prepare(&side, json!({"type": "boolean"})).unwrap());
}

#[test]
fn the_multiple_of_a_large_number_is_refused_as_too_large() {
    let error = prepare(
        &text_side(None),
        json!({"type": "integer", "multipleOf": 62_615_533}),
    )
    .err();
    let Some(PromptError::Constraint { source, .. }) = error else {
        panic!("{error:?}");
    };
    assert_eq!(source, ConstraintError::TooLarge);
}

#[test]
fn a_grammar_ends_with_its_client() {
    let side = text_side(None);
    drop(prepare(&side, json!({})).unwrap());
    let helper = helper_pid();
    let left = Client {
        place: None,
        gone: &|| true,
    };
    let request = asked(json!({"type": "integer", "multipleOf": 62_615_533}));
    let error = side.prepare(&request, left).err();
    let Some(PromptError::Constraint { source, .. }) = error else {
        panic!("{error:?}");
    };
    assert_eq!(source, ConstraintError::Gone);
    wait_for_no_jobs(helper);
}

#[test]
fn a_helper_that_was_killed_is_started_again() {
    let side = text_side(None);
    drop(prepare(&side, json!({})).unwrap());
    let helper = helper_pid();
    signal(helper, Signal::SIGKILL);
    while fs::read_to_string(format!("/proc/{helper}/stat"))
        .is_ok_and(|stat| !stat.contains(") Z "))
    {
        std::thread::yield_now();
    }
    drop(prepare(&side, json!({})).unwrap());
    assert_ne!(helper_pid(), helper);
    drop(side);
    assert!(children(process::id()).is_empty(), "it ends with its owner");
}

#[test]
fn a_template_that_takes_all_memory_or_time_is_refused() {
    let doubling = "{% set n = namespace(x='xxxxxxxxxxxxxxxx') %}{% for i in range(34) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}";
    let endless = "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
    for template in [doubling, endless] {
        let side = text_side(Some(template));
        let said = vec![ChatMessage::new(Role::User, "hi")];
        let request = GenerateRequest::new(RequestId::new(1), Prompt::Chat(said.into()));
        let error = side.prepare(&request, Client::PATIENT).err();
        assert!(
            matches!(error, Some(PromptError::Chat(ChatError::Bound))),
            "{error:?}"
        );
        wait_for_no_jobs(helper_pid());
    }
}

/// Without limits, each overflows the stack, or takes seconds and gigabytes.
#[test]
fn templates_that_cannot_be_compiled_within_bounds_are_refused() {
    let long = |text: &str, times: usize| text.repeat(times);
    let program = Some(PathBuf::from(env!("CARGO_BIN_EXE_cotenant")));
    for template in [
        "{% for".to_owned(),
        format!("{{{{ 1{} }}}}", long(" + 1", 100_000)),
        format!("{{{{ x{} }}}}", long(" ~ x", 100_000)),
        format!("{{{{ {}x }}}}", long("not ", 100_000)),
        format!("{{{{ {}x{} }}}}", long("(", 100_000), long(")", 100_000)),
        format!("{{% if a %}}{}{{% endif %}}", long("{% elif a %}", 100_000)),
        "{{ 'abc' * 9999999 }}".to_owned(),
    ] {
        let error = TextSide::with_helper(
            &header_with(Some(&template)),
            Tokens::new(4096),
            program.clone(),
        )
        .err();
        let text = error.as_ref().map_or_else(
            || "taken".to_owned(),
            |error| cotenant::causes::in_one_line(error),
        );
        println!("{text}: {}", template.chars().take(40).collect::<String>());
        assert!(
            matches!(error, Some(TextError::Chat(ChatError::Compile { .. }))),
            "{text}"
        );
    }
}

#[test]
fn a_process_and_a_thread_render_alike() {
    let said = || {
        vec![
            ChatMessage::new(Role::System, "be kind"),
            ChatMessage::new(Role::User, "hi <|im_end|>"),
        ]
    };
    let tokens = |side: &TextSide| {
        let request = GenerateRequest::new(RequestId::new(1), Prompt::Chat(said().into()));
        side.prepare(&request, Client::PATIENT).unwrap().tokens
    };
    let threads = TextSide::new(&header(), Tokens::new(4096)).unwrap();
    assert_eq!(tokens(&text_side(None)), tokens(&threads));
}

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
}

#[test]
fn a_helper_that_was_stopped_is_replaced() {
    let side = text_side(None);
    drop(prepare(&side, json!({})).unwrap());
    let helper = helper_pid();
    signal(helper, Signal::SIGSTOP);
    drop(prepare(&side, json!({"type": "boolean"})).unwrap());
    assert_ne!(helper_pid(), helper);
    assert!(
        !PathBuf::from(format!("/proc/{helper}")).exists(),
        "the one that was stopped is gone"
    );
}

#[test]
fn a_job_that_is_stopped_or_killed_is_no_fault_of_the_form() {
    let side = text_side(None);
    for sent in [Signal::SIGSTOP, Signal::SIGKILL] {
        let mut mask = prepare(&side, json!({"type": "string"}))
            .unwrap()
            .mask
            .unwrap();
        while !mask.is_ready(Duration::from_millis(5)).unwrap() {}
        let mut logits = vec![0.0; side.tokenizer().vocabulary() as usize];
        mask.apply(&mut logits).unwrap();
        let job = children(helper_pid())[0];
        signal(job, sent);
        let quote = side.tokenizer().encode("\"").unwrap()[0];
        let lost = mask.accept(quote, b"\"").and_then(|()| {
            loop {
                match mask.is_ready(Duration::from_millis(5)) {
                    Ok(false) => {}
                    Ok(true) => break mask.is_complete().map(drop),
                    Err(error) => break Err(error),
                }
            }
        });
        assert!(
            matches!(lost, Err(MaskError::Helper { .. })),
            "{sent}: {lost:?}"
        );
        if sent == Signal::SIGSTOP {
            // It does not notice that its owner has disconnected.
            signal(job, Signal::SIGKILL);
        }
        drop(mask);
        wait_for_no_jobs(helper_pid());
    }
}

/// If the helper cannot be restarted, the request is not at fault.
#[test]
fn a_helper_that_cannot_be_replaced_is_an_error_of_its_own() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let (program, gone) = (folder.path().join("program"), folder.path().join("gone"));
    let text = format!(
        "#!/bin/sh\n[ -e {} ] || exec {} \"$@\"\n",
        gone.display(),
        env!("CARGO_BIN_EXE_cotenant")
    );
    fs::write(&program, text).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let side = TextSide::with_helper(&header_with(None), Tokens::new(4096), Some(program)).unwrap();
    drop(prepare(&side, json!({})).unwrap());
    fs::write(&gone, "").unwrap();
    signal(helper_pid(), Signal::SIGKILL);
    let error = prepare(&side, json!({})).err();
    assert!(
        matches!(error, Some(PromptError::Helper { .. })),
        "{error:?}"
    );
    fs::remove_file(&gone).unwrap();
    drop(prepare(&side, json!({})).unwrap());
}

/// 62 KB, as in an agent for a home and an office.
#[test]
fn a_call_of_one_of_40_tools_can_be_required() {
    let tools = super::grammar::tools(40);
    assert!(serde_json::to_string(&tools).unwrap().len() > 48_000);
    let said = vec![ChatMessage::new(Role::User, "x")];
    let conversation = Conversation {
        messages: said,
        tools,
        ..Conversation::default()
    };
    let request = GenerateRequest {
        form: Some(AnswerForm::ToolCall { name: None }),
        ..GenerateRequest::new(RequestId::new(1), Prompt::Chat(conversation))
    };
    // Each byte of the prompt is a token.
    let program = Some(PathBuf::from(env!("CARGO_BIN_EXE_cotenant")));
    let long = TextSide::with_helper(&header_with(None), Tokens::new(1 << 20), program).unwrap();
    assert!(
        long.prepare(&request, Client::PATIENT)
            .unwrap()
            .mask
            .is_some()
    );
}
