//! Grouped list of commands, which clap itself does not support.

use std::fmt::Write as _;

use clap::Command;

/// Groups, with the commands of each in display order.
const GROUPS: [(&str, &[&str]); 7] = [
    ("Run", &["serve", "demo", "worker", "completions"]),
    ("Plan", &["check", "plan", "catalogue", "pull", "calibrate"]),
    ("Use", &["generate", "talk", "hold"]),
    (
        "Observe",
        &[
            "status", "top", "plot", "leases", "events", "metrics", "health",
        ],
    ),
    ("Explain", &["why", "postmortem", "replay"]),
    (
        "Control",
        &[
            "shed", "regrow", "kv-type", "start", "stop", "recycle", "resize", "load", "reload",
            "drain",
        ],
    ),
    ("Measure", &["bench"]),
];

/// Lists subcommands in groups, and shows the help instead of an error if there are no arguments.
pub(super) fn grouped(command: Command) -> Command {
    let mut list = String::new();
    for (group, names) in GROUPS {
        let _ = writeln!(list, "{group}:");
        for name in names {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(list, "  {name:<13}{about}");
        }
        list.push('\n');
    }
    command.arg_required_else_help(true).help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Global options:\n{{options}}\n"
    ))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::Cli;

    #[test]
    fn every_command_is_in_one_group() {
        let command = Cli::command();
        let mut listed: Vec<&str> = GROUPS
            .iter()
            .flat_map(|(_, names)| names.iter().copied())
            .collect();
        let mut known: Vec<&str> = command
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
            .map(Command::get_name)
            .collect();
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known);
    }
}
