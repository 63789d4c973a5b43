//! Ratios to the peer over several models, with the geometric mean of each figure.

use serde_json::{Value, json};

use super::shape::{ShapeName, TypeName};
use cotenant::cli::{
    Output,
    exit::CliError,
    output::{self, Column, Table},
};

/// Measurements of each model, for each figure that the peer has too.
#[derive(Default)]
pub(super) struct Ratios(Vec<(String, Vec<Row>)>);

struct Row {
    model: String,
    ours: f64,
    peer: f64,
    ratio: f64,
}

impl Ratios {
    /// Adds the medians of both, and the median over rounds of their ratio.
    pub(super) fn add(
        &mut self,
        figure: &str,
        model: (ShapeName, TypeName),
        (ours, peer): (f64, f64),
        ratio: f64,
    ) {
        let model = format!("{} {}", named(&model.0), named(&model.1));
        let row = Row {
            model,
            ours,
            peer,
            ratio,
        };
        match self.0.iter_mut().find(|(known, _)| known == figure) {
            Some((_, rows)) => rows.push(row),
            None => self.0.push((figure.to_owned(), vec![row])),
        }
    }

    /// Writes them for figures with several models.
    pub(super) fn write(&self, output: Output) -> Result<(), CliError> {
        let several: Vec<_> = self.0.iter().filter(|(_, rows)| rows.len() > 1).collect();
        if several.is_empty() {
            return Ok(());
        }
        if output != Output::Table {
            let figures = several.iter().map(|(figure, rows)| {
                let models = rows
                    .iter()
                    .map(|row| json!({"model": row.model, "ours": row.ours, "peer": row.peer, "ratio": row.ratio}));
                let least = rows.iter().map(|row| row.ratio).fold(f64::INFINITY, f64::min);
                let models = models.collect::<Vec<Value>>();
                json!({"what": figure, "geometric_mean": geometric_mean(rows), "least": least, "models": models})
            });
            return output::write_json(
                output,
                &json!({ "ratios": figures.collect::<Vec<Value>>() }),
            );
        }
        let mut table = Table::new([
            Column::Text("FIGURE"),
            Column::Text("MODEL"),
            Column::Figure("OURS"),
            Column::Figure("PEER"),
            Column::Figure("RATIO"),
        ]);
        for (figure, rows) in several {
            for row in rows {
                let number = |value: f64| format!("{value:.1}");
                let ratio = format!("{:.2}", row.ratio);
                table.row([
                    figure.clone(),
                    row.model.clone(),
                    number(row.ours),
                    number(row.peer),
                    ratio,
                ]);
            }
            let mean = format!("{:.2}", geometric_mean(rows));
            table.row([
                figure.clone(),
                "geometric mean".to_owned(),
                String::new(),
                String::new(),
                mean,
            ]);
        }
        output::write(&format!("\n{}", table.render()))
    }
}

fn geometric_mean(rows: &[Row]) -> f64 {
    let logarithms: f64 = rows.iter().map(|row| row.ratio.ln()).sum();
    (logarithms / f64::from(u32::try_from(rows.len()).unwrap_or(u32::MAX))).exp()
}

/// Returns the command-line name of a value.
fn named(value: &impl clap::ValueEnum) -> String {
    value
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const TESTS: &[(&str, fn())] = &[(
        "engine::ratios::the_mean_of_a_double_and_a_half_is_one",
        the_mean_of_a_double_and_a_half_is_one,
    )];

    fn the_mean_of_a_double_and_a_half_is_one() {
        let mut ratios = Ratios::default();
        for (types, ratio) in [(TypeName::Q8_0, 2.0), (TypeName::Q4KM, 0.5)] {
            ratios.add("decode", (ShapeName::Qwen3, types), (20.0, 10.0), ratio);
        }
        let [(figure, rows)] = ratios.0.as_slice() else {
            panic!("one figure")
        };
        assert!(figure == "decode" && (geometric_mean(rows) - 1.0).abs() < 1e-12);
        assert_eq!(rows[1].model, "qwen3-0.6b q4_k_m");
    }
}
