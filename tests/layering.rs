//! Checks of the source: imports in one direction inside a crate, and banned words.
//!
//! Imports between crates are declared in manifests. Comments, strings and test modules are ignored: a doc link or a
//! fixture creates no dependency.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "test helpers may fail loudly"
)]

use std::{
    fs,
    path::{Path, PathBuf},
};

#[path = "layering/graph.rs"]
mod graph;
#[path = "layering/growth.rs"]
mod growth;
#[path = "layering/scan.rs"]
mod scan;

use graph::{Crate, Cycle};
use scan::{blank, collect, without_tests};

/// Reads the current sources.
fn this_crate() -> Crate {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&source, &mut files);
    let texts: Vec<_> = files
        .iter()
        .map(|file| {
            (
                file.strip_prefix(&source).unwrap().to_owned(),
                fs::read_to_string(file).unwrap(),
            )
        })
        .collect();
    Crate::new(&texts)
}

fn planted(files: &[(&str, &str)]) -> Crate {
    let texts: Vec<_> = files
        .iter()
        .map(|(path, text)| (PathBuf::from(path), (*text).to_owned()))
        .collect();
    Crate::new(&texts)
}

/// Fails with the list of cycles if there are any.
fn assert_none(found: &[Cycle], what: &str) {
    let cycles: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert!(cycles.is_empty(), "files {what}:\n{}", cycles.join("\n"));
}

#[test]
fn files_of_a_folder_import_in_one_direction() {
    assert_none(
        &this_crate().import_cycles(),
        "import each other in a circle",
    );
}

#[test]
fn impl_blocks_of_a_type_call_in_one_direction() {
    let (cycles, spread) = this_crate().call_cycles(IMPL_FILES_MAX);
    assert_none(&cycles, "call each other in a circle");
    assert!(
        spread.is_empty(),
        "at most {IMPL_FILES_MAX} files may hold `impl` blocks:\n{}",
        spread.join("\n")
    );
}

#[test]
fn structs_of_policy_stay_small() {
    let wide = this_crate().wide_structs("policy", FIELDS_MAX, FLAGS_MAX);
    assert!(
        wide.is_empty(),
        "these have more than {FIELDS_MAX} fields or {FLAGS_MAX} booleans:\n{}",
        wide.join("\n")
    );
}

#[test]
fn planted_cycles_are_found() {
    let cycles = planted(&[
        (
            "probe/lib.rs",
            "pub mod psi;\nmod meminfo;\npub use meminfo::Reading;\n",
        ),
        (
            "probe/psi.rs",
            "use super::Reading;\npub struct Psi(Reading);\n",
        ),
        (
            "probe/meminfo.rs",
            "pub struct Reading;\nfn f() {\n    crate::psi::read();\n}\n",
        ),
    ])
    .import_cycles();
    assert_eq!(cycles.len(), 1, "{cycles:?}");
    assert_eq!(
        cycles[0].ties,
        [
            "src/probe/psi.rs:1 needs probe/meminfo.rs",
            "src/probe/meminfo.rs:3 needs probe/psi.rs"
        ]
    );

    let one_way = planted(&[
        (
            "probe/mod.rs",
            "pub mod psi;\nmod meminfo;\npub use meminfo::Reading;\n#[cfg(test)]\nmod wide_tests;\n",
        ),
        ("probe/psi.rs", "use super::Reading;\n"),
        (
            "probe/meminfo.rs",
            "pub struct Reading;\n#[cfg(test)]\nmod tests {\n    use super::super::psi;\n}\n",
        ),
        ("probe/wide_tests.rs", "use super::psi::Psi;\n"),
        ("units/lib.rs", "use cotenant_probe::psi;\n"),
    ]);
    assert!(one_way.import_cycles().is_empty());

    let (cycles, spread) = planted(&[
        ("policy/mod.rs", "mod core;\nmod queue;\n"),
        ("policy/core.rs", "pub struct Arbiter;\nimpl Arbiter {\n    fn a(&self) {\n        self.b();\n    }\n}\n"),
        (
            "policy/queue.rs",
            "use super::core::Arbiter;\nimpl Arbiter {\n    fn b(&self) {\n        self.a();\n    }\n}\n",
        ),
    ])
    .call_cycles(1);
    assert_eq!(cycles.len(), 1, "{cycles:?}");
    assert_eq!(cycles[0].ties.len(), 2, "{cycles:?}");
    assert_eq!(spread.len(), 1, "{spread:?}");
}

#[test]
fn a_crate_grows_only_with_a_reason() {
    let Some((base, before)) =
        growth::base().and_then(|base| Some((base.clone(), growth::sources(&base)?)))
    else {
        println!("left out: there is no commit before this one that is formatted as this one is");
        return;
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&source, &mut files);
    let after = files.iter().map(|file| {
        let name = file.strip_prefix(&source).unwrap().to_str().unwrap();
        (name.to_owned(), fs::read_to_string(file).unwrap())
    });
    let allowed = growth::allowed(&growth::messages(&base).unwrap_or_default());
    let grown = growth::grown(&growth::lines(before), &growth::lines(after), &allowed);
    assert!(
        grown.is_empty(),
        "these have grown since {base}:\n{}",
        grown.join("\n")
    );
}

#[test]
fn planted_growth_is_found() {
    let of = |text: &str| growth::lines([("probe/psi.rs".to_owned(), text.to_owned())]);
    let before = of("fn a() {}\n");
    let more = "/// Doc.\n\nfn a() {}\n#[cfg(test)]\nmod tests {\n    fn t() {}\n}\n";
    assert_eq!(of(more), before);
    let after = of("fn a() {}\nfn b() {}\n");
    let grown = |message: &str| growth::grown(&before, &after, &growth::allowed(message)).len();
    assert_eq!(grown(""), 1);
    assert_eq!(
        grown("Grows: probe +1 because it is wanted"),
        1,
        "nothing is said of what was removed"
    );
    assert_eq!(
        grown("Grows: probe +1 because it reads more; removed: nothing"),
        0
    );
    assert_eq!(
        grown("Grows: engine +1 because it reads more; removed: nothing"),
        1
    );
}

#[test]
fn planted_structs_are_found() {
    let wide = planted(&[(
        "policy/core.rs",
        "struct Small { a: bool, b: BTreeMap<u8, Vec<(u8, bool)>> }\nstruct Wide { a: bool, b: bool, c: bool }\n",
    )]);
    assert_eq!(wide.wide_structs("policy", 12, 2).len(), 1);
    assert_eq!(wide.wide_structs("policy", 1, 9).len(), 2);
}

/// These functions panic, or hold their work, if the system has no thread left.
#[test]
fn every_thread_is_started_by_what_reports_a_refusal() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&source, &mut files);
    let panicking = [
        "spawn_blocking",
        "thread::spawn(",
        "scope.spawn(",
        "tokio::fs",
    ];
    let mut found = Vec::new();
    for file in &files {
        let path = file.strip_prefix(&source).unwrap().to_str().unwrap();
        let is_test = path.contains("tests/") || path.ends_with("tests.rs");
        if is_test || path.starts_with("dev/") {
            continue;
        }
        let code = without_tests(&blank(&fs::read_to_string(file).unwrap()));
        for (index, line) in code.lines().enumerate() {
            if panicking.iter().any(|word| line.contains(word)) {
                found.push(format!("{path}:{}: {}", index + 1, line.trim()));
            }
        }
    }
    assert!(
        found.is_empty(),
        "use `cotenant_threads::blocking` or `thread::Builder`:\n{}",
        found.join("\n")
    );
}

#[test]
fn comments_messages_and_documents_use_terms_of_the_field() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "tests", "benches"] {
        collect(&root.join(folder), &mut files);
    }
    // This file contains the list of the words.
    files.retain(|file| !file.ends_with("tests/layering.rs"));
    let mut found = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).unwrap();
        found.extend(
            banned(&prose_of_code(&text))
                .into_iter()
                .chain(banned(&names_of_functions(&text)))
                .map(|(line, word)| format!("{}:{line}: {word}", file.display())),
        );
    }
    let documents = fs::read_dir(root.join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    for file in documents
        .chain([root.join("README.md")])
        .filter(|file| file.extension().is_some_and(|end| end == "md"))
    {
        let text = fs::read_to_string(&file).unwrap();
        found.extend(
            banned(&prose_of_document(&text))
                .into_iter()
                .map(|(line, word)| format!("{}:{line}: {word}", file.display())),
        );
    }
    assert!(
        found.is_empty(),
        "use terms of the field:\n{}",
        found.join("\n")
    );
}

#[test]
fn a_planted_word_is_found() {
    let code = "// nobody knows `told`\nlet told = \"it is told\"; // fine\nlet door = 1;\n";
    assert_eq!(banned(&prose_of_code(code)), [(1, "nobody"), (2, "told")]);
    let code = "#[test]\nfn the_answer_reaches_nobody() {}\n// \"lock the front door\", by the front\n// door\n";
    assert_eq!(banned(&prose_of_code(code)), [(4, "door")]);
    assert_eq!(banned(&names_of_functions(code)), [(2, "nobody")]);
    assert_eq!(
        banned(&prose_of_document(
            "asked\nback `anew`\n```\nanew\n```\nAsked back, for good.\n"
        )),
        [(6, "asked back"), (6, "for good")]
    );
}

/// Returns comments and strings of Rust source, with lines preserved and names in backticks removed.
fn prose_of_code(text: &str) -> String {
    let prose: String = text
        .chars()
        .zip(blank(text).chars())
        .map(|(char, code)| {
            if char == code && char != '\n' {
                ' '
            } else {
                char
            }
        })
        .collect();
    without_names(&prose)
}

/// Returns the names of functions, including tests, as words; lines preserved.
fn names_of_functions(text: &str) -> String {
    let names = blank(text)
        .lines()
        .map(|line| {
            let name = line.split_once("fn ").map_or("", |(_, rest)| {
                rest.split(['(', '<']).next().unwrap_or_default()
            });
            name.replace('_', " ")
        })
        .collect::<Vec<_>>();
    names.join("\n")
}

/// Returns sentences of a document, with lines preserved.
fn prose_of_document(text: &str) -> String {
    let mut in_block = false;
    let lines = text.lines().map(|line| {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        if in_block || is_fence {
            String::new()
        } else {
            without_names(line)
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn without_names(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| line.split('`').step_by(2).collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns words that are not terms of the field, with their lines.
fn banned(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words: Vec<String> = line
            .split(|c: char| !(c.is_alphanumeric() || c == '_'))
            .map(str::to_lowercase)
            .filter(|word| !word.is_empty())
            .collect();
        // Requests to an assistant may contain these.
        let line = format!(" {} ", words.join(" "))
            .replace(" front door ", " ")
            .replace(" garage door ", " ");
        found.extend(
            BANNED
                .iter()
                .filter(|word| line.contains(&format!(" {word} ")))
                .map(|word| (index + 1, *word)),
        );
    }
    found
}

/// Private words, each with an established equivalent.
const BANNED: [&str; 15] = [
    "anew",
    "asked back",
    "door",
    "doors",
    "everybody",
    "for good",
    "ghost",
    "liar",
    "liars",
    "nobody",
    "road",
    "somebody",
    "stranger",
    "told",
    "whoever",
];

/// Limit on files with `impl` blocks of one type.
const IMPL_FILES_MAX: usize = 3;

/// Limits on fields and booleans of one struct of `policy`.
const FIELDS_MAX: usize = 12;
const FLAGS_MAX: usize = 2;
