//! Reduced vocabulary: a head with fewer rows, each unchanged.

use std::path::Path;

use crate::weights::Weights as _;
use cotenant::{
    engine::{
        AnswerForm, Engine, EngineEvent, EngineOptions, Flow, GenerateRequest, Model, ModelOptions,
        Prompt, RequestId, Sayable,
        arena::Backing,
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
        text::TextSide,
    },
    policy::{kv_type::KvType, residency::EnginePlan},
    units::Tokens,
};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::stage::collect;

fn options(vocabulary: Option<Sayable>) -> ModelOptions {
    ModelOptions {
        compute: 2.into(),
        name: None,
        context: Some(Tokens::new(512)),
        conversations: 0,
        drafts: true,
        keeps_conversations: false,
        kv_backing: Backing::OnTouch,
        vocabulary,
        helper: None,
    }
}

fn plan(resident: impl IntoIterator<Item = u32>) -> EnginePlan {
    EnginePlan {
        resident: resident.into_iter().collect(),
        kv_capacity: Tokens::new(512),
        prefill_chunk: Tokens::new(16),
        kv_type: KvType::F16,
    }
}

fn scores(model: &mut Model, tokens: &[u32]) -> Vec<f32> {
    model.reset();
    model
        .forward(tokens, &mut || Flow::Continue)
        .unwrap()
        .to_vec()
}

#[test]
fn rows_that_stay_have_the_bits_of_all_rows_and_the_others_take_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    for (architecture, dtype) in [
        (Architecture::Qwen35, GgmlDType::Q8_0),
        (Architecture::Llama, GgmlDType::Q4K), // with a separate head
        (Architecture::Gemma3, GgmlDType::F32),
        (Architecture::Gemma4, GgmlDType::F32),
        (Architecture::GptOss, GgmlDType::F32),
        (Architecture::GraniteHybrid, GgmlDType::F32),
        (Architecture::NemotronH, GgmlDType::F32),
    ] {
        let path = folder.path().join("model.gguf");
        Synthetic {
            vocabulary: 1500,
            ..Synthetic::tiny(architecture, TypeMix::All(dtype), 7)
        }
        .write(&path)
        .unwrap();
        let mut whole = Model::open(&path, &plan(0..5), &options(None)).unwrap();
        // The first 300 become 320 in groups of 64; the last group has the control tokens.
        let kept = Sayable::First(300);
        let stays = |token: usize| !(320..1472).contains(&token);
        let (shape, _) = Model::inspect_with(&path, Some(&kept), 2).unwrap();
        let head = |shape: &cotenant::policy::residency::ModelShape| {
            shape.layers.last().unwrap().resident_bytes
        };
        let (few, all) = (head(&shape).get(), head(whole.shape()).get());
        assert!(few <= all * 348 / 1500 + 3 * 4096, "{few} of {all}");
        // Two tokens outside the vocabulary can still be read.
        let tokens = [5, 700, 3, 1400, 299, 42, 320];
        let expected = scores(&mut whole, &tokens);
        for resident in [vec![0, 1, 2, 3, 4], vec![1, 4], vec![0, 2]] {
            let mut model =
                Model::open(&path, &plan(resident), &options(Some(kept.clone()))).unwrap();
            assert_eq!(model.shape().layers, shape.layers);
            for (token, (one, other)) in scores(&mut model, &tokens)
                .iter()
                .zip(&expected)
                .enumerate()
            {
                let right = if stays(token) {
                    *other
                } else {
                    f32::NEG_INFINITY
                };
                assert!(
                    one.to_bits() == right.to_bits(),
                    "{architecture:?} {token}: {one} {right}"
                );
                assert_eq!(model.can_say(u32::try_from(token).unwrap()), stays(token));
            }
            let held = model.breakdown();
            assert!(
                held.total <= model.shape().plan_bytes(model.plan()),
                "{held:?}"
            );
            assert!(model.kernel_resident() <= held.used() - held.header);
        }
    }
}

#[test]
fn a_text_chooses_what_it_needs_and_one_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (path, text) = (folder.path().join("model.gguf"), folder.path().join("text"));
    Synthetic {
        vocabulary: 1500,
        ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
    }
    .write(&path)
    .unwrap();
    std::fs::write(&text, "what time is it at the time").unwrap();
    let model = Model::open(&path, &plan([]), &options(Some(Sayable::Text(text)))).unwrap();
    // Bytes and ` t`, and the control tokens.
    let said: Vec<u32> = (0..1500).filter(|token| model.can_say(*token)).collect();
    assert!(
        said.iter().copied().eq((0..320).chain(1472..1500)),
        "{said:?}"
    );
    for (name, problem) in [
        ("absent", "No such file"),
        ("empty", "no text"),
        ("binary", "UTF-8"),
    ] {
        let text = folder.path().join(name);
        match name {
            "empty" => std::fs::write(&text, "").unwrap(),
            "binary" => std::fs::write(&text, [0xff, 0xfe]).unwrap(),
            _ => {}
        }
        let error = Model::inspect_with(&path, Some(&Sayable::Text(text.clone())), 1).unwrap_err();
        let reported = format!("{error}: {}", std::error::Error::source(&error).unwrap());
        assert!(
            reported.contains(problem) && reported.contains(name),
            "{reported}"
        );
        assert!(error.hint().is_some());
    }
}

#[test]
fn forms_are_kept_with_the_tokens_that_stay() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/demo-model/demo.gguf");
    let kept = Sayable::First(320);
    let model = Model::open(&path, &plan([]), &options(Some(kept.clone()))).unwrap();
    let side = TextSide::new(model.header(), Tokens::new(512)).unwrap();
    let kitchen = side.tokenizer().encode(" kitchen").unwrap();
    assert!(
        !model.can_say(kitchen[0]),
        "a word that has to be spelled: {kitchen:?}"
    );
    let (sink, mut events) = mpsc::channel(64);
    let engine = Engine::start(EngineOptions::default(), options(Some(kept)), sink).unwrap();
    engine.handle().load(&path, plan([]));
    assert!(matches!(
        events.blocking_recv().unwrap(),
        EngineEvent::Ready { .. }
    ));
    let schema = json!({
        "type": "object",
        "properties": {"room": {"enum": ["the kitchen and the bathroom", "grüne Küche 🦙"]}},
        "required": ["room"],
        "additionalProperties": false,
    });
    let request = GenerateRequest {
        max_tokens: Some(Tokens::new(120)),
        form: Some(AnswerForm::JsonSchema {
            schema,
            field: "format",
        }),
        ..GenerateRequest::new(
            RequestId::new(1),
            Prompt::Text("turn on the light".to_owned()),
        )
    };
    let answer = collect(&mut engine.handle().generate(request).unwrap());
    let value: Value = serde_json::from_str(&answer.text).unwrap();
    assert!(value["room"].is_string(), "{value}");
    assert!(
        answer.tokens.iter().all(|token| model.can_say(*token)),
        "{answer:?}"
    );
    engine.handle().stop();
    engine.join();
}
