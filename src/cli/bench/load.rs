//! Load of the machine by other processes during a measurement.

use std::time::Instant;

use nix::sys::resource::{UsageWho, getrusage};

/// Point in time, with the CPU time of all processors and of our own processes so far.
#[derive(Debug)]
pub struct Reading {
    at: Instant,
    /// Busy and stolen seconds of all processors, and the number of processors; `None` if `/proc/stat` cannot be read.
    machine: Option<(f64, f64)>,
    own: f64,
}

impl Reading {
    /// Takes a reading.
    pub fn now() -> Self {
        Self {
            at: Instant::now(),
            machine: std::fs::read_to_string("/proc/stat")
                .ok()
                .and_then(|text| machine(&text)),
            own: [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN]
                .into_iter()
                .filter_map(|who| getrusage(who).ok())
                .map(|usage| seconds(usage.user_time()) + seconds(usage.system_time()))
                .sum(),
        }
    }

    /// Returns the share of all processors used by others since then, in percent; `None` if unknown.
    pub fn foreign_percent(&self) -> Option<f64> {
        let now = Self::now();
        let ((before, processors), (after, _)) = (self.machine?, now.machine?);
        let room = now.at.duration_since(self.at).as_secs_f64() * processors;
        let foreign = (after - before) - (now.own - self.own);
        Some((100.0 * foreign / room.max(f64::EPSILON)).clamp(0.0, 100.0))
    }
}

/// Parses busy and stolen seconds of all processors from the text of `/proc/stat`, and the number of processors.
#[expect(clippy::cast_precision_loss, reason = "a handful of processors")]
fn machine(text: &str) -> Option<(f64, f64)> {
    let fields: Vec<f64> = text
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_ascii_whitespace()
        .filter_map(|field| field.parse().ok())
        .collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; guest time is included in user and nice.
    let [user, nice, system, _, _, irq, softirq, steal, ..] = *fields.as_slice() else {
        return None;
    };
    let processors = text
        .lines()
        .skip(1)
        .take_while(|line| line.starts_with("cpu"))
        .count();
    Some((
        (user + nice + system + irq + softirq + steal) / TICKS,
        processors as f64,
    ))
}

#[expect(clippy::cast_precision_loss, reason = "seconds of a process")]
fn seconds(time: nix::sys::time::TimeVal) -> f64 {
    time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6
}

/// Ticks of `/proc/stat` per second: `USER_HZ`, 100 on all supported architectures (`proc(5)`).
pub const TICKS: f64 = 100.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_leaves_idle_and_waiting_out_and_counts_what_was_stolen() {
        let text = "cpu  100 10 50 9000 700 1 2 37 5 5\ncpu0 1 2 3\ncpu1 1 2 3\nintr 5\n";
        assert_eq!(machine(text), Some((2.0, 2.0)));
        assert_eq!(machine("cpu  1 2 3\n"), None);
        assert_eq!(machine(""), None);
    }
}
