//! Bar chart of the memory of a plan.

use std::fmt::Write as _;

use super::{
    device::Device,
    forecast::{Forecast, Stack},
};
use cotenant_units::Bytes;

/// Renders the bar as an SVG document: the reserve, each holder, free memory, and the watermarks.
pub(super) fn bar(device: &Device, stack: &Stack, forecast: &Forecast) -> String {
    let budget = &stack.params.budget;
    let llm = &forecast.llm;
    let mut parts = vec![("reserve".to_owned(), budget.reserve, "#8a8f98")];
    let kept = [
        ("layers, head", llm.layers, "#3266ad"),
        ("KV cache", llm.kv, "#5b9bd5"),
        (
            "other LLM",
            [llm.fixed, llm.conversations, llm.state, llm.workspace]
                .into_iter()
                .fold(Bytes::ZERO, Bytes::saturating_add),
            "#9dc3e6",
        ),
    ];
    parts.extend(kept.map(|(name, bytes, colour)| (name.to_owned(), bytes, colour)));
    for (worker, colour) in stack
        .params
        .workers
        .iter()
        .zip(["#4c9f70", "#8fbf73", "#c6a15b", "#b5654a"].iter().cycle())
    {
        let peak = stack
            .params
            .peaks
            .expected(&worker.name, None, worker.peak, worker.steady);
        parts.push((worker.name.clone(), peak, colour));
    }
    let sum = parts
        .iter()
        .fold(Bytes::ZERO, |sum, part| sum.saturating_add(part.1));
    if sum < budget.total {
        parts.push((
            "free".to_owned(),
            budget.total.saturating_sub(sum),
            "#e8ebef",
        ));
    }
    // Excess is drawn beyond the end of the memory.
    let whole = sum.max(budget.total).get().max(1);
    let at = |bytes: Bytes| u128::from(bytes.get()) * u128::from(WIDTH) / u128::from(whole);
    let mut body = String::new();
    let mut left = Bytes::ZERO;
    for (number, (name, bytes, colour)) in parts.iter().enumerate() {
        let (x, width) = (at(left), at(left.saturating_add(*bytes)) - at(left));
        let (column, line) = (number % 3, number / 3);
        let _ = write!(
            body,
            "<rect x=\"{}\" y=\"40\" width=\"{width}\" height=\"48\" fill=\"{colour}\"/>\
             <rect x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"{}\">{} {bytes}</text>",
            MARGIN + x,
            MARGIN + column as u128 * 250,
            118 + line * 22,
            MARGIN + column as u128 * 250 + 18,
            129 + line * 22,
            escaped(name),
        );
        left = left.saturating_add(*bytes);
    }
    let end = MARGIN + at(budget.total);
    let elevated = MARGIN
        + at(budget
            .total
            .saturating_sub(stack.params.pressure.elevated_below));
    let critical = MARGIN
        + at(budget
            .total
            .saturating_sub(stack.params.pressure.critical_below));
    for (x, colour) in [
        (elevated, "#d98e04"),
        (critical, "#c0392b"),
        (end, "#222222"),
    ] {
        let _ = write!(
            body,
            "<line x1=\"{x}\" y1=\"34\" x2=\"{x}\" y2=\"94\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        );
    }
    let height = 140 + parts.len().div_ceil(3) * 22;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\" role=\"img\"><title>{}</title><rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\
         <text x=\"{MARGIN}\" y=\"24\" font-size=\"15\">{}</text>{body}</svg>\n",
        2 * MARGIN + u128::from(WIDTH),
        escaped(&device.name),
        escaped(&format!(
            "{}: {} of memory, peak {}",
            device.name, budget.total, forecast.rehearsal.peak
        )),
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

const WIDTH: u64 = 760;
const MARGIN: u128 = 20;
