//! A thread that looks after the loop, and acts when it stands still.
//!
//! ```text
//!   turns ──► stands still for 1.75 s ──► the engine comes down to its floor, one line is written
//!     ▲                │ turns again                     │ still stands still after 5 s
//!     └────────────────┘                                 ▼
//!                                          the process ends with code 70, and systemd starts the next one
//! ```
//!
//! It needs nothing that the loop could hold: its time is the loop's own atomic, its plan was made before, its line goes
//! to stderr by one system call. systemd's watchdog is told by the loop alone, so that it too sees the stillness.

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{engine::CurrentEngine, hub::Hub};
use crate::{policy::residency::EnginePlan, standby};

/// The thread, as the loop sees it.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
}

struct Shared {
    hub: Arc<Hub>,
    engine: Option<CurrentEngine>,
    /// What the engine comes down to when nobody decides any more.
    floor: Mutex<Option<EnginePlan>>,
    off: AtomicBool,
}

impl Watchdog {
    /// Starts to look after the loop of `hub`, which turns from now on.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(super) fn start(hub: &Arc<Hub>, engine: Option<CurrentEngine>) -> io::Result<Self> {
        hub.turn();
        let shared = Arc::new(Shared {
            hub: Arc::clone(hub),
            engine,
            floor: Mutex::new(None),
            off: AtomicBool::new(false),
        });
        let watched = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("watchdog".to_owned())
            .stack_size(STACK)
            .spawn(move || {
                standby::lock_stack();
                watched.watch();
            })?;
        Ok(Self { shared })
    }

    /// Whether it has no plan yet for the case that nobody decides any more.
    pub(super) fn is_unarmed(&self) -> bool {
        self.shared.floor().is_none()
    }

    /// Tells what the engine is to come down to when nobody decides any more.
    pub(super) fn arm(&self, floor: EnginePlan) {
        *self.shared.floor() = Some(floor);
    }

    /// The loop stops on purpose.
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
        self.floor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self) {
        let mut noticed = false;
        while !self.off.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK_EVERY);
            let still = self.hub.still_for();
            if still < STILL_MAX {
                if std::mem::take(&mut noticed) {
                    say("cotenant: the control loop turns again; it decides what grows back\n");
                }
                continue;
            }
            if self.off.load(Ordering::Relaxed) {
                return;
            }
            if !std::mem::replace(&mut noticed, true) {
                let shed = standby::within(|| self.shed());
                say(if shed {
                    "cotenant: the control loop has stood still for 1.75 s: the engine comes down to its floor\n"
                } else {
                    "cotenant: the control loop has stood still for 1.75 s: there is no engine to shed\n"
                });
            }
            if still >= END_AFTER {
                say("cotenant: the control loop has stood still for 5 s: ending with code 70, to be started again\n");
                // Nothing is unwound: what hangs may hold any lock.
                // SAFETY: `_exit` takes a number and does not return.
                unsafe { libc::_exit(EXIT_STILL) };
            }
        }
    }

    /// Lets the engine come down; whether there was one to ask.
    fn shed(&self) -> bool {
        let Some(engine) = &self.engine else { return false };
        // Taken and not copied: there is nothing to allocate on the way. When the loop turns again it arms anew.
        let Some(floor) = self.floor().take() else {
            return false;
        };
        // Revision 0 is older than any that the arbiter gives out: whatever it has asked for stays asked.
        engine.handle().apply(0, floor);
        true
    }
}

/// Writes a line to stderr without the locks that the log and the standard library hold.
fn say(line: &str) {
    // SAFETY: the text is valid for reads of its length, and `write` keeps no reference to it.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// The loop turns at least once a second. Noticed with [`LOOK_EVERY`] within 2 s, as lmkd has it.
const STILL_MAX: Duration = Duration::from_millis(1750);

/// Between two looks; 8 wake-ups a second cost below 0.1 % of a core.
const LOOK_EVERY: Duration = Duration::from_millis(125);

/// A loop that has not come back by then is taken for lost (our choice: well below systemd's own 10 s).
const END_AFTER: Duration = Duration::from_secs(5);

/// Exit code of a daemon whose loop stood still: `EX_SOFTWARE` of sysexits.h.
const EXIT_STILL: libc::c_int = 70;

/// It looks at the time and hands on one plan.
const STACK: usize = 128 << 10;
