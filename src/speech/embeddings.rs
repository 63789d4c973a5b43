//! Client of a worker for embeddings: `POST /v1/embeddings`.

use hyper::body::Bytes;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::{client::ClientError, http::HttpClient};

/// Texts to embed in one request to a worker.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EmbeddingInput<'a> {
    /// The texts; none is empty, at most [`TEXTS_MAX`].
    #[serde(rename = "input")]
    pub texts: &'a [String],
    /// Shortened length of a vector, from a client that requests one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dimensions: Option<u32>,
    /// Whether a text beyond the context of the model is cut. Servers that do not know the field refuse such a text.
    #[serde(skip_serializing_if = "is_false")]
    pub truncate: bool,
}

/// Vectors of texts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Embeddings {
    /// One vector for each text, in their order, all of one length.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of the texts; 0 if the worker does not count them.
    pub tokens: u64,
}

/// Maximum number of texts in one request to a worker. Our choice: with 4096 numbers each its answer stays below
/// 4 MiB, and other clients wait for no more than 16 texts.
pub const TEXTS_MAX: usize = 16;

/// Greatest length of a vector; the longest published ones have 4096 numbers.
pub const DIMENSIONS_MAX: usize = 16_384;

impl HttpClient {
    /// Embeds texts.
    ///
    /// # Errors
    /// If the server cannot be reached, does not reply in time, refuses, or replies with something else.
    pub async fn embed(&self, input: EmbeddingInput<'_>) -> Result<Embeddings, ClientError> {
        #[derive(Serialize)]
        struct Asked<'a> {
            model: &'a str,
            encoding_format: &'static str,
            #[serde(flatten)]
            input: EmbeddingInput<'a>,
        }
        let asked = Asked {
            model: &self.model,
            encoding_format: "float",
            input,
        };
        let body = serde_json::to_vec(&asked).map_err(|error| self.wrong(error.to_string()))?;
        let limit = self.timeouts.embed;
        let ask = self.whole(
            "/v1/embeddings",
            "application/json",
            Bytes::from(body),
            ANSWER_BYTES_MAX,
        );
        let whole = timeout(limit, ask)
            .await
            .unwrap_or_else(|_| Err(self.late("embed", limit)))?;
        parse(&whole, input.texts.len()).map_err(|problem| self.wrong(problem))
    }
}

/// Reads the answer for `count` texts.
fn parse(answer: &[u8], count: usize) -> Result<Embeddings, String> {
    #[derive(Deserialize)]
    struct Answer {
        data: Vec<Datum>,
        #[serde(default)]
        usage: Usage,
    }
    #[derive(Deserialize)]
    struct Datum {
        index: usize,
        embedding: Vec<f32>,
    }
    #[derive(Default, Deserialize)]
    struct Usage {
        #[serde(default)]
        prompt_tokens: u64,
    }
    let answer: Answer = serde_json::from_slice(answer)
        .map_err(|error| format!("its answer has no embeddings: {error}"))?;
    let mut vectors = vec![Vec::new(); count];
    for Datum { index, embedding } in answer.data {
        let place = vectors
            .get_mut(index)
            .filter(|place| place.is_empty())
            .ok_or_else(|| format!("embedding {index} was not requested, or comes twice"))?;
        *place = embedding;
    }
    let length = vectors.first().map_or(0, Vec::len);
    if let Some(other) = vectors.iter().find(|vector| vector.len() != length) {
        return Err(format!(
            "its vectors have {length} and {} numbers",
            other.len()
        ));
    }
    if length == 0 || length > DIMENSIONS_MAX {
        return Err(format!(
            "its vectors have {length} numbers, between 1 and {DIMENSIONS_MAX} are expected"
        ));
    }
    if !vectors.iter().flatten().all(|number| number.is_finite()) {
        return Err("a number of a vector is not finite".to_owned());
    }
    Ok(Embeddings {
        vectors,
        tokens: answer.usage.prompt_tokens,
    })
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// 16 vectors of 16,384 numbers, each in up to 30 characters.
const ANSWER_BYTES_MAX: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_taken_in_the_order_of_the_texts_or_refused_with_the_cause() {
        let answer =
            |data: &str| format!("{{\"data\":[{data}],\"usage\":{{\"prompt_tokens\":7}}}}");
        let two =
            answer("{\"index\":1,\"embedding\":[0.5,1]},{\"index\":0,\"embedding\":[2,-1.5]}");
        assert_eq!(
            parse(two.as_bytes(), 2).unwrap(),
            Embeddings {
                vectors: vec![vec![2.0, -1.5], vec![0.5, 1.0]],
                tokens: 7,
            }
        );
        for (data, problem) in [
            (
                "{\"index\":0,\"embedding\":[1]}",
                "its vectors have 1 and 0 numbers",
            ),
            (
                "{\"index\":2,\"embedding\":[1]}",
                "embedding 2 was not requested, or comes twice",
            ),
            (
                "{\"index\":0,\"embedding\":[1]},{\"index\":0,\"embedding\":[1]}",
                "embedding 0 was not requested, or comes twice",
            ),
            (
                "{\"index\":0,\"embedding\":[]},{\"index\":1,\"embedding\":[]}",
                "its vectors have 0 numbers, between 1 and 16384 are expected",
            ),
            (
                "{\"index\":0,\"embedding\":[1e39]},{\"index\":1,\"embedding\":[1]}",
                "a number of a vector is not finite",
            ),
        ] {
            assert_eq!(parse(answer(data).as_bytes(), 2).unwrap_err(), problem);
        }
        assert!(
            parse(b"<html>", 1)
                .unwrap_err()
                .starts_with("its answer has no embeddings")
        );
    }
}
