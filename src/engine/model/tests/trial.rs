//! Tests of drafts on layers with a state.

use super::{
    parked::{plan_of, tiny},
    *,
};

/// Stops or applies a plan at one of its polls.
struct At {
    left: u32,
    flow: Option<Flow>,
}

impl Checkpoint for At {
    fn poll(&mut self) -> Flow {
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return Flow::Continue;
        }
        self.flow.take().unwrap_or(Flow::Continue)
    }

    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        result.unwrap();
    }
}

/// Two models with the same tokens, of which one drafts.
struct Pair {
    drafts: Model,
    plain: Model,
}

impl Pair {
    fn new(path: &Path) -> Self {
        let open = || {
            open_on(
                cpu(2),
                None,
                path,
                usize::MAX,
                &plan_of(1024, 64, KvType::F16),
            )
        };
        Self {
            drafts: open(),
            plain: open(),
        }
    }

    /// Verifies `draft` after `next`, of which `kept` tokens are accepted, while `flow` arrives at some poll.
    fn verify(&mut self, draft: &[u32], kept: usize, at: &mut At) {
        let span = Span {
            lane: None,
            tokens: draft,
            scored: draft.len(),
        };
        let before = self.drafts.position();
        if let Err(error) = self.drafts.forward_together(&[span], at) {
            assert!(matches!(error, ForwardError::Cancelled { .. }), "{error}");
            assert_eq!(self.drafts.recover(), before, "nothing is lost");
            return;
        }
        for (number, token) in draft.iter().enumerate().take(kept) {
            let position = self.plain.position();
            let expected = self.plain.forward(&[*token], &mut || Flow::Continue);
            let expected = expected.unwrap().to_vec();
            let found = self.drafts.logits_of(number, position).unwrap();
            assert!(found[..] == expected[..], "token {number} of a draft");
        }
        let back = u32::try_from(draft.len() - kept).unwrap();
        self.drafts.take_back(None, back);
        assert_eq!(self.drafts.position(), self.plain.position());
        let held = self.drafts.breakdown();
        assert!(held.total <= self.drafts.shape().plan_bytes(self.drafts.plan()));
        assert!(self.drafts.kernel_resident() <= held.used(), "{held:?}");
    }

    /// Both compute a token, with the same bits.
    fn same(&mut self, token: u32) {
        let go = &mut || Flow::Continue;
        let expected = self.plain.forward(&[token], go).unwrap().to_vec();
        let found = self.drafts.forward(&[token], go).unwrap();
        assert!(found[..] == expected[..], "after a draft");
    }
}

#[test]
fn a_state_advances_by_accepted_tokens_only_whatever_arrives_meanwhile() {
    for architecture in [
        Architecture::Qwen35,
        Architecture::Qwen35Moe,
        Architecture::GraniteHybrid,
        Architecture::NemotronH,
        Architecture::Lfm2,
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        tiny(&path, architecture, GgmlDType::Q8_0);
        let mut pair = Pair::new(&path);
        assert!(pair.drafts.takes_back());
        let prompt = text(3, 70);
        for model in [&mut pair.drafts, &mut pair.plain] {
            model.forward(&prompt, &mut || Flow::Continue).unwrap();
        }
        let mut left = 1;
        for (tokens, kept) in [(2, 1), (2, 2), (8, 1), (8, 8), (5, 3), (7, 6), (3, 1)] {
            let smaller = EnginePlan {
                resident: [0].into(),
                ..plan_of(320, 3, KvType::F16)
            };
            // Streamed in part, so that a smaller plan needs no ring.
            let larger = EnginePlan {
                resident: [0, 1].into(),
                ..plan_of(1024, 64, KvType::F16)
            };
            pair.drafts.apply(&larger).unwrap();
            for flow in [None, Some(Flow::Stop), Some(Flow::Apply(smaller))] {
                let most = pair.drafts.answers_max();
                let tokens = tokens.min(most);
                let draft = text(left, u32::try_from(tokens).unwrap());
                left += 1;
                let mut at = At {
                    left: left % 6,
                    flow,
                };
                pair.verify(&draft, kept.min(tokens), &mut at);
                pair.same(left);
            }
        }
    }
}

#[test]
fn a_pass_after_a_draft_that_was_not_decided_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    tiny(&path, Architecture::Qwen35, GgmlDType::Q8_0);
    let mut pair = Pair::new(&path);
    let draft = text(1, 4);
    let span = Span {
        lane: None,
        tokens: &draft,
        scored: 4,
    };
    let go = &mut || Flow::Continue;
    pair.drafts.forward_together(&[span], go).unwrap();
    let refused = pair.drafts.forward(&[1], go).unwrap_err();
    assert!(matches!(refused, ForwardError::SequenceLost), "{refused}");
    // The next prompt starts from the beginning.
    pair.drafts.reset();
    pair.same(7);
}
