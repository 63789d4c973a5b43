//! The sequences of the LLM, as operators see them.

use cotenant_engine::{EngineHandle, RunningRequest};
use cotenant_rpc::{lease_class, v1};
use cotenant_units::Tokens;

/// The sequences of an engine: the running or the kept one, and those that wait.
pub(super) fn sequences(handle: &EngineHandle) -> Vec<v1::Sequence> {
    let snapshot = handle.snapshot();
    let kv = snapshot
        .shape
        .as_ref()
        .zip(snapshot.plan.as_ref())
        .map(|(shape, plan)| (&shape.kv, plan.kv_type));
    let position = snapshot.position;
    let in_cache = |request: &RunningRequest, state: v1::SequenceState| v1::Sequence {
        id: request.id.get(),
        state: state.into(),
        client: request.client.as_deref().unwrap_or_default().to_owned(),
        lease_class: lease_class(request.class).into(),
        prompt_tokens: request.prompt_tokens.get(),
        reused_tokens: request.cached.get(),
        generated_tokens: request.generated.get(),
        kv_tokens: position.get(),
        kv_bytes: kv.map_or(0, |(shape, kind)| {
            shape.capacity_bytes(position, kind).get()
        }),
        kv_blocks: kv.map_or(0, |(shape, _)| {
            position.get().div_ceil(shape.block_tokens.get().max(1))
        }),
        waited: None,
    };
    let present = match (&snapshot.running, &snapshot.last) {
        (Some(running), _) if running.generated == Tokens::ZERO => {
            Some(in_cache(running, v1::SequenceState::Prompt))
        }
        (Some(running), _) => Some(in_cache(running, v1::SequenceState::Answer)),
        (None, Some(last)) if position > Tokens::ZERO => {
            Some(in_cache(last, v1::SequenceState::Kept))
        }
        (None, _) => None,
    };
    let waiting = handle.waiting().into_iter().map(|request| v1::Sequence {
        id: request.id.get(),
        state: v1::SequenceState::Waiting.into(),
        client: request.client.as_deref().unwrap_or_default().to_owned(),
        lease_class: lease_class(request.class).into(),
        prompt_tokens: request.prompt_tokens.get(),
        waited: request.waited.try_into().ok(),
        ..v1::Sequence::default()
    });
    present.into_iter().chain(waiting).collect()
}

/// Tokens that the running sequence has in the KV cache, and those that are kept while nothing runs: `kept` counts copies of the
/// recurrent state too.
pub(super) fn tokens_in_cache(sequences: &[v1::Sequence], kept: u32) -> (u32, u32) {
    let running = sequences.iter().find(|one| {
        matches!(
            one.state(),
            v1::SequenceState::Prompt | v1::SequenceState::Answer
        )
    });
    running.map_or((0, kept), |one| (one.kv_tokens, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_in_use_are_those_of_the_running_sequence() {
        let sequence = |state: v1::SequenceState, kv_tokens| v1::Sequence {
            state: state.into(),
            kv_tokens,
            ..v1::Sequence::default()
        };
        let waits = sequence(v1::SequenceState::Waiting, 0);
        let answer = [sequence(v1::SequenceState::Answer, 70), waits.clone()];
        assert_eq!(tokens_in_cache(&answer, 12), (70, 0));
        assert_eq!(
            tokens_in_cache(&[sequence(v1::SequenceState::Kept, 70), waits], 80),
            (0, 80)
        );
    }
}
