//! Who may import whom: reads the paths in `src/` and names the line that strays from the table in
//! `docs/architecture.md`.
//!
//! Comments, strings and test modules are left out: a doc link or a fixture ties nothing together.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "test helpers may fail loudly")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

#[path = "layering/graph.rs"]
mod graph;
#[path = "layering/scan.rs"]
mod scan;

use graph::{Crate, Cycle};
use scan::{blank, collect, tokens, without_tests};

/// Each module of the crate and the modules that it may name. Its own name is always allowed.
const TABLE: [(&str, &[&str]); 19] = [
    ("units", &[]),
    ("causes", &[]),
    ("emergency", &["units"]),
    ("heap", &["units"]),
    ("policy", &["units"]),
    ("conversation", &["units", "policy"]),
    ("config", &["units", "policy"]),
    ("probe", &["units", "policy"]),
    ("speech", &["units", "heap"]),
    ("worker", &["units", "causes", "policy", "config", "probe", "speech"]),
    ("engine", &["units", "causes", "policy", "emergency", "heap", "conversation"]),
    ("http", &["units", "causes", "heap", "policy", "speech", "conversation", "telemetry"]),
    ("rpc", &["units", "policy", "probe", "conversation"]),
    ("journal", &["units", "policy"]),
    ("telemetry", &["units", "causes", "policy"]),
    ("daemon", BELOW_DAEMON),
    ("cli", BELOW_CLI),
    ("main", &["cli", "emergency"]),
    // The map declares the modules and uses none.
    ("lib", &[]),
];

const BELOW_DAEMON: &[&str] = &[
    "units",
    "causes",
    "emergency",
    "heap",
    "policy",
    "conversation",
    "config",
    "probe",
    "speech",
    "worker",
    "engine",
    "http",
    "rpc",
    "journal",
    "telemetry",
];

/// The command line is a client of the daemon. It also starts the daemon, the workers that ship with us and the
/// demonstration, and `check` looks at machine and model without a daemon.
const BELOW_CLI: &[&str] = &[
    "units",
    "causes",
    "emergency",
    "heap",
    "policy",
    "conversation",
    "config",
    "probe",
    "speech",
    "worker",
    "engine",
    "rpc",
    "journal",
    "telemetry",
    "daemon",
];

#[test]
fn imports_follow_the_table() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&source, &mut files);
    assert!(files.len() > 10, "there is little in {}", source.display());
    let strays: Vec<String> = files
        .iter()
        .flat_map(|file| {
            let name = file.strip_prefix(&source).unwrap();
            strays(name, &fs::read_to_string(file).unwrap())
        })
        .collect();
    assert!(strays.is_empty(), "these lines import what their module may not:\n{}", strays.join("\n"));
}

#[test]
fn a_planted_line_is_found() {
    let found = |file: &str, text: &str| strays(Path::new(file), text);
    for (file, text, line) in [
        ("probe/psi.rs", "//! Doc.\nuse crate::config::Config;\n", 2),
        ("policy/arbiter/mod.rs", "use crate::{\n    units::Bytes,\n    daemon::Loop,\n};\n", 3),
        ("rpc/lease.rs", "fn f() {\n    crate::http::serve();\n}\n", 2),
        ("worker/spawn.rs", "use super::super::engine::Engine;\n", 1),
        ("worker/mod.rs", "use super::{engine::Engine};\n", 1),
        ("units.rs", "use super::policy;\n", 1),
        ("journal.rs", "pub use crate :: { self as root, policy, probe::{Sampler, psi} };\n", 1),
        ("main.rs", "fn main() { cotenant::daemon::run(); }\n", 1),
        ("speech/wav.rs", "const T: char = '\"'; use crate::http; const U: &str = \"\";\n", 1),
        ("speech/wav.rs", "fn f<'a>(x: &'a str) {}\nuse crate::r#rpc;\n", 2),
        ("engine/kv.rs", "#[cfg(test)]\nmod tests {\n    use crate::rpc;\n}\nuse crate::rpc;\n", 5),
        ("cli/show.rs", "use crate::http::Refusal;\n", 1),
        ("gpu/mod.rs", "", 0),
    ] {
        let strays = found(file, text);
        assert_eq!(strays.len(), 1, "{file}: {text}\n{strays:?}");
        assert!(strays[0].starts_with(&format!("src/{file}:{line}: ")), "{strays:?}");
    }
    for (file, text) in [
        ("probe/psi.rs", "/// See [`crate::daemon`].\n// crate::http\nuse crate::units::Bytes;\n"),
        ("probe/psi.rs", "/* crate::rpc /* nested */ crate::rpc */ use crate::policy::pressure::Sample;\n"),
        ("probe/psi.rs", "const TEXT: &str = r#\"use crate::rpc; \" crate::rpc\"#;\n"),
        ("probe/psi.rs", "use super::meminfo; mod inner { use super::super::nvmap; }\n"),
        ("probe/psi.rs", "#[cfg(test)]\nmod tests {\n    const B: &str = \"}\";\n    use crate::config;\n}\n"),
        ("config/tests.rs", "use crate::daemon;\n"),
        ("daemon/clock.rs", "use crate::{engine, rpc, http};\n"),
        ("cli/mod.rs", "use crate::daemon;\n"),
    ] {
        assert_eq!(found(file, text), Vec::<String>::new(), "{file}: {text}");
    }
}

/// The lines of a file that name what its module may not, as `src/file:line: message`.
fn strays(file: &Path, text: &str) -> Vec<String> {
    let parts: Vec<String> = file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|name| name == "tests") {
        return Vec::new();
    }
    let Some((module, allowed)) = TABLE.iter().find(|(module, _)| *module == parts[0]) else {
        let message = "this module is not in the table of tests/layering.rs";
        return vec![format!("src/{}:0: `{}`: {message}", file.display(), parts[0])];
    };
    // `probe/psi.rs` is two levels below the crate, `probe/mod.rs` and `units.rs` one.
    let depth = parts.iter().filter(|part| *part != "mod").count();
    let code = without_tests(&blank(text));
    roots(&code, depth)
        .into_iter()
        .filter(|(_, name)| TABLE.iter().any(|(known, _)| known == name))
        .filter(|(_, name)| name != module && !allowed.contains(&name.as_str()))
        .map(|(line, name)| {
            let allowed = if allowed.is_empty() { "nothing of ours".to_owned() } else { allowed.join(", ") };
            format!("src/{}:{line}: `{module}` imports `{name}`, it may import {allowed}", file.display())
        })
        .collect()
}

/// Names that follow the root of the crate, with their lines: of `crate::a`, `crate::{a, b::c}`, `cotenant::a`, and of
/// `super::super::a` where that climbs to the root.
fn roots(code: &str, depth: usize) -> Vec<(usize, String)> {
    let tokens = tokens(code);
    let word = |at: usize| tokens.get(at).map(|(_, word)| word.as_str());
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let start = at;
        at += 1;
        let mut next = start + 1;
        match word(start) {
            Some("crate" | "cotenant") if word(next) == Some("::") => next += 1,
            Some("super") if start == 0 || word(start - 1) != Some("::") => {
                let mut climbed = 1;
                while word(next) == Some("::") && word(next + 1) == Some("super") {
                    climbed += 1;
                    next += 2;
                }
                if climbed < depth || word(next) != Some("::") {
                    continue;
                }
                next += 1;
            }
            _ => continue,
        }
        if word(next) != Some("{") {
            found.extend(tokens.get(next).cloned());
            continue;
        }
        // The first word of each part of the outer group.
        let mut level = 0;
        let mut first = true;
        for (line, word) in &tokens[next..] {
            match word.as_str() {
                "{" => level += 1,
                "}" => level -= 1,
                "," if level == 1 => first = true,
                _ if level == 1 && first => {
                    found.push((*line, word.clone()));
                    first = false;
                }
                _ => {}
            }
            if level == 0 {
                break;
            }
        }
    }
    found
}

/// The crate as it stands.
fn this_crate() -> Crate {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&source, &mut files);
    let texts: Vec<_> = files
        .iter()
        .map(|file| (file.strip_prefix(&source).unwrap().to_owned(), fs::read_to_string(file).unwrap()))
        .collect();
    Crate::new(&texts)
}

fn planted(files: &[(&str, &str)]) -> Crate {
    let texts: Vec<_> = files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
    Crate::new(&texts)
}

/// Fails when there are cycles, and names them.
fn assert_none(found: &[Cycle], what: &str) {
    let cycles: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert!(cycles.is_empty(), "files {what}:\n{}", cycles.join("\n"));
}

#[test]
fn files_of_a_folder_import_in_one_direction() {
    assert_none(&this_crate().import_cycles(), "import each other in a circle");
}

#[test]
fn impl_blocks_of_a_type_call_in_one_direction() {
    let (cycles, spread) = this_crate().call_cycles(IMPL_FILES_MAX);
    assert_none(&cycles, "call each other in a circle");
    assert!(spread.is_empty(), "at most {IMPL_FILES_MAX} files may hold `impl` blocks:\n{}", spread.join("\n"));
}

#[test]
fn structs_of_policy_stay_small() {
    let wide = this_crate().wide_structs("policy", FIELDS_MAX, FLAGS_MAX);
    assert!(wide.is_empty(), "these have more than {FIELDS_MAX} fields or {FLAGS_MAX} booleans:\n{}", wide.join("\n"));
}

#[test]
fn planted_cycles_are_found() {
    let cycles = planted(&[
        ("probe/mod.rs", "pub mod psi;\nmod meminfo;\npub use meminfo::Reading;\n"),
        ("probe/psi.rs", "use super::Reading;\npub struct Psi(Reading);\n"),
        ("probe/meminfo.rs", "pub struct Reading;\nfn f() {\n    super::psi::read();\n}\n"),
    ])
    .import_cycles();
    assert_eq!(cycles.len(), 1, "{cycles:?}");
    assert_eq!(
        cycles[0].ties,
        ["src/probe/psi.rs:1 needs probe/meminfo.rs", "src/probe/meminfo.rs:3 needs probe/psi.rs"]
    );

    let one_way = planted(&[
        ("probe/mod.rs", "pub mod psi;\nmod meminfo;\npub use meminfo::Reading;\n#[cfg(test)]\nmod wide_tests;\n"),
        ("probe/psi.rs", "use super::Reading;\n"),
        ("probe/meminfo.rs", "pub struct Reading;\n#[cfg(test)]\nmod tests {\n    use super::super::psi;\n}\n"),
        ("probe/wide_tests.rs", "use super::psi::Psi;\n"),
        ("units.rs", "use crate::probe::psi;\n"),
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
fn planted_structs_are_found() {
    let wide = planted(&[(
        "policy/core.rs",
        "struct Small { a: bool, b: BTreeMap<u8, Vec<(u8, bool)>> }\nstruct Wide { a: bool, b: bool, c: bool }\n",
    )]);
    assert_eq!(wide.wide_structs("policy", 12, 2).len(), 1);
    assert_eq!(wide.wide_structs("policy", 1, 9).len(), 2);
}

#[test]
fn comments_messages_and_documents_use_terms_of_the_field() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "tests", "benches"] {
        collect(&root.join(folder), &mut files);
    }
    // This file has the list of the words.
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
    let documents = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    for file in documents.chain([root.join("README.md")]).filter(|file| file.extension().is_some_and(|end| end == "md"))
    {
        let text = fs::read_to_string(&file).unwrap();
        found.extend(
            banned(&prose_of_document(&text))
                .into_iter()
                .map(|(line, word)| format!("{}:{line}: {word}", file.display())),
        );
    }
    assert!(found.is_empty(), "use terms of the field:\n{}", found.join("\n"));
}

#[test]
fn a_planted_word_is_found() {
    let code = "// nobody knows `told`\nlet told = \"it is told\"; // fine\nlet door = 1;\n";
    assert_eq!(banned(&prose_of_code(code)), [(1, "nobody"), (2, "told")]);
    let code = "#[test]\nfn the_answer_reaches_nobody() {}\n// \"lock the front door\", by the front\n// door\n";
    assert_eq!(banned(&prose_of_code(code)), [(4, "door")]);
    assert_eq!(banned(&names_of_functions(code)), [(2, "nobody")]);
    assert_eq!(
        banned(&prose_of_document("asked\nback `anew`\n```\nanew\n```\nAsked back, for good.\n")),
        [(6, "asked back"), (6, "for good")]
    );
}

/// Comments and strings of Rust source, lines kept; names in backticks are left out.
fn prose_of_code(text: &str) -> String {
    let prose: String = text
        .chars()
        .zip(blank(text).chars())
        .map(|(char, code)| if char == code && char != '\n' { ' ' } else { char })
        .collect();
    without_names(&prose)
}

/// Names of functions, tests among them, as words; lines kept.
fn names_of_functions(text: &str) -> String {
    let names = blank(text)
        .lines()
        .map(|line| {
            let name = line.split_once("fn ").map_or("", |(_, rest)| rest.split(['(', '<']).next().unwrap_or_default());
            name.replace('_', " ")
        })
        .collect::<Vec<_>>();
    names.join("\n")
}

/// Sentences of a document, lines kept.
fn prose_of_document(text: &str) -> String {
    let mut in_block = false;
    let lines = text.lines().map(|line| {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        if in_block || is_fence { String::new() } else { without_names(line) }
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn without_names(text: &str) -> String {
    let lines = text.lines().map(|line| line.split('`').step_by(2).collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join("\n")
}

/// Words that are no terms of the field, with their lines.
fn banned(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words: Vec<String> = line
            .split(|c: char| !(c.is_alphanumeric() || c == '_'))
            .map(str::to_lowercase)
            .filter(|word| !word.is_empty())
            .collect();
        // What users say to an assistant about their doors.
        let line = format!(" {} ", words.join(" ")).replace(" front door ", " ").replace(" garage door ", " ");
        found.extend(BANNED.iter().filter(|word| line.contains(&format!(" {word} "))).map(|word| (index + 1, *word)));
    }
    found
}

/// Private words, each with a term of the field that says it.
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

#[test]
fn the_table_is_the_one_of_the_document() {
    let document = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md")).unwrap();
    let mut rows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in document.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, module, _, imports, _] = cells[..] else {
            continue;
        };
        let Some(module) = module.strip_prefix('`').and_then(|name| name.strip_suffix('`')) else {
            continue;
        };
        if !TABLE.iter().any(|(known, _)| *known == module) {
            continue;
        }
        let named: BTreeSet<String> = match imports {
            "all of the above" => rows.keys().cloned().collect(),
            _ => imports.split('`').skip(1).step_by(2).map(str::to_owned).collect(),
        };
        rows.entry(module.to_owned()).or_insert(named);
    }
    for (module, allowed) in TABLE {
        if matches!(module, "main" | "lib") {
            continue;
        }
        let allowed: BTreeSet<String> = allowed.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(rows.get(module), Some(&allowed), "`{module}` in docs/architecture.md and in tests/layering.rs");
    }
}

/// Files that may hold `impl` blocks of one type.
const IMPL_FILES_MAX: usize = 3;

/// Fields and booleans that one struct of `policy` may have.
const FIELDS_MAX: usize = 12;
const FLAGS_MAX: usize = 2;
