//! Mutations of bytes.

use rand::{Rng as _, seq::IndexedRandom as _};
use rand_chacha::ChaCha8Rng;

/// Longest input: enough to exceed every tested limit.
const INPUT_MAX: usize = 1 << 20;

/// Edge-case numbers.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0xffff_ffff_ffff_ffff,
];

/// Edge-case numbers as text.
const EDGE_WORDS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "1e999",
    "-0",
    "0.1",
    "65536",
    "4294967296",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999",
    "NaN",
];

/// One of `examples`, mutated one or more times.
pub(crate) fn damaged(examples: &[Vec<u8>], words: &[&str], rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = examples.choose(rng).cloned().unwrap_or_default();
    for _ in 0..1 << rng.random_range(0..4) {
        once(&mut bytes, examples, words, rng);
        bytes.truncate(INPUT_MAX);
    }
    bytes
}

fn once(bytes: &mut Vec<u8>, examples: &[Vec<u8>], words: &[&str], rng: &mut ChaCha8Rng) {
    let length = bytes.len();
    let at = rng.random_range(0..=length);
    let end = (at + rng.random_range(0..=64)).min(length);
    match rng.random_range(0..13) {
        0 if at < length => bytes[at] ^= 1 << rng.random_range(0..8),
        1 if at < length => bytes[at] = rng.random(),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..end)),
        4 => {
            let piece = bytes[at..end].to_vec();
            let times = 1 << rng.random_range(0..8);
            splice(bytes, at, 0, &piece.repeat(times));
        }
        5 | 6 => {
            if let Some(word) = words.choose(rng) {
                let over = if rng.random() {
                    word.len().min(length - at)
                } else {
                    0
                };
                splice(bytes, at, over, word.as_bytes());
            }
        }
        7 => {
            let edge = EDGES
                .choose(rng)
                .copied()
                .unwrap_or_default()
                .wrapping_add(rng.random_range(0..3))
                .wrapping_sub(1);
            let width = [1, 2, 4, 8][rng.random_range(0..4)];
            let over = width.min(length - at);
            splice(bytes, at, over, &edge.to_le_bytes()[..width]);
        }
        8 | 9 => digits(bytes, at, rng),
        10 => {
            let other = examples.choose(rng).cloned().unwrap_or_default();
            let from = rng.random_range(0..=other.len());
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        11 => {
            // The same construct nested in itself.
            let open = *[&b"["[..], b"{\"a\":", b"{a: ", b"- ", b"(", b"\""]
                .choose(rng)
                .unwrap_or(&&b"["[..]);
            splice(bytes, at, 0, &open.repeat(1 << rng.random_range(0..12)));
        }
        _ => {
            let noise: Vec<u8> = (0..rng.random_range(0..32)).map(|_| rng.random()).collect();
            splice(bytes, at, 0, &noise);
        }
    }
}

/// Replaces the next number written as text.
fn digits(bytes: &mut Vec<u8>, from: usize, rng: &mut ChaCha8Rng) {
    let Some(at) = bytes[from..]
        .iter()
        .position(u8::is_ascii_digit)
        .map(|at| from + at)
    else {
        return;
    };
    let over = bytes[at..]
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    let word = EDGE_WORDS.choose(rng).copied().unwrap_or_default();
    splice(bytes, at, over, word.as_bytes());
}

fn splice(bytes: &mut Vec<u8>, at: usize, over: usize, with: &[u8]) {
    bytes.splice(at..at + over, with.iter().copied());
}
