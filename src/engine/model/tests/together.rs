//! Tests of answers computed together: each has the bits of one computed alone.

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

fn number_of(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap()
}

/// The next action.
#[derive(Clone, Debug)]
enum Step {
    /// Reads a speaker's prompt, which shares a prefix with another's, while the other answers proceed.
    Ask(usize, u32, u32),
    /// Advances these answers by some tokens each; at some poll the plan changes, or the pass is cancelled.
    Together([bool; SPEAKERS], u32, Option<(u32, u32)>),
    /// Ends an answer.
    Leave(usize),
    /// Advances one answer alone.
    Alone(usize),
    /// Advances one answer alone by several tokens, some of which are removed again.
    Draft(usize, usize, usize),
    /// Changes the plan between two tokens.
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
        2 => (0..SPEAKERS, 1usize..8, 0usize..8).prop_map(|(who, tokens, back)| Step::Draft(who, tokens, back)),
        2 => (0u32..4, 0u32..900, 1u32..70).prop_map(|(parts, kv, chunk)| Step::Plan(parts, kv, chunk)),
    ]
}

/// A model with answers in progress, and a second one that computes the same answers alone.
struct House {
    model: Model,
    alone: Model,
    speakers: [Option<(Lane, Vec<u32>)>; SPEAKERS],
    /// Number of passes with several answers.
    together: u32,
}

impl House {
    fn new(path: &Path) -> Self {
        // What is computed together by two threads has the bits of one.
        let open = |threads| {
            open_on(
                cpu(threads),
                None,
                path,
                usize::MAX,
                &plan_of(3, 2048, 64, KvType::F16),
            )
        };
        Self {
            model: open(2),
            alone: open(1),
            speakers: std::array::from_fn(|_| None),
            together: 0,
        }
    }

    /// Returns the logits after these tokens, computed alone.
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
                let aside = self.model.aside_takes().get();
                let wanted = self.model.held().get() + needed + 2 * 64 + 2 * aside;
                let kind = self.model.plan().kv_type;
                let chunk = self.model.plan().prefill_chunk.get();
                self.model.apply(&plan_of(2, wanted, chunk, kind)).unwrap();
                // States and windows of lanes may take the whole of the longest context.
                let is_short = self.model.plan().kv_capacity.get() < wanted;
                let asked = Asked {
                    client: None,
                    prompt: &prompt,
                    request: 0,
                };
                let kept = self.model.select(&[], asked).kept as usize;
                // In slices, the first ones in passes with tokens of the others.
                let (first, rest) = prompt[kept..].split_at((prompt.len() - kept) / 2);
                self.model.expect(needed);
                let mut read = kept;
                for slice in first.chunks(1 + length as usize % 20) {
                    if self.go_on(
                        [true; SPEAKERS],
                        Some((&prompt[..read], slice)),
                        &mut || Flow::Continue,
                    ) {
                        read += slice.len();
                    } else {
                        match self.model.forward(slice, &mut || Flow::Continue) {
                            Ok(_) => read += slice.len(),
                            Err(error) => return self.give_up(is_short, &error),
                        }
                    }
                }
                let logits = match self.model.forward(rest, &mut || Flow::Continue) {
                    Ok(logits) => logits.to_vec(),
                    Err(error) => return self.give_up(is_short, &error),
                };
                self.model.expect(0);
                if kind == KvType::F16 {
                    assert!(self.expected(&prompt) == logits, "a prompt");
                }
                self.set_aside(who, prompt);
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
                self.go_on(who, None, &mut Once { left, flow });
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
                        self.set_aside(who, all);
                    }
                    Err(ForwardError::KvFull { .. }) => self.set_aside(who, tokens),
                    Err(error) => panic!("{error}"),
                }
            }
            // A window does not support removal.
            Step::Draft(..) if !self.model.takes_back() => {}
            Step::Draft(who, count, back) => {
                let Some((lane, mut tokens)) = self.speakers[who].take() else {
                    return;
                };
                assert_eq!(self.model.resume(&[], lane).unwrap(), tokens);
                let count = count.min(self.model.answers_max());
                let draft = text(number_of(tokens.len()), number_of(count));
                let span = Span {
                    lane: None,
                    tokens: &draft,
                    scored: count,
                };
                match self.model.forward_together(&[span], &mut || Flow::Continue) {
                    Ok(()) => {
                        // The first one is the answer's own, so that a draft keeps it.
                        let kept = count - back.min(count.saturating_sub(1));
                        for number in 0..count {
                            let all = [&tokens[..], &draft[..=number]].concat();
                            let at = u32::try_from(all.len()).unwrap();
                            let logits = self.model.logits_of(number, at).unwrap().to_vec();
                            assert!(self.expected(&all) == logits, "{number} of a draft");
                        }
                        self.model.take_back(None, number_of(count - kept));
                        tokens.extend_from_slice(&draft[..kept]);
                    }
                    Err(ForwardError::KvFull { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                self.set_aside(who, tokens);
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

    /// Ends a prompt for which there is no capacity, which happens only if the model has too little (`is_short`).
    fn give_up(&mut self, is_short: bool, error: &ForwardError) {
        assert!(
            is_short && matches!(error, ForwardError::KvFull { .. }),
            "{error}"
        );
        self.model.expect(0);
        self.model.reset();
    }

    /// Makes a speaker's answer a lane; this fails only without capacity for a copy.
    fn set_aside(&mut self, who: usize, tokens: Vec<u32>) {
        let lane = self.model.set_aside(&tokens);
        assert!(lane.is_some() || self.model.has_copies());
        self.speakers[who] = lane.map(|lane| (lane, tokens));
    }

    /// Advances the answers of these speakers, by one or several tokens each, in one pass with the next tokens of the
    /// sequence; returns whether the pass completed.
    fn go_on(
        &mut self,
        who: [bool; SPEAKERS],
        slice: Option<(&[u32], &[u32])>,
        looks: &mut dyn Checkpoint,
    ) -> bool {
        let own = slice.map_or(0, |(_, slice)| slice.len());
        let rows = self.model.rows_max();
        if own > self.model.slice_max() {
            return false;
        }
        let results = self.model.answers_max() - usize::from(own > 0);
        let some: Vec<usize> = (0..SPEAKERS)
            .filter(|number| who[*number] && self.speakers[*number].is_some())
            .take(results.min(rows - own))
            .collect();
        let mut left = rows - own - some.len();
        let mut more = |number: usize| {
            let more = (number * 5 % 7).min(left);
            left -= more;
            1 + more
        };
        let next: Vec<(Lane, Vec<u32>, usize)> = some
            .iter()
            .map(|number| {
                let (lane, tokens) = self.speakers[*number].as_ref().unwrap();
                let next = text(
                    u32::try_from(tokens.len()).unwrap() * 13,
                    number_of(more(*number)),
                );
                // All tokens have results if there are enough.
                let all = some.len() == 1 && own == 0 && next.len() <= self.model.answers_max();
                let scored = if all { next.len() } else { 1 };
                (*lane, next, scored)
            })
            .collect();
        let lanes = next.iter().map(|(lane, tokens, scored)| Span {
            lane: Some(*lane),
            tokens,
            scored: *scored,
        });
        let own = slice.map(|(_, tokens)| Span {
            lane: None,
            tokens,
            scored: 1,
        });
        let spans: Vec<Span<'_>> = own.into_iter().chain(lanes).collect();
        if spans.is_empty() {
            return false;
        }
        match self.model.forward_together(&spans, looks) {
            Ok(()) => {}
            // Nothing was computed.
            Err(ForwardError::KvFull { .. }) => return false,
            Err(ForwardError::Cancelled { .. }) => {
                assert!(slice.is_none());
                for speaker in &mut self.speakers {
                    if let Some((lane, _)) = speaker
                        && self.model.is_lost(*lane)
                    {
                        self.model.leave(*lane);
                        *speaker = None;
                    }
                }
                return false;
            }
            Err(error) => panic!("{error}"),
        }
        self.together += u32::from(spans.len() > 1);
        let mut result = 0;
        if let Some((before, slice)) = slice {
            let all = [before, slice].concat();
            let logits = self.model.logits_of(0, 0).unwrap().to_vec();
            if self.model.plan().kv_type == KvType::F16 {
                assert!(self.expected(&all) == logits, "a slice of {}", slice.len());
            }
            result += 1;
        }
        for ((_, next, scored), number) in next.into_iter().zip(some) {
            let (_, tokens) = self.speakers[number].as_mut().unwrap();
            let before = tokens.len() + next.len() - scored;
            tokens.extend(next);
            let tokens = tokens.clone();
            for end in before + 1..=tokens.len() {
                let logits = self.model.logits_of(result, 0).unwrap().to_vec();
                result += 1;
                assert!(self.expected(&tokens[..end]) == logits, "speaker {number}");
            }
        }
        true
    }
}

#[test]
fn another_kv_type_waits_for_the_end_of_a_pass_with_copies_and_leaves_answers_to_be_read_again() {
    for architecture in [
        Architecture::Qwen35,
        Architecture::GraniteHybrid,
        Architecture::NemotronH,
        Architecture::Lfm2,
        Architecture::Gemma3,
        Architecture::Gemma4,
        Architecture::GptOss,
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(architecture, TypeMix::All(GgmlDType::Q8_0), 7)
            .write(&path)
            .unwrap();
        let mut house = House::new(&path);
        let prompts: Vec<Vec<u32>> = (0..2).map(|seed| text(seed, 90 + seed)).collect();
        let lanes: Vec<Lane> = prompts
            .iter()
            .map(|prompt| {
                let asked = Asked {
                    client: None,
                    prompt,
                    request: 0,
                };
                house.model.select(&[], asked);
                house.model.forward(prompt, &mut || Flow::Continue).unwrap();
                house.model.set_aside(prompt).unwrap()
            })
            .collect();
        let spans: Vec<Span<'_>> = lanes
            .iter()
            .map(|lane| Span {
                lane: Some(*lane),
                tokens: &[5],
                scored: 1,
            })
            .collect();
        // It arrives at the first poll.
        let mut looks = Once {
            left: 0,
            flow: Some(Flow::Apply(plan_of(3, 2048, 64, KvType::Q8))),
        };
        house.model.forward_together(&spans, &mut looks).unwrap();
        for (number, prompt) in prompts.iter().enumerate() {
            let logits = house.model.logits_of(number, 0).unwrap().to_vec();
            let all = [&prompt[..], &[5]].concat();
            assert!(house.expected(&all) == logits, "{architecture:?}, {number}");
        }
        assert_eq!(house.model.plan().kv_type, KvType::Q8);
        for lane in lanes {
            assert!(house.model.is_lost(lane));
            assert!(!house.model.make_places(lane, 1) || house.model.resume(&[], lane).is_none());
            house.model.leave(lane);
            assert!(!house.model.is_lost(lane));
        }
        assert_eq!(house.model.held(), Tokens::ZERO, "{architecture:?}");
        house
            .model
            .apply(&plan_of(3, 2048, 64, KvType::F16))
            .unwrap();
        let all = [&prompts[0][..], &[5]].concat();
        let asked = Asked {
            client: None,
            prompt: &all,
            request: 0,
        };
        assert_eq!(house.model.select(&[], asked).kept, 0);
        let logits = house
            .model
            .forward(&all, &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        assert!(house.expected(&all) == logits, "{architecture:?}");
    }
}

#[test]
fn answers_that_are_computed_together_have_the_bits_of_each_alone() {
    let cases: u32 = env::var("COTENANT_TEST_SCHEDULES").map_or(8, |text| text.parse().unwrap());
    for (architecture, dtype, layers) in [
        (Architecture::Qwen3, GgmlDType::F32, 2),
        (Architecture::Llama, GgmlDType::Q8_0, 2),
        (Architecture::Qwen2, GgmlDType::Q4K, 2),
        (Architecture::Qwen35, GgmlDType::Q8_0, 4),
        (Architecture::Qwen35Moe, GgmlDType::Q8_0, 4),
        (Architecture::GraniteHybrid, GgmlDType::Q8_0, 4),
        (Architecture::NemotronH, GgmlDType::F32, 4),
        (Architecture::NemotronHMoe, GgmlDType::Q8_0, 4),
        (Architecture::Lfm2, GgmlDType::F32, 4),
        (Architecture::Lfm2Moe, GgmlDType::Q8_0, 4),
        (Architecture::Gemma2, GgmlDType::Q8_0, 7),
        (Architecture::Gemma3, GgmlDType::Q8_0, 7),
        (Architecture::Gemma4, GgmlDType::Q8_0, 7),
        (Architecture::GptOss, GgmlDType::MXFP4, 3),
        (Architecture::StableLm, GgmlDType::Q8_0, 2),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic {
            layers,
            ..Synthetic::tiny(architecture, TypeMix::All(dtype), 7)
        }
        .write(&path)
        .unwrap();
        let mut runner = TestRunner::new(ProptestConfig {
            // Each answer is compared with one computed alone from the start; a recurrent state takes longest.
            cases: if layers > 2 { cases.div_ceil(3) } else { cases },
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
