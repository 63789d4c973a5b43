//! Parsers of tool calls as models write them, with and without their templates' tags.
//!
//! | written as | by |
//! |---|---|
//! | `{"name": …, "arguments": {…}}`, alone, in a list, or in sequence | Hermes, Qwen, Granite, Phi 4, SmolLM, Llama (`parameters`) |
//! | `<function=name><parameter=key>value</parameter></function>` or `<function=name>{…}</function>` | Qwen 3 Coder, Qwen 3.5; Llama 3.1 |
//! | `name[ARGS]{…}`, `name[CALL_ID]id[ARGS]{…}`, `name{…}` | Mistral |
//! | `name(key=value)`, `[name(key=value), …]` | Gemma, Llama 3.2, LFM2 |
//! | `call:name{key:<|"|>text<|"|>}`, `call:name{key:<escape>text<escape>}` | Gemma 4, FunctionGemma |
//! | `{…}`, its name in the header of its message | gpt-oss |
//! | `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}` | DeepSeek's distillates |

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::literal;
use cotenant_conversation::AnswerPart;

/// The callable functions, by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Functions(BTreeMap<String, Vec<Parameter>>);

#[derive(Clone, Debug)]
struct Parameter {
    name: String,
    /// Types that its value may have; `None` if unrestricted.
    types: Option<BTreeSet<&'static str>>,
}

impl Functions {
    /// The functions of a conversation's tools.
    pub(super) fn of(tools: &[Value]) -> Self {
        let functions = tools.iter().filter_map(|tool| tool.get("function"));
        let declared = functions.filter_map(|function| {
            let name = function.get("name")?.as_str()?;
            let root = function.get("parameters").unwrap_or(&Value::Null);
            let properties = root.get("properties").and_then(Value::as_object);
            let parameters = properties
                .into_iter()
                .flatten()
                .map(|(name, schema)| Parameter {
                    name: name.clone(),
                    types: types(root, schema, &mut { REFERENCES_MAX }),
                });
            Some((name.to_owned(), parameters.collect()))
        });
        Self(declared.collect())
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Whether `begun` is a prefix of a name.
    fn may_become(&self, begun: &str) -> bool {
        self.0.keys().any(|name| name.starts_with(begun))
    }

    /// The longest function name at the start of `text` that is longer than an identifier.
    fn longest(&self, text: &str) -> Option<&str> {
        let identifier = literal::identifier(text).len();
        self.0
            .keys()
            .filter(|name| name.len() > identifier && text.starts_with(*name))
            .map(String::as_str)
            .max_by_key(|name| name.len())
    }

    /// The value of the text `written` between the tags of a parameter, in which `"12"` and `12` look the same; `None`
    /// if it is empty and the parameter takes no text.
    fn value(&self, function: &str, parameter: &str, written: &str) -> Option<Value> {
        let mut parameters = self.0.get(function).into_iter().flatten();
        let known = parameters.find(|known| known.name == parameter);
        let types = known.and_then(|known| known.types.as_ref());
        let takes = |kind: &str| types.is_none_or(|types| types.contains(kind));
        let is_text = types.is_some_and(|types| types.len() == 1) && takes("string");
        if !takes("string") && written.trim().is_empty() {
            return None;
        }
        let read = literal::parse(written).filter(|value| {
            let fits = takes(kind(value)) || value.is_number() && takes("number");
            !is_text && (fits || !takes("string"))
        });
        Some(read.unwrap_or_else(|| written.into()))
    }
}

/// Types that a schema in `root` allows for a value; `None` if unrestricted.
fn types(root: &Value, schema: &Value, references: &mut u8) -> Option<BTreeSet<&'static str>> {
    if let Some(reference) = schema.get("$ref") {
        let place = reference.as_str()?.strip_prefix('#')?;
        *references = references.checked_sub(1)?;
        return types(root, root.pointer(place)?, references);
    }
    if let Some(named) = schema.get("type") {
        let named = named
            .as_array()
            .map_or(std::slice::from_ref(named), Vec::as_slice);
        let known = |name: &Value| TYPES.into_iter().find(|known| name == known);
        return named.iter().map(known).collect();
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return Some(values.iter().map(kind).collect());
    }
    let either = ["anyOf", "oneOf"]
        .iter()
        .find_map(|keyword| schema.get(keyword)?.as_array())?;
    let types: Option<Vec<_>> = either
        .iter()
        .map(|schema| types(root, schema, references))
        .collect();
    Some(types?.into_iter().flatten().collect())
}

/// The type of a value.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Content at the beginning of a text.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    /// Calls, and their end.
    Calls(Vec<AnswerPart>, usize),
    /// The beginning of a call.
    More,
    /// Not a call.
    Nothing,
}

impl Found {
    /// The same, behind `lead` bytes.
    fn behind(self, lead: usize) -> Self {
        match self {
            Self::Calls(calls, end) => Self::Calls(calls, lead + end),
            other => other,
        }
    }
}

/// Parser of calls at the beginning of a text.
#[derive(Clone, Copy)]
pub(super) struct CallParser<'functions> {
    pub(super) functions: &'functions Functions,
    /// Whether undeclared functions count as well: between tags, the text is always a call.
    pub(super) any_name: bool,
    /// Whether nothing follows, so that open brackets may be closed.
    pub(super) ended: bool,
}

impl CallParser<'_> {
    /// The calls at the start of `text`, after leading white space.
    pub(super) fn read(self, text: &str) -> Found {
        let body = text.trim_start();
        let lead = text.len() - body.len();
        let found = match body.chars().next() {
            None => Found::More,
            Some('{') => self.json(body),
            Some('[') => self.list(body),
            Some('<') => self.tagged(body),
            Some(_) => self.named(body),
        };
        match found.behind(lead) {
            Found::More if self.ended => Found::Nothing,
            found => found,
        }
    }

    fn accepts(self, name: &str) -> bool {
        self.any_name || self.functions.has(name)
    }

    /// An object that is a call, or a list of such objects.
    fn json(self, body: &str) -> Found {
        if self.may_be_call(body) {
            self.value(body, |value| self.calls_of(value))
        } else {
            Found::Nothing
        }
    }

    /// Applies `calls` to the JSON value at the start of `body`.
    fn value(self, body: &str, calls: impl Fn(&Value) -> Option<Vec<AnswerPart>>) -> Found {
        let (whole, end) = match extent(body) {
            Extent::Whole(end) => (body.get(..end).unwrap_or_default().to_owned(), end),
            // Small models omit the last brackets.
            Extent::Broken { at, open } => (closed(body, at, &open), at),
            Extent::Open {
                open,
                in_text: false,
            } if self.ended => (closed(body, body.len(), &open), body.len()),
            Extent::Open { .. } => return Found::More,
        };
        match literal::parse(&whole).and_then(|value| calls(&value)) {
            Some(calls) => Found::Calls(calls, end),
            None => Found::Nothing,
        }
    }

    /// A call of a function by an object with its arguments.
    fn object(self, name: &str, body: &str) -> Found {
        self.value(body, |value| {
            value.is_object().then(|| vec![call(name, value)])
        })
    }

    fn list(self, body: &str) -> Found {
        let inner = body.get(1..).unwrap_or_default().trim_start();
        match inner.chars().next() {
            None => Found::More,
            Some('{') => match self.json(inner) {
                Found::Nothing => Found::Nothing,
                _ => self.value(body, |value| self.calls_of(value)),
            },
            Some(first) if first.is_alphabetic() || first == '_' => self.listed_names(body),
            Some(_) => Found::Nothing,
        }
    }

    /// `[name(…), name(…)]`.
    fn listed_names(self, body: &str) -> Found {
        let mut calls = Vec::new();
        let mut rest = body.get(1..).unwrap_or_default();
        loop {
            match self.named(rest.trim_start()) {
                Found::Calls(found, end) => {
                    calls.extend(found);
                    rest = rest
                        .trim_start()
                        .get(end..)
                        .unwrap_or_default()
                        .trim_start();
                }
                other => return other,
            }
            if let Some(after) = rest.strip_prefix(']') {
                return Found::Calls(calls, body.len() - after.len());
            }
            match rest.strip_prefix(',') {
                Some(after) => rest = after,
                None if rest.is_empty() && !self.ended => return Found::More,
                None => return Found::Calls(calls, body.len() - rest.len()),
            }
        }
    }

    /// `<function=name>` and its arguments.
    fn tagged(self, body: &str) -> Found {
        if let Some(rest) = body.strip_prefix(DEEPSEEK) {
            return self.deepseek(rest).behind(DEEPSEEK.len());
        }
        let Some(rest) = body.strip_prefix(FUNCTION) else {
            return if FUNCTION.starts_with(body) || DEEPSEEK.starts_with(body) {
                Found::More
            } else {
                Found::Nothing
            };
        };
        let (name, rest) = match rest.split_once('>') {
            Some((name, rest)) => (name, Some(rest)),
            None => (rest, None),
        };
        let name = name.trim_start_matches([' ', '"']);
        let Some(rest) = rest else {
            let begins = !name.contains(['\n', '<'])
                && (self.any_name || self.functions.may_become(name.trim_end_matches([' ', '"'])));
            return if begins { Found::More } else { Found::Nothing };
        };
        let name = name.trim_end_matches([' ', '"']);
        if name.is_empty() || name.contains(['\n', '<']) || !self.accepts(name) {
            return Found::Nothing;
        }
        let at = |rest: &str| body.len() - rest.len();
        let mut rest = rest.trim_start();
        if rest.starts_with('{') {
            return self.object(name, rest).behind(at(rest));
        }
        let mut arguments = Map::new();
        loop {
            rest = rest.trim_start();
            if let Some(after) = rest.strip_prefix(FUNCTION_END) {
                return Found::Calls(vec![call(name, &Value::Object(arguments))], at(after));
            }
            if CLOSERS.iter().any(|closer| rest.starts_with(closer))
                || (rest.is_empty() && self.ended)
            {
                return Found::Calls(vec![call(name, &Value::Object(arguments))], at(rest));
            }
            let Some(parameter) = rest.strip_prefix(PARAMETER) else {
                let begun = [PARAMETER, FUNCTION_END]
                    .iter()
                    .chain(&CLOSERS)
                    .any(|tag| tag.starts_with(rest));
                return if begun { Found::More } else { Found::Nothing };
            };
            let Some((key, value)) = parameter.split_once('>') else {
                return Found::More;
            };
            let Some((value, after)) = parameter_value(value, self.ended) else {
                return Found::More;
            };
            let key = key.trim().trim_matches('"');
            // The line breaks around a value belong to the tags.
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            if let Some(value) = self.functions.value(name, key, value) {
                arguments.insert(key.to_owned(), value);
            }
            rest = after;
        }
    }

    /// `name<｜tool▁sep｜>{…}`, or the type first and the arguments in a code fence.
    fn deepseek(self, body: &str) -> Found {
        let Some((kind, rest)) = body.split_once(DEEPSEEK_SEPARATOR) else {
            let begun = body.len() <= NAME_LENGTH_MAX && !body.contains('\n');
            return if begun { Found::More } else { Found::Nothing };
        };
        let (name, arguments) = if kind.trim() == "function" {
            match rest.split_once('\n') {
                Some((name, rest)) => (name.trim(), rest),
                None => return Found::More,
            }
        } else {
            (kind.trim(), rest)
        };
        let fenced = arguments.trim_start();
        let object = fenced.strip_prefix("```json").unwrap_or(fenced);
        let object = object.trim_start();
        if object.is_empty() || "```json".starts_with(object) {
            return Found::More;
        }
        if !object.starts_with('{') || !self.accepts(name) {
            return Found::Nothing;
        }
        match self.object(name, object) {
            Found::Calls(calls, end) => {
                let before = body.len() - object.len() + end;
                let after = body.get(before..).unwrap_or_default();
                // The fence belongs to the call.
                let close = after.trim_start();
                match close.strip_prefix("```") {
                    Some(rest) => Found::Calls(calls, body.len() - rest.len()),
                    None if "```".starts_with(close) && !self.ended => Found::More,
                    None => Found::Calls(calls, before),
                }
            }
            other => other,
        }
    }

    /// `call:name{key:value, …}`.
    fn escaped(self, body: &str) -> Found {
        let (name, arguments) = self.escaped_name(body);
        if self.functions.may_become(body)
            || (arguments.is_empty() && body.len() <= NAME_LENGTH_MAX)
        {
            return Found::More;
        }
        if !self.accepts(name) || !arguments.starts_with('{') {
            return Found::Nothing;
        }
        match literal::escaped_object(arguments) {
            Some((object, rest)) => Found::Calls(
                vec![call(name, &Value::Object(object))],
                body.len() - rest.len(),
            ),
            None => Found::More,
        }
    }

    /// The name after `call:`, and the text after it.
    fn escaped_name(self, body: &str) -> (&str, &str) {
        let longest = self.functions.longest(body);
        let length = longest.map_or_else(|| literal::identifier(body).len(), str::len);
        let (written, arguments) = body.split_at_checked(length).unwrap_or((body, ""));
        (self.known(written), arguments.trim_start())
    }

    /// Whether the first key of an object, possibly incomplete, is one with which calls begin.
    fn may_be_call(self, body: &str) -> bool {
        let inner = body.strip_prefix('{').unwrap_or(body).trim_start();
        let Some(quote) = inner.chars().next() else {
            return true;
        };
        inner
            .strip_prefix(['"', '\''])
            .is_some_and(|key| match key.split_once(quote) {
                Some((key, _)) => KEYS.contains(&key) || self.functions.has(key),
                None => {
                    KEYS.iter().any(|known| known.starts_with(key))
                        || self.functions.may_become(key)
                }
            })
    }

    /// `name[ARGS]{…}`, `name{…}`, `name(…)`.
    fn named(self, body: &str) -> Found {
        if let Some(rest) = body
            .strip_prefix(CALL)
            .filter(|_| !self.functions.has("call"))
        {
            return self.escaped(rest).behind(CALL.len());
        }
        if !self.ended && CALL.starts_with(body) {
            return Found::More;
        }
        if !self.ended && self.functions.may_become(body) {
            return Found::More;
        }
        let written = self
            .functions
            .longest(body)
            .unwrap_or_else(|| literal::identifier(body));
        let rest = body.get(written.len()..).unwrap_or_default();
        let name = self.known(written);
        if written.is_empty() || (rest.is_empty() && !self.ended) {
            let begun = !written.is_empty() && (self.any_name || self.may_become_known(written));
            return if begun { Found::More } else { Found::Nothing };
        }
        if written == "print" && rest.starts_with('(') {
            let found = self.read(rest.get(1..).unwrap_or_default());
            return match found {
                Found::Calls(calls, end) => {
                    let after = rest.get(1 + end..).unwrap_or_default().trim_start();
                    match after.strip_prefix(')') {
                        Some(after) => Found::Calls(calls, body.len() - after.len()),
                        None if after.is_empty() && !self.ended => Found::More,
                        None => Found::Nothing,
                    }
                }
                other => other,
            };
        }
        if !self.accepts(name) {
            return Found::Nothing;
        }
        if rest.starts_with('(') {
            if !self.any_name && !self.functions.has(name) {
                return Found::Nothing;
            }
            return match extent(rest) {
                Extent::Whole(end) => {
                    let inner = rest.get(1..end.saturating_sub(1)).unwrap_or_default();
                    match literal::arguments(inner)
                        .and_then(|arguments| self.by_key(name, arguments))
                    {
                        Some(arguments) => Found::Calls(
                            vec![call(name, &Value::Object(arguments))],
                            written.len() + end,
                        ),
                        None => Found::Nothing,
                    }
                }
                Extent::Open { .. } => Found::More,
                Extent::Broken { .. } => Found::Nothing,
            };
        }
        let arguments = match arguments_of(rest) {
            Some(arguments) => arguments,
            None if rest.len() < ID_LENGTH_MAX && NAME_ENDS.iter().any(|end| meets(rest, end)) => {
                return Found::More;
            }
            None => return Found::Nothing,
        };
        if arguments.is_empty() {
            return Found::More;
        }
        if !arguments.starts_with('{') {
            return Found::Nothing;
        }
        let before = body.len() - arguments.len();
        self.object(name, arguments).behind(before)
    }

    /// A declared name without the affixes added by models: `default_api.name`, `name.call`.
    fn known(self, written: &str) -> &str {
        if self.functions.has(written) {
            return written;
        }
        let short = written.strip_suffix(".call").unwrap_or(written);
        let last = short.rsplit('.').next().unwrap_or(short);
        [short, last]
            .into_iter()
            .find(|name| self.functions.has(name))
            .unwrap_or(written)
    }

    fn may_become_known(self, written: &str) -> bool {
        let last = written.rsplit('.').next().unwrap_or(written);
        let known = |name| self.functions.may_become(name);
        known(written)
            || known(last)
            || self.functions.has(self.known(written))
            || "print".starts_with(written)
            || MODULE.starts_with(written)
    }

    /// Names positional arguments by the parameters at their positions.
    fn by_key(
        self,
        name: &str,
        arguments: (Vec<Value>, Map<String, Value>),
    ) -> Option<Map<String, Value>> {
        let (by_place, mut by_key) = arguments;
        let parameters = self
            .functions
            .0
            .get(name)
            .map(Vec::as_slice)
            .unwrap_or_default();
        for (at, value) in by_place.into_iter().enumerate() {
            by_key.insert(parameters.get(at)?.name.clone(), value);
        }
        Some(by_key)
    }

    /// Parameters given next to a function's name.
    fn beside(self, name: &str, call: &Value) -> Value {
        let parameters = self.functions.0.get(name).into_iter().flatten();
        let names = parameters.map(|parameter| parameter.name.as_str());
        let others = names.filter(|name| !NAMES.contains(name));
        let arguments = others.filter_map(|name| Some((name.to_owned(), call.get(name)?.clone())));
        Value::Object(arguments.collect())
    }

    fn calls_of(self, value: &Value) -> Option<Vec<AnswerPart>> {
        if let Value::Array(list) = value {
            let calls: Option<Vec<_>> = list.iter().map(|value| self.calls_of(value)).collect();
            return calls
                .map(|calls| calls.concat())
                .filter(|calls| !calls.is_empty());
        }
        for nested in NESTED {
            if let Some(inner) = value.get(nested).filter(|inner| !inner.is_string()) {
                return self.calls_of(inner);
            }
        }
        let name = NAMES.iter().find_map(|key| value.get(key)?.as_str());
        let Some(name) = name else {
            // A function's name as the key of its arguments.
            let mut fields = value.as_object()?.iter();
            let (name, arguments) = fields.next().filter(|_| fields.next().is_none())?;
            let is_call = self.functions.has(name) && arguments.is_object();
            return is_call.then(|| vec![call(name, arguments)]);
        };
        let name = self.known(name);
        let arguments = match ARGUMENTS.iter().find_map(|key| value.get(key)) {
            Some(arguments) if arguments.is_object() => {
                self.accepts(name).then(|| arguments.clone())
            }
            Some(Value::String(text)) => {
                literal::parse(text).filter(|value| self.accepts(name) && value.is_object())
            }
            // Without arguments, an object with a name is a call only if the function exists.
            None | Some(Value::Null) => self.functions.has(name).then(|| self.beside(name, value)),
            Some(_) => None,
        };
        Some(vec![call(name, &arguments?)])
    }
}

/// The call of a function with these arguments, possibly truncated if `cut`.
pub(super) fn of_object(name: &str, arguments: &str, cut: bool) -> AnswerPart {
    let parser = CallParser {
        functions: &Functions::default(),
        any_name: true,
        ended: !cut,
    };
    let body = if arguments.trim().is_empty() && !cut {
        "{}"
    } else {
        arguments.trim()
    };
    let read = match parser.object(name, body) {
        Found::Calls(calls, end) if end == body.len() => calls.into_iter().next(),
        _ => None,
    };
    // As the model wrote them, for the client to judge.
    read.unwrap_or_else(|| AnswerPart::ToolCall {
        name: name.to_owned(),
        arguments: body.to_owned(),
    })
}

/// Calls of which the last is truncated: it keeps the arguments received so far, and is dropped if its name is
/// incomplete.
pub(super) fn cut(text: &str, parser: CallParser<'_>) -> Vec<AnswerPart> {
    let mut rest = text.trim_start().trim_start_matches('[');
    let mut calls = Vec::new();
    while let Found::Calls(found, end) = parser.read(rest) {
        calls.extend(found);
        rest = rest
            .get(end..)
            .unwrap_or_default()
            .trim_start_matches(SEPARATORS);
    }
    let rest = rest.trim_start();
    let last = if rest.starts_with('{') {
        cut_json(rest)
    } else if let Some(body) = rest.strip_prefix(CALL) {
        cut_escaped(body, parser)
    } else if rest.starts_with(FUNCTION) {
        cut_function(rest, parser)
    } else {
        cut_named(rest, parser)
    };
    calls.extend(last.filter(|call| match call {
        AnswerPart::ToolCall { name, .. } => parser.accepts(name),
        _ => false,
    }));
    calls
}

fn cut_json(text: &str) -> Option<AnswerPart> {
    let rest = text
        .strip_prefix('{')?
        .trim_start()
        .strip_prefix("\"name\"")?;
    let rest = rest.trim_start().strip_prefix(':')?;
    let mut values = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    let name = values.next()?.ok()?;
    let rest = rest.get(values.byte_offset()..)?.trim_start();
    let arguments = rest
        .strip_prefix(',')
        .and_then(|rest| {
            let rest = rest.trim_start();
            rest.strip_prefix("\"arguments\"")
                .or_else(|| rest.strip_prefix("\"parameters\""))
        })
        .and_then(|rest| rest.trim_start().strip_prefix(':'))
        .map_or("", str::trim_start);
    // The closing syntax of the call is truncated as well.
    let end = match extent(arguments) {
        Extent::Whole(end) => end,
        _ => arguments.len(),
    };
    Some(AnswerPart::ToolCall {
        name,
        arguments: arguments.get(..end)?.to_owned(),
    })
}

/// Complete parameters, as an unclosed object.
fn cut_function(text: &str, parser: CallParser<'_>) -> Option<AnswerPart> {
    let complete = text
        .rfind(PARAMETER_END)
        .map_or(text.find('>')? + 1, |at| at + PARAMETER_END.len());
    let whole = format!("{}{FUNCTION_END}", text.get(..complete)?);
    match parser.read(&whole) {
        Found::Calls(calls, _) => calls.into_iter().next().map(|call| match call {
            AnswerPart::ToolCall {
                name,
                mut arguments,
            } => {
                arguments.pop();
                AnswerPart::ToolCall { name, arguments }
            }
            other => other,
        }),
        Found::More | Found::Nothing => None,
    }
}

/// Complete arguments in Gemma's notation, as an unclosed object.
fn cut_escaped(body: &str, parser: CallParser<'_>) -> Option<AnswerPart> {
    let (name, arguments) = parser.escaped_name(body);
    let mut fields = Value::Object(literal::escaped_fields(arguments)).to_string();
    fields.pop();
    arguments.starts_with('{').then(|| AnswerPart::ToolCall {
        name: name.to_owned(),
        arguments: fields,
    })
}

fn cut_named(text: &str, parser: CallParser<'_>) -> Option<AnswerPart> {
    let written = literal::identifier(text);
    let rest = text.get(written.len()..)?;
    let name = parser.known(written);
    if written.is_empty() || rest.is_empty() {
        return None;
    }
    let arguments = arguments_of(rest)?;
    Some(AnswerPart::ToolCall {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    })
}

fn call(name: &str, arguments: &Value) -> AnswerPart {
    AnswerPart::ToolCall {
        name: name.to_owned(),
        arguments: arguments.to_string(),
    }
}

/// The text after a name without parentheses; `None` while it is ambiguous.
fn arguments_of(rest: &str) -> Option<&str> {
    if let Some(id) = rest.strip_prefix(CALL_ID) {
        return id
            .split_once(ARGS)
            .map(|(_, arguments)| arguments.trim_start());
    }
    if let Some(arguments) = rest.strip_prefix(ARGS) {
        return Some(arguments.trim_start());
    }
    // On a separate line in some families.
    let arguments = rest.trim_start();
    (arguments.is_empty() || arguments.starts_with('{')).then_some(arguments)
}

/// Whether one of the two is a prefix of the other.
fn meets(text: &str, tag: &str) -> bool {
    text.starts_with(tag) || tag.starts_with(text)
}

/// The value of a parameter up to its end tag, which models omit before the next parameter. `None` while the end is
/// ambiguous.
fn parameter_value(text: &str, ended: bool) -> Option<(&str, &str)> {
    let follows = |rest: &str| {
        let rest = rest.trim_start();
        let tags = [PARAMETER, FUNCTION_END].iter().chain(&CLOSERS);
        let mut begun = false;
        for tag in tags {
            if rest.starts_with(tag) {
                return Some(true);
            }
            begun |= tag.starts_with(rest);
        }
        if begun && !ended {
            None
        } else {
            Some(rest.is_empty())
        }
    };
    for (at, _) in text.match_indices('<') {
        let rest = text.get(at..)?;
        let before = text.get(..at)?;
        if let Some(after) = rest.strip_prefix(PARAMETER_END) {
            // A tag inside a value is followed by more of the value.
            if follows(after)? {
                return Some((before, after));
            }
        } else if before.ends_with('\n')
            && (rest.starts_with(PARAMETER) || rest.starts_with(FUNCTION_END))
        {
            return Some((before, rest));
        }
    }
    ended.then_some((text, ""))
}

/// Extent of the value at the start of a text.
enum Extent {
    Whole(usize),
    /// It is incomplete.
    Open {
        open: Vec<char>,
        in_text: bool,
    },
    /// The tag after it, or a mismatched bracket, precedes its end.
    Broken {
        at: usize,
        open: Vec<char>,
    },
}

fn extent(text: &str) -> Extent {
    let mut open = Vec::new();
    let mut quote = None;
    let mut escaped = false;
    for (at, character) in text.char_indices() {
        if let Some(end) = quote {
            match character {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                _ if character == end => quote = None,
                _ => {}
            }
            continue;
        }
        match character {
            '"' | '\'' => quote = Some(character),
            '{' => open.push('}'),
            '[' => open.push(']'),
            '(' => open.push(')'),
            '}' | ']' | ')' => {
                if open.last() != Some(&character) {
                    return Extent::Broken { at, open };
                }
                open.pop();
                if open.is_empty() {
                    return Extent::Whole(at + character.len_utf8());
                }
            }
            '<' if CLOSERS
                .iter()
                .any(|closer| text.get(at..).is_some_and(|rest| rest.starts_with(closer))) =>
            {
                return Extent::Broken { at, open };
            }
            _ => {}
        }
    }
    Extent::Open {
        open,
        in_text: quote.is_some(),
    }
}

/// The text up to `at` with all brackets closed.
fn closed(text: &str, at: usize, open: &[char]) -> String {
    let before = text.get(..at).unwrap_or_default().trim_end();
    before.chars().chain(open.iter().rev().copied()).collect()
}

const TYPES: [&str; 7] = [
    "array", "boolean", "integer", "null", "number", "object", "string",
];
/// Limit of references followed for the types of one parameter; beyond it, the type is unrestricted, for example in a
/// recursive schema. Our choice.
const REFERENCES_MAX: u8 = 16;
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// The prefix of Gemma 4 and FunctionGemma.
const CALL: &str = "call:";
pub(super) const DEEPSEEK: &str = "<｜tool▁call▁begin｜>";
const DEEPSEEK_SEPARATOR: &str = "<｜tool▁sep｜>";
/// Longest name with its prefix. Our choice: OpenAI's names have up to 64 characters.
const NAME_LENGTH_MAX: usize = 128;
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";
const NAME_ENDS: [&str; 2] = [ARGS, CALL_ID];
/// Longest id after a name, with its tags; Mistral's have nine characters.
const ID_LENGTH_MAX: usize = 64;
/// The module in Gemma's examples of function calls.
const MODULE: &str = "default_api.";
/// Separators between calls.
pub(super) const SEPARATORS: [char; 6] = [',', ';', ' ', '\n', '\r', '\t'];
/// Tags after a call.
pub(super) const CLOSERS: [&str; 14] = [
    "</tool_call>",
    "</function>",
    "</tools>",
    "</function_call>",
    "<|/tool_call|>",
    "<tool_call|>",
    "<|tool_call_end|>",
    "[/TOOL_CALLS]",
    "<|eom_id|>",
    "<end_function_call>",
    "</TOOLCALL>",
    "<|END_ACTION|>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];
/// Keys of objects that contain a call.
const NESTED: [&str; 4] = ["function", "function_call", "tool_call", "tool_calls"];
/// Keys of a function's name and of its arguments.
const NAMES: [&str; 6] = [
    "name",
    "function",
    "tool",
    "tool_name",
    "function_name",
    "action",
];
const ARGUMENTS: [&str; 9] = [
    "arguments",
    "parameters",
    "args",
    "input",
    "tool_input",
    "tool_args",
    "action_input",
    "params",
    "kwargs",
];
/// Keys with which a call begins.
const KEYS: [&str; 17] = [
    "name",
    "function",
    "tool",
    "tool_name",
    "arguments",
    "parameters",
    "args",
    "input",
    "type",
    "id",
    "index",
    "tool_calls",
    "tool_call",
    "function_call",
    "tool_call_id",
    "function_name",
    "action",
];
