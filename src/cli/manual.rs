//! Man pages and completion scripts of visible commands.

use std::{
    fs::{self, OpenOptions},
    io,
    path::Path,
};

use clap::Command;
use clap_mangen::roff::{Roff, bold, roman};

use cotenant_telemetry::build_name;

/// Returns the command for completion, without hidden subcommands, which the generators would include.
pub(super) fn visible(command: &Command) -> Command {
    let subcommands = command.get_subcommands().filter(|one| !one.is_hide_set());
    Command::new("cotenant")
        .version(build_name::version())
        .propagate_version(true)
        .args(command.get_arguments().cloned())
        .subcommands(subcommands.cloned())
}

/// Writes a page for each command to `folder`, with sections that clap lacks: exit status, environment, files,
/// examples.
///
/// # Errors
/// If a page cannot be written.
pub(super) fn write_pages(command: Command, folder: &Path) -> io::Result<()> {
    let pages = pages(&command);
    clap_mangen::generate_to(command, folder)?;
    for name in &pages {
        let path = folder.join(format!("cotenant-{name}.1"));
        let mut page = OpenOptions::new().append(true).open(path)?;
        sections(name).to_writer(&mut page)?;
    }
    let path = folder.join("cotenant.1");
    let mut whole = fs::read(&path)?;
    sections("").to_writer(&mut whole)?;
    fs::write(path, whole)
}

/// Returns the names of the pages of a command's subcommands.
fn pages(command: &Command) -> Vec<String> {
    let shown = command.get_subcommands().filter(|one| !one.is_hide_set());
    shown
        .flat_map(|one| {
            let name = one.get_name();
            let below = pages(one)
                .into_iter()
                .map(move |page| format!("{name}-{page}"));
            std::iter::once(name.to_owned()).chain(below)
        })
        .collect()
}

fn sections(name: &str) -> Roff {
    let mut page = Roff::new();
    let exits = if name == "health" {
        HEALTH_EXITS
    } else {
        EXITS
    };
    let mut section = |title: &str, rows: &[(&str, &str)]| {
        page.control("SH", [title]);
        for (term, text) in rows {
            page.control("TP", []);
            page.text([bold(*term)]).text([roman(*text)]);
        }
    };
    section("EXIT STATUS", exits);
    section("ENVIRONMENT", ENVIRONMENT);
    section("FILES", FILES);
    let examples: Vec<_> = EXAMPLES.iter().filter(|(of, _)| *of == name).collect();
    if !examples.is_empty() {
        page.control("SH", ["EXAMPLES"]);
        for (_, example) in examples {
            page.control("PP", []).text([bold(*example)]);
        }
    }
    page
}

/// Descriptions of the codes in `exit`.
const EXITS: &[(&str, &str)] = &[
    ("0", "done"),
    ("1", "failed"),
    ("2", "bad arguments"),
    ("3", "the supervisor cannot be reached"),
    ("4", "the supervisor refused, or is unhealthy"),
    ("5", "drain --wait timed out: answers are still running"),
    ("70", "the control loop of serve hung"),
    ("78", "invalid configuration, or a stack that does not fit"),
];

/// Exit codes of `grpc_health_probe`.
const HEALTH_EXITS: &[(&str, &str)] = &[
    ("0", "serving"),
    ("1", "bad arguments"),
    ("2", "cannot connect"),
    ("3", "the call failed"),
    ("4", "not serving"),
];

const ENVIRONMENT: &[(&str, &str)] = &[
    (
        "COTENANT_ENDPOINT",
        "socket of the supervisor, unless --endpoint is given",
    ),
    ("HF_TOKEN", "token of Hugging Face, for pull"),
    ("HF_ENDPOINT", "a mirror of Hugging Face, for pull"),
    (
        "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY",
        "proxies for pull, and hosts reached without a proxy",
    ),
    (
        "SSL_CERT_FILE",
        "CA certificates for pull, instead of the system's",
    ),
    ("NO_COLOR", "disables colours, if set and not empty"),
];

const FILES: &[(&str, &str)] = &[
    (
        "/etc/cotenant/cotenant.yaml",
        "configuration of the service",
    ),
    (
        "/run/cotenant/cotenant.sock",
        "socket for operators and tenants",
    ),
    (
        "/var/lib/cotenant/journal.ndjson",
        "events and decisions; journal.ndjson.1 is the rotated part",
    ),
    (
        "/var/lib/cotenant/calibration.json",
        "coefficients of this machine, written by calibrate",
    ),
];

/// Examples by command; those without a command are on the page of the program.
const EXAMPLES: &[(&str, &str)] = &[
    ("", "cotenant check /etc/cotenant/cotenant.yaml"),
    ("", "cotenant status"),
    ("serve", "cotenant serve --config cotenant.yaml"),
    ("check", "cotenant check /etc/cotenant/cotenant.yaml"),
    ("check", "cotenant check --audit"),
    (
        "plan",
        "cotenant plan model.gguf --device orin-nx-16g --worker asr=2GiB",
    ),
    ("plan", "cotenant plan --config /etc/cotenant/cotenant.yaml"),
    ("catalogue", "cotenant catalogue --device orin-nano-8g"),
    (
        "pull",
        "cotenant pull hf.co/Qwen/Qwen3-4B-GGUF:Q4_K_M --to models",
    ),
    ("pull", "cotenant pull ollama.com/qwen3:4b"),
    ("calibrate", "cotenant calibrate model.gguf"),
    ("demo", "cotenant demo"),
    ("worker", "cotenant worker asr --help"),
    ("completions", "cotenant completions bash"),
    ("generate", "cotenant generate hello --max-tokens 64"),
    ("talk", "cotenant talk question.wav"),
    ("hold", "cotenant hold --help"),
    ("status", "cotenant status -o json"),
    ("top", "cotenant top --interval 1s"),
    ("plot", "cotenant plot --since 2h --svg memory.svg"),
    ("leases", "cotenant leases release asr#7"),
    ("metrics", "cotenant metrics"),
    ("events", "cotenant events --follow"),
    ("health", "cotenant health --service cotenant.engine --wait"),
    ("why", "cotenant why 4711"),
    (
        "why",
        "cotenant why 4711 --file /var/lib/cotenant/journal.ndjson",
    ),
    ("postmortem", "cotenant postmortem asr -n 3"),
    ("replay", "cotenant replay /var/lib/cotenant/journal.ndjson"),
    ("shed", "cotenant shed 256MiB"),
    ("regrow", "cotenant regrow"),
    ("kv-type", "cotenant kv-type q8"),
    ("start", "cotenant start asr"),
    ("stop", "cotenant stop asr"),
    ("recycle", "cotenant recycle asr"),
    ("resize", "cotenant resize asr grammar"),
    ("load", "cotenant load"),
    ("reload", "cotenant reload"),
    ("drain", "cotenant drain"),
    ("drain", "cotenant drain --wait 60s"),
    ("drain", "cotenant drain --off"),
    ("bench", "cotenant bench --help"),
];

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _, error::ErrorKind};

    use super::*;
    use crate::Cli;

    #[test]
    fn each_command_has_examples_and_each_example_is_understood() {
        for command in visible(&Cli::command()).get_subcommands() {
            let name = command.get_name();
            assert!(EXAMPLES.iter().any(|(of, _)| *of == name), "{name}");
        }
        for (name, example) in EXAMPLES {
            assert!(
                example.starts_with(&format!("cotenant {name}")),
                "{example}"
            );
            let parsed = Cli::try_parse_from(example.split(' '));
            let fault = parsed
                .err()
                .filter(|error| error.kind() != ErrorKind::DisplayHelp);
            assert!(fault.is_none(), "{example}: {fault:?}");
        }
    }

    #[test]
    fn pages_have_exit_status_files_and_examples() {
        let folder = tempfile::tempdir().unwrap();
        write_pages(Cli::command(), folder.path()).unwrap();
        for (page, line) in [
            ("cotenant", "the supervisor cannot be reached"),
            ("cotenant-shed", "cotenant shed 256MiB"),
            ("cotenant-health", "the call failed"),
        ] {
            let text = fs::read_to_string(folder.path().join(format!("{page}.1"))).unwrap();
            for section in ["EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES"] {
                assert!(text.contains(section), "{page}: {section}: {text}");
            }
            assert!(text.contains(line), "{page}: {text}");
        }
        for page in fs::read_dir(folder.path()).unwrap() {
            let text = fs::read_to_string(page.unwrap().path()).unwrap();
            assert!(text.contains("EXIT STATUS"), "{text}");
        }
        assert!(!folder.path().join("cotenant-text-helper.1").exists());
    }

    #[test]
    fn completions_offer_values_and_nothing_that_is_hidden() {
        let mut script = Vec::new();
        let mut command = visible(&Cli::command());
        clap_complete::generate(
            clap_complete::Shell::Bash,
            &mut command,
            "cotenant",
            &mut script,
        );
        let script = String::from_utf8(script).unwrap();
        assert!(
            script.contains("kv-type") && script.contains("f16"),
            "{script}"
        );
        for hidden in ["text-helper", "audio-decoder", "manual"] {
            assert!(!script.contains(hidden), "{hidden}");
        }
    }
}
