//! Sequences of the LLM for operators: running, kept and waiting ones.

use cotenant_engine::{EngineHandle, EngineSnapshot, RunningRequest};
use cotenant_rpc::{lease_class, v1};
use cotenant_units::Tokens;

/// Returns the sequences of an engine: running ones or the last one, conversations that are parked or on disk, and
/// waiting requests.
pub(super) fn sequences(handle: &EngineHandle) -> Vec<v1::Sequence> {
    let snapshot = handle.snapshot();
    let kv = snapshot
        .shape
        .as_ref()
        .zip(snapshot.plan.as_ref())
        .map(|(shape, plan)| (&shape.kv, plan.kv_type));
    let in_cache =
        |request: &RunningRequest, position: Tokens, state: v1::SequenceState| v1::Sequence {
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
            ..v1::Sequence::default()
        };
    let is_alone = snapshot.running.len() == 1;
    let running = snapshot.running.iter().map(|one| {
        let state = if one.generated == Tokens::ZERO {
            v1::SequenceState::Prompt
        } else {
            v1::SequenceState::Answer
        };
        let tokens = one.prompt_tokens.get().saturating_add(one.generated.get());
        // Several sequences share their prefix.
        let position = if is_alone {
            snapshot.position
        } else {
            Tokens::new(tokens)
        };
        in_cache(one, position, state)
    });
    let last = snapshot
        .last
        .iter()
        .filter(|_| snapshot.running.is_empty() && snapshot.position > Tokens::ZERO);
    let saved = &snapshot.saved;
    let on_disk = |number: Option<u64>| {
        let one = saved
            .conversations
            .iter()
            .find(|one| number == Some(one.number));
        one.map_or(0, |one| one.bytes.get())
    };
    let kept = last.map(|last| v1::Sequence {
        disk_bytes: on_disk(saved.current),
        ..in_cache(last, snapshot.position, v1::SequenceState::Kept)
    });
    let bytes = |tokens| kv.map_or(0, |(shape, kind)| shape.capacity_bytes(tokens, kind).get());
    let beside = snapshot.kept.iter().map(|one| v1::Sequence {
        id: one.request,
        state: v1::SequenceState::Kept.into(),
        client: one.client.as_deref().unwrap_or_default().to_owned(),
        kv_tokens: one.tokens.get(),
        kv_bytes: bytes(one.tokens),
        kv_blocks: kv.map_or(0, |(shape, _)| {
            one.tokens.get().div_ceil(shape.block_tokens.get().max(1))
        }),
        shared_bytes: bytes(one.shared),
        idle: one.since.elapsed().try_into().ok(),
        disk_bytes: on_disk(one.saved),
        ..v1::Sequence::default()
    });
    let in_memory: Vec<u64> = snapshot
        .kept
        .iter()
        .filter_map(|one| one.saved)
        .chain(saved.current)
        .collect();
    let gone = saved
        .conversations
        .iter()
        .filter(|one| !in_memory.contains(&one.number));
    let gone = gone.map(|one| v1::Sequence {
        state: v1::SequenceState::OnDisk.into(),
        client: one.client.clone().unwrap_or_default(),
        kv_tokens: one.tokens.get(),
        disk_bytes: one.bytes.get(),
        ..v1::Sequence::default()
    });
    let waiting = handle.waiting().into_iter().map(|request| v1::Sequence {
        id: request.id.get(),
        state: v1::SequenceState::Waiting.into(),
        client: request.client.as_deref().unwrap_or_default().to_owned(),
        lease_class: lease_class(request.class).into(),
        prompt_tokens: request.prompt_tokens.get(),
        waited: request.waited.try_into().ok(),
        ..v1::Sequence::default()
    });
    let ended = kept.into_iter().chain(beside).chain(gone);
    running.chain(ended).chain(waiting).collect()
}

/// Returns the tokens in the KV cache while nothing runs: of the last conversation, and of parked ones with their
/// state.
pub(super) fn kept_tokens(snapshot: &EngineSnapshot) -> u32 {
    let held = snapshot.breakdown.as_ref();
    let beside = held.map_or(0, |held| (held.kv_marks + held.kv_parked).get());
    let plan = snapshot.shape.as_ref().zip(snapshot.plan.as_ref());
    let per_token = plan.map_or(0, |(shape, plan)| {
        shape.kv.bytes_per_token(plan.kv_type).get()
    });
    let beside = u32::try_from(beside.div_ceil(per_token.max(1))).unwrap_or(u32::MAX);
    snapshot.position.get().saturating_add(beside)
}

/// Returns the tokens of running sequences in the KV cache, and those kept while nothing runs.
pub(super) fn tokens_in_cache(sequences: &[v1::Sequence], kept: u32) -> (u32, u32) {
    let running = sequences.iter().filter(|one| {
        matches!(
            one.state(),
            v1::SequenceState::Prompt | v1::SequenceState::Answer
        )
    });
    let used = running.map(|one| one.kv_tokens).reduce(u32::saturating_add);
    used.map_or((0, kept), |used| (used, 0))
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
