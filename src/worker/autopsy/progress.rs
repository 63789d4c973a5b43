//! Loading progress of a worker, from its output.

/// Returns the last `N/M` or `N%` of a line about loading: `113/2034`, `45%`.
pub(super) fn load_progress<'a>(lines: impl DoubleEndedIterator<Item = &'a str>) -> Option<String> {
    lines.rev().take(LINES_MAX).find_map(of_line)
}

fn of_line(line: &str) -> Option<String> {
    let lower = line.to_lowercase();
    // tqdm's bar contains `%|`.
    if !(line.contains("%|") || WORDS.iter().any(|word| lower.contains(word))) {
        return None;
    }
    let fraction = line
        .split(|c: char| !(c.is_ascii_digit() || c == '/'))
        .find_map(|word| {
            let (done, all) = word.split_once('/')?;
            let (done, all): (u64, u64) = (done.parse().ok()?, all.parse().ok()?);
            (done <= all && all > 1).then(|| format!("{done}/{all}"))
        });
    fraction.or_else(|| {
        line.match_indices('%').rev().find_map(|(at, _)| {
            let digits = line
                .get(..at)?
                .rsplit(|c: char| !(c.is_ascii_digit() || c == '.'))
                .next()?;
            let percent: f64 = digits.parse().ok()?;
            (0.0..=100.0)
                .contains(&percent)
                .then(|| format!("{digits}%"))
        })
    })
}

const WORDS: [&str; 8] = [
    "load",
    "weight",
    "shard",
    "layer",
    "tensor",
    "checkpoint",
    "download",
    "progress",
];

const LINES_MAX: usize = 50;

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Option<String> {
        load_progress(lines.iter().copied())
    }

    #[test]
    fn the_last_progress_is_found() {
        assert_eq!(
            of(&[
                "Loading weights:   5%|▌         | 112/2034",
                "Loading weights:   6%|▌         | 113/2034 [00:02<00:41]"
            ]),
            Some("113/2034".to_owned())
        );
        assert_eq!(
            of(&["loading tensors 45.5 %... 45.5%"]),
            Some("45.5%".to_owned())
        );
        assert_eq!(
            of(&["loading shard 2/3", "CUDA error"]),
            Some("2/3".to_owned())
        );
        assert_eq!(
            of(&["loading model from /models/2024/3/x.gguf (4/8 layers)"]),
            Some("4/8".to_owned())
        );
    }

    #[test]
    fn other_figures_are_not_taken_for_progress() {
        for line in [
            "listening on 11/21",
            "5/3 of load",
            "load average",
            "rate 3/4",
            "",
            "weights 1/1",
        ] {
            assert_eq!(of(&[line]), None, "{line}");
        }
    }
}
