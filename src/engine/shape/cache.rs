//! Sizes of the KV cache and of recurrent states.

use crate::{
    arena::{HUGE_PAGE, has_huge_pages},
    kv::KV_BLOCK_TOKENS,
    spec::{AttentionSpec, Spec},
};
use cotenant_policy::{
    kv_type::KvType,
    residency::{KvShape, LayerKind, WindowedKv},
};
use cotenant_units::{Bytes, Tokens, page};

/// KV cache size of `spec` per token.
pub fn kv_shape(spec: &Spec) -> KvShape {
    kv_shape_with(spec, page())
}

/// The same for this page size of the kernel.
pub(super) fn kv_shape_with(spec: &Spec, page: Bytes) -> KvShape {
    let own = spec
        .layers
        .iter()
        .filter(|layer| layer.kind == LayerKind::Attention && !layer.borrows);
    let mut shape = KvShape {
        attention_layers: narrow(own.clone().count()),
        kv_heads: narrow(spec.attention.kv_heads),
        head_dim: narrow(spec.attention.head_dim),
        element_bytes: 2,
        granule: page,
        block_tokens: KV_BLOCK_TOKENS,
        windowed: None,
    };
    let windows: Vec<usize> = own.filter_map(|layer| spec.window(layer)).collect();
    let heads_of = |kind: &AttentionSpec| (narrow(kind.kv_heads), narrow(kind.head_dim));
    let heads = heads_of(&spec.attention.of_layers(true));
    let windowed = |block_tokens: Tokens| {
        let tokens = narrow(
            windows
                .iter()
                .max()?
                .saturating_sub(1)
                .saturating_add(WINDOW_ROWS),
        );
        // They may begin and end anywhere in a block.
        Some(WindowedKv {
            layers: narrow(windows.len()),
            blocks: tokens.div_ceil(block_tokens.get()).saturating_add(1),
            heads: Some(heads).filter(|heads| *heads != heads_of(&spec.attention)),
        })
    };
    shape.windowed = windowed(shape.block_tokens);
    // Blocks are whole pages, so that plan and kernel count alike; heads are multiples of 8 elements.
    if !blocks_of(&shape).all(|bytes| bytes.get().is_multiple_of(page.get())) {
        shape.block_tokens = Tokens::new(2 * KV_BLOCK_TOKENS.get());
        shape.windowed = windowed(shape.block_tokens);
    }
    if has_huge_pages(page) && blocks_of(&shape).all(|bytes| bytes >= HUGE_FROM) {
        shape.granule = HUGE_PAGE;
    }
    shape
}

/// Size of a draft block's KV cache per token, and its capacity.
pub fn draft_kv(spec: &Spec) -> Option<(KvShape, Tokens)> {
    spec.draft.as_ref()?;
    let shape = KvShape {
        attention_layers: 1,
        granule: page(),
        windowed: None,
        ..kv_shape(spec)
    };
    let tokens = DRAFT_TOKENS.next_multiple_of(shape.block_tokens.get());
    Some((shape, Tokens::new(tokens)))
}

/// Bytes of one block for each kind of layer present.
pub(super) fn blocks_of(shape: &KvShape) -> impl Iterator<Item = Bytes> + use<> {
    let parts = [
        Some(shape.whole()),
        shape.windows().map(|(windows, _)| windows),
    ]
    .into_iter()
    .flatten();
    parts
        .map(|part| part.block_bytes(KvType::F16))
        .filter(|bytes| *bytes > Bytes::ZERO)
}

/// Recurrent and convolution state of one sequence, in whole pages; zero for models without recurrent layers.
pub fn sequence_state_bytes(spec: &Spec) -> Bytes {
    let layers = spec
        .layers
        .iter()
        .filter(|layer| layer.kind == LayerKind::Recurrent)
        .count();
    state_of_layers(spec, layers)
}

/// As [`sequence_state_bytes`], for one layer: the working area of lanes.
pub fn layer_state_bytes(spec: &Spec) -> Bytes {
    state_of_layers(spec, 1)
}

/// Memory of one windowed layer: the working area of lanes.
pub(super) fn window_bytes(kv: &KvShape) -> Bytes {
    kv.windows().map_or(Bytes::ZERO, |(shape, blocks)| {
        let layer = KvShape {
            attention_layers: 1,
            ..shape
        };
        layer.blocks_bytes(blocks, KvType::F16)
    })
}

fn state_of_layers(spec: &Spec, layers: usize) -> Bytes {
    spec.recurrent.map_or(Bytes::ZERO, |recurrent| {
        Bytes::of_len(layers * (recurrent.state_len() + recurrent.conv_len()) * 4).round_up(page())
    })
}

pub(crate) fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Tokens to which a draft block attends at most. Our choice: some sentences, 1 MiB for Qwen3.5 0.8B; its state holds what
/// came before.
const DRAFT_TOKENS: u32 = 512;
/// Our choice: with blocks of this size, rounding up to huge pages costs the cache of the default context (4096 tokens,
/// 64 blocks) at most one part in sixteen; and releasing 1 GiB takes 2.4 ms, against 60 to 74 with small pages.
pub(super) const HUGE_FROM: Bytes = Bytes::from_kib(512);
/// Most rows that attend together in a layer with a window, which keeps this many tokens in addition to the window. Our
/// choice: a chunk of the default size in one go; and an answer of up to this many tokens can be repeated without
/// recomputing its prompt.
pub(crate) const WINDOW_ROWS: usize = 512;
