//! Trace of a voice device, the same for every policy.
//!
//! Eight traces are drawn from a seed, seven follow published incidents (sizes in MiB as `free -m` prints them, 15 656
//! in all): co-residency of TensorRT-Edge-LLM on an Orin NX in two runs, the outage and the crash loop of zoe, the
//! ratchet of roboflow, and callers that alternate between models (Lemonade, llama-swap). Models are loaded before the
//! first request if the policy allows it.

use super::rules::Kind;

/// Model that is loaded as a whole, or the LLM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) steady_mib: u64,
    /// Use while it loads.
    pub(super) peak_mib: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Happening {
    /// A user speaks: the recogniser must start within 300 ms, with this much additional memory.
    Listen { extra_mib: u64, lasts_ms: u64 },
    /// A sentence must be spoken within 1 s.
    Say { lasts_ms: u64 },
    /// An answer of this many tokens.
    Answer { model: &'static str, tokens: u64 },
    /// An unmanaged program changes its use to this size, at the rate of the device.
    Neighbour { mib: u64 },
    /// A model's process ends.
    Dies { model: &'static str },
    /// A model grows, and keeps the memory.
    Grows { model: &'static str, mib: u64 },
}

/// Device with its day.
#[derive(Clone, Debug)]
pub(super) struct Trace {
    pub(super) name: &'static str,
    /// Constant use by the OS and everything else.
    pub(super) baseline_mib: u64,
    /// The first is the LLM that our engine hosts.
    pub(super) models: Vec<Model>,
    /// Events by time, in ms.
    pub(super) happenings: Vec<(u64, Happening)>,
    pub(super) ends_ms: u64,
}

/// Time per token of the fully resident LLM.
pub(super) const TOKEN_US: u64 = 80_000;
/// The board's reported total.
pub(super) const TOTAL_MIB: u64 = 15_656;
/// Warm-up after loading, with time to grow: our engine waits a minute after the last change.
pub(super) const WARM_MS: u64 = 180_000;

const fn model(name: &'static str, kind: Kind, steady_mib: u64, peak_mib: u64) -> Model {
    Model {
        name,
        kind,
        steady_mib,
        peak_mib,
    }
}

/// Zoe's board: LLM 6.4 GB, Kokoro 2.2 with a peak of 2.465, Moonshine 1.1 with transients up to 3.16.
const ZOE: [Model; 3] = [
    model("llm", Kind::Llm, 6100, 6100),
    model("tts", Kind::Tts, 2200, 2465),
    model("asr", Kind::Asr, 1100, 1100),
];
/// Largest transient of Moonshine above its steady use.
const ZOE_EXTRA_MIB: u64 = 2060;
/// Use before any load, in the second run of the co-residency measurement.
const BASELINE_MIB: u64 = 3253;

/// `SplitMix64`: small, and identical on all platforms.
struct Draw(u64);

impl Draw {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
    const fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }
}

impl Trace {
    fn new(name: &'static str, models: &[Model]) -> Self {
        Self {
            name,
            baseline_mib: BASELINE_MIB,
            models: models.to_vec(),
            happenings: Vec::new(),
            ends_ms: 0,
        }
    }

    fn at(&mut self, ms: u64, happening: Happening) {
        self.happenings.push((ms, happening));
    }

    /// Adds one turn: a user speaks, the LLM answers, the answer is spoken. Returns its end.
    fn turn(&mut self, at: u64, draw: &mut Draw, extra_mib: u64, tokens: u64) -> u64 {
        let heard = at + draw.between(1500, 4000);
        let lasts_ms = heard - at;
        self.at(
            at,
            Happening::Listen {
                extra_mib,
                lasts_ms,
            },
        );
        self.at(
            heard,
            Happening::Answer {
                model: "llm",
                tokens,
            },
        );
        let speaks = heard + draw.between(800, 2000);
        self.at(speaks, Happening::Say { lasts_ms: 3000 });
        heard + tokens * TOKEN_US / 1000
    }

    /// Adds turns until `until`, with pauses and needs drawn from these ranges.
    fn converse(
        &mut self,
        from: u64,
        until: u64,
        draw: &mut Draw,
        pause_s: (u64, u64),
        extra: (u64, u64),
    ) {
        let mut at = from;
        while at < until {
            let (extra, tokens) = (draw.between(extra.0, extra.1), draw.between(40, 200));
            at = self.turn(at, draw, extra, tokens) + 1000 * draw.between(pause_s.0, pause_s.1);
        }
    }

    fn finished(mut self) -> Self {
        self.happenings.sort_by_key(|(at, _)| *at);
        let last = self.happenings.last().map_or(WARM_MS, |(at, _)| *at);
        self.ends_ms = last + 60_000;
        self
    }
}

/// Returns all traces; random ones from this seed.
pub(super) fn all(seed: u64) -> Vec<Trace> {
    let mut draw = Draw(seed);
    let mut traces = drawn(&mut draw);
    traces.extend(published(&mut draw));
    traces.into_iter().map(Trace::finished).collect()
}

const MINUTE: u64 = 60_000;

fn drawn(draw: &mut Draw) -> Vec<Trace> {
    let end = WARM_MS + 6 * MINUTE;
    let mut calm = Trace::new("wake-words", &ZOE);
    calm.converse(WARM_MS, end, draw, (10, 40), (200, 800));

    let mut peaks = Trace::new("large-transients", &ZOE);
    peaks.converse(WARM_MS, end, draw, (5, 20), (1500, ZOE_EXTRA_MIB));

    let mut barge = Trace::new("barge-in", &ZOE);
    let mut at = WARM_MS;
    while at < end {
        barge.at(
            at,
            Happening::Answer {
                model: "llm",
                tokens: 400,
            },
        );
        for word in [4000, 12_000, 20_000] {
            let (extra_mib, lasts_ms) =
                (draw.between(800, ZOE_EXTRA_MIB), draw.between(1000, 3000));
            barge.at(
                at + word + draw.between(0, 3000),
                Happening::Listen {
                    extra_mib,
                    lasts_ms,
                },
            );
        }
        at += draw.between(40_000, 70_000);
    }

    let mut neighbour = Trace::new("neighbour", &ZOE);
    neighbour.converse(WARM_MS, end, draw, (5, 20), (400, 1500));
    let mut at = WARM_MS + 20_000;
    while at < end {
        neighbour.at(
            at,
            Happening::Neighbour {
                mib: draw.between(1500, 3000),
            },
        );
        at += draw.between(20_000, 60_000);
        neighbour.at(at, Happening::Neighbour { mib: 0 });
        at += draw.between(40_000, 90_000);
    }

    let mut storm = Trace::new("neighbour-storm", &ZOE);
    storm.converse(WARM_MS, end, draw, (5, 15), (200, 1000));
    let mut at = WARM_MS + 10_000;
    while at < end {
        storm.at(
            at,
            Happening::Neighbour {
                mib: draw.between(500, 3000),
            },
        );
        at += draw.between(3000, 12_000);
    }
    storm.at(at, Happening::Neighbour { mib: 0 });

    let mut night = Trace::new("night", &ZOE);
    for hour in 0..3 {
        let from = WARM_MS + hour * 15 * MINUTE;
        night.converse(from, from + MINUTE, draw, (5, 15), (200, 1000));
    }

    let mut family = Trace::new("two-speakers", &ZOE);
    family.converse(WARM_MS, end, draw, (20, 40), (300, 1000));
    let mut at = WARM_MS + 500;
    while at < end {
        let (extra_mib, lasts_ms) = (draw.between(300, 1000), draw.between(1000, 5000));
        family.at(
            at,
            Happening::Listen {
                extra_mib,
                lasts_ms,
            },
        );
        at += draw.between(5000, 15_000);
    }

    let mut creep = Trace::new("creeping-neighbour", &ZOE);
    creep.converse(WARM_MS, end, draw, (5, 20), (200, 800));
    for step in 1..=15 {
        creep.at(
            WARM_MS + step * 30_000,
            Happening::Neighbour {
                mib: step * draw.between(150, 250),
            },
        );
    }
    vec![calm, peaks, barge, neighbour, storm, night, family, creep]
}

fn published(draw: &mut Draw) -> Vec<Trace> {
    let end = WARM_MS + 5 * MINUTE;
    // 3422 → TTS 3660 → after the first synthesis 3757 → ASR 5693, peak 6785; LLM 2219 by its measured delta.
    let mut first = Trace::new(
        "orin-nx-v080, run 1",
        &[
            model("llm", Kind::Llm, 2219, 2219),
            model("tts", Kind::Tts, 335, 335),
            model("asr", Kind::Asr, 1936, 1936),
        ],
    );
    first.baseline_mib = 3422;
    first.converse(WARM_MS, end, draw, (5, 20), (1092, 1092));

    // 3253 → TTS 4088 → LLM 6307 → all active 9968, peak 11 062: 3661 more are ASR, 1094 above is the peak.
    let mut second = Trace::new(
        "orin-nx-v080, run 2",
        &[
            model("llm", Kind::Llm, 2219, 2219),
            model("tts", Kind::Tts, 835, 835),
            model("asr", Kind::Asr, 3661, 3661),
        ],
    );
    second.converse(WARM_MS, end, draw, (5, 20), (1094, 1094));

    // The LLM ends, TTS grows to its peak and keeps the memory, and the LLM must be reloaded. Fragmentation, which
    // prevented a single large allocation, is not modelled.
    let mut outage = Trace::new("zoe-outage", &ZOE);
    outage.converse(WARM_MS, end, draw, (5, 20), (300, 1500));
    outage.at(WARM_MS + MINUTE, Happening::Dies { model: "llm" });
    outage.at(
        WARM_MS + MINUTE,
        Happening::Grows {
            model: "tts",
            mib: 265,
        },
    );

    // Less than 2 GB are available; a neighbour takes 1.5 GB for a while, during which the LLM is killed.
    let mut crashloop = Trace::new("zoe-crashloop", &ZOE);
    crashloop.baseline_mib = 3253 + 1000;
    crashloop.converse(WARM_MS, end, draw, (5, 20), (200, 600));
    crashloop.at(WARM_MS + MINUTE, Happening::Neighbour { mib: 1500 });
    crashloop.at(WARM_MS + MINUTE + 5000, Happening::Dies { model: "llm" });
    crashloop.at(WARM_MS + 3 * MINUTE, Happening::Neighbour { mib: 0 });

    // A process grows from 5 to 13.4 GB, never releases any, and is killed: more than the board has beside its OS.
    let mut ratchet = Trace::new(
        "roboflow-ratchet",
        &[
            model("llm", Kind::Llm, 2219, 2219),
            model("tts", Kind::Tts, 335, 335),
            model("asr", Kind::Asr, 1100, 1100),
        ],
    );
    ratchet.converse(WARM_MS, end, draw, (5, 20), (200, 600));
    for step in 0..=12 {
        ratchet.at(
            WARM_MS + step * 20_000,
            Happening::Neighbour {
                mib: 5000 + step * 700,
            },
        );
    }
    ratchet.at(end, Happening::Neighbour { mib: 0 });

    // A B A A C A B C, of which any two fit, in quick succession; then again with pauses.
    let mut thrash = Trace::new(
        "ab-thrash",
        &[
            model("llm", Kind::Llm, 5500, 5500),
            model("router", Kind::Llm, 4000, 4000),
            model("candidate", Kind::Llm, 4000, 4000),
        ],
    );
    for (round, pause) in [8000, 15_000].into_iter().cycle().take(6).enumerate() {
        let from = WARM_MS + u64::try_from(round).unwrap_or(0) * 130_000;
        let queue = [
            "llm",
            "router",
            "llm",
            "llm",
            "candidate",
            "llm",
            "router",
            "candidate",
        ];
        for (place, model) in (0..).zip(queue) {
            thrash.at(
                from + place * pause,
                Happening::Answer { model, tokens: 80 },
            );
        }
    }
    // The same with two models on one slot: the router before each answer.
    let mut slot = Trace::new(
        "one-slot",
        &[
            model("llm", Kind::Llm, 7000, 7000),
            model("router", Kind::Llm, 6000, 6000),
        ],
    );
    for turn in 0..25 {
        let at = WARM_MS + turn * 20_000;
        slot.at(
            at,
            Happening::Answer {
                model: "router",
                tokens: 10,
            },
        );
        slot.at(
            at + 2000,
            Happening::Answer {
                model: "llm",
                tokens: 100,
            },
        );
    }
    vec![first, second, outage, crashloop, ratchet, thrash, slot]
}
