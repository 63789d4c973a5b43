//! Captured errors and kernel logs, with the expected results.

use std::{fs, path::Path};

use super::{
    kernel_log::{self, RecordKind},
    words::{Allocator, Said, quotes},
};

/// Reads the files of a folder of captures, sorted by name.
fn captures(folder: &str) -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/jetson")
        .join(folder);
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut found: Vec<_> = entries
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, fs::read_to_string(entry.path()).unwrap())
        })
        .collect();
    found.sort();
    found
}

#[test]
fn the_last_words_of_each_program_name_the_allocator_that_refused() {
    let expected = [
        (
            "cudarc_driver_error.RECONSTRUCTED.txt",
            Some(Allocator::Cuda),
        ),
        // Table of codes, checked below.
        ("exit_codes.tsv", None),
        ("ggml_cuda_lines.txt", Some(Allocator::Cuda)),
        ("ggml_vmm_pool_lines.txt", Some(Allocator::Cuda)),
        (
            "llama_cpp_cuda0_fail.RECONSTRUCTED.txt",
            Some(Allocator::NvMap),
        ),
        ("llama_cpp_load_fail_lines.txt", Some(Allocator::Host)),
        ("matx_oom_orin.txt", Some(Allocator::Cuda)),
        ("nvmap_error_decode.tsv", None),
        ("nvmap_error_lines.txt", Some(Allocator::NvMap)),
        ("ollama_cublas_resource_lines.txt", Some(Allocator::Cuda)),
        ("pytorch_nvml_assert_orin.txt", Some(Allocator::Cuda)),
        // Usage at one stage, not a failure.
        ("tensorrt_memusage_edge-llm-99.txt", None),
    ];
    let found = captures("errors");
    let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        expected.map(|(name, _)| name),
        "each capture has its meaning here"
    );
    for ((name, text), (_, allocator)) in found.iter().zip(expected) {
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        // A program may end after any line, so each prefix is a possible output.
        let found: Vec<_> = (1..=lines.len())
            .flat_map(|last| quotes(&lines[..last]))
            .collect();
        let said: Vec<_> = found
            .iter()
            .filter(|quote| quote.is_final)
            .map(|quote| quote.said.clone())
            .collect();
        match allocator {
            Some(allocator) => assert!(
                said.contains(&Said::Allocation(allocator)),
                "{name}: {said:?}"
            ),
            None if name.ends_with(".tsv") => {}
            None => assert_eq!(said, [], "{name}"),
        }
    }
}

#[test]
fn a_code_of_nvmap_is_that_of_its_allocation() {
    let (_, text) = captures("errors")
        .into_iter()
        .find(|(name, _)| name == "nvmap_error_decode.tsv")
        .unwrap();
    for line in text.lines().skip(1) {
        let cells: Vec<&str> = line.split('\t').collect();
        let number: u64 = cells[0].parse().unwrap();
        assert_eq!(format!("{number:#x}"), cells[1]);
        // _IOW('N', 3, size): direction 1, size, 'N', 3
        assert_eq!(
            (number >> 30, number >> 8 & 0xff, number & 0xff),
            (1, u64::from(b'N'), 3)
        );
        assert!(
            cells[2].contains(&format!("{} bytes", number >> 16 & 0x3fff)),
            "{line}"
        );
        let message = format!("NvMapMemAllocInternalTagged: {number} error {}", cells[3]);
        assert_eq!(
            quotes(&[message])[0].said,
            Said::Allocation(Allocator::NvMap)
        );
    }
}

#[test]
fn each_record_of_the_kernel_log_names_its_process() {
    /// File, then for each killed process its id, its name, and whether the limit of its control group was the cause.
    type Expected = (&'static str, &'static [(u32, &'static str, bool)]);
    let expected: [Expected; 6] = [
        // The process id is missing from the report.
        ("oom_global_drive-thor_truncated.txt", &[]),
        (
            "oom_global_orin-nx-16g.RECONSTRUCTED.txt",
            &[
                (902_394, "llama-server", false),
                (902_394, "llama-server", false),
            ],
        ),
        (
            "oom_global_orin-nx_truncated.txt",
            &[(204_356, "tensorrt-edgell", false)],
        ),
        (
            "oom_memcg_full_x86_5.8.txt",
            &[
                (19_289, "memcg_process", true),
                (19_289, "memcg_process", true),
            ],
        ),
        (
            "oom_memcg_k8s_java.txt",
            &[(50_624, "java", true), (50_624, "java", true)],
        ),
        (
            "oom_memcg_orin-nx-16g.RECONSTRUCTED.txt",
            &[(341_226, "asr-worker", true), (341_226, "asr-worker", true)],
        ),
    ];
    let mut found = captures("dmesg");
    // Lines of systemd's journal, not of the kernel.
    let (systemd, text) = found.pop().unwrap();
    assert_eq!(systemd, "systemd_unit_oom_lines.RECONSTRUCTED.txt");
    assert!(text.lines().all(|line| kernel_log::parse(line).is_none()));
    let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        expected.map(|(name, _)| name),
        "each capture has its meaning here"
    );
    for ((name, text), (_, expected)) in found.iter().zip(expected) {
        let records: Vec<_> = text.lines().filter_map(kernel_log::parse).collect();
        let said: Vec<_> = records
            .iter()
            .map(|record| {
                let RecordKind::Oom { memcg, .. } = record.kind else {
                    panic!("{name}: {record:?}");
                };
                (record.pid, record.comm.as_str(), memcg)
            })
            .collect();
        assert_eq!(said, expected, "{name}");
    }
}
