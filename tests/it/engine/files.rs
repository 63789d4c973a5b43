//! Damaged, foreign, truncated and split files, and plans for another model.

use std::{
    fs::OpenOptions,
    io::Write as _,
    path::{Path, PathBuf},
};

use crate::weights::{Random, Weights as _, write_part};
use cotenant::{
    causes::in_one_line,
    engine::{
        Engine, ForwardError, Header, LoadErrorKind, Model,
        gguf::{GgmlDType, SUPPORTED},
        spec::Architecture,
        synthetic::{Entry, Synthetic, TypeMix},
    },
    policy::{kv_type::KvType, residency::EnginePlan},
};
use proptest::prelude::*;

use super::{PROMPT, go, open, options, plan, reference, tiny, write};

#[test]
fn a_file_truncated_while_streaming_fails_that_request_alone() {
    let file = tiny(Architecture::Qwen35, GgmlDType::F32);
    let expected = reference(&file.path, 0);
    let mut model = open(&file.path, &plan([], 64, 16), 1);
    let handle = OpenOptions::new().write(true).open(&file.path).unwrap();
    let bytes = std::fs::read(&file.path).unwrap();
    handle.set_len(bytes.len() as u64 / 2).unwrap();
    // Read-ahead data may still be present, so the error may take a pass or two.
    let error = (0..20)
        .find_map(|_| model.forward(&PROMPT[..1], &mut go()).err())
        .expect("half of the file is gone");
    let error = error.to_string();
    let reported = ["the file ends", "was modified after it was opened"];
    assert!(
        reported.iter().any(|problem| error.contains(problem)),
        "{error}"
    );
    assert!(matches!(
        model.forward(&[1], &mut go()),
        Err(ForwardError::SequenceLost)
    ));

    // Restore the file with the same contents.
    std::fs::write(&file.path, &bytes).unwrap();
    model.reset();
    assert!(model.forward(&PROMPT, &mut go()).unwrap()[..] == expected[0]);
    let report = model.apply(&plan(0..5, 64, 16)).unwrap();
    assert_eq!(report.plan.resident.len(), 5);
}

#[test]
fn a_file_that_is_touched_copied_over_or_appended_to_is_read_on() {
    for architecture in [Architecture::Qwen35, Architecture::Llama] {
        let file = tiny(architecture, GgmlDType::Q8_0);
        let expected = reference(&file.path, 0);
        let mut model = open(&file.path, &plan([0], 64, 16), 1);
        let bytes = std::fs::read(&file.path).unwrap();
        let handle = OpenOptions::new().append(true).open(&file.path).unwrap();
        let mut later = handle.metadata().unwrap().modified().unwrap();
        for change in ["touch", "cp", "append"] {
            match change {
                "touch" => {}
                "cp" => std::fs::write(&file.path, &bytes).unwrap(),
                _ => (&handle).write_all(b"a line").unwrap(),
            }
            // The kernel's timestamps have a resolution of some milliseconds.
            later += std::time::Duration::from_secs(1);
            handle.set_modified(later).unwrap();
            for _ in 0..2 {
                let logits = model
                    .forward(&PROMPT, &mut go())
                    .map(|logits| logits.to_vec());
                assert!(logits.unwrap() == expected[0], "{architecture:?}, {change}");
                model.reset();
            }
            let grown = model.apply(&plan([0, 1], 64, 16)).unwrap();
            assert_eq!(grown.plan.resident.len(), 2, "{architecture:?}, {change}");
            model.apply(&plan([0], 64, 16)).unwrap();
        }
    }
}

#[test]
fn a_file_that_is_written_to_is_no_longer_read_and_one_put_in_its_place_is_another() {
    let file = tiny(Architecture::Qwen35, GgmlDType::F32);
    let expected = reference(&file.path, 0);
    let other = write(&Synthetic::tiny(
        Architecture::Qwen35,
        TypeMix::All(GgmlDType::F32),
        8,
    ));
    let other = std::fs::read(&other.path).unwrap();
    let bytes = std::fs::read(&file.path).unwrap();

    // Replaced under its name: the open file is still the original.
    let mut model = open(&file.path, &plan([0, 1], 64, 16), 1);
    let beside = file.path.with_extension("new");
    std::fs::write(&beside, &other).unwrap();
    std::fs::rename(&beside, &file.path).unwrap();
    assert!(model.forward(&PROMPT, &mut go()).unwrap()[..] == expected[0]);
    model.reset();

    // Overwritten in place by a model of the same shape, which must not be used as the opened model.
    let mut model = open(&file.path, &plan([0, 1], 64, 16), 1);
    let mut whole = open(&file.path, &plan(0..5, 64, 16), 1);
    let mine = whole.forward(&PROMPT, &mut go()).unwrap().to_vec();
    assert!(mine != expected[0]);
    let handle = OpenOptions::new().write(true).open(&file.path).unwrap();
    let opened = handle.metadata().unwrap().modified().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&handle, &bytes, 0).unwrap();
    // The kernel's timestamps have a resolution of some milliseconds.
    handle
        .set_modified(opened + std::time::Duration::from_secs(1))
        .unwrap();
    let error = (0..20)
        .find_map(|_| model.forward(&PROMPT[..1], &mut go()).err())
        .expect("what is read now is another model's");
    assert!(
        error
            .to_string()
            .contains("was modified after it was opened"),
        "{error}"
    );
    let grown = model.apply(&plan(0..5, 64, 16)).unwrap_err().to_string();
    assert!(
        grown.contains("was modified after it was opened"),
        "{grown}"
    );

    // A fully resident model is unaffected.
    whole.reset();
    assert!(whole.forward(&PROMPT, &mut go()).unwrap()[..] == mine);
}

#[test]
fn damaged_weights_are_an_error_and_not_an_answer() {
    let file = tiny(Architecture::Qwen3, GgmlDType::F32);
    let header = Header::read(&file.path).unwrap();
    let tensor = header.tensor("blk.2.ffn_up.weight").unwrap();
    let mut bytes = std::fs::read(&file.path).unwrap();
    let start = usize::try_from(tensor.offset).unwrap();
    for row in 0..256 {
        bytes[start + row * 1024..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    std::fs::write(&file.path, bytes).unwrap();
    let mut model = open(&file.path, &plan(0..5, 64, 16), 1);
    let error = model.forward(&PROMPT, &mut go()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "results at position 0 are not finite: the weights are damaged"
    );
}

#[test]
fn damaged_weights_of_every_type_are_found_whatever_the_cache_is_stored_in() {
    for dtype in SUPPORTED {
        for name in [
            "blk.2.ffn_up.weight",
            "blk.1.attn_k.weight",
            "blk.0.attn_v.weight",
        ] {
            for kv_type in [KvType::F16, KvType::Q8, KvType::Q4] {
                let file = tiny(Architecture::Qwen3, dtype);
                let header = Header::read(&file.path).unwrap();
                let tensor = header.tensor(name).unwrap();
                let mut bytes = std::fs::read(&file.path).unwrap();
                let start = usize::try_from(tensor.offset).unwrap();
                // All scales are NaN.
                bytes[start..start + tensor.bytes.as_len()].fill(0xff);
                std::fs::write(&file.path, bytes).unwrap();
                let plan = EnginePlan {
                    kv_type,
                    ..plan(0..5, 64, 16)
                };
                let mut model = open(&file.path, &plan, 1);
                let error = model.forward(&PROMPT, &mut go()).map(|logits| logits[0]);
                let error = error.map_or_else(|error| error.to_string(), |logit| logit.to_string());
                assert!(
                    error.ends_with("are not finite: the weights are damaged"),
                    "{dtype:?} {name} {kv_type}: {error}"
                );
            }
        }
    }
}

#[test]
fn an_embedding_without_a_row_for_each_token_is_refused() {
    let file = tiny(Architecture::Qwen3, GgmlDType::Q8_0);
    let mut bytes = std::fs::read(&file.path).unwrap();
    let name = b"token_embd.weight";
    let at = bytes
        .windows(name.len())
        .position(|part| part == name)
        .unwrap();
    // The name is followed by the number of dimensions, and the first of them.
    let rows = at + name.len() + 4 + 8;
    assert_eq!(bytes[rows..rows + 8], 320u64.to_le_bytes());
    bytes[rows..rows + 8].copy_from_slice(&319u64.to_le_bytes());
    std::fs::write(&file.path, bytes).unwrap();
    let error = Model::inspect(&file.path, 1).unwrap_err();
    assert_eq!(
        error.kind().to_string(),
        "tensor `token_embd.weight` has dimensions [256, 319], which do not fit a model whose header says 320 tokens"
    );
}

/// Returns the kinds of errors caused by a damaged copy of a file.
fn kind_of(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.gguf");
    std::fs::write(&path, bytes).unwrap();
    match Model::inspect(&path, 1) {
        Ok(_) => "fine".to_owned(),
        Err(error) => {
            assert!(
                error.to_string().starts_with("cannot load model `"),
                "{error}"
            );
            error.kind().to_string()
        }
    }
}

/// Both versions have the same layout; version 3 only adds files of another byte order.
#[test]
fn a_file_of_version_2_is_read_as_one_of_version_3_is() {
    let file = tiny(Architecture::Qwen35, GgmlDType::Q4K);
    let logits = |resident: std::ops::Range<u32>| {
        let mut model = open(&file.path, &plan(resident, 64, 8), 1);
        model.forward(&PROMPT, &mut go()).unwrap().to_vec()
    };
    let expected = logits(0..5);
    let mut bytes = std::fs::read(&file.path).unwrap();
    bytes[4..8].copy_from_slice(&2u32.to_le_bytes());
    std::fs::write(&file.path, bytes).unwrap();
    assert!(logits(0..5) == expected && logits(0..2) == expected);
}

#[test]
fn bad_files_are_refused_with_what_is_wrong() {
    let file = tiny(Architecture::Qwen35, GgmlDType::Q8_0);
    let good = std::fs::read(&file.path).unwrap();
    assert_eq!(kind_of(&good), "fine");
    assert_eq!(kind_of(b""), "it is empty: it has 0 bytes");
    assert_eq!(
        kind_of(b"PK\x03\x04 a zip"),
        r"it is not GGUF: it starts with `PK\x03\x04` instead of `GGUF`"
    );
    assert_eq!(
        kind_of(b"GGUF\x01\0\0\0"),
        "it is GGUF version 1; versions 2 and 3 are supported"
    );
    assert_eq!(
        kind_of(b"GGUF\0\0\0\x03"),
        "it is GGUF version 3 for big-endian processors; little-endian files are supported"
    );
    assert_eq!(
        kind_of(b"GGUF\x30\0\0\0"),
        "it is GGUF version 48; versions 2 and 3 are supported"
    );

    let end = good.len() - 1;
    let tail = kind_of(&good[..end]);
    assert!(tail.contains(&format!("the file has {end}")), "{tail}");
    let middle = kind_of(&good[..700]);
    assert!(
        middle.contains("at byte") || middle.contains("at most"),
        "{middle}"
    );

    // Headers with wrong numbers of tensors or of metadata, or a wrong text length.
    let mut lies = good.clone();
    lies[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(
        kind_of(&lies).starts_with("tensor count is 18446744073709551615, at most"),
        "{}",
        kind_of(&lies)
    );
    lies = good.clone();
    lies[16..24].copy_from_slice(&(1u64 << 40).to_le_bytes());
    assert!(
        kind_of(&lies).starts_with("metadata count is 1099511627776"),
        "{}",
        kind_of(&lies)
    );
    lies = good.clone();
    lies[24..32].copy_from_slice(&(1u64 << 33).to_le_bytes());
    assert!(
        kind_of(&lies).starts_with("metadata key is 8589934592"),
        "{}",
        kind_of(&lies)
    );

    let renamed = replaced(&good, b"qwen35", b"gemma9");
    assert_eq!(
        kind_of(&renamed),
        "architecture `gemma9` is not supported; supported are exaone4, gemma2, gemma3, gemma4, gpt-oss, granite, granitehybrid, lfm2, lfm2moe, llama, mistral3, nemotron_h, nemotron_h_moe, olmo2, phi3, qwen2, qwen3, \
         qwen3moe, qwen35, qwen35moe, qwen3vl, qwen3vlmoe, smollm3 and stablelm"
    );
    let renamed = replaced(&good, b"blk.2.ffn_up.weight", b"blk.2.ffn_ab.weight");
    assert_eq!(kind_of(&renamed), "tensor `blk.2.ffn_up.weight` is missing");

    // A tensor's type number follows its name, the number of axes and the axes.
    let name = b"blk.2.ffn_up.weight";
    let at = find(&good, name) + name.len() + 4 + 16;
    let mut unknown = good.clone();
    unknown[at..at + 4].copy_from_slice(&21u32.to_le_bytes());
    let message = kind_of(&unknown);
    assert!(
        message.starts_with("tensor `blk.2.ffn_up.weight` has type IQ3_S; supported are"),
        "{message}"
    );
    let mut outside = good.clone();
    outside[at + 4..at + 12].copy_from_slice(&(1u64 << 40).to_le_bytes());
    assert!(
        kind_of(&outside).starts_with("tensor `blk.2.ffn_up.weight` ends at byte 1099"),
        "{}",
        kind_of(&outside)
    );
    // Overlapping the next tensor in the file fully, or slightly before its end.
    let place = |bytes: &[u8], name: &[u8]| {
        let at = find(bytes, name) + name.len() + 4 + 16 + 4;
        (
            at,
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()),
        )
    };
    let (up, _) = place(&good, name);
    let (_, down) = place(&good, b"blk.2.ffn_down.weight");
    for offset in [down, down + 32, down - 32] {
        let mut within = good.clone();
        within[up..up + 8].copy_from_slice(&offset.to_le_bytes());
        let message = kind_of(&within);
        let (inner, outer) = message.split_once(", inside tensor ").unwrap();
        assert!(
            [inner, outer]
                .iter()
                .any(|text| text.contains("`blk.2.ffn_up.weight`")),
            "{message}"
        );
        assert!(
            [inner, outer]
                .iter()
                .any(|text| text.contains("`blk.2.ffn_down.weight`")),
            "{message}"
        );
    }

    // The value of a key follows its name and its type.
    let key = b"qwen35.context_length";
    let length = find(&good, key) + key.len() + 4;
    for (tokens, expected) in [
        (1 << 20, "fine"),
        (1 << 24, "fine"),
        (
            (1 << 24) + 1,
            "qwen35.context_length is 16777217, at most 16777216 is possible",
        ),
        (
            u32::MAX,
            "qwen35.context_length is 4294967295, at most 16777216 is possible",
        ),
        (0, "metadata `qwen35.context_length`: it is 0"),
    ] {
        let mut long = good.clone();
        long[length..length + 4].copy_from_slice(&tokens.to_le_bytes());
        assert_eq!(kind_of(&long), expected);
    }
    let mut wide = good;
    wide[at - 16..at - 8].copy_from_slice(&(1u64 << 62).to_le_bytes());
    assert!(
        kind_of(&wide).starts_with("tensor `blk.2.ffn_up.weight` has dimensions"),
        "{}",
        kind_of(&wide)
    );
}

fn find(bytes: &[u8], wanted: &[u8]) -> usize {
    bytes
        .windows(wanted.len())
        .position(|window| window == wanted)
        .unwrap()
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = find(bytes, from);
    let mut copy = bytes.to_vec();
    copy[at..at + to.len()].copy_from_slice(to);
    copy
}

#[test]
fn a_missing_file_and_a_folder_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = Model::inspect(&folder.path().join("absent.gguf"), 1).unwrap_err();
    assert!(matches!(error.kind(), LoadErrorKind::Open(_)), "{error:?}");
    let error = Model::inspect(folder.path(), 1).unwrap_err();
    assert_eq!(error.kind().to_string(), "it is not a regular file");
}

#[test]
fn a_plan_for_another_model_is_refused() {
    let file = tiny(Architecture::Llama, GgmlDType::Q8_0);
    let error = Model::open(&file.path, &plan(0..9, 64, 8), &options(1))
        .err()
        .unwrap();
    assert_eq!(
        error.kind().to_string(),
        "the plan does not fit it: the plan names part 8 of the weights, the model has 5"
    );
    let mut model = open(&file.path, &plan(0..5, 64, 8), 1);
    let error = model.apply(&plan(0..5, 64, 0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot work with a prefill chunk of 0 tokens: it must be 1 to 4096"
    );
}

#[test]
fn a_block_for_multi_token_prediction_is_a_part_of_its_own() {
    let with = Synthetic {
        nextn: 1,
        ..Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 7)
    };
    let file = write(&with);
    let (shape, _) = Model::inspect(&file.path, 1).unwrap();
    assert_eq!((shape.layer_count(), shape.layers.len()), (4, 6));
    let inspected = Engine::inspect_with(&file.path, None, 1).unwrap();
    assert_eq!(inspected.shape.layer_count(), 4);
    assert!(inspected.unused.is_empty(), "{:?}", inspected.unused);
    let without = inspected.clone().drafting(false).shape;
    assert_eq!(without.layers.len(), 5);
    // With the block or without, and with only some layers.
    for parts in [0..6, 0..5, 0..3] {
        open(&file.path, &plan(parts, 64, 8), 1)
            .forward(&PROMPT, &mut go())
            .unwrap();
    }
}

#[test]
fn other_blocks_for_multi_token_prediction_are_left_alone() {
    // Two blocks, of which each would need the one before it.
    let with = Synthetic {
        nextn: 2,
        ..Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 7)
    };
    let file = write(&with);
    let inspected = Engine::inspect_with(&file.path, None, 1).unwrap();
    assert_eq!(inspected.shape.layers.len(), 5);
    let [unused] = &inspected.unused[..] else {
        panic!("{:?}", inspected.unused)
    };
    assert!(unused.starts_with("multi-token prediction ("), "{unused}");
    open(&file.path, &plan(0..5, 64, 8), 1)
        .forward(&PROMPT, &mut go())
        .unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_damage_to_a_header_makes_the_reader_panic(at in 0usize..12_000, byte: u8, cut in 0usize..20_000) {
        let file = tiny(Architecture::Qwen35, GgmlDType::Q4K);
        let mut bytes = std::fs::read(&file.path).unwrap();
        bytes[at] = byte;
        if cut < 10_000 {
            bytes.truncate(cut);
        }
        kind_of(&bytes);
    }
}

#[test]
fn a_model_in_several_files_is_the_same_model() {
    let model = Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 3);
    let whole = write(&model);
    let expected = reference(&whole.path, 0);
    let folder = tempfile::tempdir().unwrap();
    let first = write_parts(&model, folder.path(), 3);
    for resident in [vec![], vec![1], vec![0, 1, 2, 3]] {
        let mut model = open(&first, &plan(resident, 64, 4), 1);
        assert!(model.forward(&PROMPT, &mut go()).unwrap()[..] == expected[0]);
    }

    let part = |number: u32| {
        folder
            .path()
            .join(format!("model-{number:05}-of-00003.gguf"))
    };
    let refused = |path: &Path, expected: &[&str]| {
        let text = in_one_line(&Model::inspect(path, 1).unwrap_err());
        for expected in expected {
            assert!(text.contains(expected), "{text}");
        }
    };
    refused(&part(2), &["it is part 2 of 3 of a model"]);
    let other = folder.path().join("other.gguf");
    std::fs::copy(&first, &other).unwrap();
    refused(&other, &["first of 3 parts", "-00001-of-00003.gguf"]);
    let kept = std::fs::read(part(3)).unwrap();
    std::fs::copy(part(2), part(3)).unwrap();
    refused(&first, &["model-00003-of-00003.gguf", "split.no"]);
    std::fs::write(part(3), &kept[..kept.len() - 5000]).unwrap();
    refused(&first, &["model-00003-of-00003.gguf", "the file has"]);
    std::fs::remove_file(part(3)).unwrap();
    refused(&first, &["model-00003-of-00003.gguf", "No such file"]);
}

/// Writes a model to `parts` files in `folder`, like `llama-gguf-split`; returns the first.
fn write_parts(model: &Synthetic, folder: &Path, parts: u16) -> PathBuf {
    let tensors = model.tensors();
    let each = tensors.len().div_ceil(usize::from(parts.max(1))).max(1);
    let path = |part: usize| folder.join(format!("model-{part:05}-of-{parts:05}.gguf"));
    let mut random = Random(model.seed);
    for (number, some) in tensors.chunks(each).enumerate() {
        let mut entries = if number == 0 {
            model.metadata()
        } else {
            Vec::new()
        };
        let list = [
            ("split.no", Entry::Short(u16::try_from(number).unwrap())),
            ("split.count", Entry::Short(parts)),
            (
                "split.tensors.count",
                Entry::Int(i32::try_from(tensors.len()).unwrap()),
            ),
        ];
        entries.extend(list.map(|(key, value)| (key.to_owned(), value)));
        write_part(&path(number + 1), &entries, some, &mut random).unwrap();
    }
    path(1)
}
