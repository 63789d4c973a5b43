//! Parser of literals as models write them: JSON, or the Python notation of the same values.
//!
//! Small models write `True`, single quotes, line breaks inside strings and commas before a closing bracket.
//! `serde_json` parses valid JSON; this parser handles the rest.

use serde_json::{Map, Number, Value};

/// The value of a text that consists of one literal.
pub(super) fn parse(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok().or_else(|| {
        let mut reader = Reader { rest: text.trim() };
        let value = reader.value(0)?;
        reader.rest.trim().is_empty().then_some(value)
    })
}

/// The arguments of a call in parentheses, `1, "b", key=value`: positional ones first.
pub(super) fn arguments(text: &str) -> Option<(Vec<Value>, Map<String, Value>)> {
    let mut reader = Reader { rest: text.trim() };
    let (mut by_place, mut by_key) = (Vec::new(), Map::new());
    while !reader.rest.is_empty() {
        let name = identifier(reader.rest);
        match reader
            .rest
            .get(name.len()..)?
            .trim_start()
            .strip_prefix('=')
        {
            Some(value) if !name.is_empty() => {
                reader.rest = value;
                by_key.insert(name.to_owned(), reader.value(0)?);
            }
            _ => by_place.push(reader.value(0)?),
        }
        reader.rest = reader.rest.trim_start();
        match reader.rest.strip_prefix(',') {
            Some(rest) => reader.rest = rest.trim_start(),
            None if reader.rest.is_empty() => {}
            None => return None,
        }
    }
    Some((by_place, by_key))
}

/// An object in Gemma's notation, `{key:<|"|>text<|"|>,other:[1,true]}`, and the text after it; `None` while it is
/// incomplete. Values may also be JSON.
pub(super) fn escaped_object(text: &str) -> Option<(Map<String, Value>, &str)> {
    let mut reader = Reader { rest: text };
    let object = reader.escaped_object(0)?;
    Some((object, reader.rest))
}

/// The complete fields of an incomplete object in that notation.
pub(super) fn escaped_fields(text: &str) -> Map<String, Value> {
    let mut fields = Map::new();
    // `None` at the first incomplete field.
    let _ = Reader { rest: text }.escaped_fields(&mut fields, 0);
    fields
}

/// The name at the start of a text.
pub(super) fn identifier(text: &str) -> &str {
    let end = text.find(|character: char| {
        !(character.is_alphanumeric() || matches!(character, '_' | '-' | '.'))
    });
    text.get(..end.unwrap_or(text.len())).unwrap_or_default()
}

struct Reader<'text> {
    rest: &'text str,
}

impl Reader<'_> {
    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '{' => self.object(depth),
            '[' => self.list(']', depth),
            '(' => self.list(')', depth),
            '"' | '\'' => self.string().map(Value::String),
            _ => self.word(),
        }
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        self.take("{")?;
        let mut map = Map::new();
        while self.take("}").is_none() {
            self.rest = self.rest.trim_start();
            let key = self.string()?;
            self.take(":")?;
            map.insert(key, self.value(depth + 1)?);
            if self.take(",").is_none() {
                self.take("}")?;
                break;
            }
        }
        Some(Value::Object(map))
    }

    fn escaped_object(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let mut map = Map::new();
        self.escaped_fields(&mut map, depth)?;
        Some(map)
    }

    fn escaped_fields(&mut self, map: &mut Map<String, Value>, depth: usize) -> Option<()> {
        self.take("{")?;
        while self.take("}").is_none() {
            let key = match self.escaped_text()? {
                Some(key) => {
                    self.take(":")?;
                    key
                }
                None => {
                    let (key, rest) = self.rest.split_once(':')?;
                    self.rest = rest;
                    key.trim().to_owned()
                }
            };
            map.insert(key, self.escaped(depth + 1)?);
            if self.take(",").is_none() {
                return self.take("}");
            }
        }
        Some(())
    }

    /// The text between delimiters or in JSON's quotes; `Some(None)` if there is none, `None` while it is incomplete.
    fn escaped_text(&mut self) -> Option<Option<String>> {
        self.rest = self.rest.trim_start();
        for delimiter in ESCAPES {
            if let Some(body) = self.rest.strip_prefix(delimiter) {
                let (text, rest) = body.split_once(delimiter)?;
                self.rest = rest;
                return Some(Some(text.to_owned()));
            }
        }
        if !self.rest.starts_with('"') {
            return Some(None);
        }
        let mut values = serde_json::Deserializer::from_str(self.rest).into_iter();
        match values.next() {
            Some(Ok(text)) => {
                self.rest = self.rest.get(values.byte_offset()..)?;
                Some(Some(text))
            }
            _ => self.string().map(Some),
        }
    }

    fn escaped(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        if let Some(text) = self.escaped_text()? {
            return Some(text.into());
        }
        match self.rest.chars().next()? {
            '{' => self.escaped_object(depth).map(Value::Object),
            '[' => {
                self.take("[")?;
                let mut values = Vec::new();
                while self.take("]").is_none() {
                    values.push(self.escaped(depth + 1)?);
                    if self.take(",").is_none() {
                        self.take("]")?;
                        break;
                    }
                }
                Some(Value::Array(values))
            }
            // Small models omit escapes in a text.
            _ => {
                let end = self.rest.find([',', '}', ']'])?;
                let (word, rest) = self.rest.split_at_checked(end)?;
                self.rest = rest;
                Some(parse(word).unwrap_or_else(|| word.trim().into()))
            }
        }
    }

    fn list(&mut self, close: char, depth: usize) -> Option<Value> {
        self.rest = self.rest.get(1..)?;
        let close = close.to_string();
        let mut values = Vec::new();
        while self.take(&close).is_none() {
            values.push(self.value(depth + 1)?);
            if self.take(",").is_none() {
                self.take(&close)?;
                break;
            }
        }
        Some(Value::Array(values))
    }

    fn string(&mut self) -> Option<String> {
        let quote = self
            .rest
            .chars()
            .next()
            .filter(|quote| matches!(quote, '"' | '\''))?;
        let mut characters = self.rest.char_indices().skip(1);
        let mut text = String::new();
        while let Some((at, character)) = characters.next() {
            match character {
                '\\' => match characters.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    'u' => {
                        let digits: String = characters
                            .by_ref()
                            .take(4)
                            .map(|(_, digit)| digit)
                            .collect();
                        let code = u32::from_str_radix(&digits, 16).ok()?;
                        // Surrogate halves are rare outside JSON, which `serde_json` has parsed already.
                        text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                    }
                    other => text.push(other),
                },
                _ if character == quote => {
                    self.rest = self.rest.get(at + 1..)?;
                    return Some(text);
                }
                _ => text.push(character),
            }
        }
        None
    }

    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find(|character: char| {
            !(character.is_alphanumeric() || matches!(character, '+' | '-' | '.'))
        });
        let (word, rest) = self.rest.split_at_checked(end.unwrap_or(self.rest.len()))?;
        self.rest = rest;
        match word {
            "true" | "True" => Some(Value::Bool(true)),
            "false" | "False" => Some(Value::Bool(false)),
            "null" | "None" => Some(Value::Null),
            number => number.parse::<Number>().ok().map(Value::Number),
        }
    }

    fn take(&mut self, token: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(token)?;
        Some(())
    }
}

/// Delimiters of a text in Gemma's notation: those of Gemma 4 and FunctionGemma.
const ESCAPES: [&str; 2] = ["<|\"|>", "<escape>"];

/// The depth limit of `serde_json`.
const DEPTH_MAX: usize = 127;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn literals_of_python_become_the_same_values_as_json() {
        let python = r#"{'city': "it's", 'on': True, 'none': None, 'list': [1, -2.5, ('a',),], "line": "a
b\n\"",}"#;
        let expected = json!({"city": "it's", "on": true, "none": null, "list": [1, -2.5, ["a"]], "line": "a\nb\n\""});
        assert_eq!(parse(python), Some(expected));
        assert_eq!(
            parse("{\"a\": \"\\ud83d\\ude00\"}"),
            Some(json!({"a": "😀"}))
        );
        for broken in ["{", "{'a'}", "[1 2]", "'a", "a", "", "{}x", "{1: 2}"] {
            assert_eq!(parse(broken), None, "{broken}");
        }
        assert_eq!(parse(&"[".repeat(100_000)), None);
    }

    #[test]
    fn arguments_have_places_or_keys() {
        let (by_place, by_key) = arguments(" \"Paris\", days = 3, unit='c', ").unwrap();
        assert_eq!(
            (by_place, Value::Object(by_key)),
            (vec![json!("Paris")], json!({"days": 3, "unit": "c"}))
        );
        assert!(arguments("a b").is_none());
        assert!(arguments("x=").is_none());
    }

    #[test]
    fn gemma_s_notation_is_read_with_json_in_it() {
        let quote = "<|\"|>";
        let written = format!(
            "{{a:{quote}x}}, {{y:<tool_call|>{quote},{quote}b:c{quote}:[1,{{d:-2.5,e:null}},true], \
             \"f\": {{\"g\": \"\\ud83d\\ude00 }}\"}},h:plain, i:{{}},j:[]}}rest"
        );
        let expected = json!({
            "a": "x}, {y:<tool_call|>", "b:c": [1, {"d": -2.5, "e": null}, true],
            "f": {"g": "😀 }"}, "h": "plain", "i": {}, "j": [],
        });
        let (object, rest) = escaped_object(&written).unwrap();
        assert_eq!((Value::Object(object), rest), (expected, "rest"));
        for end in 0..written.len() - "rest".len() {
            if let Some(begun) = written.get(..end) {
                assert_eq!(escaped_object(begun), None, "{begun}");
            }
        }
        assert_eq!(
            Value::Object(escaped_fields("{a:1,b:<escape>x<escape>,c:<escape>y")),
            json!({"a": 1, "b": "x"})
        );
        assert_eq!(escaped_object(&"{a:".repeat(100_000)), None);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "([\\[\\](){}'\",:=\\\\a-z0-9 ü\n]|<escape>|<\\|\"\\|>){0,40}") {
            let _ = (parse(&text), arguments(&text), escaped_object(&text), escaped_fields(&text));
        }
    }
}
