//! Conversion of written text for a voice: removes markup and emoji, shortens addresses to hosts.

/// A sentence for speech, without Markdown; `None` if nothing is left.
///
/// Sentences never span lines, so line markup is always at the beginning of a sentence.
pub(super) fn spoken(sentence: &str) -> Option<String> {
    let line = sentence.trim();
    if line.starts_with("```") || line.starts_with("~~~") {
        return None;
    }
    let row = if line.starts_with('|') {
        cells(line)
    } else {
        line.to_owned()
    };
    let text = without_emphasis(&with_link_texts(without_line_mark(&row)));
    let words: Vec<String> = text
        .split_whitespace()
        .map(word)
        .filter(|word| !word.is_empty())
        .collect();
    let said = words.join(" ");
    said.chars().any(char::is_alphanumeric).then_some(said)
}

fn cells(row: &str) -> String {
    let cells: Vec<&str> = row
        .split('|')
        .map(str::trim)
        .filter(|cell| !cell.is_empty())
        .collect();
    cells.join(", ")
}

/// The line without the mark of a heading, quotation or list item.
fn without_line_mark(line: &str) -> &str {
    let mut rest = line;
    loop {
        let mark = rest.trim_start_matches('#');
        let behind = match rest.chars().next() {
            Some('#') if rest.len() - mark.len() <= HEADING_LEVELS => mark,
            Some('>' | '-' | '*' | '+' | '•') => rest
                .get(1..)
                .or_else(|| rest.get('•'.len_utf8()..))
                .unwrap_or_default(),
            _ => return rest,
        };
        if !behind.starts_with(char::is_whitespace) {
            return rest;
        }
        rest = behind.trim_start();
    }
}

/// The text with `[text](address)` and `![text](address)` as `text`.
fn with_link_texts(text: &str) -> String {
    let mut said = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('[') {
        let (before, link) = rest.split_at(at);
        let parts = link.split_once("](").and_then(|(shown, behind)| {
            let (_, behind) = behind.split_once(')')?;
            Some((shown.get(1..)?, behind))
        });
        match parts.filter(|(shown, _)| !shown.contains('[')) {
            Some((shown, behind)) => {
                said.push_str(before.strip_suffix('!').unwrap_or(before));
                said.push_str(shown);
                rest = behind;
            }
            None => {
                said.push_str(before);
                said.push('[');
                rest = link.get(1..).unwrap_or_default();
            }
        }
    }
    said.push_str(rest);
    said
}

/// The text without code marks, and without stars, underscores and tildes at word boundaries.
fn without_emphasis(text: &str) -> String {
    let characters: Vec<char> = text.chars().collect();
    let is_mark = |character: char| matches!(character, '*' | '_' | '~');
    let mut said = String::with_capacity(text.len());
    let mut at = 0;
    while let Some(&first) = characters.get(at) {
        if first == '`' {
            at += 1;
            continue;
        }
        let run = characters
            .iter()
            .skip(at)
            .take_while(|&&character| character == first)
            .count();
        let before = at.checked_sub(1).and_then(|at| characters.get(at)).copied();
        let after = characters.get(at + run).copied();
        let inside = |side: Option<char>| side.is_some_and(char::is_alphanumeric);
        let alone = |side: Option<char>| side.is_none_or(char::is_whitespace);
        // Keeps `2 * 3` and `snake_case`.
        let emphasis = is_mark(first)
            && (run > 1 || first != '~')
            && !(inside(before) && inside(after) && run == 1)
            && !(alone(before) && alone(after));
        if !emphasis {
            said.extend(characters.iter().skip(at).take(run));
        }
        at += run;
    }
    said
}

/// A word without emoji; an address as its host.
fn word(word: &str) -> String {
    let word = word.trim_matches(['<', '>']);
    let opened = word.trim_start_matches(['(', '"', '\'']);
    let Some(address) = ["https://", "http://"]
        .iter()
        .find_map(|scheme| opened.strip_prefix(scheme))
    else {
        return word
            .chars()
            .filter(|&character| !is_picture(character))
            .collect();
    };
    let lead = word.get(..word.len() - opened.len()).unwrap_or_default();
    let end = word.len()
        - word
            .trim_end_matches(['.', ',', ';', ':', '!', '?', ')', '"', '\''])
            .len();
    let tail = word.get(word.len() - end..).unwrap_or_default();
    let address = address.strip_prefix("www.").unwrap_or(address);
    let host = address
        .split(['/', '?', '#', ':'])
        .next()
        .unwrap_or_default();
    let host = host.trim_end_matches(['.', ',', ';', '!', ')', '"', '\'']);
    format!("{lead}{host}{tail}")
}

/// Whether a character is an emoji or part of one (Unicode 16, emoji-data, without characters of plain text).
const fn is_picture(character: char) -> bool {
    matches!(
        character,
        '\u{1f000}'..='\u{1faff}' | '\u{2600}'..='\u{27bf}' | '\u{2b05}'..='\u{2b55}' | '\u{fe0e}' | '\u{fe0f}' | '\u{200d}'
            | '\u{20e3}' | '\u{e0020}'..='\u{e007f}'
    )
}

const HEADING_LEVELS: usize = 6;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn markup_is_not_spoken() {
        for (written, expected) in [
            (
                "**Note:** the *kitchen* light is `on`.",
                Some("Note: the kitchen light is on."),
            ),
            (
                "__Bold__ and ***both*** and ~~gone~~.",
                Some("Bold and both and gone."),
            ),
            ("## Weather today", Some("Weather today")),
            ("- milk", Some("milk")),
            ("* 2 eggs", Some("2 eggs")),
            ("> quoted", Some("quoted")),
            ("• bread", Some("bread")),
            ("1. Turn it off.", Some("1. Turn it off.")),
            ("| Room | State |", Some("Room, State")),
            ("|---|:-:|", None),
            ("```python", None),
            ("---", None),
            (
                "See [the manual](https://example.com/a?b=c) now.",
                Some("See the manual now."),
            ),
            (
                "See https://www.example.com/a/b?c=d#e.",
                Some("See example.com."),
            ),
            ("(http://192.168.1.2:8123/x)", Some("(192.168.1.2)")),
            ("<https://example.com/>, then", Some("example.com, then")),
            ("Done! 🎉👍🏽", Some("Done!")),
            ("👍", None),
            ("I ❤️ it ✅", Some("I it")),
            (
                "2 * 3 = 6, a_b stays, 5 - 3 too, #1, -4 °C, ~5",
                Some("2 * 3 = 6, a_b stays, 5 - 3 too, #1, -4 °C, ~5"),
            ),
            ("He said [sic] so.", Some("He said [sic] so.")),
        ] {
            assert_eq!(spoken(written).as_deref(), expected, "{written}");
        }
    }

    proptest! {
        #[test]
        fn words_stay_as_they_are(text in "[a-zA-Z0-9é .,!?\"']{0,80}") {
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            match spoken(&text) {
                Some(said) => prop_assert_eq!(words(&said), words(&text)),
                None => prop_assert!(!text.chars().any(char::is_alphanumeric)),
            }
        }

        #[test]
        fn any_text_is_spoken_or_not(text in "\\PC{0,60}") {
            let _ = spoken(&text);
        }
    }
}
