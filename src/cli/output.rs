//! Writing to stdout: text, JSON, tables.

use std::io::{self, Write};

use serde_json::Value;

use super::{Output, exit::CliError};

/// Writes text as it is.
pub(super) fn write(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// Writes one document: on several lines for `json`, on one for `ndjson`.
pub(super) fn write_json(output: Output, value: &Value) -> Result<(), CliError> {
    let text = match output {
        Output::Ndjson => format!("{value}\n"),
        Output::Json | Output::Table => format!("{value:#}\n"),
    };
    write(&text)
}

/// Writes what was done, in words.
pub(super) fn write_done(output: Output, message: &str) -> Result<(), CliError> {
    write_done_with(output, message, &serde_json::json!({ "message": message }))
}

/// Writes what was done, in words or as `figures`.
pub(super) fn write_done_with(output: Output, message: &str, figures: &Value) -> Result<(), CliError> {
    match output {
        Output::Table => write(&format!("{message}\n")),
        Output::Json | Output::Ndjson => write_json(output, figures),
    }
}

/// A table for people: columns as wide as their widest cell, figures to the right.
pub(super) struct Table {
    head: Vec<Column>,
    rows: Vec<Vec<String>>,
}

/// Head of a column.
#[derive(Clone, Copy)]
pub(super) enum Column {
    /// Words, to the left.
    Text(&'static str),
    /// Figures, to the right.
    Figure(&'static str),
}

impl Table {
    pub(super) fn new(head: impl Into<Vec<Column>>) -> Self {
        Self {
            head: head.into(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; an empty cell is shown as `-`.
    pub(super) fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    pub(super) fn render(&self) -> String {
        let name = |column: &Column| match column {
            Column::Text(name) | Column::Figure(name) => (*name).to_owned(),
        };
        let head: Vec<_> = self.head.iter().map(name).collect();
        let mut lines = vec![String::new(); self.rows.len() + 1];
        for (index, column) in self.head.iter().enumerate() {
            let cells: Vec<&str> = std::iter::once(&head)
                .chain(&self.rows)
                .map(|row| match row.get(index).map_or("", String::as_str) {
                    "" => "-",
                    cell => cell,
                })
                .collect();
            let width = cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0);
            for (line, cell) in lines.iter_mut().zip(cells) {
                if index > 0 {
                    line.push_str("  ");
                }
                match column {
                    Column::Text(_) => line.push_str(&format!("{cell:<width$}")),
                    Column::Figure(_) => line.push_str(&format!("{cell:>width$}")),
                }
            }
        }
        lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_straight_columns_and_no_trailing_space() {
        let mut table = Table::new([Column::Text("LEASE"), Column::Figure("HELD"), Column::Text("WHY")]);
        table.row(["asr#1".to_owned(), "64 MiB".to_owned(), String::new()]);
        table.row(["a-long-name#2".to_owned(), "1 B".to_owned(), "x".to_owned()]);
        assert_eq!(
            table.render(),
            "LEASE            HELD  WHY\nasr#1          64 MiB  -\na-long-name#2     1 B  x\n"
        );
    }
}
