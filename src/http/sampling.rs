//! Sampling fields of requests, and the defaults of each API.

use super::{
    backend::{ChatSampling, SamplingWish},
    fault::Fault,
    numbers::{Whole, in_range},
};

/// The sampling fields of a request; fields that its API lacks are absent.
#[derive(Debug, Default)]
pub(super) struct SamplingFields {
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) top_k: Option<Whole>,
    pub(super) min_p: Option<f64>,
    pub(super) frequency_penalty: Option<f64>,
    pub(super) presence_penalty: Option<f64>,
    pub(super) repeat_penalty: Option<f64>,
    pub(super) seed: Option<Whole>,
}

/// Names of the fields in an API, and its defaults.
pub(super) struct SamplingDialect {
    prefix: &'static str,
    temperature_max: f64,
    /// For fields that neither the request nor the model's file sets.
    defaults: SamplingWish,
}

impl SamplingDialect {
    /// OpenAI's: the unmodified distribution.
    pub(super) const OPENAI: Self = Self {
        prefix: "",
        temperature_max: 2.0,
        defaults: SamplingWish::AS_COMPUTED,
    };

    /// Anthropic's: the same, with a lower limit.
    pub(super) const ANTHROPIC: Self = Self {
        temperature_max: 1.0,
        ..Self::OPENAI
    };

    /// OpenAI's for realtime sessions: the temperature from the time when it could be set.
    pub(super) const REALTIME: Self = Self {
        defaults: SamplingWish {
            temperature: Some(0.8),
            ..SamplingWish::NONE
        },
        ..Self::OPENAI
    };

    /// Ollama's: `DefaultOptions` in its `api/types.go`, August 2026.
    pub(super) const OLLAMA: Self = Self {
        prefix: "options.",
        temperature_max: 2.0,
        defaults: SamplingWish {
            temperature: Some(0.8),
            top_p: Some(0.9),
            top_k: Some(40),
            ..SamplingWish::NONE
        },
    };

    /// The parsed fields, with defaults for the rest. A request without a seed gets one, so that its answer can be
    /// repeated. Errors are 400 and name the field, its value and the limit.
    pub(super) fn read(&self, fields: &SamplingFields) -> Result<ChatSampling, Fault> {
        let ranged = |name: &str, value, min, max| {
            in_range(&format!("{}{name}", self.prefix), value, min, max)
        };
        let asked = SamplingWish {
            temperature: ranged("temperature", fields.temperature, 0.0, self.temperature_max)?,
            top_p: ranged("top_p", fields.top_p, 0.0, 1.0)?,
            // 0, -1 and values above the vocabulary mean "all"
            top_k: fields.top_k.map(|top_k| top_k.to().unwrap_or(0)),
            min_p: ranged("min_p", fields.min_p, 0.0, 1.0)?,
            frequency_penalty: ranged("frequency_penalty", fields.frequency_penalty, -2.0, 2.0)?,
            presence_penalty: ranged("presence_penalty", fields.presence_penalty, -2.0, 2.0)?,
            // 0 means none
            repeat_penalty: ranged("repeat_penalty", fields.repeat_penalty, 0.0, 10.0)?
                .map(|penalty| if penalty == 0.0 { 1.0 } else { penalty }),
            // -1 means random, as in Ollama and llama.cpp; for other values only equality matters
            seed: fields
                .seed
                .map(Whole::get)
                .filter(|seed| *seed != -1)
                .map(i64::cast_unsigned)
                .or_else(|| Some(SamplingWish::random_seed())),
        };
        Ok(ChatSampling {
            asked,
            defaults: self.defaults,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_read_once_for_all_apis() {
        let whole = |number: i64| Whole::of(&number.into());
        let fields = SamplingFields {
            temperature: Some(0.0),
            top_p: Some(1.0),
            top_k: whole(-1),
            repeat_penalty: Some(0.0),
            seed: whole(-2),
            ..SamplingFields::default()
        };
        for dialect in [
            SamplingDialect::OPENAI,
            SamplingDialect::ANTHROPIC,
            SamplingDialect::REALTIME,
            SamplingDialect::OLLAMA,
        ] {
            let asked = dialect.read(&fields).unwrap().asked;
            let expected = SamplingWish {
                temperature: Some(0.0),
                top_p: Some(1.0),
                top_k: Some(0),
                repeat_penalty: Some(1.0),
                seed: Some(u64::MAX - 1),
                ..SamplingWish::NONE
            };
            assert_eq!(asked, expected);
        }
    }

    #[test]
    fn each_request_without_a_seed_has_one_of_its_own() {
        let seed = |fields: &SamplingFields| {
            SamplingDialect::OLLAMA
                .read(fields)
                .unwrap()
                .asked
                .seed
                .unwrap()
        };
        let any = SamplingFields {
            seed: Whole::of(&(-1).into()),
            ..SamplingFields::default()
        };
        let seeds = [
            seed(&SamplingFields::default()),
            seed(&SamplingFields::default()),
            seed(&any),
            seed(&any),
        ];
        let different: std::collections::BTreeSet<u64> = seeds.into();
        assert_eq!(different.len(), seeds.len(), "{seeds:?}");
        assert!(
            seeds.iter().all(|seed| *seed <= u64::from(u32::MAX)),
            "a client's language holds it: {seeds:?}"
        );
    }
}
