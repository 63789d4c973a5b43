//! Logits compared with llama.cpp's, relative to its own variants.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;

use cotenant::cli::bench::engine::percent;

use super::Workbench;

/// Output of `tests/fixtures/reference-shapes/shapes.cpp`.
#[derive(Deserialize)]
struct Reference {
    /// Tokens computed in one chunk; the others follow one by one.
    prompt: usize,
    /// Interval of the samples: only the logits of each `every`-th token of the vocabulary are included.
    every: usize,
    vocabulary: u32,
    tokens: Vec<u32>,
    /// For each way of computing, a row after the prompt and after each further token.
    rows: BTreeMap<String, Rows>,
}

type Rows = Vec<Vec<f32>>;

impl Reference {
    fn read(path: &Path) -> Result<Self, String> {
        let wrong = |what: String| format!("cannot use the reference `{}`: {what}", path.display());
        let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let reference: Self =
            serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let read = reference.tokens.len();
        if reference.prompt == 0 || reference.prompt > read || reference.every == 0 {
            return Err(wrong(format!(
                "a prompt of {} of {read} tokens and every {}th logit make no sense",
                reference.prompt, reference.every
            )));
        }
        for way in [PLAIN, REPACKED] {
            if !reference.rows.contains_key(way) {
                return Err(wrong(format!("it has no rows of `{way}`")));
            }
        }
        let (rows, width) = (
            read - reference.prompt + 1,
            (reference.vocabulary as usize).div_ceil(reference.every),
        );
        for (way, found) in &reference.rows {
            if found.len() != rows || found.iter().any(|row| row.len() != width) {
                return Err(wrong(format!(
                    "`{way}` is not {rows} rows of {width} logits"
                )));
            }
        }
        Ok(reference)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Apart {
    largest: f64,
    root_mean_square: f64,
}

impl Apart {
    fn of(one: &[Vec<f32>], other: &[Vec<f32>]) -> Self {
        let distances = one.iter().flatten().zip(other.iter().flatten());
        let (mut largest, mut squares, mut count) = (0.0f64, 0.0, 0.0);
        for (one, other) in distances {
            let distance = (f64::from(*one) - f64::from(*other)).abs();
            largest = largest.max(distance);
            squares += distance * distance;
            count += 1.0;
        }
        Self {
            largest,
            root_mean_square: (squares / f64::max(count, 1.0)).sqrt(),
        }
    }
}

impl Workbench<'_> {
    /// Compares logits of the tokens in the reference.
    pub(crate) fn logits(&mut self) -> Result<(), String> {
        let Some(path) = &self.args.reference else {
            return Err("the section `logits` needs --reference FILE".to_owned());
        };
        let reference = Reference::read(path)?;
        if self.model.vocabulary() != reference.vocabulary {
            return Err(format!(
                "the reference `{}` is of another model: its vocabulary has {} tokens, this one {}",
                path.display(),
                reference.vocabulary,
                self.model.vocabulary()
            ));
        }
        let (prompt, steps) = reference
            .tokens
            .split_at_checked(reference.prompt)
            .unwrap_or((&reference.tokens, &[]));
        self.model.reset();
        let mut ours = Rows::new();
        for tokens in std::iter::once(prompt).chain(steps.chunks(1)) {
            let logits = self.forward(tokens)?;
            ours.push(logits.iter().step_by(reference.every).copied().collect());
        }
        self.compare(&ours, &reference);
        Ok(())
    }

    fn compare(&mut self, ours: &Rows, reference: &Reference) {
        let rows = &reference.rows;
        let (Some(plain), Some(repacked)) = (rows.get(PLAIN), rows.get(REPACKED)) else {
            return;
        };
        let mut say = |what: &str, apart: Apart| {
            self.values
                .add(format!("{what}, largest"), LOGIT, apart.largest);
            self.values.add(
                format!("{what}, root mean square"),
                LOGIT,
                apart.root_mean_square,
            );
        };
        let (from_plain, own) = (Apart::of(ours, plain), Apart::of(repacked, plain));
        say("ours from plain", from_plain);
        say("repacked from plain", own);
        let mut widest = own;
        for (way, found) in rows {
            if ![PLAIN, REPACKED, EXACT].contains(&way.as_str()) {
                let apart = Apart::of(found, plain);
                say(&format!("{way} from plain"), apart);
                if apart.largest > widest.largest {
                    widest = apart;
                }
            }
        }
        if let Some(exact) = rows.get(EXACT) {
            say("ours from f32", Apart::of(ours, exact));
            say("plain from f32", Apart::of(plain, exact));
            say("repacked from f32", Apart::of(repacked, exact));
        }
        if own.largest > 0.0 {
            self.values
                .add(TIMES_REPACKED, "times", from_plain.largest / own.largest);
        } else {
            self.notes
                .push("llama.cpp's repacked and plain weights give the same bits here".to_owned());
        }
        if widest.largest > 0.0 {
            self.values
                .add(TIMES_WIDEST, "times", from_plain.largest / widest.largest);
        }
        let same = ours
            .iter()
            .zip(plain)
            .filter(|(ours, plain)| best(ours) == best(plain));
        self.values.add(
            "rows with plain's best token",
            "%",
            percent(same.count() as u64, ours.len() as u64),
        );
    }
}

fn best(row: &[f32]) -> Option<usize> {
    let (place, _) = row
        .iter()
        .enumerate()
        .max_by(|one, other| one.1.total_cmp(other.1))?;
    Some(place)
}

const PLAIN: &str = "plain";
const REPACKED: &str = "repack";
const EXACT: &str = "f32";
const LOGIT: &str = "of a logit";
const TIMES_REPACKED: &str = "ours from plain, over repacked from plain";
const TIMES_WIDEST: &str = "ours from plain, over the widest of its own";

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const TESTS: &[(&str, fn())] = &[
        (
            "engine::logits::a_reference_that_is_none_is_refused_with_what_is_wrong",
            a_reference_that_is_none_is_refused_with_what_is_wrong,
        ),
        (
            "engine::logits::the_largest_distance_and_the_mean_one_are_over_all_rows",
            the_largest_distance_and_the_mean_one_are_over_all_rows,
        ),
    ];

    fn read(text: &str) -> Result<Reference, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reference.json");
        fs::write(&path, text).unwrap();
        Reference::read(&path).map_err(|error| error.split_once("`: ").unwrap().1.to_owned())
    }

    fn a_reference_that_is_none_is_refused_with_what_is_wrong() {
        let whole = r#"{"prompt":1,"every":2,"vocabulary":3,"tokens":[1,2],"rows":{
            "plain":[[0.5,1],[2,3]],"repack":[[0.5,1],[2,3]]}}"#;
        assert!(read(whole).is_ok());
        let wrong = |from: &str, to: &str| read(&whole.replace(from, to)).err().unwrap();
        assert_eq!(
            wrong("\"prompt\":1", "\"prompt\":3"),
            "a prompt of 3 of 2 tokens and every 2th logit make no sense"
        );
        assert_eq!(wrong("repack", "other"), "it has no rows of `repack`");
        assert_eq!(
            wrong("[[0.5,1],[2,3]]}", "[[0.5,1]]}"),
            "`repack` is not 2 rows of 2 logits"
        );
        assert_eq!(
            wrong("\"every\":2", "\"every\":1"),
            "`plain` is not 2 rows of 3 logits"
        );
        assert!(wrong("{\"prompt\"", "{").contains("line 1"));
    }

    fn the_largest_distance_and_the_mean_one_are_over_all_rows() {
        let one = vec![vec![1.0, 2.0], vec![3.0, 4.0]];
        let other = vec![vec![1.0, 2.0], vec![3.0, 2.0]];
        assert_eq!(
            Apart::of(&one, &other),
            Apart {
                largest: 2.0,
                root_mean_square: 1.0
            }
        );
    }
}
