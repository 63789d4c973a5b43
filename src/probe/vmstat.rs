//! Counters of `/proc/vmstat` as early signs of reclaim.

use super::{
    ProbeError, ProbeRoot,
    source::{lines, number, read_bytes},
};
use cotenant_policy::pressure::KernelCounters;

/// Reads `/proc/vmstat`.
///
/// # Errors
/// If the file cannot be read.
pub fn read(root: &ProbeRoot) -> Result<KernelCounters, ProbeError> {
    let path = root.proc("vmstat");
    let text = read_bytes(&path).map_err(|error| ProbeError::io("counters", &path, error))?;
    Ok(parse(&text))
}

/// Parses the text of `/proc/vmstat`; other lines are skipped.
pub fn parse(text: &[u8]) -> KernelCounters {
    let mut stat = KernelCounters::default();
    for (_, line) in lines(text) {
        let Some(blank) = line.iter().position(|b| *b == b' ') else {
            continue;
        };
        let (key, value) = line.split_at(blank);
        let slot = match key {
            b"workingset_refault_file" | b"workingset_refault" => &mut stat.refaults_file,
            b"pgscan_direct" => &mut stat.pgscan_direct,
            b"pswpin" => &mut stat.swap_ins,
            b"oom_kill" => &mut stat.oom_kills,
            b"cma_alloc_fail" => &mut stat.cma_failures,
            _ if key.starts_with(b"allocstall") => {
                if let Some(count) = number(value.trim_ascii()) {
                    stat.allocstalls = Some(stat.allocstalls.unwrap_or(0).saturating_add(count));
                }
                continue;
            }
            _ => continue,
        };
        *slot = number(value.trim_ascii());
    }
    stat
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counters_of_5_15_are_split_and_stalls_are_summed_over_zones() {
        let stat = parse(include_bytes!(
            "../../tests/fixtures/jetson/vmstat/vmstat_selected_5.15_thrash.RECONSTRUCTED.txt"
        ));
        assert_eq!(stat.refaults_file, Some(64_000_000_000));
        assert_eq!(stat.pgscan_direct, Some(44_120_331));
        assert_eq!(stat.allocstalls, Some(120_331 + 402_118));
        assert_eq!(stat.swap_ins, Some(4_402_118));
        assert_eq!(stat.oom_kills, Some(3));
    }

    #[test]
    fn an_older_kernel_has_one_refault_counter() {
        let stat = parse(b"workingset_refault 17\npgscan_direct_throttle 9\nallocstall 5\n");
        assert_eq!(stat.refaults_file, Some(17));
        assert_eq!(stat.pgscan_direct, None);
        assert_eq!(stat.allocstalls, Some(5));
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn stalls_do_not_overflow(a in any::<u64>(), b in any::<u64>()) {
            let _ = parse(format!("allocstall_dma {a}\nallocstall_normal {b}\n").as_bytes());
        }
    }
}
