//! Checks that documents name existing tests, files and headings.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "test helpers may fail loudly"
)]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use cotenant::policy::death::DeathClass;

#[test]
fn every_promise_names_tests_that_exist() {
    let functions = test_functions();
    let promises = fs::read_to_string(root().join("docs/promises.md")).unwrap();
    let mut rows = 0;
    let mut faults = Vec::new();
    for row in promises.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let Some(tests) = cells
            .last()
            .filter(|cell| !matches!(**cell, "test" | "---"))
        else {
            continue;
        };
        rows += 1;
        let named: Vec<&str> = backticked(tests)
            .filter(|word| is_test_name(word))
            .collect();
        if named.is_empty() {
            faults.push(format!("names no test: {row}"));
        }
        faults.extend(
            named
                .iter()
                .filter(|name| !functions.contains(**name))
                .map(|name| format!("no such test: {name}")),
        );
    }
    assert!(rows > 40, "{rows} rows");
    let number = |row: &str| row.strip_prefix("| ")?.split(' ').next()?.parse().ok();
    let numbers: Vec<usize> = promises.lines().filter_map(number).collect();
    assert_eq!(
        numbers,
        (1..=numbers.len()).collect::<Vec<_>>(),
        "promises are numbered in order"
    );
    assert!(
        faults.is_empty(),
        "docs/promises.md:\n{}",
        faults.join("\n")
    );
}

#[test]
fn links_between_documents_lead_to_files_and_headings() {
    let mut documents = vec![root().join("README.md")];
    collect(&root().join("docs"), "md", &mut documents);
    let mut faults = Vec::new();
    let mut links = 0;
    for document in &documents {
        let text = fs::read_to_string(document).unwrap();
        for target in prose(&text)
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            if target.contains("://") {
                continue;
            }
            links += 1;
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() {
                document.clone()
            } else {
                document.parent().unwrap().join(file)
            };
            let found = path.exists()
                && (heading.is_empty()
                    || prose(&fs::read_to_string(&path).unwrap_or_default())
                        .lines()
                        .any(|line| line.starts_with('#') && anchor(line) == heading));
            if !found {
                faults.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(links > 20, "{links} links");
    assert!(
        faults.is_empty(),
        "links that lead nowhere:\n{}",
        faults.join("\n")
    );
}

/// Fields that are ignored in requests and named in a header.
#[test]
fn the_document_of_errors_names_each_field_that_is_ignored() {
    let errors = fs::read_to_string(root().join("docs/errors.md")).unwrap();
    // `modalities` other than text, `parallel_tool_calls: false`: the name is the first word.
    let documented: BTreeSet<&str> = backticked(&errors)
        .filter_map(|word| word.split([':', '[', '=']).next())
        .map(str::trim)
        .collect();
    let mut files = Vec::new();
    collect(&root().join("src/http"), "rs", &mut files);
    let mut names = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(file).unwrap();
        let lists = text
            .split("named([")
            .skip(1)
            .filter_map(|rest| rest.split("])").next());
        for entry in lists.flat_map(|list| list.split('(').skip(1)) {
            names.extend(
                entry
                    .trim_start()
                    .strip_prefix('"')
                    .and_then(|rest| rest.split('"').next())
                    .map(str::to_owned),
            );
        }
        let pushed = text
            .split("ignored.push(\"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next());
        names.extend(pushed.map(str::to_owned));
    }
    // Refused or ineffective fields: arms of a `match`.
    let fields = fs::read_to_string(root().join("src/http/fields.rs")).unwrap();
    let arms = fields
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with('"') || line.starts_with("| \""))
        .filter_map(|line| line.split(" if ").next()?.split(" =>").next());
    for arm in arms {
        let quoted = arm.split('"').skip(1).step_by(2);
        names.extend(quoted.filter(|name| !name.contains(' ')).map(str::to_owned));
    }
    assert!(names.len() > 25, "{names:?}");
    let missing: Vec<&String> = names
        .iter()
        .filter(|name| !documented.contains(name.as_str()))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/errors.md does not name {missing:?}"
    );
}

#[test]
fn source_files_that_documents_cite_exist() {
    let mut files = Vec::new();
    for folder in ["src", "tests", "benches", "proto"] {
        collect(&root().join(folder), "rs", &mut files);
    }
    let mut cited = 0;
    let mut faults = Vec::new();
    for document in [
        "docs/architecture.md",
        "docs/errors.md",
        "docs/contributing.md",
    ] {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let text = prose(&text);
        let sources = backticked(&text)
            .filter(|word| Path::new(word).extension().is_some_and(|end| end == "rs"));
        for source in sources {
            cited += 1;
            if !files.iter().any(|file| file.ends_with(source)) {
                faults.push(format!("{document}: {source}"));
            }
        }
    }
    assert!(cited > 10, "{cited} files cited");
    assert!(faults.is_empty(), "no such file:\n{}", faults.join("\n"));
}

#[test]
fn alerts_and_the_dashboard_name_metrics_that_exist() {
    let mut sources = Vec::new();
    collect(&root().join("src/telemetry"), "rs", &mut sources);
    let metrics: String = sources
        .iter()
        .map(|source| fs::read_to_string(source).unwrap())
        .collect();
    for (file, least) in [
        ("deploy/prometheus/cotenant.rules.yml", 8),
        ("deploy/grafana/cotenant.json", 25),
    ] {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let named: Vec<&str> = text
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .filter_map(|word| word.strip_prefix("cotenant_"))
            .collect();
        assert!(named.len() >= least, "{file}: {} metrics", named.len());
        for name in named {
            let registered = ["", "_total", "_bucket", "_count"].iter().any(|suffix| {
                name.strip_suffix(suffix)
                    .is_some_and(|name| metrics.contains(&format!("\"{name}\"")))
            });
            assert!(registered, "{file}: no such metric: cotenant_{name}");
        }
    }
}

#[test]
fn troubleshooting_has_a_section_for_each_alert_and_a_row_for_each_refusal_and_death() {
    let document = fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
    let headings: BTreeSet<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("### "))
        .collect();
    let rows: BTreeSet<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .flat_map(backticked)
        .collect();
    let rules = fs::read_to_string(root().join("deploy/prometheus/cotenant.rules.yml")).unwrap();
    let alerts = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let links = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("runbook_url: "));
    for (alert, link) in alerts.clone().zip(links) {
        // Path of the document in the package; anchors are headings in lower case.
        assert!(headings.contains(alert), "no section for {alert}");
        assert_eq!(
            link,
            format!(
                "/usr/share/doc/cotenant/troubleshooting.md#{}",
                alert.to_lowercase()
            )
        );
    }
    let classes: Vec<String> = DeathClass::ALL.iter().map(ToString::to_string).collect();
    let leases = fs::read_to_string(root().join("src/policy/denial.rs")).unwrap();
    let (_, denials) = leases.split_once("pub enum Denial {").unwrap();
    let denials = denials
        .lines()
        .take_while(|line| *line != "}")
        .filter_map(|line| {
            let (name, _) = line.strip_prefix("    ")?.split_once(" {")?;
            name.starts_with(|c: char| c.is_ascii_uppercase())
                .then(|| snake_case(name))
        });
    let errors = fs::read_to_string(root().join("docs/errors.md")).unwrap();
    let (http, _) = errors.split_once("### Anthropic's API").unwrap();
    let codes = http
        .lines()
        .filter(|line| line.starts_with("| 503 | ") || line.starts_with("| 429 | "))
        .flat_map(|line| {
            backticked(line.split(" | ").nth(1).unwrap())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        });
    assert!(alerts.count() > 10);
    let names: Vec<String> = classes.into_iter().chain(denials).chain(codes).collect();
    assert!(names.len() > 35, "{names:?}");
    let missing: Vec<&String> = names
        .iter()
        .filter(|name| !rows.contains(name.as_str()))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/troubleshooting.md has no row for {missing:?}"
    );
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Returns the names of all functions in `src`, `tests` and `benches`.
fn test_functions() -> BTreeSet<String> {
    let mut files = Vec::new();
    for folder in ["src", "tests", "benches"] {
        collect(&root().join(folder), "rs", &mut files);
    }
    files
        .iter()
        .flat_map(|file| {
            let text = fs::read_to_string(file).unwrap();
            let names: Vec<String> = text
                .lines()
                .filter_map(|line| {
                    let (_, rest) = line.split_once("fn ")?;
                    Some(rest.split_once('(')?.0.to_owned())
                })
                .collect();
            names
        })
        .collect()
}

/// A test's name states a fact, so it has several words.
fn is_test_name(word: &str) -> bool {
    word.matches('_').count() >= 2
        && word
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

fn backticked(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns the text without its code blocks.
fn prose(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// Returns the Markdown anchor of a heading.
fn anchor(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

fn collect(folder: &Path, extension: &str, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries {
        let path = entry.expect("an entry of the folder").path();
        if path.is_dir() {
            collect(&path, extension, files);
        } else if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
