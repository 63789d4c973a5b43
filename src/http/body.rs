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
use cotenant_memory::heap;
use cotenant_units::Bytes;

#[derive(Clone, Copy, Debug)]
pub(super) struct BodyLimits {
    pub(super) max: Bytes,
    pub(super) idle: Duration,
    pub(super) total: Duration,
    /// Time after which the average rate must be at least [`BYTES_PER_SECOND_MIN`].
    pub(super) grace: Duration,
}

/// The `Content-Length`, if any.
pub(super) fn announced_length(headers: &HeaderMap) -> Option<Bytes> {
    let value = headers.get(header::CONTENT_LENGTH)?.to_str().ok()?;
    value.parse().ok().map(Bytes::new)
}

/// Reads a body to its end, in pieces of at most [`PIECE_MAX`]. `hold` reserves memory for each piece before it is
/// stored, so memory follows the received bytes, not the announced length.
///
/// # Errors
/// 413 if it is too long, at once if its announced length is; 408 if it arrives too slowly; 400 if it is truncated; any
/// error of `hold`.
pub(super) async fn read_body(
    headers: &HeaderMap,
    body: Body,
    limits: BodyLimits,
    mut hold: impl FnMut(Bytes) -> Result<(), Fault>,
) -> Result<Vec<Piece>, Fault> {
    let announced = announced_length(headers);
    if announced.is_some_and(|length| length > limits.max) {
        return Err(too_large(announced, limits.max));
    }
    let (mut read, mut last) = (Vec::new(), Vec::new());
    let mut length = 0;
    let mut pieces = body.into_data_stream();
    let began = Instant::now();
    let end = began + limits.total;
    loop {
        let idle_end = Instant::now() + limits.idle;
        let by_rate = Duration::from_millis(
            u64::try_from(length).unwrap_or(u64::MAX) * 1000 / BYTES_PER_SECOND_MIN,
        );
        let next_by = end.min(idle_end).min(began + limits.grace + by_rate);
        let piece = timeout_at(next_by, pieces.next())
            .await
            .map_err(|_elapsed| too_slow(length, limits))?;
        match piece {
            None => {
                read.push(Piece::from(last));
                return Ok(read);
            }
            Some(Ok(piece)) => {
                length += piece.len();
                if Bytes::of_len(length) > limits.max {
                    return Err(too_large(announced, limits.max));
                }
                hold(Bytes::of_len(length))?;
                // Copied, because a piece of one byte would keep its whole read buffer.
                if last.len() + piece.len() > PIECE_MAX && !last.is_empty() {
                    read.push(Piece::from(std::mem::take(&mut last)));
                }
                last.extend_from_slice(&piece);
            }
            Some(Err(error)) => return Err(broken(length, &error)),
        }
    }
}

/// The body received by [`read_body`], or 400.
pub(super) async fn received(body: Body) -> Result<Piece, Fault> {
    axum::body::to_bytes(body, usize::MAX)
        .await
        .map_err(|error| broken(0, &error))
}

/// Memory of the JSON after parsing; 413 above `max`.
pub(super) fn bounded_tree(text: &[u8], max: Bytes) -> Result<Bytes, Fault> {
    let tree = heap::tree_bytes(text);
    if tree <= max {
        return Ok(tree);
    }
    let message = format!(
        "cannot parse {} of JSON: its values take {tree} of memory, the limit is {max} (hint: send fewer lists and objects)",
        Bytes::of_len(text.len())
    );
    Err(Fault::request(
        StatusCode::PAYLOAD_TOO_LARGE,
        "request_too_large",
        message,
    ))
}

/// Parses a JSON body.
///
/// # Errors
/// 400 if it is not JSON or a field has the wrong type; the message names the field.
pub(super) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        if error.inner().is_data() {
            wrong_type(&error)
        } else {
            no_json(error.inner())
        }
    })?;
    deserializer.end().map_err(|error| no_json(&error))?;
    Ok(parsed)
}

/// A value that is missing or of a wrong type, named by the path of its field; the root has no name.
pub(super) fn wrong_type(error: &serde_path_to_error::Error<serde_json::Error>) -> Fault {
    let path = error.path().to_string();
    let cause = error.inner().to_string();
    let missing = cause.strip_prefix("missing field `");
    let (field, cause) = match missing.and_then(|rest| rest.split('`').next()) {
        Some(missing) if path == "." => (missing.to_owned(), "is missing".to_owned()),
        Some(missing) => (format!("{path}.{missing}"), "is missing".to_owned()),
        None => (path, shortened(&in_words_of_json(&cause))),
    };
    if field == "." {
        Fault::bad_request("invalid_type", format!("the request: {cause}"))
    } else {
        Fault::bad_request("invalid_type", format!("{field}: {cause}")).of_param(&field)
    }
}

/// Translates the parser's messages from Rust's types to JSON's.
fn in_words_of_json(cause: &str) -> String {
    let words = [
        ("type: map", "type: object"),
        ("type: sequence", "type: list"),
        ("expected a map", "expected an object"),
        ("expected a sequence", "expected a list"),
        ("expected f64", "expected a number"),
    ];
    let said = words.iter().fold(cause.to_owned(), |said, (rust, json)| {
        said.replace(rust, json)
    });
    match said.split_once("expected struct ") {
        Some((before, after)) => {
            let place = after.rfind(" at line ").and_then(|at| after.get(at..));
            format!("{before}expected an object{}", place.unwrap_or_default())
        }
        None => said,
    }
}

fn no_json(error: &serde_json::Error) -> Fault {
    Fault::bad_request(
        "invalid_json",
        format!("cannot parse the body as JSON: {error}"),
    )
}

fn broken(length: usize, error: &axum::Error) -> Fault {
    let message = format!("cannot read the body after {length} bytes: {error}");
    Fault::bad_request("incomplete_body", message)
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
            "cannot read the body in time: {got} bytes received; the limits are {} ms between two pieces, {} ms for the whole, and \
             {}/s on average after {} ms",
            limits.idle.as_millis(),
            limits.total.as_millis(),
            Bytes::new(BYTES_PER_SECOND_MIN),
            limits.grace.as_millis(),
        ),
    )
}

/// Our choice: a fortieth of a slow Wi-Fi. Slower bodies are assumed to be deliberate.
const BYTES_PER_SECOND_MIN: u64 = 16 << 10;
/// Our choice: holds any JSON body.
const PIECE_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_wrong_type_names_its_field() {
        #[derive(serde::Deserialize, Debug)]
        struct Outer {
            #[expect(dead_code, reason = "only parsed")]
            inner: Vec<Option<u32>>,
        }
        let fault = parse_json::<Outer>(br#"{"inner": [1, "x"]}"#).unwrap_err();
        assert_eq!(
            fault.message(),
            "inner[1]: invalid type: string \"x\", expected u32 at line 1 column 17"
        );
        for (body, expected) in [
            (
                "{\"inner\": {}}",
                "inner: invalid type: object, expected a list",
            ),
            ("{}", "inner: is missing"),
            ("[]", "the request: invalid length 0, expected an object"),
            (
                "3",
                "the request: invalid type: integer `3`, expected an object",
            ),
        ] {
            let fault = parse_json::<Outer>(body.as_bytes()).unwrap_err();
            assert!(fault.message().starts_with(expected), "{fault:?}");
            let param = expected.starts_with("inner").then(|| json!("inner"));
            assert_eq!(fault.to_json()["error"]["param"], json!(param), "{body}");
        }
        let fault = parse_json::<Outer>(b"{").unwrap_err();
        assert!(
            fault.message().starts_with("cannot parse the body as JSON"),
            "{fault:?}"
        );
        let fault = parse_json::<Outer>(br#"{"inner": []} x"#).unwrap_err();
        assert!(
            fault.message().starts_with("cannot parse the body as JSON"),
            "{fault:?}"
        );
    }
}
