//! Bounded queues of commands and requests for the engine's thread.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::{
    generate::{FinishReason, GenerateError, GenerateRequest, RequestId, SubmitError},
    handle::{EngineOptions, EnginePhase, EngineSnapshot},
    outlet::{Outlet, Reader},
    sampling::TokenMask,
    text::TextSide,
};
use crate::{policy::residency::EnginePlan, units::Tokens};

/// What the thread is asked to do between two tokens.
#[derive(Debug)]
pub(super) enum Command {
    /// Load a model.
    Load {
        /// The file.
        path: PathBuf,
        /// What it should hold at first.
        plan: EnginePlan,
    },
    /// Change what the model holds.
    Apply {
        /// Which plan.
        revision: u64,
        /// The plan.
        plan: EnginePlan,
    },
}

/// How a request is ended from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndRequest {
    /// Nobody wants the answer.
    Cancel,
    /// Its KV blocks are needed elsewhere.
    Reclaim,
}

/// A request that waits.
pub(super) struct Queued {
    pub(super) request: GenerateRequest,
    pub(super) prompt: Vec<u32>,
    pub(super) mask: Option<Box<dyn TokenMask>>,
    pub(super) outlet: Outlet,
    pub(super) submitted: Instant,
}

/// A request that ended before its turn, and how.
pub(super) struct Ended {
    pub(super) queued: Queued,
    pub(super) outcome: Result<FinishReason, GenerateError>,
}

/// What the thread finds at a command point.
pub(super) struct Polled {
    /// The next command.
    pub(super) command: Option<Command>,
    /// Plans that a later one overtook, each with the later one.
    pub(super) superseded: Vec<(u64, u64)>,
    /// Requests that ended in the queue.
    pub(super) ended: Vec<Ended>,
    /// That the running request is to end.
    pub(super) end_running: Option<EndRequest>,
    /// How far the engine is on its way out.
    pub(super) lifecycle: Lifecycle,
    /// Requests waiting.
    pub(super) queued: usize,
}

/// How far the engine is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lifecycle {
    /// It takes requests.
    Open,
    /// It finishes what it has.
    Draining,
    /// It drops what it has.
    Stopping,
    /// Its thread ended.
    Closed,
}

/// What the handles and the thread share.
pub(super) struct Shared {
    inbox: Mutex<Inbox>,
    wake: Condvar,
    state: watch::Sender<EngineSnapshot>,
    text: OnceLock<Arc<TextSide>>,
    options: EngineOptions,
}

struct Inbox {
    /// At most one plan after at most one model, however often they are asked for.
    commands: VecDeque<Command>,
    superseded: Vec<(u64, u64)>,
    queue: VecDeque<Queued>,
    ended: Vec<Ended>,
    running: Option<(RequestId, Option<EndRequest>)>,
    lifecycle: Lifecycle,
}

impl Shared {
    pub(super) fn new(options: EngineOptions) -> Self {
        Self {
            inbox: Mutex::new(Inbox {
                // With room, so that asking for a shed allocates nothing.
                commands: VecDeque::with_capacity(4),
                superseded: Vec::with_capacity(SUPERSEDED),
                queue: VecDeque::new(),
                ended: Vec::new(),
                running: None,
                lifecycle: Lifecycle::Open,
            }),
            wake: Condvar::new(),
            state: watch::Sender::new(EngineSnapshot::initial()),
            text: OnceLock::new(),
            options,
        }
    }

    // What the handles do.

    pub(super) fn command(&self, command: Command) {
        let mut inbox = self.lock();
        if let Command::Apply { revision, .. } = command
            && let Some(Command::Apply { revision: earlier, .. }) = inbox.commands.back()
        {
            let earlier = *earlier;
            inbox.commands.pop_back();
            inbox.superseded.push((earlier, revision));
        }
        inbox.commands.push_back(command);
        drop(inbox);
        self.wake.notify_all();
    }

    pub(super) fn submit(&self, queued: Queued) -> Result<(), SubmitError> {
        let mut inbox = self.lock();
        match inbox.lifecycle {
            Lifecycle::Open => {}
            Lifecycle::Draining | Lifecycle::Stopping => return Err(SubmitError::Draining),
            Lifecycle::Closed => {
                drop(inbox);
                return Err(self.unavailable());
            }
        }
        let id = queued.request.id;
        if inbox.running.is_some_and(|(running, _)| running == id)
            || inbox.queue.iter().any(|waiting| waiting.request.id == id)
        {
            return Err(SubmitError::Duplicate { id });
        }
        let limit = self.options.queue_limit.max(1);
        if inbox.queue.len() >= limit {
            // A place whose reader has gone is a free place.
            inbox.sweep(Instant::now());
        }
        if inbox.queue.len() >= limit {
            return Err(SubmitError::QueueFull {
                queued: inbox.queue.len(),
                limit,
            });
        }
        inbox.queue.push_back(queued);
        drop(inbox);
        self.wake.notify_all();
        Ok(())
    }

    pub(super) fn end(&self, id: RequestId, how: EndRequest) {
        let mut inbox = self.lock();
        if let Some((running, end)) = inbox.running.as_mut()
            && *running == id
        {
            end.get_or_insert(how);
        } else if how == EndRequest::Cancel {
            inbox.end_where(|queued| (queued.request.id == id).then_some(Ok(FinishReason::Cancelled)));
        }
        drop(inbox);
        self.wake.notify_all();
    }

    pub(super) fn drain(&self) {
        self.advance(Lifecycle::Draining);
    }

    pub(super) fn stop(&self) {
        self.advance(Lifecycle::Stopping);
    }

    pub(super) fn text(&self) -> Result<Arc<TextSide>, SubmitError> {
        self.text.get().cloned().ok_or_else(|| self.unavailable())
    }

    pub(super) fn snapshot(&self) -> EngineSnapshot {
        self.state.borrow().clone()
    }

    pub(super) fn watch(&self) -> watch::Receiver<EngineSnapshot> {
        self.state.subscribe()
    }

    pub(super) const fn options(&self) -> &EngineOptions {
        &self.options
    }

    // What the thread does.

    /// Waits until there is something to do: a command, a request, or the end; and no longer than `patience`.
    pub(super) fn wait(&self, patience: Option<Duration>) -> Work {
        let mut inbox = self.lock();
        loop {
            if inbox.lifecycle >= Lifecycle::Stopping {
                return Work::Exit;
            }
            if !inbox.commands.is_empty() || !inbox.superseded.is_empty() || !inbox.ended.is_empty() {
                return Work::Poll;
            }
            if let Some(queued) = inbox.queue.pop_front() {
                inbox.running = Some((queued.request.id, None));
                return Work::Answer(Box::new(queued));
            }
            if inbox.lifecycle == Lifecycle::Draining {
                return Work::Exit;
            }
            let Some(patience) = patience else {
                inbox = self.wake.wait(inbox).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (again, waited) = self
                .wake
                .wait_timeout(inbox, patience)
                .unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                return Work::Poll;
            }
            inbox = again;
        }
    }

    /// Takes what is there without waiting; a command only if `commands` says that there is a place for it.
    pub(super) fn poll(&self, now: Instant, commands: bool) -> Polled {
        let mut inbox = self.lock();
        inbox.sweep(now);
        Polled {
            command: if commands { inbox.commands.pop_front() } else { None },
            superseded: inbox.take_superseded(),
            ended: std::mem::take(&mut inbox.ended),
            end_running: inbox.running.and_then(|(_, end)| end),
            lifecycle: inbox.lifecycle,
            queued: inbox.queue.len(),
        }
    }

    /// The running request is over.
    pub(super) fn done(&self) {
        self.lock().running = None;
    }

    /// Takes nothing more, ever, and hands over what was left.
    pub(super) fn close(&self) -> Left {
        let mut inbox = self.lock();
        inbox.lifecycle = Lifecycle::Closed;
        Left {
            commands: std::mem::take(&mut inbox.commands),
            superseded: std::mem::take(&mut inbox.superseded),
            ended: std::mem::take(&mut inbox.ended),
            queue: std::mem::take(&mut inbox.queue),
        }
    }

    /// Whether somebody wants something, or the end has come.
    pub(super) fn is_wanted(&self) -> bool {
        let inbox = self.lock();
        inbox.lifecycle >= Lifecycle::Draining
            || !inbox.commands.is_empty()
            || !inbox.ended.is_empty()
            || !inbox.queue.is_empty()
    }

    /// Whether a command waits, a request is to end, or all.
    pub(super) fn is_pressed(&self, now: Instant) -> bool {
        let inbox = self.lock();
        inbox.lifecycle >= Lifecycle::Stopping
            || !inbox.commands.is_empty()
            || matches!(inbox.running, Some((_, Some(_))))
            || inbox
                .queue
                .iter()
                .any(|queued| queued.request.deadline.is_some_and(|deadline| deadline <= now))
    }

    pub(super) fn stopping(&self) -> bool {
        self.lock().lifecycle >= Lifecycle::Stopping
    }

    pub(super) fn open_text(&self, text: Arc<TextSide>) {
        // Set once, because an engine loads one model in its life.
        let _ = self.text.set(text);
    }

    pub(super) fn publish(&self, snapshot: EngineSnapshot) {
        self.state.send_replace(snapshot);
    }

    fn advance(&self, to: Lifecycle) {
        let mut inbox = self.lock();
        inbox.lifecycle = inbox.lifecycle.max(to);
        drop(inbox);
        self.wake.notify_all();
    }

    fn unavailable(&self) -> SubmitError {
        match self.state.borrow().phase {
            EnginePhase::Draining => SubmitError::Draining,
            EnginePhase::Failed { ref message } => SubmitError::Failed {
                message: message.clone(),
            },
            ref phase => SubmitError::NotReady { phase: phase.word() },
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // Nothing that panics runs under the lock; were it poisoned, its plain lists would still be whole.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What nobody will take any more.
pub(super) struct Left {
    pub(super) commands: VecDeque<Command>,
    pub(super) superseded: Vec<(u64, u64)>,
    pub(super) ended: Vec<Ended>,
    pub(super) queue: VecDeque<Queued>,
}

/// What the idle thread found.
pub(super) enum Work {
    /// Answer this request.
    Answer(Box<Queued>),
    /// Leave.
    Exit,
    /// Look at what [`Shared::poll`] has.
    Poll,
}

/// Plans that may be replaced between two looks at the inbox before that needs memory.
const SUPERSEDED: usize = 16;

impl Inbox {
    /// Takes the plans that were replaced, and leaves room for as many: asking for a shed allocates nothing.
    fn take_superseded(&mut self) -> Vec<(u64, u64)> {
        if self.superseded.is_empty() {
            return Vec::new();
        }
        std::mem::replace(&mut self.superseded, Vec::with_capacity(SUPERSEDED))
    }

    /// Ends waiting requests whose deadline passed or whose reader went away.
    fn sweep(&mut self, now: Instant) {
        self.end_where(|queued| {
            if queued.outlet.reader() == Reader::Gone {
                Some(Ok(FinishReason::Cancelled))
            } else if queued.request.deadline.is_some_and(|deadline| deadline <= now) {
                Some(Err(GenerateError::DeadlinePassed {
                    generated: Tokens::ZERO,
                }))
            } else {
                None
            }
        });
    }

    fn end_where(&mut self, outcome: impl Fn(&Queued) -> Option<Result<FinishReason, GenerateError>>) {
        let mut at = 0;
        while let Some(queued) = self.queue.get(at) {
            match outcome(queued) {
                None => at += 1,
                Some(outcome) => {
                    if let Some(queued) = self.queue.remove(at) {
                        self.ended.push(Ended { queued, outcome });
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{policy::kv_type::KvType, units::Tokens};

    #[test]
    fn room_for_replaced_plans_is_there_after_every_look() {
        let shared = Shared::new(EngineOptions::default());
        let order = |revision| Command::Apply {
            revision,
            plan: EnginePlan {
                resident: BTreeSet::new(),
                kv_capacity: Tokens::new(64),
                prefill_chunk: Tokens::new(8),
                kv_type: KvType::F16,
            },
        };
        for turn in 0..3 {
            let looked = shared.poll(Instant::now(), true);
            assert_eq!(looked.superseded.len(), usize::from(turn > 0));
            assert!(shared.lock().superseded.capacity() >= SUPERSEDED, "turn {turn}");
            shared.command(order(2 * turn));
            shared.command(order(2 * turn + 1));
            // Looks that find none replaced, too.
            if turn == 1 {
                shared.poll(Instant::now(), true);
                shared.poll(Instant::now(), true);
                shared.command(order(10));
                shared.command(order(11));
            }
        }
    }
}
