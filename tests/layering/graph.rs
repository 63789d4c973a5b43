//! Dependency graph of the crates: imports between files, and calls between `impl` blocks.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::scan::{blank, tokens, without_tests};

type Words = Vec<(usize, String)>;

/// One file below `src`, without its tests.
struct Source {
    /// Relative to `src`.
    path: PathBuf,
    /// `probe/psi.rs` is `[probe, psi]`, `probe/lib.rs` is `[probe]`, `main.rs` is `[main]`.
    module: Vec<String>,
    words: Words,
    imports: Vec<Import>,
    /// Names of functions, types and constants defined here.
    defined: BTreeSet<String>,
}

/// A path named in a file.
struct Import {
    line: usize,
    /// From the crate's root.
    path: Vec<String>,
    /// Its local name, if a `use` introduces it.
    name: Option<String>,
    /// `pub use`: a re-export, which creates no dependency.
    is_export: bool,
}

/// The files of a crate and their dependencies.
pub(crate) struct Crate {
    files: Vec<Source>,
    by_module: BTreeMap<Vec<String>, usize>,
}

/// A set of mutually dependent files, with the lines of the dependencies.
#[derive(Debug)]
pub(crate) struct Cycle {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) ties: Vec<String>,
}

impl std::fmt::Display for Cycle {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let files: Vec<_> = self
            .files
            .iter()
            .map(|file| file.display().to_string())
            .collect();
        write!(
            out,
            "{} files: {}\n    {}",
            files.len(),
            files.join(" "),
            self.ties.join("\n    ")
        )
    }
}

impl Crate {
    /// Reads the files, given as paths below `src` with their texts.
    pub(crate) fn new(texts: &[(PathBuf, String)]) -> Self {
        let mut hidden = BTreeSet::new();
        let mut raw = Vec::new();
        for (path, text) in texts {
            let module = module_of(path);
            let clear = blank(text);
            for name in test_modules(&tokens(&clear)) {
                let mut of_tests = module.clone();
                of_tests.push(name);
                hidden.insert(of_tests);
            }
            raw.push((path.clone(), module, tokens(&without_tests(&clear))));
        }
        raw.retain(|(_, module, _)| !(0..=module.len()).any(|end| hidden.contains(&module[..end])));
        let modules: BTreeSet<Vec<String>> =
            raw.iter().map(|(_, module, _)| module.clone()).collect();
        let files: Vec<Source> = raw
            .into_iter()
            .map(|(path, module, words)| Source {
                imports: imports(&words, &module, &modules),
                defined: definitions(&words),
                path,
                module,
                words,
            })
            .collect();
        let by_module = files
            .iter()
            .enumerate()
            .map(|(at, file)| (file.module.clone(), at))
            .collect();
        Self { files, by_module }
    }

    /// Import cycles among the files of one crate.
    pub(crate) fn import_cycles(&self) -> Vec<Cycle> {
        let mut edges: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for (from, file) in self.files.iter().enumerate() {
            for import in file.imports.iter().filter(|import| !import.is_export) {
                let Some(to) = self.resolve(&import.path, 0) else {
                    continue;
                };
                if to != from && self.files[to].module.first() == file.module.first() {
                    edges.entry((from, to)).or_insert(import.line);
                }
            }
        }
        self.cycles(&edges, |_| String::new())
    }

    /// Cycles of calls on `self` between files with `impl` blocks of one type, and types with inherent `impl` blocks in
    /// more than `most` files.
    pub(crate) fn call_cycles(&self, most: usize) -> (Vec<Cycle>, Vec<String>) {
        // (file of the definition, name of the type) → file of the block → definitions and calls there.
        let mut types: BTreeMap<(usize, String), BTreeMap<usize, Block>> = BTreeMap::new();
        for (at, file) in self.files.iter().enumerate() {
            for found in blocks(&file.words) {
                let owner = self.owner(at, &found.name);
                let block = types
                    .entry((owner, found.name))
                    .or_default()
                    .entry(at)
                    .or_default();
                block.is_own |= found.block.is_own;
                block.defined.extend(found.block.defined);
                block.called.extend(found.block.called);
            }
        }
        let mut cycles = Vec::new();
        let mut spread = Vec::new();
        for ((_, name), blocks) in &types {
            let own: Vec<usize> = blocks
                .iter()
                .filter(|(_, block)| block.is_own)
                .map(|(at, _)| *at)
                .collect();
            if own.len() > most {
                let files: Vec<_> = own
                    .iter()
                    .map(|at| self.files[*at].path.display().to_string())
                    .collect();
                spread.push(format!(
                    "`{name}` has `impl` blocks in {} files: {}",
                    own.len(),
                    files.join(" ")
                ));
            }
            let mut edges = BTreeMap::new();
            for (&from, block) in blocks {
                for (called, line) in &block.called {
                    if block.defined.contains(called) {
                        continue;
                    }
                    let homes = blocks
                        .iter()
                        .filter(|(_, other)| other.is_own && other.defined.contains(called));
                    for (&to, _) in homes {
                        edges.entry((from, to)).or_insert(*line);
                    }
                }
            }
            cycles.extend(self.cycles(&edges, |_| format!(" on `{name}`")));
        }
        (cycles, spread)
    }

    /// The file that defines a type named in a file.
    fn owner(&self, at: usize, name: &str) -> usize {
        let file = &self.files[at];
        if file.defined.contains(name) {
            return at;
        }
        let import = file
            .imports
            .iter()
            .find(|import| import.name.as_deref() == Some(name));
        import
            .and_then(|import| self.resolve(&import.path, 0))
            .unwrap_or(at)
    }

    /// The file at the end of a path, through re-exports.
    fn resolve(&self, path: &[String], depth: usize) -> Option<usize> {
        let (end, at) = (1..=path.len())
            .rev()
            .find_map(|end| self.by_module.get(&path[..end]).map(|at| (end, *at)))?;
        let file = &self.files[at];
        let Some(name) = path.get(end) else {
            return Some(at);
        };
        if file.defined.contains(name) || depth > 8 {
            return Some(at);
        }
        if let Some(import) = file
            .imports
            .iter()
            .find(|import| import.name.as_ref() == Some(name))
        {
            let mut target = import.path.clone();
            target.extend_from_slice(&path[end + 1..]);
            return self.resolve(&target, depth + 1);
        }
        let globs = file
            .imports
            .iter()
            .filter(|import| import.name.as_deref() == Some("*"));
        for glob in globs {
            let mut target = glob.path.clone();
            target.extend_from_slice(&path[end..]);
            if let Some(found) = self.resolve(&target, depth + 1)
                && self.files[found].defined.contains(name)
            {
                return Some(found);
            }
        }
        Some(at)
    }

    fn cycles(
        &self,
        edges: &BTreeMap<(usize, usize), usize>,
        what: impl Fn(usize) -> String,
    ) -> Vec<Cycle> {
        let reach = |from: usize| {
            let mut seen = BTreeSet::new();
            let mut open = vec![from];
            while let Some(at) = open.pop() {
                for &(_, to) in edges.range((at, 0)..(at + 1, 0)).map(|(edge, _)| edge) {
                    if seen.insert(to) {
                        open.push(to);
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<usize, BTreeSet<usize>> = edges
            .keys()
            .map(|(from, _)| *from)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .map(|at| (at, reach(at)))
            .collect();
        let mut taken = BTreeSet::new();
        let mut found = Vec::new();
        for (&at, to) in &reached {
            if !to.contains(&at) || taken.contains(&at) {
                continue;
            }
            let members: Vec<usize> = to
                .iter()
                .copied()
                .filter(|other| reached.get(other).is_some_and(|back| back.contains(&at)))
                .collect();
            taken.extend(members.iter().copied());
            let ties = edges
                .iter()
                .filter(|((from, to), _)| members.contains(from) && members.contains(to))
                .map(|((from, to), line)| {
                    let (from_path, to_path) = (
                        self.files[*from].path.display(),
                        self.files[*to].path.display(),
                    );
                    format!("src/{from_path}:{line} needs {to_path}{}", what(*from))
                })
                .collect();
            found.push(Cycle {
                files: members
                    .iter()
                    .map(|at| self.files[*at].path.clone())
                    .collect(),
                ties,
            });
        }
        found
    }

    /// Structs below a folder that exceed the limits of fields or booleans: `src/file: name: figures`.
    pub(crate) fn wide_structs(
        &self,
        folder: &str,
        fields_max: usize,
        flags_max: usize,
    ) -> Vec<String> {
        let inside = self
            .files
            .iter()
            .filter(|file| file.module.first().is_some_and(|first| first == folder));
        inside
            .flat_map(|file| {
                structs(&file.words)
                    .into_iter()
                    .filter_map(|(line, name, fields, flags)| {
                        (fields > fields_max || flags > flags_max).then(|| {
                            format!(
                                "src/{}:{line}: `{name}` has {fields} fields, {flags} booleans",
                                file.path.display()
                            )
                        })
                    })
            })
            .collect()
    }
}

/// `probe/psi.rs` is `[probe, psi]`.
fn module_of(path: &Path) -> Vec<String> {
    let parts = path.with_extension("");
    let mut module: Vec<String> = parts
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    // `probe/lib.rs` is the root of a crate, `lib.rs` that of the program.
    if module
        .last()
        .is_some_and(|last| last == "mod" || last == "lib" && module.len() > 1)
    {
        module.pop();
    }
    module
}

/// Modules in separate files that are compiled only for tests.
fn test_modules(words: &Words) -> Vec<String> {
    let is = |at: usize, wanted: &[&str]| {
        wanted
            .iter()
            .enumerate()
            .all(|(i, word)| words.get(at + i).is_some_and(|(_, found)| found == word))
    };
    let mut found = Vec::new();
    for at in 0..words.len() {
        if !is(at, &["#", "[", "cfg", "(", "test", ")", "]"]) {
            continue;
        }
        let mut next = at + 7;
        // Further attributes precede the module.
        while is(next, &["#", "["]) {
            next = (next..words.len())
                .find(|i| words[*i].1 == "]")
                .map_or(words.len(), |i| i + 1);
        }
        while words
            .get(next)
            .is_some_and(|(_, word)| matches!(word.as_str(), "pub" | "(" | "crate" | "super" | ")"))
        {
            next += 1;
        }
        if is(next, &["mod"]) && is(next + 2, &[";"]) {
            found.push(words[next + 1].1.clone());
        }
    }
    found
}

fn definitions(words: &Words) -> BTreeSet<String> {
    let kinds = [
        "fn",
        "struct",
        "enum",
        "trait",
        "const",
        "static",
        "type",
        "union",
        "macro_rules",
    ];
    words
        .windows(2)
        .filter(|pair| kinds.contains(&pair[0].1.as_str()))
        .map(|pair| pair[1].1.clone())
        .collect()
}

fn imports(words: &Words, module: &[String], modules: &BTreeSet<Vec<String>>) -> Vec<Import> {
    let word = |at: usize| words.get(at).map_or("", |(_, word)| word.as_str());
    let mut found = Vec::new();
    for at in 0..words.len() {
        if at > 0 && word(at - 1) == "::" || word(at + 1) != "::" {
            continue;
        }
        let mut next = at + 2;
        let base: Vec<String> = match word(at) {
            "crate" => module.iter().take(1).cloned().collect(),
            "self" => module.to_vec(),
            "super" => {
                let mut up = 1;
                while word(next) == "super" && word(next + 1) == "::" {
                    up += 1;
                    next += 2;
                }
                module[..module.len().saturating_sub(up)].to_vec()
            }
            child => {
                let mut path = module.to_vec();
                path.push(child.to_owned());
                if !modules.contains(&path) {
                    continue;
                }
                path
            }
        };
        let in_use = (0..at)
            .rev()
            .take_while(|i| !matches!(word(*i), ";" | "}" | "{"))
            .find(|i| word(*i) == "use");
        let is_export =
            in_use.is_some_and(|used| used > 0 && matches!(word(used - 1), "pub" | ")"));
        let mut leaves = Vec::new();
        tree(words, next, base, &mut leaves);
        found.extend(leaves.into_iter().map(|(line, path, alias)| {
            let name = in_use.and(alias.or_else(|| path.last().cloned()));
            let path = if path.last().is_some_and(|last| last == "*") {
                path[..path.len() - 1].to_vec()
            } else {
                path
            };
            Import {
                line,
                path,
                name,
                is_export,
            }
        }));
    }
    found
}

/// The paths of a tree such as `a::{b, c::{self, d as e}}`; returns the position after it.
fn tree(
    words: &Words,
    at: usize,
    prefix: Vec<String>,
    out: &mut Vec<(usize, Vec<String>, Option<String>)>,
) -> usize {
    let word = |at: usize| words.get(at).map_or("", |(_, word)| word.as_str());
    let line = words.get(at).map_or(0, |(line, _)| *line);
    match word(at) {
        "{" => {
            let mut next = at + 1;
            while next < words.len() && word(next) != "}" {
                next = tree(words, next, prefix.clone(), out);
                if word(next) == "," {
                    next += 1;
                } else if word(next) != "}" {
                    // Not a tree of paths: a block of code.
                    return next;
                }
            }
            next + 1
        }
        "self" => {
            out.push((line, prefix, None));
            at + 1
        }
        "<" | "" => {
            out.push((line, prefix, None));
            at + 1
        }
        name => {
            let mut path = prefix;
            path.push(name.to_owned());
            if word(at + 1) == "::" {
                return tree(words, at + 2, path, out);
            }
            if word(at + 1) == "as" {
                out.push((line, path, Some(word(at + 2).to_owned())));
                return at + 3;
            }
            out.push((line, path, None));
            at + 1
        }
    }
}

#[derive(Default)]
struct Block {
    /// Whether it is inherent rather than of a trait.
    is_own: bool,
    defined: BTreeSet<String>,
    called: BTreeMap<String, usize>,
}

struct Found {
    name: String,
    block: Block,
}

/// The `impl` blocks of a file.
fn blocks(words: &Words) -> Vec<Found> {
    let word = |at: usize| words.get(at).map_or("", |(_, word)| word.as_str());
    let mut found = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let starts = word(at) == "impl"
            && (at == 0 || matches!(word(at - 1), "}" | ";" | "]" | "{" | "unsafe"));
        if !starts {
            at += 1;
            continue;
        }
        let Some(open) = (at..words.len()).find(|i| word(*i) == "{") else {
            break;
        };
        let close = matching(words, open);
        // The name is the last word outside angle brackets after `for`, or of the whole.
        let (mut level, mut name, mut is_own) = (0i32, String::new(), true);
        for i in at + 1..open {
            match word(i) {
                "<" => level += 1,
                ">" if word(i - 1) != "-" => level -= 1,
                "for" if level == 0 => is_own = false,
                "where" if level == 0 => break,
                text if level == 0 && text.chars().all(|c| c.is_alphanumeric() || c == '_') => {
                    text.clone_into(&mut name);
                }
                _ => {}
            }
        }
        let mut block = Block {
            is_own,
            ..Block::default()
        };
        let mut depth = 0;
        for (i, (line, _)) in words.iter().enumerate().take(close).skip(open) {
            match word(i) {
                "{" => depth += 1,
                "}" => depth -= 1,
                "fn" if depth == 1 => {
                    block.defined.insert(word(i + 1).to_owned());
                }
                "self" | "Self"
                    if matches!(word(i + 1), "." | "::") && matches!(word(i + 3), "(" | "::") =>
                {
                    block.called.entry(word(i + 2).to_owned()).or_insert(*line);
                }
                _ => {}
            }
        }
        found.push(Found { name, block });
        at = close.max(at + 1);
    }
    found
}

/// Position of the bracket that closes the one at `open`.
fn matching(words: &Words, open: usize) -> usize {
    let mut depth = 0;
    for (i, (_, word)) in words.iter().enumerate().skip(open) {
        match word.as_str() {
            "{" => depth += 1,
            "}" => {
                depth -= 1;
                if depth == 0 {
                    return i;
                }
            }
            _ => {}
        }
    }
    words.len()
}

/// Structs with named fields: line, name, number of fields, number of `bool` fields.
fn structs(words: &Words) -> Vec<(usize, String, usize, usize)> {
    let word = |at: usize| words.get(at).map_or("", |(_, word)| word.as_str());
    let mut found = Vec::new();
    for at in 0..words.len() {
        if word(at) != "struct" {
            continue;
        }
        let Some(open) = (at..words.len()).find(|i| matches!(word(*i), "{" | ";" | "(")) else {
            break;
        };
        if word(open) != "{" {
            continue;
        }
        let (mut level, mut fields, mut flags) = (0i32, 0, 0);
        for i in open..=matching(words, open).min(words.len() - 1) {
            match word(i) {
                "{" | "(" | "[" | "<" => level += 1,
                "}" | ")" | "]" => level -= 1,
                ">" if word(i - 1) != "-" => level -= 1,
                ":" if level == 1 => {
                    fields += 1;
                    flags += usize::from(word(i + 1) == "bool");
                }
                _ => {}
            }
        }
        found.push((words[at].0, word(at + 1).to_owned(), fields, flags));
    }
    found
}
