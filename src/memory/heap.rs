//! Heap of this process: size estimates of JSON trees, and the return of free pages.
//!
//! A tree of [`serde_json::Value`] takes up to a hundred times the bytes of its text: `{"":0},` is seven bytes of text
//! and 500 bytes of heap. Client input is therefore measured first, and parsed only within a limit.

use std::{
    mem::size_of,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use serde_json::Value;
use tokio::runtime::Handle;

use cotenant_threads::blocking;
use cotenant_units::Bytes;

/// Upper bound of the heap of a [`Value`] of this text, as allocated by glibc. Linear in the text; allocates nothing.
/// For text that is not JSON, it bounds the partial tree of a failing parser.
///
/// Texts in the tree that begin like an object count as parsed too, as arguments of tool calls are.
pub fn tree_bytes(text: &[u8]) -> Bytes {
    let mut tree = Tree {
        bytes: 0,
        levels: [Level::default(); LEVELS_MAX],
        depth: 0,
    };
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        at += 1;
        match byte {
            b' ' | b'\n' | b'\t' | b'\r' | b':' => {}
            b',' => tree.next(),
            b'{' => tree.open(true),
            b'[' => tree.open(false),
            b'}' | b']' => tree.close(),
            b'"' => {
                tree.filled();
                let (end, bytes) = string(text, at);
                tree.bytes += bytes;
                at = end;
            }
            _ => tree.filled(),
        }
    }
    // Unclosed levels have been built up to the end of the text.
    while tree.depth > 0 {
        tree.close();
    }
    Bytes::new(tree.bytes)
}

/// Configures glibc's allocator so that [`trim`] returns all free memory, regardless of the allocating thread.
///
/// `malloc_trim` returns free pages inside every arena, but free memory at the end only of the main arena. Other
/// arenas, which serve most threads, shrink only in `free`, once their end exceeds a threshold. By default this
/// threshold rises to twice the largest freed mapping, up to 64 MiB, and chunks in fast bins are not merged with the
/// end before `malloc_trim` runs: 22 MiB stayed at the end of an arena with 1 MiB in use after 300 requests of up to 1
/// MiB. Without fast bins, allocating and freeing a small chunk takes about 60 ns longer.
pub fn return_early() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` may be called at any time; these parameters are byte counts. None affects memory in use.
    unsafe {
        libc::mallopt(libc::M_MXFAST, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, ARENA_END_MAX);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM);
    }
}

/// Returns the allocator's free memory to the system, under glibc; called after many small allocations were freed.
/// Complete only after [`return_early`].
pub fn trim() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: returns free pages of the allocator to the kernel, and changes nothing in use.
        unsafe { libc::malloc_trim(0) };
    }
}

/// Records that a request's memory was freed. Once enough has accumulated, the heap is trimmed on another thread.
pub fn freed(bytes: Bytes) {
    let sum = FREED
        .fetch_add(bytes.get(), Ordering::Relaxed)
        .saturating_add(bytes.get());
    if sum < TRIMMED_BEHIND.get() || TRIM_IS_DUE.swap(true, Ordering::AcqRel) {
        return;
    }
    let Ok(runtime) = Handle::try_current() else {
        TRIM_IS_DUE.store(false, Ordering::Release);
        return;
    };
    runtime.spawn(async {
        tokio::time::sleep(TRIMMED_AFTER).await;
        TRIM_IS_DUE.store(false, Ordering::Release);
        FREED.store(0, Ordering::Relaxed);
        // Without a thread, it is trimmed after the next release.
        let _trimmed = blocking(trim).await;
    });
}

static FREED: AtomicU64 = AtomicU64::new(0);
static TRIM_IS_DUE: AtomicBool = AtomicBool::new(false);

/// Our choice: free memory kept at the end of each arena for the next requests.
#[cfg(target_env = "gnu")]
const ARENA_END_MAX: libc::c_int = 1 << 20;
/// Allocations from this size on are separate mappings, unmapped when freed. glibc's default, without its rise to 32
/// MiB.
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 128 << 10;
/// Our choice: memory that the allocator may keep from finished requests.
const TRIMMED_BEHIND: Bytes = Bytes::from_mib(1);
/// Our choice: concurrent requests are freed together; trimming some 100 MiB takes 10 ms.
const TRIMMED_AFTER: Duration = Duration::from_millis(250);

/// A text under measurement.
struct Tree {
    bytes: u64,
    levels: [Level; LEVELS_MAX],
    depth: usize,
}

/// An open list or object.
#[derive(Clone, Copy, Default)]
struct Level {
    is_object: bool,
    /// Commas so far.
    commas: u64,
    /// Whether it is non-empty.
    filled: bool,
}

impl Tree {
    fn filled(&mut self) {
        if let Some(level) = self.top() {
            level.filled = true;
        }
    }

    fn next(&mut self) {
        if let Some(level) = self.top() {
            level.commas += 1;
        }
    }

    fn open(&mut self, is_object: bool) {
        self.filled();
        if let Some(level) = self.levels.get_mut(self.depth) {
            *level = Level {
                is_object,
                ..Level::default()
            };
        }
        self.depth += 1;
    }

    fn close(&mut self) {
        let Some(depth) = self.depth.checked_sub(1) else {
            return;
        };
        self.depth = depth;
        // The parser refuses or skips deeper nesting.
        let Some(level) = self.levels.get(depth) else {
            return;
        };
        if level.filled || level.commas > 0 {
            let entries = level.commas + 1;
            self.bytes += if level.is_object {
                object_bytes(entries)
            } else {
                list_bytes(entries)
            };
        }
    }

    fn top(&mut self) -> Option<&mut Level> {
        self.levels.get_mut(self.depth.checked_sub(1)?)
    }
}

/// The end of the text whose opening quote precedes `start`, and its heap.
fn string(text: &[u8], start: usize) -> (usize, u64) {
    let mut at = start;
    let mut length = 0;
    let (mut begun, mut nested) = (false, false);
    let mut inside = 0;
    loop {
        let (character, next) = match text.get(at) {
            None | Some(b'"') => break,
            Some(b'\\') => escaped(text, at + 1),
            Some(&byte) => (byte, at + 1),
        };
        // A character is never longer than its escape.
        length += next - at;
        at = next;
        if !begun && !character.is_ascii_whitespace() {
            (begun, nested) = (true, character == b'{');
        }
        if nested {
            inside += match character {
                b'{' => object_bytes(1),
                b'[' => list_bytes(1),
                b',' => ENTRY_BYTES,
                // One of the two quotes around a text.
                b'"' => ALLOCATED_MIN / 2,
                _ => 0,
            };
        }
    }
    let own = if length == 0 {
        0
    } else {
        allocated(length as u64)
    };
    // Nested texts are no longer than the text itself.
    (at + 1, own + if nested { inside + own } else { 0 })
}

/// The character of the escape after a backslash, and the position after it; 0 for one without structural meaning.
fn escaped(text: &[u8], at: usize) -> (u8, usize) {
    match text.get(at) {
        Some(b'u') => {
            let digits = text
                .get(at + 1..at + 5)
                .and_then(|digits| str::from_utf8(digits).ok());
            let character = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
            (
                character
                    .and_then(|character| u8::try_from(character).ok())
                    .unwrap_or(0),
                (at + 5).min(text.len()),
            )
        }
        Some(b'n' | b'r' | b't') => (b' ', at + 1),
        Some(&byte) => (byte, at + 1),
        None => (0, at),
    }
}

/// Heap of a list: a vector that doubles.
fn list_bytes(entries: u64) -> u64 {
    allocated(entries.next_power_of_two().max(LIST_MIN) * size_of::<Value>() as u64)
}

/// Heap of an ordered object: a vector of entries, with the capacity of its index table.
fn object_bytes(entries: u64) -> u64 {
    let buckets = if entries <= 3 {
        4
    } else {
        (entries * 8).div_ceil(7).next_power_of_two()
    };
    let places = if buckets == 4 { 3 } else { buckets / 8 * 7 };
    let entry = size_of::<(u64, String, Value)>() as u64;
    allocated(places * entry) + allocated(buckets * 9 + GROUP_BYTES)
}

/// Size of a glibc allocation: a header word, in steps of 16 bytes.
const fn allocated(bytes: u64) -> u64 {
    let chunk = (bytes + 8).next_multiple_of(16);
    if chunk < ALLOCATED_MIN {
        ALLOCATED_MIN
    } else {
        chunk
    }
}

const ALLOCATED_MIN: u64 = 32;
/// Initial capacity of a list in entries.
const LIST_MIN: u64 = 4;
/// Overhead of an object's table besides its places.
const GROUP_BYTES: u64 = 16;
/// One more entry of an object that has just grown, its table place included.
const ENTRY_BYTES: u64 = 2 * (size_of::<(u64, String, Value)>() as u64 + 9);
/// Depth limit of serde_json.
const LEVELS_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structure_counts_and_the_words_of_a_text_do_not() {
        let of = |text: &str| tree_bytes(text.as_bytes()).get();
        for flat in [
            "", "0", "null", "-1e400", "{}", "[]", "[ ]", "\"\"", "]", "}",
        ] {
            assert_eq!(of(flat), 0, "{flat}");
        }
        assert_eq!(of("[0]"), list_bytes(1));
        assert_eq!(of("[0, 1, [2], {}, 4"), list_bytes(5) + list_bytes(1));
        assert_eq!(of(r#"{"": 0}"#), object_bytes(1));
        assert_eq!(of(r#""a, {b} [c]""#), allocated(11));
        assert_eq!(of(r#""a\"b""#), allocated(4));
    }

    #[test]
    fn arguments_in_a_text_count_however_they_are_escaped() {
        let plain = tree_bytes(br#"" \n{\"a\": [1, 2]}""#);
        assert!(plain.get() > object_bytes(1) + list_bytes(2), "{plain}");
        assert!(tree_bytes(br#"" \n\u007b\u0022a\u0022: \u005b1\u002c 2]}""#) >= plain);
    }

    #[test]
    fn what_is_nested_deeper_than_parsers_read_hides_nothing() {
        let text = format!(
            "{{\"x\":{}{},\"y\":[0,0]}}",
            "[".repeat(1000),
            "]".repeat(1000)
        );
        assert!(tree_bytes(text.as_bytes()).get() >= list_bytes(2) + object_bytes(2));
        assert!(tree_bytes("[".repeat(1 << 20).as_bytes()).get() < 1 << 17);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_measured(text: Vec<u8>) {
            let bytes = tree_bytes(&text);
            proptest::prop_assert!(bytes.get() <= 1000 * text.len() as u64);
        }
    }
}
