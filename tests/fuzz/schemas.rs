//! Schemas of all keywords with extreme values: kept or refused within the bounds of a job.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use cotenant::{
    causes::in_one_line,
    engine::{AnswerForm, Client, GenerateRequest, Header, Prompt, RequestId, text::TextSide},
    units::Tokens,
};
use serde_json::{Map, Value, json};

use crate::runner::{Target, fuzz};

/// Memory of a job, beyond memory shared with the helper: 2 MiB for a vocabulary of this size, 4 bytes per byte of its
/// schema, its stack, and modified pages of the program.
const JOB_MAX_KB: u64 = (2 << 10) + 4 * (SCHEMA_MAX as u64 >> 10) + 512;

/// HTTP refuses longer ones.
const SCHEMA_MAX: usize = 1 << 20;

#[test]
fn schemas() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/demo-model/demo.gguf");
    let program = PathBuf::from(env!("CARGO_BIN_EXE_cotenant"));
    let side = TextSide::with_helper(
        &Header::read(&model).unwrap(),
        Tokens::new(4096),
        Some(program),
    )
    .unwrap();
    let (most, stop) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let watcher = watch_jobs(Arc::clone(&most), Arc::clone(&stop));
    let target = Target {
        name: "schemas",
        examples: (0..32u8)
            .map(|seed| {
                (0..40u8)
                    .map(|at| seed.wrapping_mul(at).wrapping_add(at.wrapping_mul(7)))
                    .collect()
            })
            .collect(),
        words: &["\u{0}", "\u{1}", "\u{7f}", "abc", "\n\n\n\n"],
        memory_max: |_length| 64 << 20,
        // The CPU time of a job, on a shared machine.
        hang: std::time::Duration::from_secs(20),
    };
    fuzz(&target, |bytes| {
        let schema = draw(&mut bytes.iter().copied(), 0);
        if schema.to_string().len() > SCHEMA_MAX {
            return "too long".to_owned();
        }
        let request = GenerateRequest {
            form: Some(AnswerForm::JsonSchema {
                schema,
                field: "format",
            }),
            ..GenerateRequest::new(RequestId::new(1), Prompt::Text("x".to_owned()))
        };
        match side.prepare(&request, Client::PATIENT) {
            Err(error) => in_one_line(&error),
            Ok(prepared) => babble(&side, prepared.mask.unwrap(), bytes),
        }
    });
    stop.store(true, Ordering::SeqCst);
    watcher.join().unwrap();
    let most = most.load(Ordering::SeqCst);
    println!("schemas: a job had at most {most} kB");
    assert!(most <= JOB_MAX_KB, "a job had {most} kB");
}

/// An answer of this form, in which the input selects among the allowed tokens.
fn babble(
    side: &TextSide,
    mut mask: Box<dyn cotenant::engine::sampling::TokenMask>,
    bytes: &[u8],
) -> String {
    let tokenizer = side.tokenizer();
    let choices = bytes.iter().chain(std::iter::repeat(&0)).take(60);
    for &choice in choices {
        let mut logits = vec![0.0; tokenizer.vocabulary() as usize];
        let step = (|| {
            while !mask.is_ready(std::time::Duration::from_millis(20))? {}
            mask.apply(&mut logits)?;
            let allowed: Vec<u32> = (0..)
                .zip(&logits)
                .filter(|(_, logit)| logit.is_finite())
                .map(|(token, _)| token)
                .collect();
            let Some(&token) = allowed.get(usize::from(choice) * 37 % allowed.len().max(1)) else {
                return Ok(Some("nothing is allowed".to_owned()));
            };
            if tokenizer.is_end(token) {
                return Ok(Some("good: ended".to_owned()));
            }
            mask.accept(token, tokenizer.bytes(token))?;
            while !mask.is_ready(std::time::Duration::from_millis(20))? {}
            Ok::<_, cotenant::engine::sampling::MaskError>(
                mask.is_complete()?.then(|| "good: complete".to_owned()),
            )
        })();
        match step {
            Ok(None) => {}
            Ok(Some(end)) => return end,
            Err(error) => return in_one_line(&error),
        }
    }
    "good: goes on".to_owned()
}

/// Monitors the private memory of running jobs.
pub(crate) fn watch_jobs(most: Arc<AtomicU64>, stop: Arc<AtomicBool>) -> thread::JoinHandle<()> {
    let own = std::process::id();
    let task = |pid: u32| -> Vec<u32> {
        let text =
            fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        text.split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect()
    };
    thread::spawn(move || {
        while !stop.load(Ordering::SeqCst) {
            // The helper is a child of the thread that started it.
            let threads = fs::read_dir(format!("/proc/{own}/task")).unwrap();
            let helpers = threads.flatten().flat_map(|thread| {
                let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
                text.split_whitespace()
                    .filter_map(|pid| pid.parse().ok())
                    .collect::<Vec<u32>>()
            });
            let jobs: u64 = helpers.flat_map(task).map(private).sum();
            most.fetch_max(jobs, Ordering::SeqCst);
            thread::sleep(std::time::Duration::from_millis(2));
        }
    })
}

/// Private memory of a process, in kB.
fn private(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Private_Dirty:"));
    line.map_or(0, |line| {
        line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
    })
}

/// Numbers at the edges of the library's range.
const NUMBERS: [f64; 20] = [
    0.0,
    1.0,
    -1.0,
    2.0,
    3.0,
    7.0,
    10.0,
    97.0,
    255.0,
    9999.0,
    10_000.0,
    65_537.0,
    1_000_003.0,
    62_615_533.0,
    4_294_967_291.0,
    -9_007_199_254_740_993.0,
    9.3e18,
    1e300,
    0.000_001,
    123.456_789,
];

const PATTERNS: [&str; 14] = [
    "^a*$",
    "(a|b)*a(a|b){20}",
    "^((a{1,1000}){1,1000}){1,1000}$",
    ".*x.{60}",
    "\\d{4}-\\d{2}",
    "(",
    "[^\"]{0,9999}",
    "(?=a)b",
    "(a*)*b",
    "\\p{L}{500}",
    "^(aa|aaa|aaaaa|aaaaaaa)*$",
    "a{0,100000}",
    "[a-z]+@[a-z]+\\.(com|org)",
    "",
];

const FORMATS: [&str; 8] = [
    "date-time",
    "email",
    "uuid",
    "ipv6",
    "uri",
    "hostname",
    "duration",
    "nothing",
];

/// A schema selected by the bytes; empty below some depth.
fn draw(bytes: &mut impl Iterator<Item = u8>, depth: u32) -> Value {
    let mut next = |most: usize| usize::from(bytes.next().unwrap_or(0)) % most;
    let kind = if depth > 6 { next(4) } else { next(16) };
    let number = |at: usize| {
        let value = NUMBERS[at % NUMBERS.len()];
        if value.fract() == 0.0 && value.abs() < 1e15 {
            serde_json::from_str(&format!("{value:.0}")).unwrap()
        } else {
            json!(value)
        }
    };
    match kind {
        0 => json!({"type": "boolean"}),
        1 => {
            let mut map =
                Map::from_iter([("type".to_owned(), json!(["integer", "number"][next(2)]))]);
            for keyword in [
                "multipleOf",
                "minimum",
                "maximum",
                "exclusiveMinimum",
                "exclusiveMaximum",
            ] {
                if next(3) == 0 {
                    map.insert(keyword.to_owned(), number(next(NUMBERS.len())));
                }
            }
            Value::Object(map)
        }
        2 => {
            let mut map = Map::from_iter([("type".to_owned(), json!("string"))]);
            if next(2) == 0 {
                map.insert("pattern".to_owned(), json!(PATTERNS[next(PATTERNS.len())]));
            }
            if next(3) == 0 {
                map.insert("format".to_owned(), json!(FORMATS[next(FORMATS.len())]));
            }
            for keyword in ["minLength", "maxLength"] {
                if next(3) == 0 {
                    map.insert(keyword.to_owned(), number(next(NUMBERS.len())));
                }
            }
            Value::Object(map)
        }
        3 => {
            let (length, count) = (next(256) * 2, next(256));
            let texts: Vec<Value> = (0..count)
                .map(|at| json!(format!("{at:0length$}")))
                .collect();
            json!({"enum": texts})
        }
        4..=6 => {
            let count = next(10);
            let properties: Map<String, Value> = (0..count)
                .map(|at| (format!("p{at}"), draw(bytes, depth + 1)))
                .collect();
            let required: Vec<Value> = (0..count)
                .step_by(2)
                .map(|at| json!(format!("p{at}")))
                .collect();
            let mut map = json!({"type": "object", "properties": properties, "required": required});
            match bytes.next().unwrap_or(0) % 4 {
                0 => map["additionalProperties"] = json!(false),
                1 => map["additionalProperties"] = draw(bytes, depth + 1),
                2 => {
                    map["patternProperties"] =
                        json!({PATTERNS[0]: draw(bytes, depth + 1), "^x": {"type": "null"}});
                }
                _ => map["maxProperties"] = json!(bytes.next()),
            }
            map
        }
        7 | 8 => {
            let (least, most) = (number(next(NUMBERS.len())), number(next(NUMBERS.len())));
            let mut map = json!({"type": "array", "items": draw(bytes, depth + 1)});
            match bytes.next().unwrap_or(0) % 4 {
                0 => map["minItems"] = least,
                1 => map["maxItems"] = most,
                2 => map["prefixItems"] = (0..5).map(|_| draw(bytes, depth + 1)).collect(),
                _ => map["uniqueItems"] = json!(true),
            }
            map
        }
        9..=12 => {
            let keyword = ["anyOf", "allOf", "oneOf", "allOf"][next(4)];
            let count = 1 + next(8);
            let all: Vec<Value> = (0..count).map(|_| draw(bytes, depth + 1)).collect();
            json!({keyword: all})
        }
        13 => {
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [draw(bytes, depth + 1), {"type": "array", "items": {"$ref": "#/$defs/a"}}]}}})
        }
        14 => json!({"const": draw(bytes, depth + 1)}),
        _ => json!({"not": draw(bytes, depth + 1)}),
    }
}
