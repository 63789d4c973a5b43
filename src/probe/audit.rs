//! Audit of a device: losses of memory or speed, each with its remedy.
//!
//! Every rule reads small files below a [`ProbeRoot`] and returns at most one finding. An unreadable file is no
//! finding. Costs in bytes are measured on the device; costs in percent refer to the tokens per second of an answer,
//! which is bound by memory bandwidth, or of streamed layers for findings about the disk.

mod facts;
mod hardware;
mod memory;
mod software;

pub use self::facts::{Cost, Finding, Severity, Version};
use self::facts::{Facts, Rule};
use super::ProbeRoot;

/// Returns all rules, in display order.
fn rules() -> impl Iterator<Item = &'static Rule> {
    software::RULES
        .iter()
        .chain(memory::RULES)
        .chain(hardware::RULES)
}

/// Returns the number of rules.
pub fn rule_count() -> usize {
    rules().count()
}

/// Returns the versions of a Jetson's software, each with the expected one for its L4T; empty elsewhere.
pub fn versions(root: &ProbeRoot) -> Vec<Version> {
    software::versions(&Facts::read(root))
}

/// Applies all rules; returns the findings in order, warnings and notes mixed.
pub fn audit(root: &ProbeRoot) -> Vec<Finding> {
    let facts = Facts::read(root);
    rules()
        .filter(|(rule, _)| can_tell(rule, root))
        .filter_map(|(rule, look)| {
            let found = look(&facts)?;
            Some(Finding {
                rule,
                severity: found.severity,
                text: found.text,
                cost: found.cost,
                remedy: found.remedy,
            })
        })
        .collect()
}

/// Returns whether a rule that infers from a missing file applies: in a partial copy of a machine, absence proves
/// nothing.
fn can_tell(rule: &str, root: &ProbeRoot) -> bool {
    match rule {
        // Rights of the calling process, on this machine.
        "rights" => root.is_live(),
        "psi" => root.proc("vmstat").exists(),
        "cgroup_memory" => root.sys("fs/cgroup").exists(),
        "nvmap_access" => root.sys("kernel/debug").exists(),
        "swap_missing" => root.proc("swaps").exists(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn at_least_twenty_rules_have_names_of_their_own() {
        let names: BTreeSet<_> = rules().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), rule_count());
        assert!(rule_count() >= 45, "{}", rule_count());
    }
}
