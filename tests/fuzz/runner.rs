//! Runner of one fuzzing target.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use crate::{damage::damaged, memory};

/// A format.
pub(crate) struct Target<'a> {
    pub(crate) name: &'static str,
    /// Valid examples.
    pub(crate) examples: Vec<Vec<u8>>,
    /// Words of the format.
    pub(crate) words: &'a [&'a str],
    /// Limit of allocations in bytes for one input, by its length.
    pub(crate) memory_max: fn(usize) -> usize,
    /// Time limit of one input.
    pub(crate) hang: Duration,
}

/// Examples kept; afterwards new ones replace old ones.
const KEPT: usize = 512;

/// The running input and its start, for the watchdog thread.
type Running = Arc<Mutex<Option<(Instant, Vec<u8>)>>>;

/// Mutates and runs until the time is over. `run` returns the answer as text.
pub(crate) fn fuzz(target: &Target<'_>, mut run: impl FnMut(&[u8]) -> String) {
    let seconds = number("COTENANT_FUZZ_SECONDS").unwrap_or(1);
    let seed = number("COTENANT_FUZZ_SEED").unwrap_or(0x00c0_ffee);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let panics = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&panics);
    // Includes panics on other threads, and panics caught by a runtime.
    std::panic::set_hook(Box::new(move |info| {
        counted.fetch_add(1, Ordering::SeqCst);
        eprintln!("{info}");
    }));
    let running = Running::default();
    watch((target.name, target.hang), seed, &running);

    let mut examples = target.examples.clone();
    let mut answers = BTreeSet::new();
    for example in &target.examples {
        answers.insert(kind_of(&run(example)));
    }
    let valid = answers.len();
    let (mut executions, mut most) = (0u64, 0);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(seconds) {
        let input = damaged(&examples, target.words, &mut rng);
        *running.lock().unwrap() = Some((Instant::now(), input.clone()));
        let before = memory::begin();
        let answer = catch_unwind(AssertUnwindSafe(|| run(&input)));
        let used = memory::most_since(before);
        *running.lock().unwrap() = None;
        executions += 1;
        most = most.max(used);
        let (Ok(answer), 0) = (answer, panics.load(Ordering::SeqCst)) else {
            panic!(
                "{}, seed {seed}: a panic for {}",
                target.name,
                shown(&input)
            );
        };
        let limit = (target.memory_max)(input.len());
        assert!(
            used <= limit,
            "{}, seed {seed}: {used} bytes allocated, {limit} may be, for {}",
            target.name,
            shown(&input)
        );
        if answers.insert(kind_of(&answer)) {
            if examples.len() < KEPT {
                examples.push(input);
            } else {
                let place = usize::try_from(executions).unwrap_or(0) % KEPT;
                examples[place] = input;
            }
        }
    }
    println!(
        "{}: {executions} executions in {:.1} s, seed {seed}; {valid} kinds of answers to valid input, {} in all; at most \
         {most} bytes allocated at once",
        target.name,
        began.elapsed().as_secs_f64(),
        answers.len()
    );
    assert!(answers.len() > valid, "the damage changed nothing");
}

/// Ends the process with the input if one takes too long: a hanging test would report nothing.
fn watch((name, hang): (&'static str, Duration), seed: u64, running: &Running) {
    let running = Arc::downgrade(running);
    std::thread::spawn(move || {
        while let Some(running) = running.upgrade() {
            if let Some((since, input)) = &*running.lock().unwrap()
                && since.elapsed() > hang
            {
                eprintln!("{name}, seed {seed}: a hang for {}", shown(input));
                std::process::abort();
            }
            drop(running);
            std::thread::sleep(Duration::from_millis(200));
        }
    });
}

/// An answer without figures and quotations: the rest identifies the code path.
fn kind_of(answer: &str) -> String {
    let mut quoted = false;
    let mut kind = String::new();
    for character in answer.chars().take(400) {
        match character {
            '`' | '"' => quoted = !quoted,
            _ if quoted || character.is_ascii_digit() => {}
            _ => kind.push(character),
        }
    }
    kind
}

/// An input as a Rust literal, shortened.
fn shown(input: &[u8]) -> String {
    let mut text = format!(
        "{} bytes: b\"{}",
        input.len(),
        input[..input.len().min(4000)].escape_ascii()
    );
    if input.len() > 4000 {
        let _ = write!(text, "…");
    }
    text.push('"');
    text
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is `{text}`, not a number")),
    )
}
