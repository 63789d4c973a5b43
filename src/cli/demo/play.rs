//! Script of the demonstration: budget, workers and the other program.

use std::{io, net::SocketAddr, path::Path};

use crate::{cli::stage::Process, units::Bytes};

/// What a process of an unoptimised build weighs more than one of a release build, measured.
const HEAVIER: u64 = if cfg!(debug_assertions) { 6 } else { 0 };

/// All memory of the demonstration's session: of five processes.
pub(super) const TOTAL: Bytes = Bytes::from_mib(300 + 5 * HEAVIER);

/// What of it is never handed out: the supervisor itself and this program.
pub(super) const RESERVE: Bytes = Bytes::from_mib(56 + 2 * HEAVIER);

/// What the neighbour takes without asking: more than the KV cache can give, so that layers go too.
pub(super) const NEIGHBOUR: Bytes = Bytes::from_mib(186);

/// How fast it takes it, per second.
const NEIGHBOUR_RATE: Bytes = Bytes::from_mib(80);

/// A neighbour that takes memory without a lease.
pub(super) fn neighbour() -> io::Result<Process> {
    Process::ballast(NEIGHBOUR, NEIGHBOUR_RATE)
}

/// The daemon's configuration.
pub(super) fn configuration(folder: &Path, http: SocketAddr) -> String {
    let folder = folder.display();
    format!(
        "\
budget:
  total: {total}MiB
  reserve: {reserve}MiB
  scope: session          # what counts is the memory of the demonstration's own processes
  dwell: 2s
  sample_max: 100ms
  fill_rate_max: 400MiB    # the neighbour takes 80 MiB a second
shedding: {{reclaim_min: 16MiB}}
llm:
  path: {folder}/demo.gguf
  name: demo
  threads: 1
  context: 65536
  kv_floor: 512
  kv_memory: at-once      # so that the kernel, too, sees what is held, given up and grown back
  mode: balanced
workers:
  - name: tts
    role: tts
    argv: [\"${{SELF}}\", worker, tts, --socket, \"${{SOCKET}}\"]
    memory: {{steady: {tts}MiB, peak: {tts_peak}MiB}}
  - name: asr
    role: asr
    argv: [\"${{SELF}}\", worker, asr, --socket, \"${{SOCKET}}\", --vocabulary, \"${{VARIANT}}\", --grammar, {folder}/home.gram]
    memory:
      variants:
        - {{name: grammar, bytes: {grammar}MiB, peak: {grammar_peak}MiB}}
        - {{name: open, bytes: {open}MiB, peak: {open_peak}MiB}}
http:
  listen: {http}
grpc:
  socket: {folder}/cotenant.sock
  abstract_name: none
journal:
  path: {folder}/journal.ndjson
state_dir: {folder}/state
runtime_dir: {folder}
log:
  filter: info
  format: text
",
        total = TOTAL.whole_mib(),
        reserve = RESERVE.whole_mib(),
        tts = 10 + HEAVIER,
        tts_peak = 16 + HEAVIER,
        grammar = 40 + HEAVIER,
        grammar_peak = 48 + HEAVIER,
        open = 110 + HEAVIER,
        open_peak = 116 + HEAVIER,
    )
}
