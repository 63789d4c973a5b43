use proptest::prelude::*;
use ratatui::{Terminal, backend::TestBackend};

use super::*;
use cotenant_rpc::v1::{
    Budget, EntryKind, JournalEntry, KvType, Lease, LeaseClass, LeaseKind, Sequence, SequenceState,
    Worker, WorkerState,
};

fn lease(tenant: &str, kind: LeaseKind, mib: u64) -> Lease {
    Lease {
        name: format!("{tenant}#1"),
        tenant: tenant.to_owned(),
        kind: kind.into(),
        held_bytes: mib << 20,
        used_bytes: Some(mib << 19),
        ..Lease::default()
    }
}

fn sequences() -> Vec<Sequence> {
    let waiting = |id, client: &str| Sequence {
        id,
        state: SequenceState::Waiting.into(),
        client: client.to_owned(),
        lease_class: LeaseClass::Batch.into(),
        prompt_tokens: 812,
        waited: Some(prost_types::Duration {
            seconds: 3,
            nanos: 0,
        }),
        ..Sequence::default()
    };
    let running = Sequence {
        id: 17,
        state: SequenceState::Answer.into(),
        client: "kitchen".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        prompt_tokens: 1150,
        reused_tokens: 1024,
        generated_tokens: 50,
        kv_tokens: 1200,
        kv_bytes: 133 << 20,
        kv_blocks: 19,
        ..Sequence::default()
    };
    let kept = Sequence {
        id: 15,
        state: SequenceState::Kept.into(),
        client: "hall".to_owned(),
        kv_tokens: 1100,
        kv_bytes: 126 << 20,
        kv_blocks: 18,
        shared_bytes: 112 << 20,
        idle: Some(prost_types::Duration {
            seconds: 40,
            nanos: 0,
        }),
        ..Sequence::default()
    };
    [running, kept]
        .into_iter()
        .chain((18..26).map(|id| waiting(id, "reports")))
        .collect()
}

fn entry(sequence: u64, summary: &str, body_json: &str) -> JournalEntry {
    JournalEntry {
        sequence,
        at: Some(prost_types::Duration {
            seconds: i64::try_from(sequence).unwrap(),
            nanos: 0,
        }),
        kind: EntryKind::Event.into(),
        summary: summary.to_owned(),
        body_json: body_json.to_owned(),
        ..JournalEntry::default()
    }
}

fn busy() -> Screen {
    let worker = |name: &str, state: WorkerState| Worker {
        name: name.to_owned(),
        state: state.into(),
        pid: Some(4711),
        starts: 1,
        ..Worker::default()
    };
    let mut screen = Screen::new(GetStatusResponse {
            version: "1.2.3".to_owned(),
            boot_id: "one".to_owned(),
            uptime: Some(prost_types::Duration { seconds: 3725, nanos: 0 }),
            budget: Some(Budget {
                budget_bytes: 300 << 20,
                held_bytes: 244 << 20,
                used_bytes: 230 << 20,
                unaccounted_bytes: 14 << 20,
                free_bytes: 42 << 20,
                ..Budget::default()
            }),
            pressure: Some(Pressure {
                level: PressureLevel::Elevated.into(),
                headroom_bytes: Some(40 << 20),
                mem_available_bytes: Some(900 << 20),
                some_avg10_ratio: Some(0.0123),
                ..Pressure::default()
            }),
            engine: Some(Engine {
                state: EngineState::Ready.into(),
                model: "Qwen3-0.6B".to_owned(),
                layers_total: 28,
                layers_resident: 20,
                kv_capacity_tokens: 2048,
                kv_capacity_full_tokens: 4096,
                kv_used_tokens: 1200,
                kv_kept_tokens: 100,
                kv_type: KvType::F16.into(),
                milli_tokens_per_second: 31_500,
                sequences: sequences(),
                kv_block_tokens: 64,
                growth_waits: "needs 92.7 MiB headroom, has 84.1 MiB".to_owned(),
                ..Engine::default()
            }),
            workers: vec![worker("asr", WorkerState::Ready), worker("tts", WorkerState::Starting)],
            reboot_advised: vec!["no process holds 2.1 GiB of the 4.7 GiB that the GPU has".to_owned()],
            next_shed: "unused KV blocks (20 MiB): cheapest for 32 MiB, with headroom below 52 MiB (now 40 MiB)"
                .to_owned(),
            leases: vec![
                lease("llm", LeaseKind::Engine, 180),
                lease("asr", LeaseKind::Worker, 40),
                lease("tts", LeaseKind::Worker, 24),
            ],
            ..GetStatusResponse::default()
        });
    for (sequence, summary, body) in [
        (
            1,
            "shed 20 MiB from the LLM for `asr`",
            r#"{"event":"deadline_reached"}"#,
        ),
        (
            2,
            "`asr` is wanted",
            r#"{"event":"worker_wanted","worker":"asr"}"#,
        ),
        (
            3,
            "`asr` is ready",
            r#"{"event":"worker_ready","worker":"asr","pid":4711}"#,
        ),
        (4, "`asr` is ready", r#"{"event":"deadline_reached"}"#),
        (
            5,
            "`tts` is wanted",
            r#"{"event":"worker_wanted","worker":"tts"}"#,
        ),
    ] {
        screen.events.add(entry(sequence, summary, body));
    }
    screen
}

fn drawn(screen: &Screen, width: u16, height: u16) -> String {
    let text = screen.text(width, height);
    text.lines.iter().map(|line| format!("{line}\n")).collect()
}

#[test]
fn a_busy_device_on_terminals_of_80_and_40_columns() {
    let mut screen = busy();
    insta::assert_snapshot!("top_80", drawn(&screen, 80, 40));
    screen.silent_for = Some(Duration::from_secs(12));
    insta::assert_snapshot!("top_40", drawn(&screen, 40, 32));
}

#[test]
fn nothing_is_wider_or_higher_than_the_terminal() {
    let mut screen = busy();
    screen.status.engine.as_mut().unwrap().model = "模型\u{1b}[31m".repeat(30);
    for palette in [Palette::Letters, Palette::Colours] {
        screen.palette = palette;
        for (width, height) in [(1, 1), (20, 5), (40, 10), (80, 24), (200, 60)] {
            let text = screen.text(width, height);
            assert!(text.height() <= height.into(), "{width} x {height}");
            assert!(
                text.width() <= width.into(),
                "{width} x {height}: {}",
                text.width()
            );
            assert!(!drawn(&screen, width, height).contains('\u{1b}'));
        }
    }
}

#[test]
fn without_a_model_and_before_the_first_sample_there_is_no_bar_for_them() {
    let screen = Screen::new(GetStatusResponse::default());
    assert!(!drawn(&screen, 80, 24).contains("layers"));
}

#[test]
fn each_event_is_shown_once_and_readings_are_not() {
    let mut screen = busy();
    screen.events.add(JournalEntry {
        name: "sampled".to_owned(),
        ..entry(6, "a reading", r#"{"event":"deadline_reached"}"#)
    });
    assert_eq!(screen.events.lines().len(), 2);
    screen.press(KeyCode::Char('e'));
    assert_eq!(screen.events.lines().len(), 4);
}

/// A device whose LLM gave memory to a worker for half a minute.
fn after_a_shed() -> Screen {
    let mut screen = busy();
    let start = screen.status.uptime.unwrap().seconds;
    for second in 1..=90 {
        let mut status = screen.status.clone();
        status.uptime.as_mut().unwrap().seconds = start + second;
        status.next_shed.clear();
        let engine = status.engine.as_mut().unwrap();
        engine.sequences.clear();
        let (llm, asr) = if (30..60).contains(&second) {
            (120, 100)
        } else {
            (180, 40)
        };
        status.leases[0].held_bytes = llm << 20;
        status.leases[1].held_bytes = asr << 20;
        screen.observe(status);
    }
    screen
}

#[test]
fn the_last_minutes_are_a_chart_where_the_terminal_has_rows_for_it() {
    let mut screen = after_a_shed();
    assert!(!drawn(&screen, 80, 23).contains(" ago "));
    insta::assert_snapshot!("top_chart", drawn(&screen, 80, 42));
    screen.palette = Palette::Colours;
    insta::assert_snapshot!("top_chart_coloured", drawn(&screen, 80, 42));
    let backend = TestBackend::new(80, 42);
    let mut terminal = Terminal::new(backend).unwrap();
    terminal
        .draw(|frame| frame.render_widget(screen.text(80, 42), frame.area()))
        .unwrap();
    let buffer = terminal.backend().buffer();
    let hues = |column| (buffer[(column, 16)].fg, buffer[(column, 16)].bg);
    // The LLM now; during the shed, the end of one worker below another one.
    assert_eq!(hues(79), (Color::Blue, Color::Reset));
    assert_eq!(hues(55), (Color::Yellow, Color::Green));
}

#[test]
fn keys_select_an_event_and_open_and_close_panes() {
    let mut screen = after_a_shed();
    assert_eq!(screen.press(KeyCode::Enter), Reaction::Redraw);
    screen.press(KeyCode::Up);
    assert_eq!(screen.press(KeyCode::Enter), Reaction::Explain(5));
    screen.press(KeyCode::Up);
    screen.press(KeyCode::Up);
    assert_eq!(screen.press(KeyCode::Enter), Reaction::Explain(2));
    screen.explain("event  2\n       at\naction \u{1b}[2J", 80);
    screen.press(KeyCode::Down);
    let shown = drawn(&screen, 80, 40);
    let explained = "\n\n\nevent  2\n       at\naction \\u{1b}[2J\n";
    assert!(shown.ends_with(explained), "{shown}");
    screen.press(KeyCode::Char('?'));
    screen.press(KeyCode::Char('?'));
    screen.press(KeyCode::Char('p'));
    insta::assert_snapshot!("top_help", drawn(&screen, 80, 40));
    // Closes the pane, deselects, quits.
    assert_eq!(screen.press(KeyCode::Esc), Reaction::Redraw);
    assert_eq!(screen.press(KeyCode::Esc), Reaction::Redraw);
    assert_eq!(screen.press(KeyCode::Esc), Reaction::Quit);
    assert_eq!(screen.press(KeyCode::Char('q')), Reaction::Quit);
}

#[test]
fn a_long_event_keeps_its_outcome() {
    let text = "the LLM sheds 30 MiB for a reason; 30 MiB verified back";
    assert_eq!(shortened(text, 80), text);
    assert_eq!(
        shortened(text, 50),
        "the LLM sheds 30 MiB for a …; 30 MiB verified back"
    );
    assert_eq!(shortened(text, 30), text);
}

#[test]
fn holders_are_sorted_by_memory_or_name() {
    let mut screen = busy();
    screen.status.leases[0].held_bytes = 1 << 20;
    let order = |screen: &Screen| {
        let text = drawn(screen, 80, 60);
        let names = text
            .lines()
            .filter_map(|line| line.split_once("#1").map(|it| it.0.to_owned()));
        names.collect::<Vec<_>>()
    };
    assert_eq!(order(&screen), ["llm", "asr", "tts"]);
    screen.press(KeyCode::Char('m'));
    assert_eq!(order(&screen), ["asr", "tts", "llm"]);
    screen.press(KeyCode::Char('n'));
    assert_eq!(order(&screen), ["asr", "llm", "tts"]);
}

#[test]
fn another_run_of_the_supervisor_clears_events_and_chart() {
    let mut screen = after_a_shed();
    let boot_id = "two".to_owned();
    screen.observe(GetStatusResponse {
        boot_id,
        ..screen.status.clone()
    });
    assert_eq!(screen.events.last_sequence, 0);
    assert!(screen.events.lines().is_empty());
}

proptest! {
    #[test]
    fn a_bar_is_full_and_every_part_has_a_cell(amounts in proptest::collection::vec(0..1u64 << 40, 1..12), columns in 12..200usize) {
        let widths = widths(&amounts, columns);
        let total: u64 = amounts.iter().sum();
        prop_assert_eq!(widths.iter().sum::<usize>(), if total == 0 { 0 } else { columns });
        for (amount, width) in amounts.iter().zip(widths) {
            prop_assert_eq!(*amount > 0, width > 0);
        }
    }
}
