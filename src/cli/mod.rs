//! The command line: verbs that are clients of a running supervisor, and verbs that need none.
//!
//! Data goes to stdout and everything else to stderr. `--output json` gives one document, `ndjson` one line for each
//! thing; names are those of proto3 JSON, except that 64-bit numbers stay numbers. Environment variables that are read:
//! `COTENANT_ENDPOINT`.

mod ascii_chart;
mod bench;
mod chart;
mod check;
mod check_workers;
mod demo;
mod events;
pub mod exit;
mod generate;
mod health;
mod hold;
mod leases;
mod operate;
mod output;
mod postmortem;
mod quantity;
mod replay;
mod serve;
mod session;
mod show;
mod stage;
mod status;
mod talk;
mod why;
mod worker;

use std::{ffi::OsString, io, process::ExitCode, time::Duration};

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use tonic::transport::Channel;

use self::exit::CliError;
use crate::{engine, rpc::Endpoint};

/// Owns the memory of one unified-memory device: LLM in process, ASR and TTS as workers, byte leases that shrink.
#[derive(Debug, Parser)]
#[command(name = "cotenant", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// Options of all verbs.
    #[command(flatten)]
    pub global: Global,
    /// The verb.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of all verbs.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Socket of the supervisor: `unix:///path` or `unix-abstract:name`.
    #[arg(
        long,
        global = true,
        env = "COTENANT_ENDPOINT",
        default_value = "unix:///run/cotenant/cotenant.sock",
        value_name = "ADDRESS"
    )]
    pub endpoint: Endpoint,
    /// How to print data.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    /// How long a call may take, such as `5s` or `500ms`; streams are not limited.
    #[arg(long, global = true, default_value = "5s", value_name = "DURATION", value_parser = quantity::duration)]
    pub timeout: Duration,
}

/// How to print data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// One JSON document.
    Json,
    /// One JSON document on each line.
    Ndjson,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon in the foreground.
    Serve(serve::ServeArgs),
    /// Show what a configuration would do on this machine, without starting anything.
    Check(check::CheckArgs),
    /// Show the whole stack at work, for real, in under a minute.
    Demo(demo::DemoArgs),
    /// Measure.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Run one of the workers that this program itself can be.
    Worker(worker::WorkerArgs),
    /// Show budget, pressure, engine, workers and leases.
    Status,
    /// List leases, or release one.
    Leases(leases::Leases),
    /// Keep a lease, alone or for a program that runs under it.
    Hold(hold::Hold),
    /// Print what happened and what was done about it.
    Events(events::Events),
    /// Take memory back from the LLM now.
    Shed(operate::Shed),
    /// Keep the context of the LLM as another type from now on.
    KvType(operate::KvTypeArgs),
    /// Let the LLM grow back without waiting for the dwell.
    Regrow,
    /// Admit nothing new; what runs may finish.
    Drain,
    /// Stop a worker and start it again.
    Recycle(operate::Worker),
    /// Start a worker.
    Start(operate::Worker),
    /// Stop a worker until it is started again.
    Stop(operate::Worker),
    /// Change the variant of a worker.
    Resize(operate::Resize),
    /// Generate text with the LLM.
    Generate(generate::Generate),
    /// Say a recording to the Wyoming door, and hear the answer.
    Talk(talk::Talk),
    /// Ask whether the supervisor, or a part of it, answers; exit codes of grpc_health_probe.
    Health(health::Health),
    /// Say why workers died: the evidence, how sure it is, and what can be done.
    Postmortem(postmortem::Postmortem),
    /// Feed a journal's events through the arbiter again and compare its decisions.
    Replay(replay::Replay),
    /// Explain a decision of a journal with its figures, and what came of it.
    Why(why::Why),
    /// Compute grammars and chat templates for the daemon that started this.
    #[command(hide = true)]
    TextHelper,
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Parses the arguments, runs the verb, and returns the exit code.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<_> = arguments.into_iter().collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too, and are no fault. Nothing can be done when they cannot be printed.
            let _ = error.print();
            let code = match u8::try_from(error.exit_code()) {
                Ok(exit::OK) => exit::OK,
                _ if arguments.iter().skip(1).any(|argument| argument == "health") => exit::health::USAGE,
                _ => exit::USAGE,
            };
            return ExitCode::from(code);
        }
    };
    match run(cli) {
        Ok(code) => code,
        Err(error) => error.report(),
    }
}

fn run(cli: Cli) -> Result<ExitCode, CliError> {
    let Cli { global, command } = cli;
    match command {
        Command::Serve(verb) => Ok(serve::run(&verb)),
        Command::Check(verb) => Ok(check::run(&global, &verb)),
        Command::Demo(verb) => Ok(demo::run(&verb)),
        Command::Bench(verb) => bench::run(&global, &verb),
        Command::Worker(verb) => Ok(worker::run(verb)),
        Command::Status => client(status::status(&global)),
        Command::Leases(verb) => client(leases::run(&global, verb)),
        Command::Hold(verb) => runtime()?.block_on(hold::run(&global, &verb)),
        Command::Events(verb) => client(events::run(&global, &verb)),
        Command::Shed(verb) => client(operate::shed(&global, &verb)),
        Command::KvType(verb) => client(operate::kv_type(&global, &verb)),
        Command::Regrow => client(operate::regrow(&global)),
        Command::Drain => client(operate::drain(&global)),
        Command::Recycle(verb) => client(operate::control(&global, verb, operate::Control::Recycle)),
        Command::Start(verb) => client(operate::control(&global, verb, operate::Control::Start)),
        Command::Stop(verb) => client(operate::control(&global, verb, operate::Control::Stop)),
        Command::Resize(verb) => client(operate::resize(&global, verb)),
        Command::Generate(verb) => client(generate::run(&global, verb)),
        Command::Talk(verb) => client(talk::run(&global, &verb)),
        Command::Health(verb) => runtime()?.block_on(async { Ok(health::run(&global, &verb).await) }),
        Command::Postmortem(verb) => postmortem::run(&global, &verb),
        Command::Replay(verb) => replay::run(&global, &verb),
        Command::Why(verb) => why::run(&global, &verb),
        Command::TextHelper => Ok(engine::helper::serve_stdin()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "cotenant", &mut script);
            output::write(&String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs a verb that talks to the supervisor.
fn client(verb: impl Future<Output = Result<(), CliError>>) -> Result<ExitCode, CliError> {
    runtime()?.block_on(verb)?;
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error: io::Error| CliError::failed("cannot start", error))
}

impl Global {
    /// Connects to the supervisor.
    async fn connect(&self) -> Result<Channel, CliError> {
        match tokio::time::timeout(self.timeout, self.endpoint.connect()).await {
            Ok(channel) => Ok(channel?),
            Err(_) => Err(self.too_late()),
        }
    }

    /// A request with the deadline of `--timeout`.
    fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.set_timeout(self.timeout);
        request
    }

    /// A call with the deadline of `--timeout`, kept here too in case the supervisor hangs.
    async fn call<T>(
        &self,
        call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T, CliError> {
        // The supervisor's own answer to a deadline has a reason; it gets the time to arrive.
        match tokio::time::timeout(self.timeout + ANSWER_GRACE, call).await {
            Ok(response) => Ok(response?.into_inner()),
            Err(_) => Err(self.too_late()),
        }
    }

    fn too_late(&self) -> CliError {
        CliError::Failed {
            act: format!("no answer from `{}` within {:?}", self.endpoint, self.timeout),
            source: None,
            hint: Some("allow more with --timeout".to_owned()),
            code: exit::UNREACHABLE,
        }
    }
}

/// How much longer than the deadline a call may take (our choice).
const ANSWER_GRACE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn health_reports_bad_arguments_as_its_model_does() {
        let parse = |arguments: &[&str]| main(arguments.iter().map(Into::into));
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
