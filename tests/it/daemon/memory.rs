//! Memory that is shed, measured as returned, and regrown, while answers continue unchanged.

use std::{fs, path::Path, time::Duration};

use cotenant::rpc::v1::{CreateLeaseRequest, LeaseClass, RenewLeaseRequest, UpdateLeaseRequest};
use serde_json::json;

use super::frozen::Frozen;
use super::installation::{Installation, anonymous, budget, content, demo_model, long_form, whole};
use crate::http::client::{Answer, Connection};

const MIB: u64 = 1 << 20;

/// A tenant's lease at rest, in MiB: more than the process of this test uses.
const SMALL: u64 = 80;

/// Its request while the model generates, in MiB: it does not fit together with the full engine.
const LARGE: u64 = 144;

/// A prompt answered in a few tokens.
const COMMAND: &str = "turn on the kitchen light";

/// A prompt with a long answer.
const STORY: &str = "tell me a story";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_operator_sheds_is_back_with_the_kernel_and_grows_again() {
    // A dwell longer than this test.
    let installation = Installation::new(
        &format!("{}{}", budget(128), demo_model(32_768)).replace("dwell: 300ms", "dwell: 30m"),
    );
    let daemon = installation.start().await;
    daemon.whole().await;
    let answer = content(&daemon.ask(COMMAND).await);
    // Chunk size of prompts, and the longest time without commands: nothing is streamed, so no chunk is larger.
    let engine = &installation.json(&["status"])["engine"];
    assert_eq!(engine["prefillChunkTokens"], 128, "{engine}");
    assert!(
        engine["commandGapMaxMs"].as_f64().unwrap() > 0.0,
        "{engine}"
    );
    let shown = super::life::in_one_line(&installation.tell(&["status"]));
    assert!(
        shown.contains("prompts by 128 tokens") && shown.contains("commands within"),
        "{shown}"
    );
    let gap = daemon.metric("cotenant_llm_command_gap_max_seconds").await;
    assert!(gap > Some(0.0), "{gap:?}");
    let before = anonymous(daemon.pid());

    let said = installation.tell(&["shed", "64MiB"]);
    assert!(said.starts_with("shed "), "{said}");
    let after = anonymous(daemon.pid());
    let status = installation.json(&["status"]);
    // Neither sampling, nor the decision, nor the engine allocated from the system.
    assert!(status["standbyServed"].as_u64().unwrap() > 100, "{status}");
    assert_eq!(status["standbyMissed"], 0, "{status}");
    assert!(!status["locked"].as_array().unwrap().is_empty(), "{status}");
    let engine = &status["engine"];
    let claimed = engine["shedBytes"].as_u64().unwrap();
    assert!(claimed >= 64 * MIB, "{engine}");
    // Unused capacity is in the ledger but not resident.
    let events = installation.json(&["events"]);
    let routine = ["sampled", "measured", "deadline_reached"];
    let shown = |event: &serde_json::Value| routine.iter().any(|name| event["name"] == *name);
    assert!(!events.as_array().unwrap().iter().any(shown), "{events}");
    let applied = |field: &str| -> u64 {
        let events = events.as_array().unwrap().iter();
        let applied = events.filter(|event| event["name"] == "engine_applied");
        applied
            .map(|event| event["body"][field].as_u64().unwrap_or(0))
            .sum()
    };
    let (untouched, freed) = (applied("untouched_given"), applied("freed"));
    assert!(untouched > 0 && freed > 0, "{events}");
    assert!(
        before - after + untouched + MIB >= claimed && freed + untouched >= claimed,
        "claimed {claimed}, {untouched} untouched and {freed} freed, and the kernel saw {before} become {after}"
    );
    assert_eq!(engine["sheds"], 1);
    assert!(engine["kvCapacityTokens"].as_u64().unwrap() < 32_768);
    let lease = &installation.json(&["leases"])[0];
    assert_eq!(lease["heldBytes"], engine["planBytes"]);
    assert!(lease["usedBytes"].as_u64().unwrap() <= lease["heldBytes"].as_u64().unwrap());
    assert_eq!(
        content(&daemon.ask(COMMAND).await),
        answer,
        "the same answer with less"
    );

    installation.tell(&["regrow"]);
    let status = daemon.whole().await;
    assert!(status.engine.unwrap().regrown_bytes >= claimed);
    assert_eq!(
        content(&daemon.ask(COMMAND).await),
        answer,
        "the same answer again"
    );
    let events = installation.json(&["events"]);
    let names: Vec<&str> = events
        .as_array()
        .unwrap()
        .iter()
        .map(|event| event["name"].as_str().unwrap())
        .collect();
    for name in [
        "start",
        "engine_inspected",
        "load_engine",
        "apply_plan",
        "engine_applied",
    ] {
        assert!(names.contains(&name), "{name} is missing: {names:?}");
    }
    let text = installation.events();
    assert!(
        text.contains("an operator asked for 64 MiB") && text.contains("weighed candidates"),
        "{text}"
    );
    // A decision and its outcome are one line, whose number `why` takes.
    let text = installation.tell(&["events"]);
    let about = |words: &str| -> Vec<&str> {
        let lines = text.lines();
        lines.filter(|line| line.contains(words)).collect()
    };
    let sheds = about("an operator asked for 64 MiB; the engine sheds");
    assert_eq!(sheds.len(), 1, "{text}");
    assert!(sheds[0].contains("applied after"), "{text}");
    assert_eq!(about("weighed candidates"), [""; 0], "{text}");
    assert_eq!(about("supervisor").len(), 1, "{text}");
    let number = sheds[0].split_whitespace().next().unwrap();
    let why = installation.tell(&["why", number]);
    assert!(why.contains("weighed candidates"), "{why}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_text_of_a_daemon_with_an_llm_is_locked_as_it_is_in_memory_and_not_dropped_before() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(4096)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let before = resident_text(daemon.pid());
    let of_program = |line: &String| line.starts_with("the program");
    daemon
        .until("the program is locked", |status| {
            status.locked.iter().any(of_program)
        })
        .await;
    let after = resident_text(daemon.pid());
    // Dropped text is reloaded page by page; a few unlocked pages may be reclaimed.
    assert!(
        after > 0 && after >= before / 10 * 9,
        "{before} became {after}"
    );
    daemon.end().await;
}

/// Returns the resident bytes of a process's program text.
fn resident_text(pid: u32) -> u64 {
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut is_text, mut kib) = (false, 0);
    for line in maps.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            [range, permissions, .., path] if range.contains('-') => {
                is_text = permissions.starts_with("r-x") && Path::new(path) == program;
            }
            ["Rss:", resident, _] if is_text => kib += resident.parse::<u64>().unwrap(),
            _ => {}
        }
    }
    kib * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_rooms_take_turns_and_each_continues_its_own_conversation() {
    let model = demo_model(2048);
    for (setting, warm) in [("", 4), (", conversations: 0", 0)] {
        let model = model.replace(", conversations: 0", setting);
        let installation = Installation::new(&format!("{}{model}", budget(128)));
        let daemon = installation.start().await;
        daemon.whole().await;
        let mut found = 0;
        let mut rooms = Vec::new();
        for room in ["kitchen", "hall", "study", "garden"] {
            let asked = format!("the light in the {room} was on all day long. ").repeat(26);
            let asked = json!({"role": "user", "content": asked + COMMAND});
            let first = daemon
                .chat(json!({"messages": [asked], "max_tokens": 8}))
                .await;
            rooms.push((asked, first));
        }
        for (asked, first) in rooms {
            let read = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
            let answer = json!({"role": "assistant", "content": content(&first)});
            let next = json!({"messages": [asked, answer, {"role": "user", "content": COMMAND}], "max_tokens": 8});
            let usage = daemon.chat(next).await.json()["usage"].clone();
            let cached = usage["prompt_tokens_details"]["cached_tokens"]
                .as_u64()
                .unwrap();
            println!("{setting} {read} {cached}");
            found += usize::from(cached + 72 >= read);
        }
        if warm > 0 {
            assert_eq!(
                found, warm,
                "states of four conversations have their places"
            );
        } else {
            assert!(found < 4, "the capacity of the context holds all states");
        }
        daemon.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_turn_goes_on_from_the_first_and_says_the_same() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(8192)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let question = "the light in the kitchen was on all day long. ".repeat(30) + COMMAND;
    let count = |answer: &Answer| {
        let usage = answer.json()["usage"].clone();
        let cached = usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap();
        (usage["prompt_tokens"].as_u64().unwrap(), cached)
    };
    let first = daemon.ask(&question).await;
    let (read, cached) = count(&first);
    assert!(read > 200 && cached < 64, "{cached} of {read}");

    let next = json!({ "messages": [
        {"role": "user", "content": question},
        {"role": "assistant", "content": content(&first)},
        {"role": "user", "content": COMMAND},
    ]});
    let second = daemon.chat(next.clone()).await;
    let (all, cached) = count(&second);
    // A mark lies within 72 tokens of the end of a prompt, for any rendering of the answer.
    assert!(
        cached + 72 >= read && all > read,
        "{cached} cached of {read}, then {all}"
    );

    // Another conversation in between: the first still continues from its mark.
    daemon.ask(STORY).await;
    let again = daemon.chat(next.clone()).await;
    let (_, cached) = count(&again);
    assert!(cached + 72 >= read, "{cached} cached of {read}");
    assert_eq!(content(&second), content(&again));
    let counted = daemon
        .metric("cotenant_tokens_total{kind=\"cached\"}")
        .await;
    assert!(counted.is_some_and(|tokens| tokens >= 200.0), "{counted:?}");
    daemon.end().await;

    // Everything is recomputed: the answer is the same.
    let daemon = installation.start().await;
    daemon.whole().await;
    let third = daemon.chat(next).await;
    let (_, cached) = count(&third);
    assert!(cached < 64, "{cached}");
    assert_eq!(content(&second), content(&third));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_needs_a_shed_is_granted_while_an_answer_goes_on_unchanged() {
    let installation = Installation::new(&format!("{}{}", budget(167), demo_model(32_768)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let story = json!({
        "messages": [{"role": "user", "content": STORY}], "max_tokens": 1500, "temperature": 2.0, "seed": 3,
        "response_format": long_form(),
    });
    let undisturbed = content(&daemon.chat(story.clone()).await);

    let mut leases = daemon.leases();
    let mut lease = leases
        .create_lease(CreateLeaseRequest {
            request_id: "asr".to_owned(),
            tenant: "asr".to_owned(),
            lease_class: LeaseClass::AudioRealtime.into(),
            min_bytes: SMALL * MIB,
            max_bytes: SMALL * MIB,
            term: Some(prost_types::Duration {
                seconds: 60,
                nanos: 0,
            }),
            max_wait: None,
            ..CreateLeaseRequest::default()
        })
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap();
    let mut answer = Box::pin(daemon.chat(story));
    let mut grants = 0;
    let mut mib = LARGE;
    let disturbed = loop {
        let update = UpdateLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
            min_bytes: mib * MIB,
            max_bytes: mib * MIB,
            max_wait: Some(prost_types::Duration {
                seconds: 10,
                nanos: 0,
            }),
        };
        let mut leases = leases.clone();
        let granted = async move {
            let granted = leases
                .update_lease(update)
                .await
                .unwrap()
                .into_inner()
                .lease
                .unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await; // let the answer proceed between two changes
            assert!(granted.held_bytes >= mib * MIB, "{granted:?}");
            granted
        };
        tokio::select! {
            answer = &mut answer => break answer,
            granted = granted => {
                grants += u32::from(mib == LARGE);
                lease = granted;
                mib = if mib == LARGE { SMALL } else { LARGE };
            }
        }
    };
    drop(answer);
    assert_eq!(content(&disturbed), undisturbed);
    assert!(grants >= 1, "the answer was over before the first grant");
    let status = daemon.status().await;
    assert!(status.engine.as_ref().unwrap().sheds >= 1, "{status:#?}");
    assert!(
        installation
            .events()
            .contains("`asr` (audio-realtime) needs"),
        "{}",
        installation.events()
    );
    // The tenant ends; the engine regrows.
    let name = installation
        .json(&["leases"])
        .as_array()
        .unwrap()
        .iter()
        .find(|lease| lease["tenant"] == "asr")
        .unwrap()["name"]
        .clone();
    installation.tell(&["leases", "release", name.as_str().unwrap()]);
    daemon.until("grown back", whole).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pressure_by_another_user_takes_optional_memory_and_gives_it_back() {
    let installation = Installation::new(&format!(
        "{}{}workers:\n  - {{name: process, role: other, argv: ['${{SELF}}', worker, ballast, 100MiB, --rate, 100MiB], memory: {{steady: 4MiB, peak: 4MiB}}, autostart: false}}\n",
        budget(160),
        demo_model(32_768)
    ));
    let daemon = installation.start().await;
    daemon.until("whole", whole).await;
    let answer = content(&daemon.ask("hello").await);
    installation.tell(&["start", "process"]);
    daemon
        .until("shed", |status| {
            status
                .engine
                .as_ref()
                .is_some_and(|engine| engine.sheds > 0 && !engine.changing)
        })
        .await;
    assert_eq!(content(&daemon.ask("hello").await), answer);
    installation.tell(&["stop", "process"]);
    daemon.until("grown back", whole).await;
    let metrics = crate::http::client::get(daemon.http, "/metrics").await;
    assert!(metrics.text().contains("cotenant_"), "{}", metrics.text());
    let chat = daemon
        .chat(json!({ "messages": [{"role": "user", "content": "hello"}], "stream": true }))
        .await;
    assert_eq!(chat.status, 200);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_may_lose_the_oldest_of_its_context_goes_on_where_others_end() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(192)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let question = "tell me a long story about a rabbit in the forest";
    let ask = |shift: bool| {
        json!({
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 190,
            "context_shift": shift,
        })
    };
    let ended = daemon.chat(ask(false)).await;
    let gone_on = daemon.chat(ask(true)).await;
    let (short, long) = (ended.json(), gone_on.json());
    assert_eq!(short["choices"][0]["finish_reason"], "length", "{short}");
    // The last sampled token does not fit into the cache, and need not.
    assert_eq!(short["usage"]["total_tokens"], 193, "{short}");
    assert!(
        long["usage"]["total_tokens"].as_u64().unwrap() > 193,
        "{long}"
    );
    assert_eq!(
        long["usage"]["kv_dropped_tokens"].as_u64().unwrap() % 64,
        0,
        "{long}"
    );
    assert!(
        long["usage"]["kv_dropped_tokens"].as_u64().unwrap() > 0,
        "{long}"
    );
    assert!(
        content(&gone_on).starts_with(&content(&ended)),
        "{short} {long}"
    );
    let text = installation.events();
    assert!(
        text.contains("dropped the 64 oldest tokens of its context"),
        "{text}"
    );
    daemon.end().await;
}

/// The journal's file system stalls when memory is short, as on eMMC: queued lines must not use memory needed by a
/// shed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_that_stalls_takes_nothing_of_the_emergency_reserve() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(16_384)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let mut client = daemon.leases();
    let asked = CreateLeaseRequest {
        request_id: "one".to_owned(),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Batch.into(),
        min_bytes: MIB,
        ..CreateLeaseRequest::default()
    };
    let lease = client
        .create_lease(asked)
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap();
    let stalled = Frozen::thread(daemon.pid(), "journal");
    // More events than the reserve has blocks of a line's size.
    for _ in 0..1500 {
        let renewal = RenewLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
        };
        client.renew_lease(renewal).await.unwrap();
    }
    installation.tell(&["shed", "16MiB"]);
    let status = installation.json(&["status"]);
    assert_eq!(status["standbyMissed"], 0, "{status}");
    stalled.thaw();
    daemon.end().await;
}

/// The body of a request takes the daemon's own memory, and is reported as such: no other holder can use it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_daemon_itself_uses_is_shown_as_its_own() {
    let installation = Installation::new(&format!(
        "{}{}workers:
  - name: ears
    role: asr
    argv: [sleep, \"1000\"]
    socket: {{FOLDER}}/ears.sock
    ready: {{kind: started}}
    memory: {{steady: 4MiB}}
",
        budget(256),
        demo_model(1024)
    ));
    let daemon = installation.start().await;
    let own = |status: &cotenant::rpc::v1::GetStatusResponse| {
        status
            .budget
            .as_ref()
            .and_then(|budget| budget.supervisor_bytes)
            .unwrap_or_default()
    };
    let before = own(&daemon
        .until("measured", |status| whole(status) && own(status) > 0)
        .await);
    // From an upload that never completes.
    let head = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n\
         content-length: {}\r\n\r\n",
        24 * MIB
    );
    let mut upload = Connection::open(daemon.http).await;
    upload
        .send(&[head.as_bytes(), &vec![b'a'; 20 << 20]].concat())
        .await;
    let status = daemon
        .until("the body is seen", |status| {
            own(status) >= before + 12 * MIB
        })
        .await;
    let unaccounted = status.budget.as_ref().unwrap().unaccounted_bytes;
    assert!(unaccounted < 8 * MIB, "{unaccounted}");
    assert!(installation.tell(&["status"]).contains("supervisor"));
    drop(upload);
    daemon.end().await;
}
