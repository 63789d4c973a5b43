//! Frames between a job and its owner: a kind, a length, a body.

use std::io::{self, Read, Write};

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To a job: compile this JSON schema.
    Schema,
    /// To a job: compile this grammar in Lark's notation.
    Lark,
    /// To a job: check whether the template can be compiled.
    Compile,
    /// To a job: render the template with this context, in JSON.
    Render,
    /// To a job: the chosen tokens.
    Token,
    /// From a job: it has begun, in the process with this number.
    Begun,
    /// From the helper: a job reached its limit of memory or time.
    Bound,
    /// From a job: the grammar continues. A mask follows; after forced bytes only on request.
    GoesOn,
    /// From a job: the grammar is complete.
    Complete,
    /// From a job: the allowed next tokens, one bit each. To a job: request for these.
    Mask,
    /// From a job: the rendered text.
    Text,
    /// From a job: the template itself refused.
    Refused,
    /// From a job: the reason of a failure.
    Failed,
}

const KINDS: [Kind; 13] = [
    Kind::Schema,
    Kind::Lark,
    Kind::Compile,
    Kind::Render,
    Kind::Token,
    Kind::Begun,
    Kind::Bound,
    Kind::GoesOn,
    Kind::Complete,
    Kind::Mask,
    Kind::Text,
    Kind::Refused,
    Kind::Failed,
];

/// Writes one frame.
pub(super) fn write(stream: &mut impl Write, kind: Kind, body: &[u8]) -> io::Result<()> {
    let length =
        u32::try_from(body.len()).map_err(|_| io::Error::other("a frame of more than 4 GiB"))?;
    let mut head = [kind as u8, 0, 0, 0, 0];
    if let Some(place) = head.get_mut(1..) {
        place.copy_from_slice(&length.to_le_bytes());
    }
    stream.write_all(&head)?;
    stream.write_all(body)
}

/// Reads the head of one frame: its kind, and the length of the body that follows.
pub(super) fn read_head(stream: &mut impl Read) -> io::Result<(Kind, usize)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let kind = KINDS
        .get(usize::from(kind))
        .copied()
        .ok_or_else(|| io::Error::other("a frame of no known kind"))?;
    Ok((kind, u32::from_le_bytes(length) as usize))
}

/// Reads the body of one frame.
pub(super) fn read_body(stream: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    if length > BODY_MAX {
        return Err(io::Error::other("a frame of more than 64 MiB"));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok(body)
}

/// Longer than the largest request of clients and its rendering.
const BODY_MAX: usize = 64 << 20;

/// Reads one frame.
pub(super) fn read(stream: &mut impl Read) -> io::Result<(Kind, Vec<u8>)> {
    let (kind, length) = read_head(stream)?;
    Ok((kind, read_body(stream, length)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_comes_back_as_it_was_written() {
        for kind in KINDS {
            let mut bytes = Vec::new();
            write(&mut bytes, kind, b"body").unwrap();
            assert_eq!(
                read(&mut bytes.as_slice()).unwrap(),
                (kind, b"body".to_vec())
            );
        }
        assert!(read(&mut [200, 0, 0, 0, 0].as_slice()).is_err());
        assert!(read(&mut [0, 9, 0, 0, 0, 1].as_slice()).is_err());
    }
}
