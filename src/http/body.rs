//! Request bodies within limits of size and time.

use std::time::Duration;

use axum::{
    body::{Body, Bytes as Piece},
    http::{HeaderMap, StatusCode, header},
};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};

use super::fault::{Fault, shortened};
use crate::units::Bytes;

/// Limits of one body.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyLimits {
    /// Most bytes.
    pub(super) max: Bytes,
    /// Longest wait for the next piece.
    pub(super) idle: Duration,
    /// Longest time for the whole.
    pub(super) total: Duration,
}

/// The length that the client announces, if it does.
pub(super) fn announced_length(headers: &HeaderMap) -> Option<Bytes> {
    let value = headers.get(header::CONTENT_LENGTH)?.to_str().ok()?;
    value.parse().ok().map(Bytes::new)
}

/// Reads a body to its end.
///
/// # Errors
/// 413 when it is longer than allowed, at once when its announced length already is; 408 when it comes too slowly;
/// 400 when it breaks off.
pub(super) async fn read_body(headers: &HeaderMap, body: Body, limits: BodyLimits) -> Result<Vec<u8>, Fault> {
    let room = announced_length(headers).unwrap_or(Bytes::ZERO).min(limits.max);
    let mut bytes = Vec::with_capacity(room.as_len());
    each_piece(headers, body, limits, |piece| bytes.extend_from_slice(&piece)).await?;
    Ok(bytes)
}

/// The same in the pieces in which it came, for a reader that takes them one by one.
///
/// # Errors
/// As [`read_body`].
pub(super) async fn read_pieces(headers: &HeaderMap, body: Body, limits: BodyLimits) -> Result<Vec<Piece>, Fault> {
    let mut pieces = Vec::new();
    each_piece(headers, body, limits, |piece| pieces.push(piece)).await?;
    Ok(pieces)
}

async fn each_piece(
    headers: &HeaderMap,
    body: Body,
    limits: BodyLimits,
    mut take: impl FnMut(Piece),
) -> Result<(), Fault> {
    let announced = announced_length(headers);
    if announced.is_some_and(|length| length > limits.max) {
        return Err(too_large(announced, limits.max));
    }
    let mut length = 0;
    let mut pieces = body.into_data_stream();
    let end = Instant::now() + limits.total;
    loop {
        let idle_end = Instant::now() + limits.idle;
        let piece = timeout_at(end.min(idle_end), pieces.next()).await.map_err(|_elapsed| too_slow(length, limits))?;
        match piece {
            None => return Ok(()),
            Some(Ok(piece)) => {
                length += piece.len();
                if Bytes::of_len(length) > limits.max {
                    return Err(too_large(announced, limits.max));
                }
                take(piece);
            }
            Some(Err(error)) => {
                return Err(Fault::request(
                    StatusCode::BAD_REQUEST,
                    "incomplete_body",
                    format!("cannot read the body after {length} bytes: {error}"),
                ));
            }
        }
    }
}

/// Parses a JSON body; the message names the field at fault.
///
/// # Errors
/// 400 when it is no JSON, or a field has the wrong type.
pub(super) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let cause = error.inner();
        if !cause.is_data() {
            return no_json(cause);
        }
        let cause = shortened(&cause.to_string());
        if path == "." {
            Fault::request(StatusCode::BAD_REQUEST, "invalid_type", format!("the request: {cause}"))
        } else {
            Fault::request(StatusCode::BAD_REQUEST, "invalid_type", format!("{path}: {cause}")).of_param(&path)
        }
    })?;
    deserializer.end().map_err(|error| no_json(&error))?;
    Ok(parsed)
}

fn no_json(error: &serde_json::Error) -> Fault {
    Fault::request(StatusCode::BAD_REQUEST, "invalid_json", format!("cannot parse the body as JSON: {error}"))
}

fn too_large(announced: Option<Bytes>, max: Bytes) -> Fault {
    let length = announced
        .filter(|&length| length > max)
        .map_or_else(|| format!("more than {max}"), |length| length.to_string());
    Fault::request(
        StatusCode::PAYLOAD_TOO_LARGE,
        "request_too_large",
        format!("cannot take the body: it is {length}, the limit is {max}"),
    )
}

fn too_slow(got: usize, limits: BodyLimits) -> Fault {
    Fault::request(
        StatusCode::REQUEST_TIMEOUT,
        "request_timeout",
        format!(
            "cannot read the body: {got} bytes came; the limits are {} ms between two pieces and {} ms for the whole",
            limits.idle.as_millis(),
            limits.total.as_millis(),
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_type_names_its_field() {
        #[derive(serde::Deserialize, Debug)]
        struct Outer {
            #[expect(dead_code, reason = "only parsed")]
            inner: Vec<Option<u32>>,
        }
        let fault = parse_json::<Outer>(br#"{"inner": [1, "x"]}"#).unwrap_err();
        assert_eq!(fault.message(), "inner[1]: invalid type: string \"x\", expected u32 at line 1 column 17");
        let fault = parse_json::<Outer>(b"{").unwrap_err();
        assert!(fault.message().starts_with("cannot parse the body as JSON"), "{fault:?}");
        let fault = parse_json::<Outer>(br#"{"inner": []} x"#).unwrap_err();
        assert!(fault.message().starts_with("cannot parse the body as JSON"), "{fault:?}");
    }
}
