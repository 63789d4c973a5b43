//! Who may import whom: reads the paths in `src/` and names the line that strays from the table in
//! `docs/architecture.md`.
//!
//! Comments, strings and test modules are left out: a doc link or a fixture ties nothing together.
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

/// Each module of the crate and the modules that it may name. Its own name is always allowed.
const TABLE: [(&str, &[&str]); 17] = [
    ("units", &[]),
    ("causes", &[]),
    ("standby", &["units"]),
    ("policy", &["units"]),
    ("config", &["units", "policy"]),
    ("probe", &["units", "policy"]),
    ("speech", &["units"]),
    ("worker", &["units", "causes", "policy", "config", "speech"]),
    ("engine", &["units", "causes", "policy", "standby"]),
    ("http", &["units", "causes", "policy", "speech"]),
    ("rpc", &["units", "policy"]),
    ("journal", &["units", "policy"]),
    ("telemetry", &["units", "policy"]),
    ("daemon", BELOW_DAEMON),
    ("cli", BELOW_CLI),
    ("main", &["cli", "standby"]),
    // The map declares the modules and uses none.
    ("lib", &[]),
];

const BELOW_DAEMON: &[&str] = &[
    "units",
    "causes",
    "standby",
    "policy",
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

/// The command line is a client, and it starts the daemon, the workers that ship with us, and the demonstration.
const BELOW_CLI: &[&str] = &[
    "units",
    "causes",
    "standby",
    "policy",
    "config",
    "probe",
    "speech",
    "worker",
    "engine",
    "http",
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
    assert!(
        strays.is_empty(),
        "these lines import what their module may not:\n{}",
        strays.join("\n")
    );
}

#[test]
fn a_planted_line_is_found() {
    let found = |file: &str, text: &str| strays(Path::new(file), text);
    for (file, text, line) in [
        ("probe/psi.rs", "//! Doc.\nuse crate::config::Config;\n", 2),
        (
            "policy/arbiter/mod.rs",
            "use crate::{\n    units::Bytes,\n    daemon::Loop,\n};\n",
            3,
        ),
        ("rpc/lease.rs", "fn f() {\n    crate::http::serve();\n}\n", 2),
        ("worker/spawn.rs", "use super::super::engine::Engine;\n", 1),
        ("worker/mod.rs", "use super::{engine::Engine};\n", 1),
        ("units.rs", "use super::policy;\n", 1),
        (
            "journal.rs",
            "pub use crate :: { self as root, policy, probe::{Sampler, psi} };\n",
            1,
        ),
        ("main.rs", "fn main() { cotenant::daemon::run(); }\n", 1),
        (
            "speech/wav.rs",
            "const T: char = '\"'; use crate::http; const U: &str = \"\";\n",
            1,
        ),
        ("speech/wav.rs", "fn f<'a>(x: &'a str) {}\nuse crate::r#rpc;\n", 2),
        (
            "engine/kv.rs",
            "#[cfg(test)]\nmod tests {\n    use crate::rpc;\n}\nuse crate::rpc;\n",
            5,
        ),
        ("gpu/mod.rs", "", 0),
    ] {
        let strays = found(file, text);
        assert_eq!(strays.len(), 1, "{file}: {text}\n{strays:?}");
        assert!(strays[0].starts_with(&format!("src/{file}:{line}: ")), "{strays:?}");
    }
    for (file, text) in [
        (
            "probe/psi.rs",
            "/// See [`crate::daemon`].\n// crate::http\nuse crate::units::Bytes;\n",
        ),
        (
            "probe/psi.rs",
            "/* crate::rpc /* nested */ crate::rpc */ use crate::policy::pressure::Sample;\n",
        ),
        (
            "probe/psi.rs",
            "const TEXT: &str = r#\"use crate::rpc; \" crate::rpc\"#;\n",
        ),
        (
            "probe/psi.rs",
            "use super::meminfo; mod inner { use super::super::nvmap; }\n",
        ),
        (
            "probe/psi.rs",
            "#[cfg(test)]\nmod tests {\n    const B: &str = \"}\";\n    use crate::config;\n}\n",
        ),
        ("config/tests.rs", "use crate::daemon;\n"),
        ("daemon/clock.rs", "use crate::{engine, rpc, http};\n"),
        ("cli/mod.rs", "use crate::daemon;\n"),
    ] {
        assert_eq!(found(file, text), Vec::<String>::new(), "{file}: {text}");
    }
}

/// The lines of a file that name what its module may not, as `src/file:line: message`.
fn strays(file: &Path, text: &str) -> Vec<String> {
    let parts: Vec<String> = file
        .with_extension("")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
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
            let allowed = if allowed.is_empty() {
                "nothing of ours".to_owned()
            } else {
                allowed.join(", ")
            };
            format!(
                "src/{}:{line}: `{module}` imports `{name}`, it may import {allowed}",
                file.display()
            )
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

/// Words, `::` and single signs, with their lines.
fn tokens(code: &str) -> Vec<(usize, String)> {
    let mut tokens: Vec<(usize, String)> = Vec::new();
    let mut line = 1;
    let mut chars = code.chars().peekable();
    while let Some(char) = chars.next() {
        if char == '\n' {
            line += 1;
        } else if char.is_alphanumeric() || char == '_' {
            let mut word = String::from(char);
            while let Some(more) = chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                word.push(more);
            }
            // `r#crate` is the word `crate`.
            if word == "r" && chars.next_if_eq(&'#').is_some() {
                continue;
            }
            tokens.push((line, word));
        } else if char == ':' && chars.next_if_eq(&':').is_some() {
            tokens.push((line, "::".to_owned()));
        } else if !char.is_whitespace() {
            tokens.push((line, char.to_string()));
        }
    }
    tokens
}

/// The text with blanks for comments, strings and characters; lines stay where they are.
fn blank(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out: Vec<char> = chars.clone();
    let is = |at: usize, wanted: &str| wanted.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c));
    let is_word = |at: usize| chars.get(at).is_some_and(|c| c.is_alphanumeric() || *c == '_');
    let mut at = 0;
    while at < chars.len() {
        let end = if is(at, "//") {
            (at..chars.len()).find(|i| chars[*i] == '\n').unwrap_or(chars.len())
        } else if is(at, "/*") {
            let (mut level, mut i) = (1, at + 2);
            while level > 0 && i < chars.len() {
                if is(i, "/*") {
                    level += 1;
                    i += 2;
                } else if is(i, "*/") {
                    level -= 1;
                    i += 2;
                } else {
                    i += 1;
                }
            }
            i
        } else if chars[at] == 'r' && (at == 0 || !is_word(at - 1) || chars[at - 1] == 'b') && raw_string(&chars, at) {
            let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
            let close = format!("\"{}", "#".repeat(hashes));
            let body = at + 1 + hashes + 1;
            (body..chars.len())
                .find(|i| is(*i, &close))
                .map_or(chars.len(), |i| i + close.chars().count())
        } else if chars[at] == '"' {
            let mut i = at + 1;
            while i < chars.len() && chars[i] != '"' {
                i += if chars[i] == '\\' { 2 } else { 1 };
            }
            i + 1
        } else if chars[at] == '\'' && chars.get(at + 1) == Some(&'\\') {
            (at + 3..chars.len())
                .find(|i| chars[*i] == '\'')
                .map_or(chars.len(), |i| i + 1)
        } else if chars[at] == '\'' && chars.get(at + 2) == Some(&'\'') {
            at + 3
        } else {
            at += 1;
            continue;
        };
        for place in &mut out[at..end.min(chars.len())] {
            if *place != '\n' {
                *place = ' ';
            }
        }
        at = end;
    }
    out.into_iter().collect()
}

/// Whether `r`, some `#` and a quote stand here.
fn raw_string(chars: &[char], at: usize) -> bool {
    chars[at + 1..].iter().find(|c| **c != '#') == Some(&'"')
}

/// The text with blanks for every block under `#[cfg(test)]`.
fn without_tests(code: &str) -> String {
    let mut out = code.to_owned();
    while let Some(start) = out.find("#[cfg(test)]") {
        let body = out[start..].find(['{', ';']).map(|i| start + i);
        let end = match body {
            Some(open) if out.as_bytes()[open] == b'{' => {
                let mut level = 0;
                out[open..]
                    .char_indices()
                    .find(|(_, c)| {
                        level += i32::from(*c == '{') - i32::from(*c == '}');
                        level == 0
                    })
                    .map_or(out.len(), |(i, _)| open + i + 1)
            }
            Some(semicolon) => semicolon + 1,
            None => out.len(),
        };
        let blank: String = out[start..end]
            .chars()
            .map(|c| if c == '\n' { '\n' } else { ' ' })
            .collect();
        out.replace_range(start..end, &blank);
    }
    out
}

/// All Rust files below a folder, in order.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .expect("the sources are there")
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            files.push(path);
        }
    }
}
