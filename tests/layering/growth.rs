//! Lines of code per crate, checked against the growth allowed by commits.

use std::{
    collections::BTreeMap,
    io::Write,
    path::Path,
    process::{Command, Stdio},
    thread,
};

use crate::scan::{blank, without_tests};

/// Lines of code per crate, without blank lines, comments and tests.
pub(crate) type Lines = BTreeMap<String, i64>;

/// Counts the files, given as paths below `src` with their texts.
pub(crate) fn lines(files: impl IntoIterator<Item = (String, String)>) -> Lines {
    let mut lines = Lines::new();
    for (path, text) in files {
        let is_test = path
            .split('/')
            .any(|part| part == "tests" || part.ends_with("tests.rs"));
        let Some((name, _)) = path.split_once('/').filter(|_| !is_test) else {
            continue;
        };
        let code = without_tests(&blank(&text));
        let count = code.lines().filter(|line| !line.trim().is_empty()).count();
        *lines.entry(name.to_owned()).or_default() += i64::try_from(count).unwrap();
    }
    lines
}

/// Growth allowed by commit messages: the number of each line `Grows: CRATE +N because …`.
pub(crate) fn allowed(messages: &str) -> Lines {
    let mut allowed = Lines::new();
    for line in messages.lines() {
        let Some(rest) = line.strip_prefix("Grows: ") else {
            continue;
        };
        let mut words = rest.splitn(3, ' ');
        let (name, count, reason) = (words.next(), words.next(), words.next());
        let count = count
            .and_then(|count| count.strip_prefix('+'))
            .and_then(|count| count.parse::<i64>().ok());
        let is_reasoned = reason
            .is_some_and(|reason| reason.starts_with("because ") && reason.contains("; removed: "));
        if let (Some(name), Some(count), true) = (name, count, is_reasoned) {
            *allowed.entry(name.to_owned()).or_default() += count;
        }
    }
    allowed
}

/// Crates that grew beyond their allowance.
pub(crate) fn grown(before: &Lines, after: &Lines, allowed: &Lines) -> Vec<String> {
    let of = |lines: &Lines, name: &str| lines.get(name).copied().unwrap_or_default();
    let excess = |name: &String| of(after, name) - of(before, name) - of(allowed, name);
    after
        .keys()
        .filter(|name| excess(name) > 0)
        .map(|name| {
            let (was, is) = (of(before, name), of(after, name));
            format!(
                "{name}: {was} to {is} lines; write `Grows: {name} +{} because …; removed: …`",
                is - was
            )
        })
        .collect()
}

/// Output of git; `None` on failure.
fn git(arguments: &[&str], input: &str) -> Option<String> {
    let mut git = Command::new("git");
    git.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR"));
    let mut running = git
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdin = running.stdin.take()?;
    let input = input.to_owned();
    let writer = thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = running.wait_with_output().ok()?;
    writer.join().ok()?.ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The base commit of this work: its merge base with the published branch, or else the second to last commit.
pub(crate) fn base() -> Option<String> {
    let head = git(&["rev-parse", "HEAD"], "")?;
    let published = git(&["merge-base", "HEAD", "origin/main"], "").filter(|base| *base != head);
    Some(
        published
            .or_else(|| git(&["rev-parse", "HEAD~1"], ""))?
            .trim()
            .to_owned(),
    )
}

/// The messages of the commits since then.
pub(crate) fn messages(base: &str) -> Option<String> {
    git(&["log", "--format=%B", &format!("{base}..HEAD")], "")
}

/// The sources of a commit; `None` if it had another layout.
pub(crate) fn sources(commit: &str) -> Option<Vec<(String, String)>> {
    let names = git(
        &[
            "ls-tree",
            "-r",
            "--name-only",
            commit,
            "src",
            ".rustfmt.toml",
        ],
        "",
    )?;
    if names.lines().any(|name| name == ".rustfmt.toml") {
        return None;
    }
    let is_source = |name: &&str| Path::new(name).extension().is_some_and(|end| end == "rs");
    let names: Vec<&str> = names.lines().filter(is_source).collect();
    let wanted: String = names
        .iter()
        .map(|name| format!("{commit}:{name}\n"))
        .collect();
    let contents = git(&["cat-file", "--batch"], &wanted)?;
    let mut rest = contents.as_str();
    let mut found = Vec::new();
    for name in names {
        // `HASH blob BYTES`, the text, and a line end.
        let (head, text) = rest.split_once('\n')?;
        let bytes: usize = head.rsplit(' ').next()?.parse().ok()?;
        found.push((
            name.strip_prefix("src/")?.to_owned(),
            text.get(..bytes)?.to_owned(),
        ));
        rest = text.get(bytes + 1..)?;
    }
    Some(found)
}
