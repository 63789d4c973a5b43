//! Raw form of the configuration file: every scalar is text, so that all faults can be listed.
//!
//! Only the form is checked here: YAML, known keys, no duplicate keys, lists where lists are expected.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_yaml::Value;

use super::error::{Fault, LoadErrorKind, is_too_deep};

/// Scalar as written; `None` if the key is missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Text(pub(super) Option<String>);

/// Keys and their texts, sorted by key, without duplicates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table(pub(super) BTreeMap<String, String>);

/// Declares sections of the file. A key without a type is a scalar.
macro_rules! raw {
    ($($(#[$attribute:meta])? $part:ident { $($key:ident $(: $type:ty)?),+ $(,)? })+) => {$(
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        $(#[$attribute])?
        pub(super) struct $part {
            $(pub(super) $key: raw!(@type $($type)?),)+
        }
    )+};
    (@type) => { Text };
    (@type $type:ty) => { $type };
}

raw! {
    RawConfig {
        budget: RawBudget, shedding: RawShedding, leases: RawLeases, llm: Option<RawLlm>, workers: Vec<RawWorker>,
        http: RawHttp, wyoming: RawWyoming, grpc: RawGrpc, journal: RawJournal, safe_profile: RawSafeProfile,
        state_dir, runtime_dir, log: RawLog, telemetry: RawTelemetry,
    }
    RawBudget {
        total, reserve, scope, watermarks: RawWatermarks, dwell, grace, hysteresis, fill_rate_max, sample_min,
        sample_max,
    }
    RawWatermarks { elevated, critical, last_resort }
    RawShedding { reclaim_min, settle, deadlines: RawDeadlines, verify_timeout }
    #[serde(rename_all = "kebab-case")]
    RawDeadlines { audio_realtime, interactive, llm_elastic, batch }
    RawLeases { term_min, term_max, wait_max, queue_max, per_user_max }
    RawLlm {
        path, name, threads, parallel, drafts, conversations, keep_conversations, device, cuda: RawCuda, context, vocabulary, answer_tokens_max, answer_time_max, answer_time_shared, kv_floor,
        kv_memory, kv_type, kv_type_least, prefill_chunk, prefill_chunk_max, mode, resident_layers_min,
        after: Vec<String>, load_timeout, apply_timeout, restart: RawRestart,
    }
    RawCuda { memory, kernels }
    RawWorker {
        name, role, argv: Vec<String>, env: Table, working_dir, protocol, model, socket, port, ready: RawReady, class,
        memory: MemoryForm, restart: RawRestart, stop_grace, oom_score_adj, autostart, pinned, after: Vec<String>,
        lease, idle: RawIdle, wake_timeout, answer_timeout, user, group, limits: RawLimits, sandbox: RawSandbox,
        pressure: RawPressure,
    }
    RawIdle { shrink_after, stop_after }
    RawLimits { memory, address_space, core, file_size, memlock, open_files, processes }
    RawSandbox { read: Vec<String>, write: Vec<String>, syscalls, required }
    RawPressure { watch, shrinks_to }
    RawReady { kind, timeout, path, status, text, pattern }
    RawMemory { steady, peak, recycle_above, variants: Vec<RawVariant> }
    RawVariant { name, bytes, peak }
    RawRestart { intensity, window, stable_after, backoff, backoff_max }
    RawHttp {
        listen, allowed_hosts: Vec<String>, trusted_proxies: Vec<String>, keys_file, keyless: Option<Vec<Text>>,
        models: Table, voices: Table,
    }
    RawWyoming {
        listen: Vec<String>, languages: Vec<String>, system, wait_max, audio_max, connections_max, conversations_max,
        history_max,
    }
    RawGrpc { socket, abstract_name, tcp: Option<RawTcp>, roles: RawRoles, limits: RawGrpcLimits }
    RawTcp { listen, cert, key, client_ca, role }
    RawRoles { operators: RawIds, watchdogs: RawIds, delegates: RawIds, tenants: RawIds, viewers: RawIds, others }
    RawIds { uids: Vec<Text>, gids: Vec<Text> }
    RawGrpcLimits { message_max, calls_per_connection, connections: RawBounds, streams: RawBounds, reader_patience }
    RawBounds { per_process, per_user, total }
    RawJournal { path, max_size }
    RawSafeProfile { crashes, within }
    RawLog { filter, format }
    RawTelemetry { otlp, otlp_ca, otlp_events, vllm_names }
}

/// Parses the form of a file. A file without content is an empty mapping.
pub(super) fn parse<T: Default + DeserializeOwned>(text: &str) -> Result<T, LoadErrorKind> {
    if is_blank(text) {
        return Ok(T::default());
    }
    serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text)).map_err(|error| {
        // `.` is the file itself, `?` an unreadable key.
        let path = error.path().to_string();
        let path = path.trim_end_matches('?').trim_end_matches('.').to_owned();
        LoadErrorKind::Faults(vec![fault(path, error.inner())])
    })
}

/// Returns line and column, from 1, of the value at `path` (`workers[0].argv`); if it is missing, of the innermost
/// enclosing mapping or list.
pub(super) fn position(text: &str, path: &str) -> Option<(usize, usize)> {
    let steps: Vec<&str> = path
        .split(['.', '['])
        .map(|step| step.trim_end_matches(']'))
        .collect();
    (1..=steps.len()).rev().find_map(|depth| {
        let steps = steps.get(..depth)?;
        let error = Walk(steps)
            .deserialize(serde_yaml::Deserializer::from_str(text))
            .err()?;
        if !error.to_string().contains(FOUND) {
            return None;
        }
        error.location().map(|at| (at.line(), at.column()))
    })
}

/// Returns whether a file sets no value. An empty list is a value: it means none.
pub(super) fn sets_nothing(text: &str) -> bool {
    fn is_nothing(value: &Value) -> bool {
        match value {
            Value::Null => true,
            Value::Mapping(keys) => keys.values().all(is_nothing),
            _ => false,
        }
    }
    is_blank(text)
        || !is_too_deep(text)
            && serde_yaml::from_str(text).is_ok_and(|value: Value| is_nothing(&value))
}

/// Returns whether a text consists of comments and white space.
fn is_blank(text: &str) -> bool {
    text.lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
}

fn fault(path: String, error: &serde_yaml::Error) -> Fault {
    let position = error.location().map(|at| (at.line(), at.column()));
    let whole = error.to_string();
    let message = match position {
        Some((line, column)) => whole.replace(&format!(" at line {line} column {column}"), ""),
        None => whole,
    };
    // The reader prefixes its message with the path, or with that of the enclosing mapping.
    let message = match message.split_once(": ") {
        Some((front, rest)) if path.starts_with(front) => rest,
        _ => &message,
    };
    let (message, hint) = explain(message);
    Fault {
        path,
        position,
        message,
        hint,
    }
}

/// Rewords the reader's message, with a remedy if one is known.
fn explain(message: &str) -> (String, Option<String>) {
    let mut quoted = message.split('`').skip(1).step_by(2);
    if message.starts_with("unknown field") {
        let key = quoted.next().unwrap_or_default();
        let known: Vec<&str> = quoted.collect();
        let hint = match nearest(key, &known) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known keys here are {}", list(&known)),
        };
        return (format!("unknown key `{key}`"), Some(hint));
    }
    if message.starts_with("duplicate") {
        return (
            message.replace("field", "key"),
            Some("keep one of the two".to_owned()),
        );
    }
    for (cause, words, hint) in EXPLAINED {
        if message.contains(cause) {
            let words = if words.is_empty() { message } else { words };
            return (words.to_owned(), Some(hint.to_owned()));
        }
    }
    if message.starts_with("invalid type") {
        let hint = if message.ends_with("a sequence") {
            "write a list: `[first, second]`"
        } else if message.contains("expected struct") {
            "write keys and values, indented below this key"
        } else {
            "write one plain value"
        };
        let message = match message.split_once(", expected struct") {
            Some((found, _)) => format!("{found}, expected a mapping"),
            None => message.to_owned(),
        };
        return (message, Some(hint.to_owned()));
    }
    (message.to_owned(), None)
}

/// Returns the known word closest to `word`, if it is close enough to be intended.
pub(super) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|candidate| (distance(word, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= candidate.len().div_ceil(3))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Joins words as `a`, `b` and `c`, each in backticks.
pub(super) fn list(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [one] => format!("`{one}`"),
        [front @ .., last] => {
            let front: Vec<String> = front.iter().map(|word| format!("`{word}`")).collect();
            format!("{} and `{last}`", front.join(", "))
        }
    }
}

/// Returns the edit distance of two words; words longer than 64 bytes count as unrelated.
fn distance(from: &str, to: &str) -> usize {
    if from.len().max(to.len()) > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (b, above) in to.bytes().zip(row.iter_mut().skip(1)) {
            let cost = (diagonal + usize::from(a != b))
                .min(left + 1)
                .min(*above + 1);
            diagonal = *above;
            *above = cost;
            left = cost;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // When a string is requested, the reader returns any scalar as written: `no`, `~` and `12` alike.
        String::deserialize(deserializer).map(|text| Self(Some(text)))
    }
}

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Table;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table, A::Error> {
                let mut table = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if table.contains_key(&key) {
                        return Err(de::Error::custom(format!("duplicate key `{key}`")));
                    }
                    table.insert(key, value);
                }
                Ok(Table(table))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// `auto`, treated as absent, or a mapping.
#[derive(Debug, Default)]
pub(super) struct MemoryForm(pub(super) RawMemory);

impl<'de> Deserialize<'de> for MemoryForm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Forms;
        impl<'de> Visitor<'de> for Forms {
            type Value = MemoryForm;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`auto` or a mapping")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<MemoryForm, E> {
                match text {
                    "auto" => Ok(MemoryForm::default()),
                    other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
                }
            }
            fn visit_unit<E: de::Error>(self) -> Result<MemoryForm, E> {
                Ok(MemoryForm::default())
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<MemoryForm, A::Error> {
                RawMemory::deserialize(de::value::MapAccessDeserializer::new(map)).map(MemoryForm)
            }
        }
        deserializer.deserialize_any(Forms)
    }
}

/// Descends a path and fails at its end, so that the reader's error carries the position.
struct Walk<'a>(&'a [&'a str]);

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((step, rest)) = self.0.split_first() else {
            return Err(de::Error::custom(FOUND));
        };
        while let Some(key) = map.next_key::<String>()? {
            if key == *step {
                return map.next_value_seed(Walk(rest));
            }
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<(), A::Error> {
        let Some((step, rest)) = self.0.split_first() else {
            return Err(de::Error::custom(FOUND));
        };
        let Ok(index) = step.parse::<usize>() else {
            return Ok(());
        };
        for _ in 0..index {
            if sequence.next_element::<IgnoredAny>()?.is_none() {
                return Ok(());
            }
        }
        sequence.next_element_seed(Walk(rest)).map(|_| ())
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i128<E: de::Error>(self, _: i128) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u128<E: de::Error>(self, _: u128) -> Result<(), E> {
        self.scalar()
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<(), E> {
        self.scalar()
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.scalar()
    }
}

impl Walk<'_> {
    fn scalar<E: de::Error>(&self) -> Result<(), E> {
        if self.0.is_empty() {
            Err(E::custom(FOUND))
        } else {
            Ok(())
        }
    }
}

/// Errors of the YAML parser, our wording if different, and the remedy.
const EXPLAINED: [(&str, &str, &str); 8] = [
    ("did not find expected", "", LOOK),
    ("not allowed in this context", "", LOOK),
    ("tab character", "", INDENT),
    ("cannot start any token", "", INDENT),
    ("repetition limit", "", WRITE_OUT),
    ("recursion limit", "", WRITE_OUT),
    (
        "more than one document",
        "the file has more than one document",
        "remove what follows the second `---`",
    ),
    (
        "unknown anchor",
        "`*` refers to an undefined anchor",
        "quote values that begin with `*` or `&`",
    ),
];
const LOOK: &str = "look for a missing quote, bracket or colon here or on the line before";
const INDENT: &str = "indent with spaces; quote values that begin with a special character";
const WRITE_OUT: &str = "write the values out instead of `&` and `*`";

/// Marker of [`Walk`] at the end of its path.
const FOUND: &str = "the path ends here";
