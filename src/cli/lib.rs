//! Command line: clients of a running daemon, and commands that need none.
//!
//! Data is written to stdout and everything else to stderr. `--output json` writes one document, `ndjson` one line per
//! item; names follow proto3 JSON, except that 64-bit integers are numbers. Environment variables read:
//! `COTENANT_ENDPOINT`; by `pull` also `HF_TOKEN`, `HF_ENDPOINT` and those of proxies and certificates.

mod ascii_chart;
pub mod bench;
mod chart;
mod check;
mod check_workers;
mod config_file;
mod decisions;
pub mod demo;
mod events;
pub mod exit;
mod generate;
mod global;
mod group;
mod health;
mod help;
mod hold;
mod leases;
mod manual;
mod metrics;
mod operate;
pub mod output;
mod plan;
mod plot;
mod postmortem;
mod progress;
mod pull;
mod quantity;
mod replay;
mod serve;
pub mod session;
mod show;
pub mod stage;
mod status;
mod talk;
mod top;
mod why;
mod worker;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{CommandFactory, FromArgMatches as _, Parser, Subcommand};

use self::{exit::CliError, global::runtime};
pub use self::{global::Global, output::Output};
use cotenant_engine as engine;
use cotenant_memory::emergency;
use cotenant_speech as speech;
use cotenant_telemetry::build_name;

/// Runs an LLM, speech-to-text and text-to-speech on one small board, within one memory budget.
#[derive(Debug, Parser)]
#[command(name = "cotenant", version = build_name::version(), propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// Options of all commands.
    #[command(flatten)]
    pub global: Global,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the supervisor in the foreground.
    Serve(serve::ServeArgs),
    /// Check a configuration against this machine: budget, command lines, memory; start nothing.
    Check(check::CheckArgs),
    /// Predict memory and speed of a model and its workers on a device; load nothing.
    Plan(plan::PlanArgs),
    /// List common models with their longest context and speed on each board.
    Catalogue(plan::catalogue::CatalogueArgs),
    /// Show the plan of a model from Hugging Face, Ollama's registry or a URL, then fetch it.
    Pull(pull::PullArgs),
    /// Measure compute and disk speed of this machine, for `plan`.
    Calibrate(plan::calibrate::CalibrateArgs),
    /// Run a demonstration of the whole stack, in under a minute.
    Demo(demo::DemoArgs),
    /// Run a built-in worker: asr, tts.
    Worker(worker::WorkerArgs),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write man pages into a folder.
    #[command(hide = true)]
    Manual {
        /// The folder.
        folder: PathBuf,
    },
    /// Compute grammars and chat templates for the daemon that started this.
    #[command(hide = true)]
    TextHelper,
    /// Decode one audio file for the daemon that started this.
    #[command(hide = true)]
    AudioDecoder,
    /// Generate text with the LLM.
    Generate(generate::Generate),
    /// Send a recording through speech recognition, LLM and speech synthesis.
    Talk(talk::Talk),
    /// Hold a lease, until interrupted, while a command runs, or for a control group.
    ///
    /// With --cgroup, --unit or --container, the processes of a control group hold the lease: it is granted, its name is
    /// printed, and it lasts until the group is removed or `cotenant leases release` ends it, also across restarts of the
    /// supervisor. The same command again prints the same lease. This needs the role operator or delegate.
    Hold(hold::Hold),
    /// Show budget, pressure, LLM, workers and leases.
    Status(status::Status),
    /// Show memory, holders and recent events on a terminal, live.
    Top(top::Top),
    /// Plot memory by owner over time, from the journal.
    Plot(plot::Plot),
    /// List leases, or release one.
    Leases(leases::Leases),
    /// Print the metrics of the supervisor, or write them for node_exporter.
    Metrics(metrics::Metrics),
    /// Print events and decisions of the supervisor.
    Events(events::Events),
    /// Check the health of the supervisor or one of its services; exit codes of grpc_health_probe.
    Health(health::Health),
    /// Explain a decision: its inputs, the alternatives, the outcome.
    Why(why::Why),
    /// Explain why workers died: evidence, confidence, remedy.
    Postmortem(postmortem::Postmortem),
    /// Replay a journal through the decision logic, and compare the decisions.
    Replay(replay::Replay),
    /// Shed memory of the LLM now.
    Shed(operate::Shed),
    /// Return shed memory to the LLM now.
    Regrow,
    /// Change the type of the LLM's KV cache.
    KvType(operate::KvTypeArgs),
    /// Start a worker.
    Start(operate::Worker),
    /// Stop a worker until it is started again.
    Stop(operate::Worker),
    /// Restart a worker.
    Recycle(operate::Worker),
    /// Change the variant of a worker.
    Resize(operate::Resize),
    /// Load a model that failed to load or was missing, and show progress.
    Load(operate::Load),
    /// Reload the configuration; list changes in force and those that need a restart.
    Reload,
    /// Refuse new requests and let running ones finish; `drain --off` ends the drain.
    Drain(operate::Drain),
    /// Measure speed and latency on this machine.
    #[command(subcommand)]
    Bench(bench::Command),
}

/// Parses the arguments, runs the verb, and returns the exit code. `commit` is the commit of the build, or empty.
pub fn main(arguments: impl IntoIterator<Item = OsString>, commit: &'static str) -> ExitCode {
    build_name::set_commit(commit);
    let arguments: Vec<_> = arguments.into_iter().collect();
    let parsed = help::grouped(Cli::command())
        .try_get_matches_from(&arguments)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            let given = arguments.iter().skip(1);
            let code = match u8::try_from(error.exit_code()) {
                Ok(exit::OK) => exit::OK,
                _ if given.clone().any(|argument| argument == "health") => exit::health::USAGE,
                _ => exit::USAGE,
            };
            let words: Vec<_> = given.filter_map(|argument| argument.to_str()).collect();
            if code != exit::OK && output::is_for_programs(&words) {
                let text = error.render().to_string();
                let text = text.trim_start_matches("error: ").trim();
                return CliError::plain(text, code).report(true);
            }
            // Includes help and version. A failure to print them cannot be reported.
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let as_json = cli.global.output != Output::Table;
    match run(cli) {
        Ok(code) => code,
        Err(error) => error.report(as_json),
    }
}

fn run(cli: Cli) -> Result<ExitCode, CliError> {
    let Cli { global, command } = cli;
    match command {
        Command::Serve(verb) => Ok(serve::run(&verb)),
        Command::Check(verb) => Ok(check::run(&global, &verb)),
        Command::Plan(verb) => plan::run(&global, &verb),
        Command::Catalogue(verb) => done(plan::catalogue::run(&global, &verb)),
        Command::Pull(verb) => pull::run(&global, &verb),
        Command::Calibrate(verb) => done(plan::calibrate::run(&global, &verb)),
        Command::Demo(verb) => Ok(demo::run(&global, &verb)),
        Command::Bench(verb) => bench::run(&global, &verb),
        Command::Worker(verb) => Ok(worker::run(&verb)),
        Command::Status(verb) => client(status::run(&global, &verb)),
        Command::Top(verb) => client(top::run(&global, &verb)),
        Command::Leases(verb) => client(leases::run(&global, verb)),
        Command::Hold(verb) => runtime()?.block_on(hold::run(&global, &verb)),
        Command::Events(verb) => client(events::run(&global, &verb)),
        Command::Shed(verb) => client(operate::shed(&global, &verb)),
        Command::KvType(verb) => client(operate::kv_type(&global, &verb)),
        Command::Regrow => client(operate::regrow(&global)),
        Command::Load(load) => client(operate::load(&global, &load)),
        Command::Reload => client(operate::reload(&global)),
        Command::Drain(drain) => client(operate::drain(&global, drain)),
        Command::Recycle(verb) => {
            client(operate::control(&global, verb, operate::Control::Recycle))
        }
        Command::Start(verb) => client(operate::control(&global, verb, operate::Control::Start)),
        Command::Stop(verb) => client(operate::control(&global, verb, operate::Control::Stop)),
        Command::Resize(verb) => client(operate::resize(&global, verb)),
        Command::Generate(verb) => client(generate::run(&global, verb)),
        Command::Talk(verb) => client(talk::run(&global, &verb)),
        Command::Health(verb) => {
            runtime()?.block_on(async { Ok(health::run(&global, &verb).await) })
        }
        Command::Postmortem(verb) => postmortem::run(&global, &verb),
        Command::Replay(verb) => replay::run(&global, &verb),
        Command::Metrics(verb) => done(metrics::run(&global, &verb)),
        Command::Plot(verb) => done(plot::run(&global, &verb)),
        Command::Why(verb) => why::run(&global, &verb),
        Command::TextHelper => Ok(engine::helper::serve_stdin()),
        Command::AudioDecoder => {
            emergency::end_when_refused();
            Ok(speech::decoder::serve_stdin())
        }
        Command::Manual { folder } => {
            let cannot = |error| {
                CliError::failed(
                    format!("cannot write man pages to `{}`", folder.display()),
                    error,
                )
            };
            manual::write_pages(Cli::command(), &folder).map_err(cannot)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            let mut command = manual::visible(&Cli::command());
            clap_complete::generate(shell, &mut command, "cotenant", &mut script);
            output::write(&String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Completes a verb that needs no supervisor.
fn done(result: Result<(), CliError>) -> Result<ExitCode, CliError> {
    result.map(|()| ExitCode::SUCCESS)
}

fn client(verb: impl Future<Output = Result<(), CliError>>) -> Result<ExitCode, CliError> {
    runtime()?.block_on(verb)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(
        not(debug_assertions),
        ignore = "clap checks itself in debug builds alone"
    )]
    fn the_arguments_are_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_lists_every_command_in_its_group() {
        insta::assert_snapshot!(help::grouped(Cli::command()).render_help());
    }

    #[test]
    fn health_reports_bad_arguments_as_its_model_does() {
        let parse = |arguments: &[&str]| main(arguments.iter().map(Into::into), "");
        let code = |code: u8| format!("{:?}", ExitCode::from(code));
        assert_eq!(
            format!("{:?}", parse(&["cotenant", "health", "--nonsense"])),
            code(exit::health::USAGE)
        );
        assert_eq!(
            format!("{:?}", parse(&["cotenant", "status", "--nonsense"])),
            code(exit::USAGE)
        );
    }
}
