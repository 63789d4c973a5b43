//! Tests of pressure levels.

use proptest::prelude::*;

use super::*;

const fn mib(mib: u64) -> Bytes {
    Bytes::from_mib(mib)
}

fn params() -> PressureParams {
    PressureParams {
        elevated_below: mib(130),
        critical_below: mib(65),
        last_resort_below: mib(30),
        hysteresis: mib(20),
        dwell: Duration::from_secs(10),
        ..PressureParams::scaled_to(mib(1000))
    }
}

fn observe(pressure: &mut Pressure, millis: u64, headroom: u64) -> Option<PressureLevel> {
    let sample = Sample {
        taken_at: Timestamp::from_millis(millis),
        ..Sample::default()
    };
    pressure
        .observe(&sample, mib(headroom))
        .map(|change| change.to)
}

#[test]
fn level_rises_with_the_second_sample_and_falls_only_after_the_dwell_time() {
    let mut pressure = Pressure::new(params());
    assert_eq!(observe(&mut pressure, 0, 131), None);
    assert_eq!(observe(&mut pressure, 1000, 125), None);
    assert_eq!(
        observe(&mut pressure, 1010, 125),
        Some(PressureLevel::Elevated)
    );
    assert_eq!(pressure.dwell_left(Timestamp::from_millis(1010)), None);
    for second in 2..12 {
        assert_eq!(
            observe(&mut pressure, second * 1000, 400),
            None,
            "{second} s"
        );
    }
    let left = pressure.dwell_left(Timestamp::from_millis(11_500));
    assert_eq!(left, Some(Duration::from_millis(500)));
    assert_eq!(
        observe(&mut pressure, 12_000, 400),
        Some(PressureLevel::Normal)
    );
}

#[test]
fn a_sample_within_the_hysteresis_starts_the_dwell_again() {
    let mut pressure = Pressure::new(params());
    observe(&mut pressure, 0, 120);
    observe(&mut pressure, 10, 120);
    for second in 1..10 {
        observe(&mut pressure, second * 1000, 400);
    }
    assert_eq!(observe(&mut pressure, 10_000, 149), None);
    for second in 11..21 {
        assert_eq!(observe(&mut pressure, second * 1000, 151), None);
    }
    assert_eq!(
        observe(&mut pressure, 21_000, 151),
        Some(PressureLevel::Normal)
    );
}

#[test]
fn one_bad_sample_is_not_believed_but_a_steep_slope_is() {
    let mut pressure = Pressure::new(params());
    observe(&mut pressure, 0, 135);
    assert_eq!(observe(&mut pressure, 1000, 128), None);
    assert_eq!(observe(&mut pressure, 1010, 135), None);
    assert_eq!(
        observe(&mut pressure, 1020, 110),
        Some(PressureLevel::Elevated)
    );
}

#[test]
fn a_confirming_signal_stands_for_the_second_sample() {
    let mut pressure = Pressure::new(params());
    let sample = |millis, stalls| Sample {
        taken_at: Timestamp::from_millis(millis),
        counters: KernelCounters {
            allocstalls: Some(stalls),
            ..KernelCounters::default()
        },
        ..Sample::default()
    };
    assert_eq!(pressure.observe(&sample(0, 7), mib(131)), None);
    let change = pressure.observe(&sample(1000, 9), mib(129)).unwrap();
    let below = LevelReason::Below {
        headroom: mib(129),
        watermark: mib(130),
        by: Confirmation::Stalls { count: 2 },
    };
    assert_eq!(change.reason, below);
}

#[test]
fn samples_come_faster_the_nearer_the_watermark_is() {
    let mut pressure = Pressure::new(params());
    assert_eq!(pressure.interval(), Duration::from_millis(10));
    for (millis, headroom, expected) in [
        (0, 100_000, 1000),
        (10, 2178, 341),
        (20, 131, 10),
        (30, 66, 10),
    ] {
        observe(&mut pressure, millis, headroom);
        assert_eq!(pressure.interval().as_millis(), expected, "{headroom} MiB");
    }
}

#[test]
fn samples_near_a_watermark_follow_the_slope_once_it_is_known() {
    let mut pressure = Pressure::new(params());
    let mut now = 0;
    let mut samples = 0;
    // 30 MiB above the watermark, with the noise of an idle machine.
    while now < 10_000 {
        observe(&mut pressure, now, 160 + u64::from(now % 3 == 0));
        now += u64::try_from(pressure.interval().as_millis()).unwrap();
        samples += 1;
    }
    assert!((100..320).contains(&samples), "{samples} in 10 s");
    assert_eq!(pressure.interval(), CALM_INTERVAL);
    // Shrinking headroom and Critical are sampled at the shortest interval.
    observe(&mut pressure, now, 140);
    assert_eq!(pressure.interval(), Duration::from_millis(10));
    observe(&mut pressure, now + 10, 60);
    assert_eq!(pressure.interval(), Duration::from_millis(10));
}

#[test]
fn a_late_sample_changes_nothing() {
    let mut pressure = Pressure::new(params());
    observe(&mut pressure, 1000, 500);
    assert_eq!(observe(&mut pressure, 900, 1), None);
    assert_eq!(observe(&mut pressure, 1000, 1), None);
    assert_eq!(pressure.headroom(), Some(mib(500)));
}

#[test]
fn available_leaves_out_what_the_gpu_can_never_have() {
    let sample = Sample {
        memory: MemoryReading {
            mem_available: mib(1000),
            ..MemoryReading::default()
        },
        gpu: GpuReading {
            cma_free: Some(mib(200)),
            nvmap_pool: Some(mib(50)),
            ..GpuReading::default()
        },
        ..Sample::default()
    };
    assert_eq!(sample.available(), mib(850));
}

/// Observes a sample with the counters `(refaults, stalls)`.
fn signs(
    pressure: &mut Pressure,
    millis: u64,
    headroom: u64,
    (refaults, stalls): (u64, u64),
) -> Option<LevelChange> {
    let sample = Sample {
        taken_at: Timestamp::from_millis(millis),
        counters: KernelCounters {
            refaults_file: Some(refaults),
            allocstalls: Some(stalls),
            ..KernelCounters::default()
        },
        ..Sample::default()
    };
    pressure.observe(&sample, mib(headroom))
}

#[test]
fn file_pages_read_again_for_three_seconds_are_elevated_where_headroom_is_not_plentiful() {
    for (headroom, expected) in [(250, PressureLevel::Elevated), (300, PressureLevel::Normal)] {
        let mut pressure = Pressure::new(params());
        for step in 0..=16 {
            let changed = signs(&mut pressure, step * 200, headroom, (step * 1200, 0));
            assert!(changed.is_none() || step == 15, "{step}: {changed:?}");
        }
        assert_eq!(pressure.level(), expected, "{headroom} MiB");
    }
}

#[test]
fn contiguous_memory_that_is_refused_is_elevated_where_headroom_is_not_plentiful() {
    for (headroom, expected) in [(250, PressureLevel::Elevated), (300, PressureLevel::Normal)] {
        let mut pressure = Pressure::new(params());
        for (millis, failures) in [(0, 3), (200, 3), (400, 5)] {
            let sample = Sample {
                taken_at: Timestamp::from_millis(millis),
                counters: KernelCounters {
                    cma_failures: Some(failures),
                    ..KernelCounters::default()
                },
                ..Sample::default()
            };
            let change = pressure.observe(&sample, mib(headroom));
            assert!(change.is_none() || millis == 400, "{change:?}");
        }
        assert_eq!(pressure.level(), expected, "{headroom} MiB");
    }
}

#[test]
fn stalls_in_two_samples_are_critical_below_the_upper_watermark() {
    let mut pressure = Pressure::new(params());
    assert_eq!(signs(&mut pressure, 0, 200, (0, 1)), None);
    assert_eq!(signs(&mut pressure, 200, 200, (0, 5)), None);
    assert_eq!(
        signs(&mut pressure, 400, 200, (0, 9)),
        None,
        "plenty is there"
    );
    let change = signs(&mut pressure, 600, 120, (0, 12)).unwrap();
    assert_eq!(change.to, PressureLevel::Critical);
    let again = LevelReason::StallsAgain {
        headroom: mib(120),
        watermark: mib(130),
        stalls: 3,
        scans: 0,
    };
    assert_eq!(change.reason, again);
    for second in 1..30 {
        signs(&mut pressure, 600 + second * 1000, 400, (0, 12));
    }
    assert_eq!(pressure.level(), PressureLevel::Normal);
}

#[test]
fn a_counter_that_goes_back_says_nothing() {
    let mut pressure = Pressure::new(params());
    signs(&mut pressure, 0, 120, (1 << 40, 1 << 40));
    for step in 1..20 {
        let change = signs(&mut pressure, step * 200, 125, (1000 - step, 1000 - step));
        assert!(change.is_none_or(|change| change.to == PressureLevel::Elevated));
    }
}

#[test]
fn the_slope_foretells_when_nothing_will_be_left() {
    let mut pressure = Pressure::new(params());
    for step in 0u64..=20 {
        observe(&mut pressure, step * 200, 900 - step * 20);
    }
    assert_eq!(pressure.trend.losing_per_s(), mib(100));
    assert_eq!(pressure.exhausted_in(), Some(Duration::from_secs(5)));
    for step in 21..40 {
        observe(&mut pressure, step * 200, 500);
    }
    assert_eq!(pressure.exhausted_in(), None);
}

#[test]
fn what_was_taken_at_once_foretells_no_end() {
    let mut pressure = Pressure::new(params());
    for step in 0u64..10 {
        observe(&mut pressure, step * 200, 900);
    }
    observe(&mut pressure, 2000, 600);
    for step in 11u64..14 {
        observe(&mut pressure, step * 200, 600);
        assert!(pressure.trend.losing_per_s() > Bytes::ZERO);
        assert_eq!(pressure.exhausted_in(), None);
    }
}

#[test]
fn a_loss_of_a_moment_foretells_no_end() {
    let mut pressure = Pressure::new(params());
    let mut headroom = 900;
    let mut said = Vec::new();
    for second in 0u64..50 {
        // Two seconds at rest, as when a worker is started; later without end.
        if (10..12).contains(&second) || second > 15 {
            headroom -= 17;
        }
        observe(&mut pressure, second * 1000, headroom);
        said.extend(pressure.exhausted_in().map(|left| (second, left.as_secs())));
    }
    assert_eq!(said.first(), Some(&(33, 32)), "{said:?}");
    assert_eq!(said.len(), 17, "and from then on: {said:?}");
}

#[test]
fn elevated_has_a_grace_unless_critical_is_ahead() {
    let grace = Duration::from_secs(2);
    let mut slow = Pressure::new(PressureParams { grace, ..params() });
    observe(&mut slow, 0, 131);
    observe(&mut slow, 1000, 128);
    assert_eq!(observe(&mut slow, 2000, 127), Some(PressureLevel::Elevated));
    assert!(slow.in_grace(Timestamp::from_millis(3999)));
    assert!(!slow.in_grace(Timestamp::from_millis(4000)));
    let mut fast = Pressure::new(PressureParams { grace, ..params() });
    observe(&mut fast, 0, 400);
    observe(&mut fast, 900, 220);
    assert_eq!(observe(&mut fast, 1800, 100), Some(PressureLevel::Elevated));
    assert!(
        !fast.in_grace(Timestamp::from_millis(1801)),
        "{:?}",
        fast.trend.losing_per_s()
    );
}

#[test]
fn stalls_of_a_machine_with_plenty_say_nothing_of_a_session_on_it() {
    let level = |available| {
        let mut pressure = Pressure::new(params());
        for (at, stalls) in [(0, 1), (200, 5), (400, 9), (600, 12)] {
            let sample = Sample {
                taken_at: Timestamp::from_millis(at),
                memory: MemoryReading {
                    mem_total: mib(16_000),
                    mem_available: mib(available),
                    ..MemoryReading::default()
                },
                scope_used: Some(mib(880)),
                counters: KernelCounters {
                    allocstalls: Some(stalls),
                    ..KernelCounters::default()
                },
                ..Sample::default()
            };
            pressure.observe(&sample, mib(120));
        }
        pressure.level()
    };
    assert_eq!(level(1999), PressureLevel::Critical, "the machine is short");
    assert_eq!(
        level(2000),
        PressureLevel::Elevated,
        "by the session's own headroom"
    );
}

#[test]
fn a_neighbour_that_takes_what_the_engine_gives_back_is_a_slope() {
    let grace = Duration::from_secs(2);
    let urgent = |returned, at| {
        let mut pressure = Pressure::new(PressureParams { grace, ..params() });
        for millis in [0, 500, 1000] {
            observe(&mut pressure, millis, 120);
        }
        pressure
            .trend
            .came_back(mib(returned), Timestamp::from_millis(1000));
        observe(&mut pressure, 1500, 120);
        pressure
            .trend
            .came_back(mib(returned), Timestamp::from_millis(at));
        observe(&mut pressure, 2000, 120);
        (
            pressure.is_urgent(),
            pressure.trend.lost_within(Duration::from_secs(1)),
        )
    };
    assert_eq!(urgent(0, 1500), (false, Bytes::ZERO));
    assert_eq!(
        urgent(90, 1500),
        (true, mib(180)),
        "taken as soon as it was given"
    );
    assert_eq!(
        urgent(90, 2100).1,
        Bytes::ZERO,
        "the sample is older than what was given back"
    );

    let mut pressure = Pressure::new(params());
    let mut lost = |millis, headroom| {
        observe(&mut pressure, millis, headroom);
        pressure.trend.lost_within(Duration::from_millis(100))
    };
    for (millis, headroom) in [(0, 400), (1000, 400), (1100, 250)] {
        assert_eq!(lost(millis, headroom), Bytes::ZERO, "a jump is no slope");
    }
    assert!(lost(1200, 100) > mib(20), "twice is one");
    assert_eq!(lost(1300, 100), Bytes::ZERO, "it has all that it wanted");
}

#[test]
fn what_was_granted_is_no_slope() {
    let grace = Duration::from_secs(2);
    let fall = |granted| {
        let mut pressure = Pressure::new(PressureParams { grace, ..params() });
        observe(&mut pressure, 0, 300);
        observe(&mut pressure, 900, 300);
        pressure.trend.granted(mib(granted));
        let first = observe(&mut pressure, 1000, 100);
        (
            first,
            observe(&mut pressure, 1100, 100),
            pressure.is_urgent(),
        )
    };
    assert_eq!(
        fall(0),
        (Some(PressureLevel::Elevated), None, false),
        "a neighbour, which may have all that it wanted"
    );
    assert_eq!(
        fall(200),
        (None, Some(PressureLevel::Elevated), false),
        "a lease"
    );
    assert_eq!(
        fall(20).0,
        Some(PressureLevel::Elevated),
        "more than was granted"
    );
}

#[test]
fn a_checkpoint_of_the_version_before_is_read() {
    let mut pressure = Pressure::new(params());
    for second in 0..5u64 {
        observe(&mut pressure, second * 1000, 200 - second * 30);
    }
    let mut value = serde_json::to_value(&pressure).unwrap();
    let fields = value.as_object_mut().unwrap();
    for new in ["losing", "losing_since"] {
        assert!(fields.remove(new).is_some(), "{new}");
    }
    let before = "params last level calm rose_at refaulting_since stalls_in_a_row earlier granted returned \
                  critical_by_signs lost_lately";
    assert!(
        before
            .split_whitespace()
            .all(|field| fields.contains_key(field)),
        "{fields:?}"
    );
    assert_eq!(fields.len(), 12, "{fields:?}");
    let mut read: Pressure = serde_json::from_value(value).unwrap();
    assert_eq!(read.level(), PressureLevel::Elevated);
    observe(&mut read, 5000, 50);
    observe(&mut pressure, 5000, 50);
    assert_eq!(read.trend.losing_per_s(), pressure.trend.losing_per_s());
}

proptest! {
    #[test]
    fn the_level_falls_at_most_once_per_dwell_and_never_without_headroom(
        samples in prop::collection::vec((1u64..3000, 0u64..400), 1..300),
    ) {
        let mut pressure = Pressure::new(params());
        let mut now = 0;
        let mut fell_at = None;
        for (wait, headroom) in samples {
            now += wait;
            let before = pressure.level();
            if let Some(to) = observe(&mut pressure, now, headroom) && to < before {
                prop_assert!(headroom >= 65 + 20);
                if let Some(last) = fell_at.replace(now) {
                    prop_assert!(now - last >= 10_000);
                }
            }
        }
    }
}
