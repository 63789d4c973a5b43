//! Settings of the Wyoming API.

use std::{collections::BTreeMap, time::Duration};

use crate::{config::Config, units::Bytes};

/// What can be set.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) languages: Vec<String>,
    pub(super) system: Option<String>,
    pub(super) wait_max: Duration,
    pub(super) audio_max: Duration,
    pub(super) conversations_max: usize,
    pub(super) history_max: Bytes,
    /// Names of voices as clients send them, and the worker's voice that each stands for.
    pub(super) aliases: BTreeMap<String, String>,
}

impl Settings {
    pub(super) fn of(config: &Config) -> Self {
        let api = &config.wyoming;
        Self {
            languages: api.languages.clone(),
            system: api.system.clone(),
            wait_max: api.wait_max,
            audio_max: api.audio_max,
            conversations_max: usize::try_from(api.conversations_max).unwrap_or(usize::MAX),
            history_max: api.history_max,
            aliases: config.http.voices.clone(),
        }
    }
}
