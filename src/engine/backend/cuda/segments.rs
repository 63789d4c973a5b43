//! Segments of a token: groups of held commands, launched as one graph if repeated.
//!
//! A graph represents exactly the commands from which it was captured: any other sequence, for example because a layer
//! is streamed or the cache has another type, is launched command by command. Weights are addressed through a table of
//! parts, so that releasing and rereading a part leaves the commands unchanged.

use std::{
    mem,
    sync::atomic::{AtomicBool, Ordering},
};

use super::{
    driver::{Address, CudaError, GraphExec},
    parameters::{Job, Kernel},
};

/// Commands on a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "nearly all are launches")]
pub(super) enum Command {
    Launch {
        kernel: Kernel,
        grid: (u32, u32, u32),
        shared: u32,
        job: Job,
    },
    /// Sets words.
    Set {
        to: Address,
        word: u32,
        count: usize,
    },
    Copy {
        from: Address,
        to: Address,
        bytes: usize,
    },
}

/// Tables written by the host and read by kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tables {
    /// Address of a part of the weights, by its index in the table.
    Part(u32),
    /// Attention's description of the cache.
    Cache,
    /// Rows of the head.
    Said,
}

impl Command {
    fn reads(&self, tables: Tables) -> bool {
        let Self::Launch { job, .. } = self else {
            return false;
        };
        match job {
            Job::Products(job) => match tables {
                Tables::Part(part) => job
                    .matrix
                    .iter()
                    .any(|matrix| (matrix.part..matrix.part + matrix.parts()).contains(&part)),
                Tables::Cache | Tables::Said => false,
            },
            Job::Heads(_) | Job::Attend(_) | Job::Join(_) => tables == Tables::Cache,
            Job::Finish(_) => tables == Tables::Said,
            Job::Activate(_) | Job::Convert(_) | Job::Delta(_) | Job::Embed(_) | Job::Norm(_) => {
                false
            }
        }
    }
}

/// A context's stream for launching segments; each call binds the thread.
pub(super) trait Launches {
    /// Queues a command.
    ///
    /// # Safety
    ///
    /// The parameters of a launch match the kernel, and device memory used by the command exists until it has been
    /// executed.
    unsafe fn issue(&self, command: &Command) -> Result<(), CudaError>;

    /// Captures commands as a graph.
    fn capture(&self, commands: &[Command]) -> Result<GraphExec, CudaError>;

    /// Queues a graph.
    ///
    /// # Safety
    ///
    /// As of [`issue`](Self::issue), for each of its commands.
    unsafe fn launch(&self, graph: GraphExec) -> Result<(), CudaError>;

    /// Returns a graph, which may still be executing.
    fn forget(&self, graph: GraphExec);
}

/// Held commands of a context's stream, and its earlier segments.
#[derive(Debug, Default)]
pub(super) struct Segments {
    held: Vec<Command>,
    /// Bytes of weights read by the held commands.
    weights: usize,
    known: Vec<Known>,
    /// Number of segments so far.
    clock: u64,
    /// Whether graphs are captured, and the number of failures.
    graphs: bool,
    failures: u32,
    /// Failure to launch held commands, which are lost.
    failed: Option<CudaError>,
}

/// A segment that was launched before.
#[derive(Debug)]
struct Known {
    commands: Vec<Command>,
    /// Captured at the second launch.
    graph: Option<GraphExec>,
    /// Time of its last launch.
    used: u64,
}

/// Set once a graph could not be launched: no context of this process uses graphs from then on.
static NO_GRAPHS: AtomicBool = AtomicBool::new(false);

pub(super) fn allow_no_graphs() {
    NO_GRAPHS.store(true, Ordering::Relaxed);
}

pub(super) fn are_graphs_allowed() -> bool {
    !NO_GRAPHS.load(Ordering::Relaxed)
}

impl Segments {
    /// Whether no commands are held.
    pub(super) const fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether the held commands form a whole segment, on an integrated device or another one.
    pub(super) const fn is_whole(&self, integrated: bool) -> bool {
        self.held.len() >= SEGMENT || (integrated && self.weights >= WEIGHTS_MAX)
    }

    /// Whether a held command reads this table.
    pub(super) fn reads(&self, tables: Tables) -> bool {
        self.held.iter().any(|command| command.reads(tables))
    }

    /// Holds a command that reads this many bytes of weights.
    ///
    /// # Safety
    ///
    /// Memory used by it exists until [`submit`](Self::submit) has been called and its launches have been executed; the
    /// thread is bound.
    pub(super) unsafe fn hold(
        &mut self,
        stream: &impl Launches,
        command: Command,
        weights: usize,
    ) -> Result<(), CudaError> {
        if self.held.len() >= HELD_MAX || self.failed.is_some() {
            self.submit(stream)?;
        }
        self.held.push(command);
        self.weights += weights;
        Ok(())
    }

    /// Launches the held commands; the thread is bound. An error is permanent.
    pub(super) fn submit(&mut self, stream: &impl Launches) -> Result<(), CudaError> {
        self.submit_as(stream, true)
    }

    /// As [`Self::submit`] for an incomplete segment: it will not recur, and memory may be short.
    pub(super) fn submit_cut(&mut self, stream: &impl Launches) -> Result<(), CudaError> {
        self.submit_as(stream, false)
    }

    fn submit_as(&mut self, stream: &impl Launches, ends: bool) -> Result<(), CudaError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let held = mem::take(&mut self.held);
        let launched = self.launch(stream, &held, ends);
        (self.held, self.weights) = (held, 0);
        self.held.clear();
        launched.inspect_err(|error| self.fail(error.clone()))
    }

    /// Drops the held commands, whose memory may then be released.
    pub(super) fn fail(&mut self, error: CudaError) {
        self.held.clear();
        self.failed.get_or_insert(error);
    }

    fn launch(
        &mut self,
        stream: &impl Launches,
        commands: &[Command],
        ends: bool,
    ) -> Result<(), CudaError> {
        let is_segment = ends && self.graphs && commands.len() >= SEGMENT_MIN;
        let graph = if is_segment {
            self.graph_of(stream, commands)
        } else {
            None
        };
        match graph {
            // SAFETY: captured from these commands, whose memory exists by the contract of `hold`.
            Some(graph) => unsafe { stream.launch(graph) },
            // SAFETY: as above.
            None => commands
                .iter()
                .try_for_each(|command| unsafe { stream.issue(command) }),
        }
    }

    /// The graph of a segment, captured at its second occurrence.
    fn graph_of(&mut self, stream: &impl Launches, commands: &[Command]) -> Option<GraphExec> {
        self.clock += 1;
        let Some(known) = self
            .known
            .iter_mut()
            .find(|known| known.commands == commands)
        else {
            self.make_room(stream, commands.len());
            self.known.push(Known {
                commands: commands.to_vec(),
                graph: None,
                used: self.clock,
            });
            return None;
        };
        known.used = self.clock;
        if known.graph.is_none() {
            known.graph = stream.capture(commands).ok();
        }
        let graph = known.graph;
        self.failures += u32::from(graph.is_none());
        if self.failures >= FAILURES_MAX {
            // The remaining memory is needed elsewhere.
            self.set_graphs(stream, false);
        }
        graph
    }

    /// Forgets the least recently launched segments until there is room for this many commands.
    fn make_room(&mut self, stream: &impl Launches, commands: usize) {
        while !self.has_room(commands) {
            let oldest = self
                .known
                .iter()
                .enumerate()
                .min_by_key(|(_, known)| known.used);
            let Some((oldest, _)) = oldest else { return };
            self.known.swap_remove(oldest).forget(stream);
        }
    }

    /// Whether one more segment of this many commands fits.
    fn has_room(&self, commands: usize) -> bool {
        let known: usize = self.known.iter().map(|known| known.commands.len()).sum();
        self.known.len() < KNOWN_MAX && known + commands <= COMMANDS_MAX
    }

    /// Enables capturing graphs, or disables it permanently.
    pub(super) fn set_graphs(&mut self, stream: &impl Launches, graphs: bool) {
        (self.graphs, self.failures) = (graphs && are_graphs_allowed(), 0);
        for known in self.known.drain(..) {
            known.forget(stream);
        }
    }

    /// Captures the last segment repeatedly up to the limit of graphs; returns whether that succeeded.
    pub(super) fn fill_up(&mut self, stream: &impl Launches) -> bool {
        let graphs = |known: &Known| known.graph.is_some();
        let Some(commands) = self
            .known
            .iter()
            .rfind(|known| graphs(known))
            .map(|known| known.commands.clone())
        else {
            return false;
        };
        while self.graphs && self.has_room(commands.len()) {
            let Ok(graph) = stream.capture(&commands) else {
                self.set_graphs(stream, false);
                break;
            };
            self.known.push(Known {
                commands: commands.clone(),
                graph: Some(graph),
                used: 0,
            });
        }
        self.graphs
    }
}

impl Known {
    fn forget(self, stream: &impl Launches) {
        if let Some(graph) = self.graph {
            stream.forget(graph);
        }
    }
}

/// Launches per segment: a quarter of a token of a 4B model. With fewer, more segments wait for the host; with more,
/// the device waits for the first one.
const SEGMENT: usize = 64;
/// Fewer do not justify a graph.
const SEGMENT_MIN: usize = 4;
/// Most commands held when no end of a segment is requested.
const HELD_MAX: usize = 2 * SEGMENT;
/// Weights read per segment on an integrated device: 4 ms at 32 GB/s, since a command waits for all launched work.
const WEIGHTS_MAX: usize = 128 << 20;
/// Limits of known segments and of their commands, 0.5 MiB on the host: a token of a model with 60 layers of one
/// segment each, or with 100 layers of which some share a segment.
const KNOWN_MAX: usize = 64;
const COMMANDS_MAX: usize = 1024;
/// Actions of other threads may fail a capture.
const FAILURES_MAX: u32 = 3;

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, ptr};

    use super::*;

    /// Records calls; captures fail while failures are left.
    #[derive(Default)]
    struct Noted {
        calls: RefCell<Vec<&'static str>>,
        failures: RefCell<u32>,
    }

    impl Noted {
        fn call(&self, name: &'static str) {
            self.calls.borrow_mut().push(name);
        }

        fn taken(&self) -> Vec<&'static str> {
            let mut calls = self.calls.take();
            calls.dedup();
            calls
        }
    }

    impl Launches for Noted {
        unsafe fn issue(&self, _: &Command) -> Result<(), CudaError> {
            self.call("issue");
            Ok(())
        }

        fn capture(&self, _: &[Command]) -> Result<GraphExec, CudaError> {
            self.call("capture");
            let left = *self.failures.borrow();
            *self.failures.borrow_mut() = left.saturating_sub(1);
            if left > 0 {
                Err(CudaError::out_of_memory())
            } else {
                Ok(ptr::null_mut())
            }
        }

        unsafe fn launch(&self, _: GraphExec) -> Result<(), CudaError> {
            self.call("launch");
            Ok(())
        }

        fn forget(&self, _: GraphExec) {
            self.call("forget");
        }
    }

    fn held(segments: &mut Segments, stream: &Noted, first: u64, count: u64) {
        for to in first..first + count {
            // SAFETY: nothing is executed.
            unsafe {
                segments.hold(
                    stream,
                    Command::Set {
                        to,
                        word: 0,
                        count: 1,
                    },
                    0,
                )
            }
            .unwrap();
        }
    }

    fn submitted(
        segments: &mut Segments,
        stream: &Noted,
        first: u64,
        count: u64,
    ) -> Vec<&'static str> {
        held(segments, stream, first, count);
        segments.submit(stream).unwrap();
        stream.taken()
    }

    #[test]
    fn a_segment_is_captured_when_it_comes_again_and_only_launched_from_then_on() {
        let (mut segments, stream) = (Segments::default(), Noted::default());
        segments.set_graphs(&stream, true);
        assert_eq!(submitted(&mut segments, &stream, 0, 4), ["issue"]);
        assert_eq!(
            submitted(&mut segments, &stream, 0, 4),
            ["capture", "launch"]
        );
        assert_eq!(submitted(&mut segments, &stream, 0, 4), ["launch"]);
        // A different segment, a short one, and a cut one, each repeated.
        assert_eq!(submitted(&mut segments, &stream, 1, 4), ["issue"]);
        for _ in 0..3 {
            assert_eq!(submitted(&mut segments, &stream, 0, 3), ["issue"]);
            held(&mut segments, &stream, 0, 5);
            segments.submit_cut(&stream).unwrap();
            assert_eq!(stream.taken(), ["issue"]);
        }
        segments.set_graphs(&stream, false);
        assert_eq!(stream.taken(), ["forget"]);
        assert_eq!(submitted(&mut segments, &stream, 0, 4), ["issue"]);
    }

    #[test]
    fn what_was_not_launched_for_the_longest_time_makes_room() {
        let (mut segments, stream) = (Segments::default(), Noted::default());
        segments.set_graphs(&stream, true);
        for number in (0..KNOWN_MAX as u64 + 1).flat_map(|number| [number, number]) {
            submitted(&mut segments, &stream, 10 * number, 4);
            submitted(&mut segments, &stream, 0, 4);
        }
        assert_eq!(segments.known.len(), KNOWN_MAX);
        assert_eq!(submitted(&mut segments, &stream, 0, 4), ["launch"]);
        assert_eq!(
            submitted(&mut segments, &stream, 10, 4),
            ["forget", "issue"]
        );
    }

    #[test]
    fn three_captures_that_fail_are_the_end_of_graphs() {
        let (mut segments, stream) = (
            Segments::default(),
            Noted {
                failures: RefCell::new(3),
                ..Noted::default()
            },
        );
        segments.set_graphs(&stream, true);
        assert_eq!(submitted(&mut segments, &stream, 0, 4), ["issue"]);
        for _ in 0..3 {
            assert_eq!(
                submitted(&mut segments, &stream, 0, 4),
                ["capture", "issue"]
            );
        }
        assert_eq!(submitted(&mut segments, &stream, 0, 4), ["issue"]);
    }

    #[test]
    fn what_is_lost_is_an_error_of_everything_behind_it() {
        let (mut segments, stream) = (Segments::default(), Noted::default());
        held(&mut segments, &stream, 0, 4);
        segments.fail(CudaError::out_of_memory());
        assert!(segments.submit(&stream).is_err() && segments.submit_cut(&stream).is_err());
        let set = Command::Set {
            to: 0,
            word: 0,
            count: 1,
        };
        // SAFETY: nothing is executed.
        let is_lost = unsafe { segments.hold(&stream, set, 0) }.is_err();
        assert!(is_lost);
        assert!(stream.taken().is_empty());
    }
}
