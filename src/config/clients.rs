//! Clients of the HTTP APIs and their keys, from a file readable only by its owner.

use std::{collections::BTreeMap, fmt, path::Path};

use serde::Deserialize;

use super::{
    Fault, LoadError, LoadErrorKind,
    checker::Checker,
    error,
    raw::{self, Text},
};
use cotenant_policy::{lease::Class, roles::Role};
use cotenant_units::Tokens;

/// A client of the HTTP APIs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// Its name in events and logs, under the rules for worker names.
    pub name: String,
    /// Key that identifies it.
    pub key: Secret,
    /// Urgency of its LLM requests. Default `interactive`.
    pub class: Class,
    /// What it may do from the page: `operator` or `viewer`. Default `viewer`.
    pub role: Role,
    /// Limit on its concurrent requests. Default 16, 1 to 1000.
    pub requests_max: u32,
    /// Token limit of one answer. Default: as `llm.answer_tokens_max`; 1 to 1048576.
    pub tokens_max: Option<Tokens>,
}

/// Text that is never printed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Secret(String);

impl Secret {
    /// Returns the text itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawClients {
    clients: Vec<RawClient>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawClient {
    name: Text,
    key: Text,
    class: Text,
    role: Text,
    requests_max: Text,
    tokens_max: Text,
}

/// Reads and checks the file of keys at `path`.
///
/// # Errors
/// As [`load`](super::load()), and if users other than its owner may read it. No error shows a key.
pub fn load_clients(path: &Path) -> Result<Vec<ClientConfig>, LoadError> {
    let read = || {
        let text = error::read_private(path).map_err(|kind| match kind {
            LoadErrorKind::Io(error) => LoadErrorKind::Keys(error),
            other => other,
        })?;
        if error::is_too_deep(&text) {
            return Err(LoadErrorKind::TooDeep);
        }
        if raw::sets_nothing(&text) {
            return Err(LoadErrorKind::Empty(error::KEYS_HINT));
        }
        check(&raw::parse(&text)?, &text)
    };
    read().map_err(|kind| LoadError::new(path, kind))
}

/// Roles that a key may have.
const ROLES: [(&str, Role); 2] = [("operator", Role::Operator), ("viewer", Role::Viewer)];

fn check(raw: &RawClients, text: &str) -> Result<Vec<ClientConfig>, LoadErrorKind> {
    let mut checker = Checker::default();
    if raw.clients.len() > CLIENTS_MAX {
        checker.fault(
            "clients",
            format!(
                "has {} clients, at most {CLIENTS_MAX} are read",
                raw.clients.len()
            ),
            None,
        );
    }
    let mut clients = Vec::new();
    let (mut names, mut keys): (BTreeMap<String, usize>, BTreeMap<String, usize>) =
        Default::default();
    for (index, raw) in raw.clients.iter().enumerate().take(CLIENTS_MAX) {
        let at = |key: &str| format!("clients[{index}].{key}");
        checker.require(&at("name"), &raw.name, "write `name: kitchen`");
        checker.require(&at("key"), &raw.key, KEY_HINT);
        let name = checker.name(&at("name"), &raw.name).unwrap_or_default();
        let key = checker
            .given(&at("key"), &raw.key)
            .unwrap_or_default()
            .to_owned();
        let plain = (KEY_MIN..=KEY_MAX).contains(&key.len())
            && key.bytes().all(|byte| byte.is_ascii_graphic());
        if raw.key.0.is_some() && !plain {
            let problem =
                format!("is not {KEY_MIN} to {KEY_MAX} printable ASCII characters without spaces");
            checker.fault(&at("key"), problem, Some(KEY_HINT));
        }
        for (what, text, seen) in [("name", &name, &mut names), ("key", &key, &mut keys)] {
            if let Some(first) = seen
                .insert(text.clone(), index)
                .filter(|_| !text.is_empty())
            {
                let message = format!("duplicates that of clients[{first}]");
                checker.fault(&at(what), message, Some("give each its own"));
            }
        }
        clients.push(ClientConfig {
            name,
            key: Secret(key),
            class: checker
                .class(&at("class"), &raw.class)
                .unwrap_or(Class::Interactive),
            role: checker
                .one_of(&at("role"), &raw.role, &ROLES)
                .unwrap_or(Role::Viewer),
            requests_max: checker
                .number(&at("requests_max"), &raw.requests_max, 1..=1000)
                .unwrap_or(16),
            tokens_max: checker
                .number(&at("tokens_max"), &raw.tokens_max, 1..=1 << 20)
                .map(Tokens::new),
        });
    }
    if checker.faults.is_empty() {
        return Ok(clients);
    }
    let located = |mut fault: Fault| {
        fault.position = raw::position(text, &fault.path);
        fault
    };
    Err(LoadErrorKind::Faults(
        checker.faults.into_iter().map(located).collect(),
    ))
}

/// More than a device serves; each request is compared with every client. Our choice.
const CLIENTS_MAX: usize = 256;
/// At least 96 bits, at 6 bits per character.
const KEY_MIN: usize = 16;
const KEY_MAX: usize = 256;
const KEY_HINT: &str = "`openssl rand -hex 24` generates a key";

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    fn load(text: &str, mode: u32) -> Result<Vec<ClientConfig>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
        load_clients(file.path()).map_err(|error| error.report())
    }

    const KITCHEN: &str = "clients:\n  - {name: kitchen, key: 0123456789abcdef, class: batch, requests_max: 2, tokens_max: 64}\n";

    #[test]
    fn clients_are_read_and_a_key_is_not_shown() {
        let clients = load(KITCHEN, 0o600).unwrap();
        assert_eq!(clients[0].key.reveal(), "0123456789abcdef");
        let shown = format!("{clients:?}");
        assert!(
            shown.contains("kitchen") && !shown.contains("0123456789"),
            "{shown}"
        );
        assert_eq!(
            (
                clients[0].class,
                clients[0].requests_max,
                clients[0].tokens_max
            ),
            (Class::Batch, 2, Some(Tokens::new(64)))
        );
        assert_eq!(load("clients: []\n", 0o400), Ok(Vec::new()));
    }

    #[test]
    fn a_file_of_keys_that_is_missing_or_was_cut_short_is_refused_with_what_to_write() {
        for text in ["", "# clients\n", "clients:\n"] {
            let report = load(text, 0o600).unwrap_err();
            assert!(
                report.contains("it sets nothing") && report.contains("hint: write `clients: "),
                "{text:?}: {report}"
            );
        }
        let folder = tempfile::tempdir().unwrap();
        let report = load_clients(&folder.path().join("none"))
            .unwrap_err()
            .report();
        assert!(
            report.contains("hint: write `clients: ") && !report.contains("--config"),
            "{report}"
        );
    }

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        for mode in [0o644, 0o640, 0o604, 0o660, 0o601] {
            let report = load(KITCHEN, mode).unwrap_err();
            assert!(
                report.contains(&format!("mode {mode:04o}")) && report.contains("chmod 600"),
                "{report}"
            );
        }
    }

    #[test]
    fn faults_have_their_place_and_show_no_key() {
        let report = load(
            "clients:\n- {name: a, key: 0123456789abcdef}\n- {name: a, key: 0123456789abcdef}\n- {name: B, key: short}\n- {class: loud}\n",
            0o600,
        )
        .unwrap_err();
        for fault in [
            "3:10: clients[1].name: duplicates that of clients[0]",
            "clients[1].key: duplicates that of clients[0]",
            "clients[2].name: `B` is not a name",
            "clients[2].key: is not 16 to 256",
            "clients[3].name: is required",
            "clients[3].key: is required",
            "clients[3].class: `loud`",
        ] {
            assert!(report.contains(fault), "{fault}: {report}");
        }
        assert!(
            !report.contains("0123456789") && !report.contains("short"),
            "{report}"
        );
    }
}
