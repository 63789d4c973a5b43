//! Output on stdout: text, JSON, tables.

use std::{
    io::{self, Write},
    path::Path,
};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;
use tokio::io::{Interest, unix::AsyncFd};

use super::exit::{CliError, escaped};
use cotenant_journal::{self as journal, Contents};
use cotenant_rpc::json;

/// How to print data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text for people.
    Table,
    /// One JSON document.
    Json,
    /// One JSON document per line.
    Ndjson,
}

/// Returns whether unparsable arguments request JSON.
pub(super) fn is_for_programs(arguments: &[&str]) -> bool {
    let asks = |value: &str| matches!(value, "json" | "ndjson");
    arguments
        .iter()
        .zip(arguments.iter().skip(1))
        .any(|(name, value)| matches!(*name, "-o" | "--output") && asks(value))
        || arguments.iter().any(|one| {
            let value = one
                .strip_prefix("--output=")
                .or_else(|| one.strip_prefix("-o"));
            value.is_some_and(|value| asks(value.trim_start_matches('=')))
        })
}

/// Writes text for people: control characters other than line ends and tabs are escaped, since names, logs and answers
/// may contain terminal sequences.
///
/// # Errors
/// If stdout cannot be written.
pub fn write(text: &str) -> Result<(), CliError> {
    write_raw(&escaped(text))
}

/// Formats a count with its noun: `1 fault`, `2 faults`.
pub fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

fn write_raw(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// Waits until the reader of a pipe at stdout has closed it; forever if stdout is a file.
pub(super) async fn closed() {
    // SAFETY: nothing in this program closes or replaces stdout.
    let watched = unsafe { AsyncFd::register_with_interest(io::stdout(), Interest::ERROR) };
    match watched {
        Ok(stdout) if stdout.ready(Interest::ERROR).await.is_ok() => {}
        _ => std::future::pending().await,
    }
}

/// Converts keys to the form of proto3 JSON: `ended_unix_us` becomes `endedUnixUs`.
pub(super) fn camel_case(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .into_iter()
            .map(|(key, value)| (json::camel_case(&key), camel_case(value)))
            .collect(),
        Value::Array(values) => values.into_iter().map(camel_case).collect(),
        other => other,
    }
}

/// Writes one document: on several lines for `json`, on one for `ndjson`.
pub fn write_json(output: Output, value: &Value) -> Result<(), CliError> {
    let text = match output {
        Output::Ndjson => format!("{value}\n"),
        Output::Json | Output::Table => format!("{value:#}\n"),
    };
    write_raw(&text)
}

/// Writes values: as text, as one list for `json`, or one per line for `ndjson`.
pub(super) fn write_list(
    output: Output,
    mut values: impl Iterator<Item = Value>,
    text: impl FnOnce() -> String,
) -> Result<(), CliError> {
    match output {
        Output::Table => write(&text()),
        Output::Json => write_json(output, &values.collect()),
        Output::Ndjson => values.try_for_each(|value| write_json(output, &value)),
    }
}

/// Reads a journal, and reports unreadable lines.
pub(super) fn read_journal(path: &Path, act: impl Into<String>) -> Result<Contents, CliError> {
    let contents = journal::read(path).map_err(|error| CliError::failed(act, error))?;
    if !contents.damaged.is_empty() {
        let lines = listed(&contents.damaged);
        let path = path.display();
        eprintln!("{path}: skipped unreadable lines {lines}");
    }
    Ok(contents)
}

/// Writes a report, as text or as JSON.
///
/// # Errors
/// If stdout cannot be written.
pub fn write_report(
    output: Output,
    report: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), CliError> {
    match output {
        Output::Table => write(&text()),
        Output::Json | Output::Ndjson => {
            let value = serde_json::to_value(report)
                .map_err(|error| CliError::failed("cannot write JSON", error))?;
            write_json(output, &value)
        }
    }
}

/// Writes a result: as text, or as an object with the text as `message` and the known values.
pub(super) fn write_done(output: Output, message: &str, mut known: Value) -> Result<(), CliError> {
    if output == Output::Table {
        return write(&format!("{message}\n"));
    }
    if let Some(fields) = known.as_object_mut() {
        fields.insert("message".to_owned(), message.into());
    }
    write_json(output, &known)
}

/// Table for people: columns as wide as their widest cell, figures right-aligned.
pub struct Table {
    head: Vec<Column>,
    rows: Vec<Vec<String>>,
}

/// Lists numbers as in a sentence: `3, 7, 9`; of many, only the first ones.
pub(super) fn listed<T: ToString>(numbers: &[T]) -> String {
    let shown: Vec<String> = numbers
        .iter()
        .take(LISTED_MAX)
        .map(ToString::to_string)
        .collect();
    let more = numbers.len().saturating_sub(LISTED_MAX);
    if more > 0 {
        format!("{} and {more} more", shown.join(", "))
    } else {
        shown.join(", ")
    }
}

/// Numbers listed. Our choice.
const LISTED_MAX: usize = 10;

/// Head of a column.
#[derive(Clone, Copy)]
pub enum Column {
    /// Left-aligned text.
    Text(&'static str),
    /// Right-aligned figures.
    Figure(&'static str),
}

/// Text of a column for an item.
pub(super) type Cell<T> = fn(&T) -> String;

impl Table {
    /// Creates a table without rows.
    pub fn new(head: impl Into<Vec<Column>>) -> Self {
        Self {
            head: head.into(),
            rows: Vec::new(),
        }
    }

    /// Creates a table with a row per item.
    pub(super) fn of<T>(items: &[T], columns: &[(Column, Cell<T>)]) -> Self {
        let row = |item| columns.iter().map(|(_, cell)| cell(item)).collect();
        Self {
            head: columns.iter().map(|(head, _)| *head).collect(),
            rows: items.iter().map(row).collect(),
        }
    }

    /// Adds a row; an empty cell is shown as `-`.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    /// Renders the table.
    pub fn render(&self) -> String {
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
            let width = cells
                .iter()
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0);
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
        lines
            .iter()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_straight_columns_and_no_trailing_space() {
        let mut table = Table::new([
            Column::Text("LEASE"),
            Column::Figure("HELD"),
            Column::Text("WHY"),
        ]);
        table.row(["asr#1".to_owned(), "64 MiB".to_owned(), String::new()]);
        table.row(["a-long-name#2".to_owned(), "1 B".to_owned(), "x".to_owned()]);
        assert_eq!(
            table.render(),
            "LEASE            HELD  WHY\nasr#1          64 MiB  -\na-long-name#2     1 B  x\n"
        );
    }
}
