//! Jinja rendering compatible with Python's jinja2 as used by transformers.
//!
//! minijinja is the template engine; the differences visible to models are implemented here: lists, maps and constants
//! print as in Python, `tojson` is `json.dumps`, an undefined value has length 0, and a template may refuse a
//! conversation by `raise_exception`. Noncharacters (U+FDD0 and following) print verbatim everywhere, since
//! [`chat`](super::chat) marks texts with them.

use std::{borrow::Cow, error::Error as _, fmt::Write as _};

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind,
    value::{Kwargs, Value, ValueKind},
};
use serde::Serialize;

/// A compiled chat template.
pub(super) struct Template {
    environment: Environment<'static>,
}

/// Error of compiling or rendering a template.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TemplateError {
    /// Invalid Jinja, or a failure while rendering.
    #[error("{0}")]
    Failed(String),
    /// The template refused its input, with this message.
    #[error("{0}")]
    Refused(String),
}

/// Error raised by `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl Template {
    /// Compiles a template.
    pub(super) fn new(source: &str) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| match value.as_str() {
            Some(text) => Ok(out.write_str(text)?),
            None => Ok(out.write_str(&text_of(value))?),
        });
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                let error = Error::new(ErrorKind::InvalidOperation, "the template refuses it");
                Err(error.with_source(Raised(message)))
            },
        );
        environment.add_function("strftime_now", |format: String| date::now(&format));
        environment.add_filter("tojson", to_json);
        environment.add_filter("string", |value: Value| text_of(&value));
        environment.add_filter("length", length);
        environment.add_filter("count", length);
        let source = without_generation_tags(source).into_owned();
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| TemplateError::Failed(error.to_string()))?;
        Ok(Self { environment })
    }

    /// Renders it for a context.
    pub(super) fn render(&self, context: &impl Serialize) -> Result<String, TemplateError> {
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(context));
        rendered.map_err(|error| {
            let mut cause = error.source();
            while let Some(inner) = cause {
                if let Some(Raised(message)) = inner.downcast_ref() {
                    return TemplateError::Refused(message.clone());
                }
                cause = inner.source();
            }
            TemplateError::Failed(error.to_string())
        })
    }
}

/// Removes the tags that mark the model's own words for training, keeping the text between them.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    let mut rest = source;
    let mut out = String::new();
    while let Some((before, (tag, after))) = rest
        .split_once("{%")
        .and_then(|(before, tail)| Some((before, tail.split_once("%}")?)))
    {
        out.push_str(before);
        let body = tag
            .trim_start_matches(['-', '+'])
            .trim_end_matches(['-', '+'])
            .trim();
        match body {
            "generation" => {
                write!(out, "{{%{}%}}", tag.replace("generation", "if true")).unwrap_or_default();
            }
            "endgeneration" => {
                write!(out, "{{%{}%}}", tag.replace("endgeneration", "endif")).unwrap_or_default();
            }
            _ => write!(out, "{{%{tag}%}}").unwrap_or_default(),
        }
        rest = after;
    }
    if out.is_empty() {
        return Cow::Borrowed(source);
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Python's `str`.
fn text_of(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            print(value, Style::Python, &mut out, 0);
            out
        }
    }
}

/// The length of a text, list or map; 0 if undefined.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    match value.len() {
        Some(length) => Ok(length),
        None => Ok(value.try_iter()?.count()),
    }
}

/// Python's `json.dumps`, with the defaults of transformers.
#[expect(
    clippy::needless_pass_by_value,
    reason = "minijinja hands options over"
)]
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let separators: Option<Vec<String>> = options.get("separators")?;
    let json = Json {
        indent: options.get("indent")?,
        ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item: separators.as_ref().and_then(|pair| pair.first()).cloned(),
        key: separators.as_ref().and_then(|pair| pair.get(1)).cloned(),
    };
    let mut out = String::new();
    print(value, Style::Json(&json), &mut out, 0);
    Ok(out)
}

/// Output style of a value.
#[derive(Clone, Copy)]
enum Style<'options> {
    Json(&'options Json),
    Python,
}

/// Options of `json.dumps`.
struct Json {
    indent: Option<usize>,
    ascii: bool,
    sorted: bool,
    item: Option<String>,
    key: Option<String>,
}

fn print(value: &Value, style: Style<'_>, out: &mut String, depth: usize) {
    let is_json = matches!(style, Style::Json(_));
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => {
            out.push_str(if is_json { "null" } else { "None" });
        }
        ValueKind::Bool => out.push_str(match (value.is_true(), is_json) {
            (true, true) => "true",
            (true, false) => "True",
            (false, true) => "false",
            (false, false) => "False",
        }),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), style, out),
        ValueKind::Seq | ValueKind::Iterable if value.try_iter().is_ok() => {
            let items = value.try_iter().into_iter().flatten();
            list(['[', ']'], items, style, out, depth, |item, out| {
                print(&item, style, out, depth + 1);
            });
        }
        ValueKind::Map if value.try_iter().is_ok() => {
            let mut keys: Vec<Value> = value.try_iter().into_iter().flatten().collect();
            if matches!(style, Style::Json(Json { sorted: true, .. })) {
                keys.sort();
            }
            list(
                ['{', '}'],
                keys.into_iter(),
                style,
                out,
                depth,
                |key, out| {
                    match (key.as_str(), is_json) {
                        (Some(text), _) => quote(text, style, out),
                        (None, true) => quote(&text_of(&key), style, out),
                        (None, false) => print(&key, style, out, depth + 1),
                    }
                    match style {
                        Style::Json(Json {
                            key: Some(text), ..
                        }) => out.push_str(text),
                        _ => out.push_str(": "),
                    }
                    print(
                        &value.get_item(&key).unwrap_or_default(),
                        style,
                        out,
                        depth + 1,
                    );
                },
            );
        }
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => float(number, is_json, out),
            Err(_) => write!(out, "{value}").unwrap_or_default(),
        },
        // Writing to a `String` never fails.
        _ => write!(out, "{value}").unwrap_or_default(),
    }
}

fn list(
    [open, close]: [char; 2],
    items: impl Iterator<Item = Value>,
    style: Style<'_>,
    out: &mut String,
    depth: usize,
    mut item: impl FnMut(Value, &mut String),
) {
    let (indent, between) = match style {
        Style::Json(Json { indent, item, .. }) => (*indent, item.as_deref()),
        Style::Python => (None, None),
    };
    let line = |depth: usize, out: &mut String| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    let mut some = false;
    for value in items {
        if some {
            out.push_str(between.unwrap_or(if indent.is_some() { "," } else { ", " }));
        }
        some = true;
        line(depth + 1, out);
        item(value, out);
    }
    if some {
        line(depth, out);
    }
    out.push(close);
}

/// A float as by Python's `repr`, or as JSON, which spells non-finite numbers differently.
fn float(number: f64, is_json: bool, out: &mut String) {
    let text = match (number, is_json) {
        (number, true) if number.is_nan() => "NaN".to_owned(),
        (number, false) if number.is_nan() => "nan".to_owned(),
        (number, true) if number.is_infinite() => {
            format!("{}Infinity", if number < 0.0 { "-" } else { "" })
        }
        _ => format!("{number:?}"),
    };
    // Python writes exponents with a sign and at least two digits.
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent
                .strip_prefix('-')
                .map_or(('+', exponent), |exponent| ('-', exponent));
            write!(out, "{digits}e{sign}{exponent:0>2}").unwrap_or_default();
        }
        None => out.push_str(&text),
    }
}

fn quote(text: &str, style: Style<'_>, out: &mut String) {
    let ascii = match style {
        Style::Json(json) => Some(json.ascii),
        Style::Python => None,
    };
    let mark = match ascii {
        None if text.contains('\'') && !text.contains('"') => '"',
        None => '\'',
        Some(_) => '"',
    };
    out.push(mark);
    for character in text.chars() {
        let number = u32::from(character);
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' if ascii.is_some() => out.push_str("\\b"),
            '\u{c}' if ascii.is_some() => out.push_str("\\f"),
            character if character == mark => out.extend(['\\', mark]),
            '\u{fdd0}'..='\u{fddf}' => out.push(character),
            '\0'..='\u{1f}' if ascii.is_some() => {
                write!(out, "\\u{number:04x}").unwrap_or_default();
            }
            character if ascii == Some(true) && !character.is_ascii() => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}").unwrap_or_default();
                }
            }
            character if ascii.is_none() && is_hidden(character) => match number {
                0..0x100 => write!(out, "\\x{number:02x}").unwrap_or_default(),
                0x100..0x1_0000 => write!(out, "\\u{number:04x}").unwrap_or_default(),
                _ => write!(out, "\\U{number:08x}").unwrap_or_default(),
            },
            character => out.push(character),
        }
    }
    out.push(mark);
}

/// Whether Python's `repr` escapes it: characters without a glyph, and every space except U+0020.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || (character.is_whitespace() && character != ' ')
        || matches!(character, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e000}'..='\u{f8ff}')
}

/// Current dates for templates, in UTC.
mod date {
    use std::time::{SystemTime, UNIX_EPOCH};

    use minijinja::{Error, ErrorKind};

    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = [
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
    ];

    /// The current time in a format of `strftime`.
    pub(super) fn now(format: &str) -> Result<String, Error> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        at(now.as_secs(), format)
    }

    pub(super) fn at(seconds: u64, format: &str) -> Result<String, Error> {
        let (mut days, second) = (seconds / 86_400, seconds % 86_400);
        let weekday = usize::try_from(days % 7).unwrap_or(0);
        let is_leap = |year: u64| {
            year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
        };
        let mut year = 1970;
        while days >= 365 + u64::from(is_leap(year)) {
            days -= 365 + u64::from(is_leap(year));
            year += 1;
        }
        let of_year = days + 1;
        let lengths = [
            31,
            28 + u64::from(is_leap(year)),
            31,
            30,
            31,
            30,
            31,
            31,
            30,
            31,
            30,
            31,
        ];
        let mut month = 0;
        for length in lengths {
            if days < length {
                break;
            }
            days -= length;
            month += 1;
        }
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let month_name = MONTHS.get(month).copied().unwrap_or_default();
        let day_name = DAYS.get(weekday).copied().unwrap_or_default();
        let short = |name: &str| name.chars().take(3).collect::<String>();
        let mut out = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            out.push_str(&match characters.next() {
                Some('Y') => year.to_string(),
                Some('y') => format!("{:02}", year % 100),
                Some('m') => format!("{:02}", month + 1),
                Some('d') => format!("{:02}", days + 1),
                Some('e') => format!("{:2}", days + 1),
                Some('B') => month_name.to_owned(),
                Some('b' | 'h') => short(month_name),
                Some('A') => day_name.to_owned(),
                Some('a') => short(day_name),
                Some('j') => format!("{of_year:03}"),
                Some('H') => format!("{hour:02}"),
                Some('I') => format!("{:02}", (hour + 11) % 12 + 1),
                Some('M') => format!("{minute:02}"),
                Some('S') => format!("{second:02}"),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('%') => "%".to_owned(),
                other => {
                    let what = format!("strftime_now: `%{}` is not known", other.unwrap_or(' '));
                    return Err(Error::new(ErrorKind::InvalidOperation, what));
                }
            });
        }
        Ok(out)
    }
}

const NAME: &str = "chat";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rendered(source: &str, context: &serde_json::Value) -> String {
        Template::new(source).unwrap().render(context).unwrap()
    }

    /// Each value next to the output of Python 3.12 with jinja2 3.1.6.
    #[test]
    fn values_print_as_in_python() {
        for (source, printed) in [
            (
                "{{ x }}",
                r#"{'a': [1, 2.0, True, None, "it's", 'say "it\'s"'], 'ü\n\x07': {}}"#,
            ),
            (
                "{{ x['a'] | string }}",
                r#"[1, 2.0, True, None, "it's", 'say "it\'s"']"#,
            ),
            (
                "{{ x.a[2] }} {{ none }} {{ y }}|{{ 0.00001 }} {{ 1e16 }}",
                "True None |1e-05 1e+16",
            ),
            (
                "{{ x | tojson }}",
                r#"{"a": [1, 2.0, true, null, "it's", "say \"it's\""], "ü\n\u0007": {}}"#,
            ),
            (
                "{{ x | tojson(ensure_ascii=True) }}",
                r#"{"a": [1, 2.0, true, null, "it's", "say \"it's\""], "\u00fc\n\u0007": {}}"#,
            ),
            ("{{ x.a[:2] | tojson(indent=2) }}", "[\n  1,\n  2.0\n]"),
            (
                "{{ {'b': 1, 'a': []} | tojson(sort_keys=true, separators=(',', ':')) }}",
                r#"{"a":[],"b":1}"#,
            ),
            (
                "{{ y | length }} {{ x | length }} {{ 'äb' | length }}",
                "0 2 2",
            ),
            ("{% generation %}a{%- endgeneration -%} b", "ab"),
        ] {
            let context =
                json!({"x": {"a": [1, 2.0, true, null, "it's", "say \"it's\""], "ü\n\u{7}": {}}});
            assert_eq!(rendered(source, &context), printed, "{source}");
        }
    }

    #[test]
    fn noncharacters_stay_what_they_are() {
        let context = || json!({"x": ["<\u{fdd0}|"]});
        assert_eq!(rendered("{{ x }}", &context()), "['<\u{fdd0}|']");
        assert_eq!(
            rendered("{{ x | tojson(ensure_ascii=True) }}", &context()),
            "[\"<\u{fdd0}|\"]"
        );
    }

    #[test]
    fn a_template_refuses_in_its_own_words_and_fails_in_others() {
        let refuse =
            Template::new("{% if x %}{{ raise_exception('not ' ~ x) }}{% endif %}{{ 1 + y }}")
                .unwrap();
        let refused = refuse.render(&json!({"x": "so"})).unwrap_err();
        assert_eq!(refused, TemplateError::Refused("not so".to_owned()));
        assert!(matches!(
            refuse.render(&json!({})),
            Err(TemplateError::Failed(_))
        ));
        assert!(matches!(
            Template::new("{% for"),
            Err(TemplateError::Failed(_))
        ));
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "Thursday, 01 January 1970, 001 12:00 AM"),
            (951_827_696, "Tuesday, 29 February 2000, 060 12:34 PM"),
            (1_798_761_599, "Thursday, 31 December 2026, 365 11:59 PM"),
        ] {
            assert_eq!(
                date::at(seconds, "%A, %d %B %Y, %j %I:%M %p").unwrap(),
                date
            );
        }
        assert!(date::at(0, "%Q").is_err());
    }
}
