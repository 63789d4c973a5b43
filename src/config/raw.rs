//! Raw form of the file: every scalar is text, so that all faults can be listed at once.
//!
//! What is checked here is the form alone: YAML, known keys, no key twice, lists where lists belong.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::error::{Fault, LoadErrorKind};

/// A scalar as written; absent when the key is not there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Text(pub(super) Option<String>);

/// Keys and their texts, in the order of the keys; a key may come once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table(pub(super) BTreeMap<String, String>);

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawConfig {
    pub(super) budget: RawBudget,
    pub(super) shedding: RawShedding,
    pub(super) leases: RawLeases,
    pub(super) llm: Option<RawLlm>,
    pub(super) workers: Vec<RawWorker>,
    pub(super) http: RawHttp,
    pub(super) wyoming: RawWyoming,
    pub(super) grpc: RawGrpc,
    pub(super) journal: RawJournal,
    pub(super) safe_profile: RawSafeProfile,
    pub(super) state_dir: Text,
    pub(super) runtime_dir: Text,
    pub(super) log: RawLog,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawBudget {
    pub(super) total: Text,
    pub(super) reserve: Text,
    pub(super) scope: Text,
    pub(super) watermarks: RawWatermarks,
    pub(super) dwell: Text,
    pub(super) grace: Text,
    pub(super) hysteresis: Text,
    pub(super) fill_rate_max: Text,
    pub(super) sample_min: Text,
    pub(super) sample_max: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawWatermarks {
    pub(super) elevated: Text,
    pub(super) critical: Text,
    pub(super) last_resort: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawShedding {
    pub(super) reclaim_min: Text,
    pub(super) settle: Text,
    pub(super) deadlines: RawDeadlines,
    pub(super) verify_timeout: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(super) struct RawDeadlines {
    pub(super) audio_realtime: Text,
    pub(super) interactive: Text,
    pub(super) llm_elastic: Text,
    pub(super) batch: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLeases {
    pub(super) term_min: Text,
    pub(super) term_max: Text,
    pub(super) wait_max: Text,
    pub(super) queue_max: Text,
    pub(super) per_user_max: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLlm {
    pub(super) path: Text,
    pub(super) name: Text,
    pub(super) threads: Text,
    pub(super) device: Text,
    pub(super) cuda: RawCuda,
    pub(super) context: Text,
    pub(super) vocabulary: Text,
    pub(super) answer_tokens_max: Text,
    pub(super) answer_time_max: Text,
    pub(super) kv_floor: Text,
    pub(super) kv_memory: Text,
    pub(super) kv_type: Text,
    pub(super) kv_type_least: Text,
    pub(super) prefill_chunk: Text,
    pub(super) prefill_chunk_max: Text,
    pub(super) mode: Text,
    pub(super) resident_layers_min: Text,
    pub(super) after: Vec<String>,
    pub(super) load_timeout: Text,
    pub(super) apply_timeout: Text,
    pub(super) restart: RawRestart,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawCuda {
    pub(super) memory: Text,
    pub(super) kernels: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawWorker {
    pub(super) name: Text,
    pub(super) role: Text,
    pub(super) argv: Vec<String>,
    pub(super) env: Table,
    pub(super) working_dir: Text,
    pub(super) protocol: Text,
    pub(super) model: Text,
    pub(super) socket: Text,
    pub(super) port: Text,
    pub(super) ready: RawReady,
    pub(super) class: Text,
    pub(super) memory: RawMemory,
    pub(super) restart: RawRestart,
    pub(super) stop_grace: Text,
    pub(super) oom_score_adj: Text,
    pub(super) autostart: Text,
    pub(super) pinned: Text,
    pub(super) after: Vec<String>,
    pub(super) lease: Text,
    pub(super) idle: RawIdle,
    pub(super) wake_timeout: Text,
    pub(super) answer_timeout: Text,
    pub(super) user: Text,
    pub(super) group: Text,
    pub(super) limits: RawLimits,
    pub(super) sandbox: RawSandbox,
    pub(super) pressure: RawPressure,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawIdle {
    pub(super) shrink_after: Text,
    pub(super) stop_after: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLimits {
    pub(super) memory: Text,
    pub(super) address_space: Text,
    pub(super) core: Text,
    pub(super) file_size: Text,
    pub(super) memlock: Text,
    pub(super) open_files: Text,
    pub(super) processes: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSandbox {
    pub(super) read: Vec<String>,
    pub(super) write: Vec<String>,
    pub(super) syscalls: Text,
    pub(super) required: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawPressure {
    pub(super) watch: Text,
    pub(super) shrinks_to: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawReady {
    pub(super) kind: Text,
    pub(super) timeout: Text,
    pub(super) path: Text,
    pub(super) status: Text,
    pub(super) text: Text,
    pub(super) pattern: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawMemory {
    pub(super) steady: Text,
    pub(super) peak: Text,
    pub(super) recycle_above: Text,
    pub(super) variants: Vec<RawVariant>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawVariant {
    pub(super) name: Text,
    pub(super) bytes: Text,
    pub(super) peak: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawRestart {
    pub(super) intensity: Text,
    pub(super) window: Text,
    pub(super) stable_after: Text,
    pub(super) backoff: Text,
    pub(super) backoff_max: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawHttp {
    pub(super) listen: Text,
    pub(super) allowed_hosts: Vec<String>,
    pub(super) keys_file: Text,
    pub(super) keyless: Option<Vec<Text>>,
    pub(super) models: Table,
    pub(super) voices: Table,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawWyoming {
    pub(super) listen: Vec<String>,
    pub(super) languages: Vec<String>,
    pub(super) system: Text,
    pub(super) wait_max: Text,
    pub(super) audio_max: Text,
    pub(super) connections_max: Text,
    pub(super) conversations_max: Text,
    pub(super) history_max: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawGrpc {
    pub(super) socket: Text,
    pub(super) abstract_name: Text,
    pub(super) tcp: Option<RawTcp>,
    pub(super) roles: RawRoles,
    pub(super) limits: RawGrpcLimits,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawTcp {
    pub(super) listen: Text,
    pub(super) cert: Text,
    pub(super) key: Text,
    pub(super) client_ca: Text,
    pub(super) role: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawRoles {
    pub(super) operators: RawIds,
    pub(super) watchdogs: RawIds,
    pub(super) tenants: RawIds,
    pub(super) viewers: RawIds,
    pub(super) others: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawIds {
    pub(super) uids: Vec<Text>,
    pub(super) gids: Vec<Text>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawGrpcLimits {
    pub(super) message_max: Text,
    pub(super) calls_per_connection: Text,
    pub(super) connections: RawBounds,
    pub(super) streams: RawBounds,
    pub(super) reader_patience: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawBounds {
    pub(super) per_process: Text,
    pub(super) per_user: Text,
    pub(super) total: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawJournal {
    pub(super) path: Text,
    pub(super) max_size: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSafeProfile {
    pub(super) crashes: Text,
    pub(super) within: Text,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLog {
    pub(super) filter: Text,
    pub(super) format: Text,
}

/// Reads the form of a file. A file without content is an empty mapping.
pub(super) fn parse<T: Default + DeserializeOwned>(text: &str) -> Result<T, LoadErrorKind> {
    if is_blank(text) {
        return Ok(T::default());
    }
    serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text)).map_err(|error| {
        // `.` is the file itself, `?` a key that could not be read.
        let path = error.path().to_string();
        let path = path.trim_end_matches('?').trim_end_matches('.').to_owned();
        LoadErrorKind::Faults(vec![fault(path, error.inner())])
    })
}

/// Where the value at `path` (`workers[0].argv`) begins, from line and column 1; where it is missing, the innermost
/// mapping or list around it.
pub(super) fn position(text: &str, path: &str) -> Option<(usize, usize)> {
    let steps: Vec<&str> = path.split(['.', '[']).map(|step| step.trim_end_matches(']')).collect();
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

/// Comments and white space alone.
fn is_blank(text: &str) -> bool {
    text.lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
}

/// Turns an error of the YAML reader into a fault of ours.
fn fault(path: String, error: &serde_yaml::Error) -> Fault {
    let position = error.location().map(|at| (at.line(), at.column()));
    let whole = error.to_string();
    let message = match position {
        Some((line, column)) => whole.replace(&format!(" at line {line} column {column}"), ""),
        None => whole,
    };
    // The reader puts the path in front of its message, or that of the mapping around.
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

/// Puts the reader's words into ours, with a remedy where we know one.
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
        return (message.replace("field", "key"), Some("keep one of the two".to_owned()));
    }
    if message.contains("did not find expected") || message.contains("not allowed in this context") {
        let hint = "look for a missing quote, bracket or colon here or on the line before";
        return (message.to_owned(), Some(hint.to_owned()));
    }
    if message.contains("tab character") || message.contains("cannot start any token") {
        return (
            message.to_owned(),
            Some("indent with spaces; quote values that begin with a special character".to_owned()),
        );
    }
    if message.contains("repetition limit") || message.contains("recursion limit") {
        return (
            message.to_owned(),
            Some("write the values out instead of `&` and `*`".to_owned()),
        );
    }
    if message.contains("more than one document") {
        return (
            "there is more than one document".to_owned(),
            Some("remove what follows the second `---`".to_owned()),
        );
    }
    if message.contains("unknown anchor") {
        return (
            "`*` refers to an anchor that is not there".to_owned(),
            Some("quote values that begin with `*` or `&`".to_owned()),
        );
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

/// The known word that differs least from `word`, if it is close enough to be meant.
pub(super) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|candidate| (distance(word, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= candidate.len().div_ceil(3))
        .min()
        .map(|(_, candidate)| candidate)
}

/// `a`, `b` and `c`, each in backticks.
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

/// Insertions, deletions and replacements that turn one word into the other; words beyond 64 bytes are far away.
fn distance(from: &str, to: &str) -> usize {
    if from.len().max(to.len()) > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (b, above) in to.bytes().zip(row.iter_mut().skip(1)) {
            let cost = (diagonal + usize::from(a != b)).min(left + 1).min(*above + 1);
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
        // Asked for a string, the reader hands over any scalar as it is written: `no`, `~` and `12` alike.
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

/// Goes down a path and fails where it ends, so that the reader's error tells the position.
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

/// What [`Walk`] says where its path ends.
const FOUND: &str = "the path ends here";
