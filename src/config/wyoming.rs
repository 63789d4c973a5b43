//! Settings of the Wyoming API.

use std::{net::SocketAddr, time::Duration};

use super::{
    WyomingConfig, WyomingListen,
    checker::{Checker, MINUTE, SECOND},
    raw::{RawWyoming, Text},
};
use cotenant_units::Bytes;

pub(super) fn check(checker: &mut Checker, raw: RawWyoming) -> WyomingConfig {
    let listen = raw.listen.iter().enumerate().filter_map(|(index, written)| {
        let path = format!("wyoming.listen[{index}]");
        match written.split_once("://") {
            Some(("unix", socket)) => {
                let socket = Text(Some(socket.to_owned()));
                checker.socket(&path, &socket).map(WyomingListen::Unix)
            }
            Some(("tcp", address)) if address.parse::<SocketAddr>().is_ok() => {
                address.parse().ok().map(WyomingListen::Tcp)
            }
            _ => {
                checker.fault(
                    &path,
                    format!("`{}` is no address of a Wyoming server", written.escape_debug()),
                    Some("write `tcp://127.0.0.1:10300`, with an address and not a name, or `unix:///path`"),
                );
                None
            }
        }
    });
    let listen = listen.collect();
    for (index, language) in raw.languages.iter().enumerate() {
        let tag = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if language.is_empty() || language.len() > LANGUAGE_MAX || !language.chars().all(tag) {
            checker.fault(
                &format!("wyoming.languages[{index}]"),
                format!("`{}` is no language", language.escape_debug()),
                Some("write tags such as `en` or `en-US`"),
            );
        }
    }
    let languages = if raw.languages.is_empty() {
        vec!["en".to_owned()]
    } else {
        raw.languages
    };
    let history = Bytes::ZERO..=Bytes::from_mib(1);
    WyomingConfig {
        listen,
        languages,
        system: checker
            .given("wyoming.system", &raw.system)
            .map(str::to_owned),
        wait_max: checker
            .duration("wyoming.wait_max", &raw.wait_max, Duration::ZERO..=MINUTE)
            .unwrap_or(5 * SECOND),
        audio_max: checker
            .duration("wyoming.audio_max", &raw.audio_max, SECOND..=10 * MINUTE)
            .unwrap_or(MINUTE),
        connections_max: checker
            .number("wyoming.connections_max", &raw.connections_max, 1..=1024)
            .unwrap_or(32),
        conversations_max: checker
            .number(
                "wyoming.conversations_max",
                &raw.conversations_max,
                0..=10_000,
            )
            .unwrap_or(32),
        history_max: checker
            .size("wyoming.history_max", &raw.history_max, history)
            .unwrap_or(Bytes::from_kib(16)),
    }
}

/// Our choice: longer than any tag in use.
const LANGUAGE_MAX: usize = 16;
