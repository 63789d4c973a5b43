//! Measurements for developers: `cargo bench --bench developer -- COMMAND`.
//!
//! The program includes the product: measurements start `serve`, `worker` and other commands of `cotenant` from this
//! executable. Without a command, it runs its tests.

mod autopsy;
mod bodies;
mod drafts;
mod engine;
mod first_byte;
mod kill;
mod noncompliant;
mod replay;
mod rivals;
mod shapes;
mod soak;
mod speakers;
mod storm;
mod tenants;
#[cfg(test)]
mod tests;
use cotenant_dev::weights;

use std::{alloc::System, ffi::OsString, process::ExitCode};

use clap::{CommandFactory as _, Parser, Subcommand};
use cotenant::{
    cli::{
        Cli, Output,
        bench::{THREADS, measured, on_a_stage, report::Report},
        exit::{self, CliError},
        session::Interrupts,
    },
    emergency::EmergencyAllocator,
};

/// Allocator of the product.
#[global_allocator]
static ALLOCATOR: EmergencyAllocator<System> = EmergencyAllocator::before(System);

/// Measurements of cotenant for developers.
#[derive(Debug, Parser)]
#[command(name = "developer", version)]
struct Developer {
    /// Output format.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(subcommand)]
    measurement: Measurement,
}

/// What to measure.
#[derive(Debug, Subcommand)]
enum Measurement {
    /// Share of injected deaths that the post-mortem names correctly, and its delay.
    Autopsy(autopsy::AutopsyArgs),
    /// Whether the daemon gives back what large requests of every API have taken.
    Bodies(bodies::BodiesArgs),
    /// Answers with drafted tokens beside the same answers without.
    Drafts(drafts::DraftsArgs),
    /// The engine on models of random weights, and beside llama.cpp's logits.
    Engine(Box<engine::EngineArgs>),
    /// Time from a neighbour's crossing of the watermark to the first byte shed.
    FirstByte(first_byte::FirstByteArgs),
    /// Time to a grant while memory is free.
    Grants(tenants::GrantsArgs),
    /// Workers and leases across a daemon that is killed at random points.
    Kill(kill::KillArgs),
    /// Time until a tenant that acknowledges a target and frees nothing is detected.
    Noncompliant(noncompliant::NoncompliantArgs),
    /// One of those tenants.
    #[command(hide = true)]
    NoncompliantHolder(noncompliant::HolderArgs),
    /// Renewals per second of one core.
    Renewals(tenants::RenewalsArgs),
    /// Time to replay the journal of a day.
    Replay(replay::ReplayArgs),
    /// The arbiter beside the rules of other programs, on the same simulated days.
    Rivals(rivals::RivalsArgs),
    /// Whether the memory of the daemon grows with the requests that it serves.
    Soak(soak::SoakArgs),
    /// Several speakers on one model: first tokens, answers at once, a long prompt beside them.
    Speakers(speakers::SpeakersArgs),
    /// Kills by the kernel under random demands in a control group with a limit.
    Storm(storm::StormArgs),
}

fn main() -> ExitCode {
    // `cargo bench` adds `--bench` to the arguments.
    let arguments: Vec<OsString> = std::env::args_os()
        .filter(|argument| argument != "--bench")
        .collect();
    let benched = std::env::args_os().len() > arguments.len();
    let command = arguments.get(1).and_then(|argument| argument.to_str());
    let of = |program: clap::Command| {
        command.is_some_and(|name| program.get_subcommands().any(|one| one.get_name() == name))
    };
    if benched || of(Developer::command()) {
        return measure(&arguments);
    }
    if of(Cli::command()) {
        return cotenant::cli::main(arguments, "");
    }
    #[cfg(test)]
    return tests::run();
    #[cfg(not(test))]
    measure(&arguments)
}

fn measure(arguments: &[OsString]) -> ExitCode {
    let Developer {
        output,
        measurement,
    } = match Developer::try_parse_from(arguments) {
        Ok(developer) => developer,
        Err(error) => {
            // A failure to print the help cannot be handled.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(exit::USAGE));
        }
    };
    run(&measurement, output).unwrap_or_else(|error| error.report(false))
}

fn run(measurement: &Measurement, output: Output) -> Result<ExitCode, CliError> {
    match measurement {
        Measurement::Kill(args) => kill::run(args),
        Measurement::Engine(args) => engine::run(args, output).map(|()| ExitCode::SUCCESS),
        Measurement::Replay(args) => {
            let report =
                replay::run(args).map_err(|problem| CliError::plain(problem, exit::FAILED))?;
            report.write(output)?;
            Ok(ExitCode::SUCCESS)
        }
        Measurement::Drafts(args) => {
            let report =
                drafts::run(args).map_err(|problem| CliError::plain(problem, exit::FAILED))?;
            report.write(output)?;
            Ok(ExitCode::SUCCESS)
        }
        Measurement::Rivals(args) => rivals::run(args, output).map(|()| ExitCode::SUCCESS),
        Measurement::Autopsy(args) => name_deaths(args, output),
        Measurement::Bodies(args) => on_a_stage(THREADS, || reported(bodies::run(args), output)),
        Measurement::FirstByte(args) => {
            on_a_stage(THREADS, || reported(first_byte::run(args), output))
        }
        Measurement::Grants(args) => on_a_stage(args.client_threads, || {
            reported(tenants::grants(args), output)
        }),
        Measurement::Noncompliant(args) => {
            on_a_stage(THREADS, || reported(noncompliant::run(args), output))
        }
        Measurement::NoncompliantHolder(args) => {
            measured(THREADS, || noncompliant::hold(args)).map(|()| ExitCode::SUCCESS)
        }
        Measurement::Renewals(args) => {
            on_a_stage(THREADS, || reported(tenants::renewals(args), output))
        }
        Measurement::Soak(args) => on_a_stage(THREADS, || reported(soak::run(args), output)),
        Measurement::Speakers(args) => {
            on_a_stage(THREADS, || reported(speakers::run(args), output))
        }
        Measurement::Storm(args) => on_a_stage(THREADS, || reported(storm::run(args), output)),
    }
}

/// Prints the report of a measurement.
async fn reported(
    measuring: impl Future<Output = Result<Report, String>>,
    format: Output,
) -> Result<(), String> {
    measuring
        .await?
        .write(format)
        .map_err(|error| error.to_string())
}

fn name_deaths(args: &autopsy::AutopsyArgs, format: Output) -> Result<ExitCode, CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| CliError::failed("cannot start", error))?;
    let right = runtime.block_on(async {
        let mut interrupts = Interrupts::new().map_err(|error| CliError::failed("cannot start", error))?;
        tokio::select! {
            done = autopsy::run(args, format) => done,
            code = interrupts.next() => Err(CliError::plain("the measurement was interrupted", code)),
        }
    })?;
    Ok(ExitCode::from(if right { exit::OK } else { exit::FAILED }))
}
