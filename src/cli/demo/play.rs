//! What the demonstration plays: its budget, its workers, its neighbour.

use std::{io, net::SocketAddr, path::Path};

use crate::{cli::stage::Process, units::Bytes};

/// All memory of the demonstration's session.
pub(super) const TOTAL: Bytes = Bytes::from_mib(300);

/// What of it is never handed out: the supervisor itself and this program.
pub(super) const RESERVE: Bytes = Bytes::from_mib(56);

/// What the neighbour takes without asking: more than is free, and less than the KV cache can give.
pub(super) const NEIGHBOUR: Bytes = Bytes::from_mib(120);

/// How fast it takes it, per second.
const NEIGHBOUR_RATE: Bytes = Bytes::from_mib(40);

/// A neighbour that takes memory without a lease.
pub(super) fn neighbour() -> io::Result<Process> {
    Process::start(&[
        "worker".to_owned(),
        "ballast".to_owned(),
        format!("{}MiB", NEIGHBOUR.whole_mib()),
        "--rate".to_owned(),
        format!("{}MiB", NEIGHBOUR_RATE.whole_mib()),
    ])
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
  fill_rate_max: 400MiB    # the neighbour takes 40 MiB a second
shedding: {{reclaim_min: 16MiB}}
llm:
  path: {folder}/demo.gguf
  name: demo
  threads: 1
  context: 65536
  kv_floor: 512
  mode: balanced
workers:
  - name: tts
    role: tts
    argv: [\"${{SELF}}\", worker, tts, --socket, \"${{SOCKET}}\"]
    memory: {{steady: 10MiB, peak: 16MiB}}
  - name: asr
    role: asr
    argv: [\"${{SELF}}\", worker, asr, --socket, \"${{SOCKET}}\", --vocabulary, \"${{VARIANT}}\", --grammar, {folder}/home.gram]
    memory:
      variants:
        - {{name: grammar, bytes: 40MiB, peak: 48MiB}}
        - {{name: open, bytes: 110MiB, peak: 116MiB}}
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
    )
}
