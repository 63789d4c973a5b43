//! Tokens of Rust source, with comments, strings and test modules blanked.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Words, `::` and single characters, with their lines.
pub(crate) fn tokens(code: &str) -> Vec<(usize, String)> {
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

/// The text with comments, strings and characters blanked; lines are preserved.
pub(crate) fn blank(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out: Vec<char> = chars.clone();
    let is = |at: usize, wanted: &str| {
        wanted
            .chars()
            .enumerate()
            .all(|(i, c)| chars.get(at + i) == Some(&c))
    };
    let is_word = |at: usize| {
        chars
            .get(at)
            .is_some_and(|c| c.is_alphanumeric() || *c == '_')
    };
    let mut at = 0;
    while at < chars.len() {
        let end = if is(at, "//") {
            (at..chars.len())
                .find(|i| chars[*i] == '\n')
                .unwrap_or(chars.len())
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
        } else if chars[at] == 'r'
            && (at == 0 || !is_word(at - 1) || chars[at - 1] == 'b')
            && raw_string(&chars, at)
        {
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

/// Whether a raw string starts here.
fn raw_string(chars: &[char], at: usize) -> bool {
    chars[at + 1..].iter().find(|c| **c != '#') == Some(&'"')
}

/// The text with every block under `#[cfg(test)]` blanked.
pub(crate) fn without_tests(code: &str) -> String {
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
pub(crate) fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
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
