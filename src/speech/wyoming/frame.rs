//! Framing of Wyoming messages.

use std::io;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use cotenant_memory::heap;
use cotenant_units::Bytes;

/// One message: a type, a JSON object and raw bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Frame {
    /// The event type, for example `audio-chunk`.
    pub kind: String,
    /// Its fields.
    pub data: Map<String, Value>,
    /// Its raw bytes, for example samples.
    pub payload: Vec<u8>,
}

impl Frame {
    /// A message without fields and payload.
    pub fn new(kind: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            ..Self::default()
        }
    }

    /// Encodes the message.
    ///
    /// The fields always follow the header line, because a reader that uses Python's `readline` fails on a line of 64
    /// KiB.
    ///
    /// # Errors
    /// If the type makes the header line exceed [`FrameLimits::header`] of the default limits.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let data = if self.data.is_empty() {
            Vec::new()
        } else {
            serde_json::to_vec(&self.data).map_err(FrameError::Data)?
        };
        let header = HeaderOut {
            kind: &self.kind,
            version: VERSION,
            data_length: (!data.is_empty()).then_some(data.len()),
            payload_length: (!self.payload.is_empty()).then_some(self.payload.len()),
        };
        let mut bytes = serde_json::to_vec(&header).map_err(FrameError::Header)?;
        let limit = FrameLimits::default().header;
        if bytes.len() >= limit {
            return Err(FrameError::HeaderTooLong { limit });
        }
        bytes.reserve_exact(1 + data.len() + self.payload.len());
        bytes.push(b'\n');
        bytes.extend_from_slice(&data);
        bytes.extend_from_slice(&self.payload);
        Ok(bytes)
    }
}

/// Limits of received messages; larger announced lengths are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameLimits {
    /// Bytes of the header line with its newline.
    pub header: usize,
    /// Bytes of the JSON object after the header line.
    pub data: usize,
    /// Bytes of the payload.
    pub payload: usize,
    /// Memory of header line and JSON object, each after parsing.
    pub tree: Bytes,
}

impl Default for FrameLimits {
    /// 64 KiB is the limit of the reference implementation's `readline`; a large `info` has some 100 KiB; 1 MiB of
    /// payload is 32 s of speech, where clients send 20 … 128 ms. Common JSON takes six times its text.
    fn default() -> Self {
        Self {
            header: 64 << 10,
            data: 1 << 20,
            payload: 1 << 20,
            tree: Bytes::from_mib(6),
        }
    }
}

/// Result of [`decode`].
#[derive(Clone, Debug, PartialEq)]
pub enum Decoded {
    /// A whole message and its length in bytes.
    Frame(Box<Frame>, usize),
    /// Part of a message, which has at least this many bytes.
    Incomplete(usize),
}

/// Decodes the message at the start of `bytes`.
///
/// # Errors
/// If no continuation can make them a message.
pub fn decode(bytes: &[u8], limits: FrameLimits) -> Result<Decoded, FrameError> {
    let window = bytes.get(..limits.header).unwrap_or(bytes);
    let Some(end) = window.iter().position(|&byte| byte == b'\n') else {
        if window.len() >= limits.header {
            return Err(FrameError::HeaderTooLong {
                limit: limits.header,
            });
        }
        return Ok(Decoded::Incomplete(bytes.len() + 1));
    };
    let (line, rest) = bytes.split_at(end);
    let rest = rest.get(1..).unwrap_or_default();
    check_tree("header", line, limits.tree)?;
    let header: HeaderIn = serde_json::from_slice(line).map_err(FrameError::Header)?;
    let data_length = bounded("data_length", header.data_length, limits.data)?;
    let payload_length = bounded("payload_length", header.payload_length, limits.payload)?;
    let total = end + 1 + data_length + payload_length;
    let (Some(data_bytes), Some(payload)) = (
        rest.get(..data_length),
        rest.get(data_length..data_length + payload_length),
    ) else {
        return Ok(Decoded::Incomplete(total));
    };
    let mut data = header.data.unwrap_or_default();
    if !data_bytes.is_empty() {
        check_tree("data", data_bytes, limits.tree)?;
        let more: Option<Map<String, Value>> =
            serde_json::from_slice(data_bytes).map_err(FrameError::Data)?;
        data.extend(more.unwrap_or_default());
    }
    let frame = Frame {
        kind: header.kind,
        data,
        payload: payload.to_vec(),
    };
    Ok(Decoded::Frame(Box::new(frame), total))
}

/// Reads messages from a stream.
#[derive(Debug)]
pub struct FrameReader<R> {
    inner: R,
    limits: FrameLimits,
    buffer: Vec<u8>,
    /// Minimum length of the buffered message.
    needed: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// A reader with the given limits.
    pub const fn new(inner: R, limits: FrameLimits) -> Self {
        Self {
            inner,
            limits,
            buffer: Vec::new(),
            needed: 1,
        }
    }

    /// The next message; `None` if the peer closed the stream between two messages. Cancel-safe.
    ///
    /// # Errors
    /// If the stream fails, ends within a message, or has invalid data. Nothing can be read afterwards.
    pub async fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        loop {
            if self.buffer.len() >= self.needed {
                match decode(&self.buffer, self.limits)? {
                    Decoded::Frame(frame, consumed) => {
                        self.buffer.drain(..consumed);
                        if self.buffer.is_empty() && self.buffer.capacity() > KEPT_BUFFER {
                            self.buffer = Vec::new();
                        }
                        self.needed = 1;
                        return Ok(Some(*frame));
                    }
                    Decoded::Incomplete(needed) => self.needed = needed,
                }
            }
            // Allocates space as data arrives, not as announced.
            self.buffer.reserve(READ_SIZE);
            if self.inner.read_buf(&mut self.buffer).await? == 0 {
                if self.buffer.is_empty() {
                    return Ok(None);
                }
                return Err(FrameError::Truncated {
                    received: self.buffer.len(),
                });
            }
        }
    }

    /// Reads and discards up to the end of the stream or about `limit` bytes.
    pub async fn discard(&mut self, limit: usize) {
        let mut dropped = 0;
        while dropped < limit {
            self.buffer.clear();
            self.buffer.reserve(READ_SIZE);
            match self.inner.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => dropped += count,
            }
        }
    }
}

/// Writes one message and flushes it.
///
/// # Errors
/// If it cannot be encoded or the stream fails.
pub async fn write_frame<W: AsyncWrite + Unpin>(
    writer: &mut W,
    frame: &Frame,
) -> Result<(), FrameError> {
    writer.write_all(&frame.encode()?).await?;
    writer.flush().await?;
    Ok(())
}

/// Reason why bytes are not a Wyoming message.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The header line does not end.
    #[error("no newline within the first {limit} bytes of a Wyoming message")]
    HeaderTooLong {
        /// The limit in bytes.
        limit: usize,
    },
    /// The header line is malformed.
    #[error("header of a Wyoming message is not a JSON object with a `type`")]
    Header(#[source] serde_json::Error),
    /// The data is malformed.
    #[error("data of a Wyoming message is not a JSON object")]
    Data(#[source] serde_json::Error),
    /// A part exceeds its limit.
    #[error("`{field}` of a Wyoming message is {announced}, at most {limit} bytes are accepted")]
    TooLong {
        /// The field of the header.
        field: &'static str,
        /// Announced length.
        announced: u64,
        /// The limit in bytes.
        limit: usize,
    },
    /// A part would exceed its memory limit.
    #[error("{part} of a Wyoming message would take {tree} of memory, the limit is {limit}")]
    TreeTooLarge {
        /// The part.
        part: &'static str,
        /// Memory of its values.
        tree: Bytes,
        /// The limit.
        limit: Bytes,
    },
    /// The stream ended within a message.
    #[error("stream ended {received} bytes into a Wyoming message")]
    Truncated {
        /// Received bytes of it.
        received: usize,
    },
    /// The stream failed.
    #[error("cannot exchange a Wyoming message")]
    Io(#[from] io::Error),
}

/// The header line as received: `type` is required, lengths may be missing or null.
#[derive(Deserialize)]
struct HeaderIn {
    #[serde(rename = "type")]
    kind: String,
    data: Option<Map<String, Value>>,
    data_length: Option<u64>,
    payload_length: Option<u64>,
}

/// The header line as sent.
#[derive(Serialize)]
struct HeaderOut<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    version: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_length: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_length: Option<usize>,
}

fn check_tree(part: &'static str, text: &[u8], limit: Bytes) -> Result<(), FrameError> {
    let tree = heap::tree_bytes(text);
    if tree > limit {
        return Err(FrameError::TreeTooLarge { part, tree, limit });
    }
    // The tree is freed with the event built from it.
    heap::freed(tree);
    Ok(())
}

fn bounded(field: &'static str, announced: Option<u64>, limit: usize) -> Result<usize, FrameError> {
    let announced = announced.unwrap_or(0);
    match usize::try_from(announced) {
        Ok(length) if length <= limit => Ok(length),
        _ => Err(FrameError::TooLong {
            field,
            announced,
            limit,
        }),
    }
}

/// Protocol version in each header: the release of OHF-Voice/wyoming whose `event.py` and `info.py` this follows.
const VERSION: &str = "1.10.2";

/// Bytes per read; an audio message of 128 ms has 4 KiB.
const READ_SIZE: usize = 8 << 10;

/// Capacity above which a buffer is not kept for the next message.
const KEPT_BUFFER: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SMALL: FrameLimits = FrameLimits {
        header: 256,
        data: 128,
        payload: 64,
        tree: Bytes::from_mib(1),
    };

    fn frame(kind: &str, data: Value, payload: &[u8]) -> Frame {
        let Value::Object(data) = data else {
            panic!("an object")
        };
        Frame {
            kind: kind.to_owned(),
            data,
            payload: payload.to_vec(),
        }
    }

    fn whole(bytes: &[u8]) -> Frame {
        match decode(bytes, SMALL).unwrap() {
            Decoded::Frame(frame, consumed) => {
                assert_eq!(consumed, bytes.len());
                *frame
            }
            Decoded::Incomplete(needed) => panic!("wants {needed} bytes, has {}", bytes.len()),
        }
    }

    #[test]
    fn data_behind_the_header_wins_over_data_within() {
        let bytes =
            b"{\"type\":\"x\",\"data\":{\"a\":1,\"b\":2},\"data_length\":13,\"payload_length\":3}\n{\"b\":3,\"c\":4}abc";
        assert_eq!(
            whole(bytes),
            frame("x", serde_json::json!({"a": 1, "b": 3, "c": 4}), b"abc")
        );
    }

    #[test]
    fn explicit_nulls_and_unknown_fields_are_let_through() {
        let bytes =
            b"{\"type\":\"describe\",\"data\":null,\"data_length\":null,\"payload_length\":null,\"version\":null,\"new\":[]}\n";
        assert_eq!(whole(bytes), Frame::new("describe"));
        assert_eq!(
            whole(b"{\"type\":\"x\",\"data_length\":4}\nnull"),
            Frame::new("x")
        );
    }

    #[test]
    fn the_header_line_carries_no_data_and_no_empty_lengths() {
        let bytes = Frame::new("describe").encode().unwrap();
        assert_eq!(bytes, b"{\"type\":\"describe\",\"version\":\"1.10.2\"}\n");
        let long = frame("t", serde_json::json!({"text": "a".repeat(100_000)}), b"");
        let line = long.encode().unwrap();
        assert!(line.iter().position(|&byte| byte == b'\n').unwrap() < 100);
    }

    #[test]
    fn every_announced_length_has_a_limit() {
        for (bytes, expected) in [
            (
                "{\"type\":\"x\",\"data_length\":129}\n",
                "`data_length` of a Wyoming message is 129, at most 128 bytes are accepted",
            ),
            (
                "{\"type\":\"x\",\"payload_length\":18446744073709551615}\n",
                "`payload_length` of a Wyoming message is 18446744073709551615, at most 64 bytes are accepted",
            ),
            (
                "{\"type\":\"x\",\"payload_length\":-1}\n",
                "header of a Wyoming message is not a JSON object with a `type`",
            ),
            (
                "{\"no\":\"type\"}\n",
                "header of a Wyoming message is not a JSON object with a `type`",
            ),
            (
                "HTTP/1.1 400 Bad Request\r\n",
                "header of a Wyoming message is not a JSON object with a `type`",
            ),
            (
                "{\"type\":\"x\",\"data_length\":2}\n[]",
                "data of a Wyoming message is not a JSON object",
            ),
        ] {
            assert_eq!(
                decode(bytes.as_bytes(), SMALL).unwrap_err().to_string(),
                expected
            );
        }
        let endless = vec![b'{'; 256];
        assert!(matches!(
            decode(&endless, SMALL),
            Err(FrameError::HeaderTooLong { limit: 256 })
        ));
    }

    #[test]
    fn a_header_nested_beyond_reason_is_an_error() {
        let mut bytes = b"{\"type\":\"x\",\"data\":".to_vec();
        bytes.extend(vec![b'['; 60_000]);
        bytes.push(b'\n');
        assert!(matches!(
            decode(&bytes, FrameLimits::default()),
            Err(FrameError::Header(_))
        ));
    }

    #[tokio::test]
    async fn a_stream_that_ends_within_a_message_is_not_a_clean_end() {
        let bytes = frame("x", serde_json::json!({"a": 1}), b"abc")
            .encode()
            .unwrap();
        for cut in 0..=bytes.len() {
            let mut reader = FrameReader::new(&bytes[..cut], SMALL);
            let result = reader.next().await;
            if cut == 0 {
                assert!(matches!(result, Ok(None)));
            } else if cut == bytes.len() {
                assert!(matches!(result, Ok(Some(_))));
                assert!(matches!(reader.next().await, Ok(None)));
            } else {
                assert!(
                    matches!(result, Err(FrameError::Truncated { received }) if received == cut)
                );
            }
        }
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        (
            "[a-z-]{1,20}",
            proptest::collection::btree_map(".{0,8}", ".{0,20}", 0..3),
            proptest::collection::vec(any::<u8>(), 0..64),
        )
            .prop_map(|(kind, data, payload)| Frame {
                kind,
                data: data
                    .into_iter()
                    .map(|(key, text)| (key, Value::String(text)))
                    .collect(),
                payload,
            })
    }

    proptest! {
        #[test]
        fn frames_survive_any_split_of_the_stream(
            frames in proptest::collection::vec(any_frame(), 1..5),
            pieces in proptest::collection::vec(1usize..40, 1..8),
        ) {
            let mut bytes = Vec::new();
            for frame in &frames {
                bytes.extend(frame.encode().unwrap());
            }
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let read = runtime.block_on(async {
                let (mut near, far) = tokio::io::duplex(4096);
                let feed = async move {
                    let mut rest = bytes.as_slice();
                    for piece in pieces.iter().cycle() {
                        if rest.is_empty() {
                            break;
                        }
                        let (now, later) = rest.split_at((*piece).min(rest.len()));
                        near.write_all(now).await.unwrap();
                        tokio::task::yield_now().await;
                        rest = later;
                    }
                };
                let take = async {
                    let mut reader = FrameReader::new(far, FrameLimits::default());
                    let mut read = Vec::new();
                    while let Some(frame) = reader.next().await.unwrap() {
                        read.push(frame);
                    }
                    read
                };
                tokio::join!(feed, take).1
            });
            prop_assert_eq!(read, frames);
        }
    }
}
