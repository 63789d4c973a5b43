//! Detection of stop strings, also across tokens.

/// Search for stop strings in a text that arrives in pieces.
#[derive(Debug)]
pub(super) struct StopStrings {
    /// With their indices in the request.
    stops: Vec<(usize, String)>,
    /// The end of the text so far in which a stop string may have begun.
    held: String,
}

/// Result of a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// This text precedes any stop string; it may be empty.
    Clear(String),
    /// The stop string at this index of the request was met; with the remaining text before it.
    Met(String, usize),
}

impl StopStrings {
    /// Empty strings are dropped: they would end every answer at once.
    pub(super) fn new(stops: &[String]) -> Self {
        Self {
            stops: stops
                .iter()
                .cloned()
                .enumerate()
                .filter(|(_, stop)| !stop.is_empty())
                .collect(),
            held: String::new(),
        }
    }

    /// Takes the next piece.
    pub(super) fn push(&mut self, text: &str) -> Scan {
        if self.stops.is_empty() {
            return Scan::Clear(text.to_owned());
        }
        self.held.push_str(text);
        // The first complete match wins, so that the answer does not depend on the split of the text.
        let met = self.stops.iter().filter_map(|(place, stop)| {
            let at = self.held.find(stop)?;
            Some((at + stop.len(), at, *place))
        });
        if let Some((_, at, place)) = met.min() {
            self.held.truncate(at);
            return Scan::Met(std::mem::take(&mut self.held), place);
        }
        let keep_from = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(|&at| {
                let tail = self.held.get(at..).unwrap_or_default();
                self.stops.iter().any(|(_, stop)| stop.starts_with(tail))
            })
            .unwrap_or(self.held.len());
        let kept = self.held.split_off(keep_from);
        Scan::Clear(std::mem::replace(&mut self.held, kept))
    }

    /// The held text, at the end of the answer.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut scanner = StopStrings::new(
            &stops
                .iter()
                .map(|&stop| stop.to_owned())
                .collect::<Vec<_>>(),
        );
        let mut text = String::new();
        for piece in pieces {
            match scanner.push(piece) {
                Scan::Clear(clear) => text.push_str(&clear),
                Scan::Met(rest, _) => return (text + &rest, true),
            }
        }
        (text + &scanner.finish(), false)
    }

    #[test]
    fn a_stop_string_is_found_across_pieces_and_is_not_part_of_the_text() {
        assert_eq!(run(&["END"], &["a E", "N", "D b"]), ("a ".to_owned(), true));
        assert_eq!(run(&["END"], &["a EN", "Xb"]), ("a ENXb".to_owned(), false));
        assert_eq!(run(&["END"], &["a EN", "END"]), ("a EN".to_owned(), true));
    }

    #[test]
    fn the_first_of_several_stop_strings_counts() {
        assert_eq!(
            run(&["later", "\n"], &["one\ntwo later"]),
            ("one".to_owned(), true)
        );
        // For any split of the text, the string that completes first ends it.
        for pieces in [&["ab", "cd"][..], &["ab", "c", "d"], &["abcd"]] {
            assert_eq!(
                run(&["bcd", "c"], pieces),
                ("ab".to_owned(), true),
                "{pieces:?}"
            );
        }
    }

    #[test]
    fn empty_stop_strings_do_not_count() {
        assert_eq!(run(&["", "é"], &["caf", "e"]), ("cafe".to_owned(), false));
        assert_eq!(run(&["é"], &["caf", "é", "x"]), ("caf".to_owned(), true));
    }
}
