//! `cotenant plan` and `cotenant catalogue`, without a supervisor.

use std::{
    fs::{self, File},
    path::Path,
    process::{Command, Output},
};

use cotenant::engine::{
    spec::Architecture,
    synthetic::{Synthetic, TypeMix},
};
use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cotenant"))
        .args(arguments)
        .env_remove("COTENANT_CONFIG")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(arguments: &[&str]) -> Value {
    let output = run(&[arguments, &["-o", "json"]].concat());
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)))
}

fn hollow(folder: &Path, model: &Synthetic) -> String {
    let path = folder.join("model.gguf");
    model.write_hollow(File::create(&path).unwrap()).unwrap();
    path.display().to_string()
}

#[test]
fn a_4b_model_with_a_voice_stack_is_planned_for_an_orin_from_its_header_alone() {
    let folder = tempfile::tempdir().unwrap();
    let model = hollow(folder.path(), &Synthetic::qwen35_4b(TypeMix::Q4KM, 1));
    let picture = folder.path().join("bar.svg").display().to_string();
    let arguments = [
        "plan",
        &model,
        "--device",
        "orin-nx-16g",
        "--worker",
        "asr=2GiB",
        "--worker",
        "tts=1GiB:800MiB",
        "--svg",
        &picture,
    ];
    let output = run(&arguments);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed}{}", text(&output.stderr));
    for said in [
        "qwen35 on 32 layers",
        "4096 tokens as f16, 32 KiB each; 8 of 32 layers attend",
        "declared peak, 800 MiB at rest",
        "start order\n  llm (",
        "Elevated, others take",
        "verdict: fits: peak ",
    ] {
        assert!(printed.contains(said), "{said}: {printed}");
    }
    let svg = fs::read_to_string(&picture).unwrap();
    assert!(svg.starts_with("<svg ") && svg.contains("KV cache 128 MiB"), "{svg}");
    let planned = json(&arguments);
    assert_eq!(planned["ok"], true);
    assert_eq!(planned["model"]["kvBytesPerToken"], 32 << 10);
    let kinds: Vec<_> = planned["model"]["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|group| &group["kind"])
        .collect();
    assert_eq!(
        kinds,
        ["embedding", "attention", "recurrent", "feed_forward", "vectors"]
    );
    let file = planned["model"]["fileBytes"].as_u64().unwrap();
    assert_eq!(file / 100_000_000, 27, "{file}");
    assert_eq!(fs::metadata(&model).unwrap().len(), file);
}

#[test]
fn a_model_that_is_too_large_streams_and_one_that_never_fits_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = hollow(folder.path(), &Synthetic::qwen35_4b(TypeMix::Q4KM, 1));
    let device = folder.path().join("box.yaml");
    let on = |memory: &str| {
        fs::write(
            &device,
            format!("{{memory: {memory}, memory_bandwidth: 20GiB, disk_bandwidth: 1GiB}}"),
        )
        .unwrap();
        json(&["plan", &model, "--device", device.to_str().unwrap()])
    };
    let small = on("2500MiB");
    assert!(
        small["verdict"].as_str().unwrap().starts_with("runs with less"),
        "{small}"
    );
    assert_eq!(small["forecast"]["contextResident"], 0);
    let none = on("256MiB");
    assert!(
        none["verdict"].as_str().unwrap().starts_with("cannot work: llm"),
        "{none}"
    );
    assert_eq!(none["ok"], false);
    let output = run(&["plan", &model, "--device", device.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(78));
}

#[test]
fn a_config_json_is_planned_like_the_file_that_it_becomes() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    fs::write(
        &config,
        r#"{"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 40960, "tie_word_embeddings": true}"#,
    )
    .unwrap();
    let model = hollow(folder.path(), &Synthetic::qwen3_0_6b(TypeMix::Q4KM, 1));
    let total = |path: &str| json(&["plan", path, "--device", "orin-nano-8g"])["forecast"]["llm"]["total"].clone();
    assert_eq!(total(config.to_str().unwrap()), total(&model));
}

#[test]
fn a_header_that_lies_is_refused_with_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let model = hollow(folder.path(), &Synthetic::tiny(Architecture::Qwen3, TypeMix::Q4KM, 1));
    let whole = fs::read(&model).unwrap();
    let short = folder.path().join("short.gguf");
    fs::write(&short, &whole[..whole.len() / 2]).unwrap();
    let many = folder.path().join("many.gguf");
    let mut lie = whole.clone();
    lie[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&many, lie).unwrap();
    for (path, said) in [(short, "ends at"), (many, "tensor count")] {
        let output = run(&["plan", path.to_str().unwrap(), "--device", "orin-nx-16g"]);
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(78), "{printed}");
        assert!(
            printed.starts_with("error: cannot load model `") && printed.contains(said),
            "{printed}"
        );
    }
    let output = run(&["plan", "/nowhere/model.gguf", "--device", "nowhere"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("hint: known boards: orin-nx-16g"));
}

#[test]
fn the_catalogue_has_every_model_on_every_board() {
    let entries = json(&["catalogue"]);
    let entries = entries.as_array().unwrap();
    let of = |model: &str, device: &str| {
        entries
            .iter()
            .find(|entry| entry["model"] == model && entry["device"] == device)
            .unwrap_or_else(|| panic!("{model} on {device}"))
    };
    assert_eq!(of("Qwen3-14B", "orin-nano-8g")["resident"], false);
    assert_eq!(of("Qwen3-14B", "orin-nx-16g")["resident"], true);
    assert_eq!(of("Qwen3.5-4B", "orin-nano-8g")["resident"], true);
    assert!(
        entries.len().is_multiple_of(5) && entries.len() >= 50,
        "{}",
        entries.len()
    );
}

#[test]
fn a_device_is_audited_from_a_folder_without_a_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let put = |path: &str, capture: &str| {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/jetson");
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(fixtures.join(capture), path).unwrap();
    };
    put("proc/meminfo", "meminfo/orin-nx-16g_r36.4_idle.RECONSTRUCTED.txt");
    put("proc/swaps", "zram/proc_swaps_orin-nx-16g.RECONSTRUCTED.txt");
    put("etc/nv_tegra_release", "nv_tegra_release/r36.4.7.txt");
    let root = folder.path().to_str().unwrap();
    let output = run(&["check", "--root", root]);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    assert!(
        printed.contains("warning: zram of 7.6 GiB is half of the memory"),
        "{printed}"
    );
    assert!(
        printed.contains("; costs 4.4 GiB\n") && printed.contains("  hint: disable `nvzramconfig`"),
        "{printed}"
    );
    let found = json(&["check", "--root", root]);
    let fault = found["audit"]
        .as_array()
        .unwrap()
        .iter()
        .find(|found| found["rule"] == "l4t_known_fault")
        .unwrap();
    assert_eq!(fault["cost"]["kind"], "memory", "{fault}");
}

#[test]
fn a_folder_that_is_no_device_is_not_audited_as_free_of_faults() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(&["check", "--root", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("proc/meminfo"),
        "{}",
        text(&output.stderr)
    );
    assert!(!text(&output.stdout).contains("0 warnings"), "{}", text(&output.stdout));
}
