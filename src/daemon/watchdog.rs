//! Stall detector: a thread that sheds the engine and ends the process when the loop hangs.
//!
//! ```text
//!   Running ──► no turn for 1.75 s ──► Stalled: the engine sheds to its floor, one line is written
//!      ▲                │ the loop runs again                     │ no turn for 5 s
//!      └────────────────┘                                         ▼
//!                                             the process ends with code 70, and systemd starts the next one
//! ```
//!
//! It waits for nothing that a hung loop holds: the loop's time is atomic, the plan is precomputed, and lines are
//! written to stderr by one system call. Only the loop notifies systemd's watchdog, so systemd detects the stall too.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{control_handle::ControlHandle, control_loop::Clock as _, engine::CurrentEngine};
use cotenant_memory::emergency;
use cotenant_policy::residency::EnginePlan;
use cotenant_units::lock::locked;

/// Handle of the thread, for the loop.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
}

struct Shared {
    control: Arc<ControlHandle>,
    engine: Option<CurrentEngine>,
    /// Plan to which the engine sheds.
    floor: Mutex<Option<EnginePlan>>,
    off: AtomicBool,
}

impl Watchdog {
    /// Creates a detector that is not running yet.
    pub(super) fn new(control: &Arc<ControlHandle>, engine: Option<CurrentEngine>) -> Self {
        Self {
            shared: Arc::new(Shared {
                control: Arc::clone(control),
                engine,
                floor: Mutex::new(None),
                off: AtomicBool::new(false),
            }),
        }
    }

    /// Starts the thread. The loop must be running from now on.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(super) fn start(&self) -> io::Result<()> {
        let watched = Arc::clone(&self.shared);
        watched.control.beat(watched.control.clock().now());
        std::thread::Builder::new()
            .name("watchdog".to_owned())
            .stack_size(STACK)
            .spawn(move || {
                emergency::lock_stack();
                watched.watch();
            })?;
        Ok(())
    }

    pub(super) fn is_unarmed(&self) -> bool {
        self.shared.floor().is_none()
    }

    /// Sets the plan to which the engine sheds if the loop stalls.
    pub(super) fn arm(&self, floor: EnginePlan) {
        *self.shared.floor() = Some(floor);
    }

    /// Ends the detector, before the loop stops on purpose.
    pub(super) fn stand_down(&self) {
        self.shared.off.store(true, Ordering::Relaxed);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stand_down();
    }
}

impl Shared {
    fn floor(&self) -> std::sync::MutexGuard<'_, Option<EnginePlan>> {
        locked(&self.floor)
    }

    fn watch(&self) {
        let mut stall = Stall::default();
        while !self.off.load(Ordering::Relaxed) {
            std::thread::sleep(next_look(self.control.since_beat()));
            let reaction = stall.observe(self.control.since_beat());
            if self.off.load(Ordering::Relaxed) {
                return;
            }
            match reaction {
                Reaction::None => {}
                Reaction::Resumed => {
                    say("cotenant: the control loop runs again, and decides on regrowth\n");
                }
                Reaction::Shed => {
                    let shed = emergency::within(|| self.shed());
                    say(if shed {
                        "cotenant: the control loop has not run for 1.75 s: the engine sheds to its floor\n"
                    } else {
                        "cotenant: the control loop has not run for 1.75 s: no engine to shed\n"
                    });
                }
                Reaction::End => {
                    say(
                        "cotenant: the control loop has not run for 5 s: exiting with code 70 for a restart\n",
                    );
                    // No unwinding: the hung thread may hold any lock.
                    // SAFETY: `_exit` takes a number and does not return.
                    unsafe { libc::_exit(EXIT_STALLED) };
                }
            }
        }
    }

    /// Sheds the engine to its floor; returns whether a plan was set.
    fn shed(&self) -> bool {
        let Some(engine) = &self.engine else {
            return false;
        };
        // Taken instead of cloned, to avoid an allocation. The loop sets it again if it resumes.
        let Some(floor) = self.floor().take() else {
            return false;
        };
        // Revision 0 is older than any of the arbiter's, whose requests therefore stay in force.
        engine.handle().apply(0, floor);
        true
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    None,
    /// The loop runs again after a stall.
    Resumed,
    /// The engine must shed to its floor.
    Shed,
    /// The process must end.
    End,
}

#[derive(Debug, Default)]
struct Stall {
    noticed: bool,
}

impl Stall {
    /// Judges a loop that last ran `idle` ago.
    fn observe(&mut self, idle: Duration) -> Reaction {
        if idle < STALL_MIN {
            return if std::mem::take(&mut self.noticed) {
                Reaction::Resumed
            } else {
                Reaction::None
            };
        }
        if !std::mem::replace(&mut self.noticed, true) {
            Reaction::Shed
        } else if idle >= END_AFTER {
            Reaction::End
        } else {
            Reaction::None
        }
    }
}

/// Returns the time until the next look at a loop that last ran `idle` ago: when it would count as stalled.
fn next_look(idle: Duration) -> Duration {
    STALL_MIN.saturating_sub(idle).max(LOOK_EVERY)
}

/// Writes a line to stderr without the locks of the log and the standard library.
fn say(line: &str) {
    // SAFETY: the text is valid for reads of its length, and `write` keeps no reference to it.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// The loop runs at least once per second. With [`LOOK_EVERY`], a stall is detected within 2 s, as in lmkd.
const STALL_MIN: Duration = Duration::from_millis(1750);

/// Polling interval of a stalled loop.
const LOOK_EVERY: Duration = Duration::from_millis(125);

/// Time without an iteration after which the loop counts as lost (our choice: well below systemd's 10 s).
const END_AFTER: Duration = Duration::from_secs(5);

/// Exit code after a stall: `EX_SOFTWARE` of sysexits.h.
const EXIT_STALLED: libc::c_int = 70;

/// Sufficient for reading the time and passing on one plan.
const STACK: usize = 128 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(stall: &mut Stall, millis: &[u64]) -> Vec<Reaction> {
        millis
            .iter()
            .map(|millis| stall.observe(Duration::from_millis(*millis)))
            .collect()
    }

    #[test]
    fn a_loop_that_runs_is_looked_at_once_it_would_have_stalled() {
        let next = |millis| next_look(Duration::from_millis(millis)).as_millis();
        assert_eq!(
            [0, 750, 1700, 1750, 60_000].map(next),
            [1750, 1000, 125, 125, 125]
        );
    }

    #[test]
    fn a_stall_sheds_once_and_a_loop_that_runs_again_is_left_alone() {
        use Reaction::{None, Resumed, Shed};
        let mut stall = Stall::default();
        assert_eq!(observed(&mut stall, &[0, 1000, 1749]), [None; 3]);
        assert_eq!(
            observed(&mut stall, &[1750, 1875, 4999]),
            [Shed, None, None]
        );
        assert_eq!(observed(&mut stall, &[10, 20]), [Resumed, None]);
        assert_eq!(
            observed(&mut stall, &[1800]),
            [Shed],
            "the next stall counts too"
        );
    }

    #[test]
    fn a_stall_that_lasts_ends_the_process_after_it_has_shed() {
        let mut stall = Stall::default();
        // The machine was suspended, or the detector itself got no processor: the engine still sheds first.
        assert_eq!(
            observed(&mut stall, &[60_000, 60_125]),
            [Reaction::Shed, Reaction::End]
        );
        assert_eq!(
            observed(&mut Stall::default(), &[1750, 5000]),
            [Reaction::Shed, Reaction::End]
        );
    }
}
