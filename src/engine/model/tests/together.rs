//! Answers that are computed together: each has the bits of one that is computed alone.

use proptest::{prelude::*, test_runner::TestRunner};

use super::*;

const SPEAKERS: usize = 8;

fn plan_of(resident: u32, kv: u32, chunk: u32, kv_type: KvType) -> EnginePlan {
    EnginePlan {
        kv_capacity: Tokens::new(kv),
        prefill_chunk: Tokens::new(chunk),
        kv_type,
        ..plan(0..resident)
    }
}

/// What happens next.
#[derive(Clone, Debug)]
enum Step {
    /// A speaker's prompt is read, beginning as another's does, while the others' answers are under way.
    Ask(usize, u32, u32),
    /// The answers of these go on by a token each, and at some look there is another plan, or all of it is broken off.
    Together([bool; SPEAKERS], u32, Option<(u32, u32)>),
    /// An answer is over.
    Leave(usize),
    /// One goes on alone.
    Alone(usize),
    /// Another plan between two tokens.
    Plan(u32, u32, u32),
}

fn step() -> impl Strategy<Value = Step> {
    let plan = (0u32..4, 0u32..900);
    prop_oneof![
        3 => (0..SPEAKERS, 1u32..150, 0u32..40).prop_map(|(who, length, seed)| Step::Ask(who, length, seed)),
        6 => (any::<[bool; SPEAKERS]>(), 0u32..6, prop::option::of(plan.clone()))
            .prop_map(|(who, look, plan)| Step::Together(who, look, plan)),
        1 => (0..SPEAKERS).prop_map(Step::Leave),
        2 => (0..SPEAKERS).prop_map(Step::Alone),
        2 => (0u32..4, 0u32..900, 1u32..70).prop_map(|(parts, kv, chunk)| Step::Plan(parts, kv, chunk)),
    ]
}

/// A model, the answers that are under way, and the same answers computed alone.
struct House {
    model: Model,
    alone: Model,
    speakers: [Option<(Lane, Vec<u32>)>; SPEAKERS],
    /// Passes of several answers.
    together: u32,
}

impl House {
    fn new(path: &Path) -> Self {
        let open = || {
            open_on(
                cpu(1),
                None,
                path,
                usize::MAX,
                &plan_of(3, 2048, 64, KvType::F16),
            )
        };
        Self {
            model: open(),
            alone: open(),
            speakers: std::array::from_fn(|_| None),
            together: 0,
        }
    }

    /// The logits that one who is alone has behind these tokens.
    fn expected(&mut self, tokens: &[u32]) -> Vec<f32> {
        self.alone.reset();
        self.alone
            .forward(tokens, &mut || Flow::Continue)
            .unwrap()
            .to_vec()
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Ask(who, length, seed) => {
                if self.speakers[who].is_some() {
                    return;
                }
                let prompt = [text(0, 80), text(seed, length)].concat();
                let needed = u32::try_from(prompt.len()).unwrap();
                let held = self.model.held().get() + needed + 2 * 64;
                let kind = self.model.plan().kv_type;
                let chunk = self.model.plan().prefill_chunk.get();
                self.model.apply(&plan_of(2, held, chunk, kind)).unwrap();
                let asked = Asked {
                    client: None,
                    prompt: &prompt,
                };
                let kept = self.model.select(&[], asked).kept as usize;
                // In slices, between which the others go on.
                let (first, rest) = prompt[kept..].split_at((prompt.len() - kept) / 2);
                if !first.is_empty() {
                    self.model.forward(first, &mut || Flow::Continue).unwrap();
                    self.go_on([true; SPEAKERS], &mut || Flow::Continue);
                }
                let logits = self.model.forward(rest, &mut || Flow::Continue).unwrap();
                let logits = logits.to_vec();
                if kind == KvType::F16 {
                    assert!(self.expected(&prompt) == logits, "a prompt");
                }
                let lane = self.model.set_aside(&prompt).unwrap();
                self.speakers[who] = Some((lane, prompt));
            }
            Step::Together(who, left, plan) => {
                let chunk = self.model.plan().prefill_chunk.get();
                let flow = plan.map(|(parts, kv)| {
                    let kind = self.model.plan().kv_type;
                    if kv == 0 {
                        Flow::Stop
                    } else {
                        Flow::Apply(plan_of(parts, kv, chunk, kind))
                    }
                });
                self.go_on(who, &mut Once { left, flow });
            }
            Step::Leave(who) => {
                if let Some((lane, _)) = self.speakers[who].take() {
                    self.model.leave(lane);
                }
            }
            Step::Alone(who) => {
                let Some((lane, tokens)) = self.speakers[who].take() else {
                    return;
                };
                assert_eq!(self.model.resume(&[], lane).unwrap(), tokens);
                let next = u32::try_from(tokens.len()).unwrap() % 300;
                let all = [&tokens[..], &[next]].concat();
                match self.model.forward(&[next], &mut || Flow::Continue) {
                    Ok(logits) => {
                        let logits = logits.to_vec();
                        assert!(self.expected(&all) == logits, "alone");
                        let lane = self.model.set_aside(&all).unwrap();
                        self.speakers[who] = Some((lane, all));
                    }
                    Err(ForwardError::KvFull { .. }) => {
                        let lane = self.model.set_aside(&tokens).unwrap();
                        self.speakers[who] = Some((lane, tokens));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Plan(parts, kv, chunk) => {
                let kind = self.model.plan().kv_type;
                let report = self.model.apply(&plan_of(parts, kv, chunk, kind)).unwrap();
                assert!(report.plan.kv_capacity >= self.model.held());
            }
        }
        let held = self.model.breakdown();
        assert!(
            held.kv_parked + self.model.untouched() <= held.kv,
            "{held:?}"
        );
        assert!(self.model.kernel_resident() <= held.used(), "{held:?}");
    }

    /// The answers of these speakers go on by a token each.
    fn go_on(&mut self, who: [bool; SPEAKERS], looks: &mut dyn Checkpoint) {
        let some: Vec<usize> = (0..SPEAKERS)
            .filter(|number| who[*number] && self.speakers[*number].is_some())
            .take(self.model.answers_max())
            .collect();
        let rows: Vec<(Lane, u32)> = some
            .iter()
            .map(|number| {
                let (lane, tokens) = self.speakers[*number].as_ref().unwrap();
                (*lane, u32::try_from(tokens.len()).unwrap() * 13 % 300)
            })
            .collect();
        if rows.is_empty() {
            return;
        }
        match self.model.forward_together(&rows, looks) {
            Ok(()) => {}
            Err(ForwardError::KvFull { .. } | ForwardError::Cancelled { .. }) => return,
            Err(error) => panic!("{error}"),
        }
        self.together += u32::from(rows.len() > 1);
        for (row, number) in some.into_iter().enumerate() {
            let logits = self.model.logits_of(row, rows[row].0).unwrap().to_vec();
            let (_, tokens) = self.speakers[number].as_mut().unwrap();
            tokens.push(rows[row].1);
            let tokens = tokens.clone();
            assert!(self.expected(&tokens) == logits, "{row} of {rows:?}");
        }
    }
}

#[test]
fn answers_that_are_computed_together_have_the_bits_of_each_alone() {
    let cases = env::var("COTENANT_TEST_SCHEDULES").map_or(8, |text| text.parse().unwrap());
    for (architecture, dtype) in [
        (Architecture::Qwen3, GgmlDType::F32),
        (Architecture::Llama, GgmlDType::Q8_0),
        (Architecture::Qwen2, GgmlDType::Q4K),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic {
            layers: 2,
            ..Synthetic::tiny(architecture, TypeMix::All(dtype), 7)
        }
        .write(&path)
        .unwrap();
        let mut runner = TestRunner::new(ProptestConfig {
            cases,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let together = std::cell::Cell::new(0);
        runner
            .run(&prop::collection::vec(step(), 10..40), |steps| {
                let mut house = House::new(&path);
                for step in &steps {
                    house.take(step);
                }
                together.set(together.get() + house.together);
                Ok(())
            })
            .unwrap_or_else(|failed| panic!("{architecture:?}: {failed}"));
        assert!(together.get() > 0, "{architecture:?}");
    }
}
