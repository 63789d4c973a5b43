//! Chart of memory by owner over time, as SVG.
//!
//! Between two points, the value of the earlier one holds. Positions are whole pixels; text uses the viewer's fonts, so
//! none need be installed for drawing.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use plotters::{
    backend::SVGBackend,
    coord::Shift,
    drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea},
    element::{Circle, PathElement, Polygon, Rectangle, Text},
    style::{
        Color, FontStyle, FontTransform, IntoFont, RGBColor, TextStyle,
        text_anchor::{HPos, Pos, VPos},
    },
};

use cotenant_policy::params::ENGINE_TENANT;
use cotenant_units::{Bytes, Timestamp};

/// Memory by owner at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ChartPoint {
    /// Time of the point.
    pub at: Timestamp,
    /// Bytes by owner; a missing owner holds nothing.
    pub owners: BTreeMap<String, Bytes>,
}

impl ChartPoint {
    /// Returns the memory of all owners.
    pub(super) fn total(&self) -> Bytes {
        self.owners
            .values()
            .copied()
            .fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// Returns the memory of one owner.
    pub(super) fn of(&self, owner: &str) -> Bytes {
        self.owners.get(owner).copied().unwrap_or(Bytes::ZERO)
    }
}

/// Kind of a mark, which determines its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkKind {
    /// Memory became short.
    Alarm,
    /// Any other event.
    Note,
    /// Memory was taken again.
    Regrow,
    /// Memory was released.
    Shed,
}

/// Marked event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChartMark {
    /// Time of the event.
    pub at: Timestamp,
    /// Short label; long ones are truncated.
    pub label: String,
    /// Kind of event.
    pub kind: MarkKind,
}

/// Contents of a chart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chart {
    /// Title.
    pub title: String,
    /// Line below the title.
    pub subtitle: String,
    /// Points in order of time.
    pub points: Vec<ChartPoint>,
    /// Limit on the memory of all owners.
    pub budget: Bytes,
    /// Name of the limit.
    pub budget_name: &'static str,
    /// Start of the chart as the time since 1970, if times are shown as clock times (UTC) rather than seconds.
    pub epoch: Option<Duration>,
    /// Marked events.
    pub marks: Vec<ChartMark>,
    /// Owners from the bottom to the top of the stack; others follow by name.
    pub order: Vec<String>,
}

/// Row of a table of figures.
pub(super) struct TableRow {
    /// Name of the figure.
    pub name: String,
    /// Value with its unit.
    pub value: String,
    /// Its aim, or why there is no value.
    pub note: String,
    /// Whether the aim is met; `None` without one.
    pub is_met: Option<bool>,
}

/// Draws a table of figures as SVG; values have the colour of their aim, met or missed.
pub(super) fn table_svg(
    title: &str,
    subtitle: &str,
    rows: &[TableRow],
) -> Result<String, ChartError> {
    let line = |index: usize| HEADING + ABOVE_PLOT + LINE * i32::try_from(index).unwrap_or(0);
    let size = (PICTURE_WIDTH, line(rows.len()).unsigned_abs() + BELOW_PLOT);
    let mut svg = String::new();
    {
        let canvas = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        canvas.fill(&PAPER)?;
        let draw = |text: &str, at, style| canvas.draw(&Text::new(text.to_owned(), at, style));
        draw(title, (LEFT, 12), text_style(TITLE_SIZE, INK).font_bold())?;
        draw(subtitle, (LEFT, 38), text_style(TEXT_SIZE, SOFT))?;
        for (index, row) in rows.iter().enumerate() {
            let (y, colour) = (line(index), row.is_met.map_or(INK, met_colour));
            draw(&row.name, (LEFT, y), text_style(TEXT_SIZE, INK))?;
            let value = text_style(TEXT_SIZE, colour).font_bold();
            draw(&row.value, (VALUES, y), value)?;
            let note = clipped(&row.note, NOTE_CHARS);
            draw(&note, (NOTES, y), text_style(SMALL_SIZE, SOFT))?;
        }
        canvas.present()?;
    }
    Ok(svg)
}

const fn met_colour(is_met: bool) -> RGBColor {
    mark_colour(if is_met {
        MarkKind::Regrow
    } else {
        MarkKind::Alarm
    })
}

/// Drawing failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the chart: {reason}")]
pub(super) struct ChartError {
    /// Message of the drawing library.
    reason: String,
}

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for ChartError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self {
            reason: error.to_string(),
        }
    }
}

impl Chart {
    /// Returns owners that hold memory at some time, from the bottom to the top of the stack.
    pub(super) fn owners(&self) -> Vec<&str> {
        let held: BTreeSet<&str> = self
            .points
            .iter()
            .flat_map(|point| &point.owners)
            .filter(|(_, bytes)| **bytes > Bytes::ZERO)
            .map(|(owner, _)| owner.as_str())
            .collect();
        let first = self
            .order
            .iter()
            .map(String::as_str)
            .filter(|owner| held.contains(owner));
        let rest = held
            .iter()
            .copied()
            .filter(|owner| !self.order.iter().any(|named| named == owner));
        first.chain(rest).collect()
    }

    /// Returns the maximum memory of `owner`.
    pub(super) fn peak(&self, owner: &str) -> Bytes {
        self.points
            .iter()
            .map(|point| point.of(owner))
            .max()
            .unwrap_or(Bytes::ZERO)
    }

    /// Returns the first and the last time shown.
    pub(super) fn span(&self) -> (Timestamp, Timestamp) {
        let times = || {
            let points = self.points.iter().map(|point| point.at);
            points.chain(self.marks.iter().map(|mark| mark.at))
        };
        (
            times().min().unwrap_or(Timestamp::START),
            times().max().unwrap_or(Timestamp::START),
        )
    }

    /// Returns the top of the scale: the budget, or the highest total if that is larger.
    pub(super) fn most(&self) -> Bytes {
        self.points
            .iter()
            .map(ChartPoint::total)
            .fold(self.budget, Bytes::max)
    }

    /// Formats a time as on the chart: `12.3 s`, or `15:04:05`.
    pub(super) fn time(&self, at: Timestamp) -> String {
        let Some(epoch) = self.epoch else {
            return seconds(at);
        };
        let second = (epoch + at.since_start()).as_secs() % (24 * 3600);
        format!(
            "{:02}:{:02}:{:02}",
            second / 3600,
            second / 60 % 60,
            second % 60
        )
    }

    /// Renders the chart as a standalone SVG file.
    ///
    /// # Errors
    /// If the drawing library fails, which writing to memory excludes.
    pub(super) fn to_svg(&self) -> Result<String, ChartError> {
        let mut svg = String::new();
        let labels = lay_out_labels(&self.marks, |at| self.time(at), |at| self.frame(0).x(at));
        let lanes = labels.iter().map(|label| label.lane + 1).max().unwrap_or(0);
        let frame = self.frame(lanes);
        let size = (PICTURE_WIDTH, frame.bottom.unsigned_abs() + BELOW_PLOT);
        {
            let canvas = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            canvas.fill(&PAPER)?;
            self.draw_heading(&canvas)?;
            self.draw_grid(&canvas, &frame)?;
            self.draw_areas(&canvas, &frame)?;
            self.draw_budget(&canvas, &frame)?;
            draw_marks(&canvas, &frame, &labels)?;
            self.draw_legend(&canvas, &frame)?;
            canvas.present()?;
        }
        Ok(svg)
    }

    fn frame(&self, lanes: i32) -> Frame {
        let (from, to) = self.span();
        let top = HEADING + lanes * LANE + ABOVE_PLOT;
        let step = mib_step(self.most());
        Frame {
            from,
            to,
            top,
            bottom: top + PLOT_HEIGHT,
            step,
            most: self
                .most()
                .saturating_add(Bytes::new(step.get() / 4))
                .round_up(step),
        }
    }

    fn draw_heading(&self, canvas: &Canvas<'_>) -> Result<(), ChartError> {
        let title = text_style(TITLE_SIZE, INK).font_bold();
        canvas.draw(&Text::new(self.title.as_str(), (PLOT_LEFT, 12), title))?;
        let subtitle = text_style(TEXT_SIZE, SOFT);
        canvas.draw(&Text::new(
            self.subtitle.as_str(),
            (PLOT_LEFT, 38),
            subtitle,
        ))?;
        Ok(())
    }

    fn draw_grid(&self, canvas: &Canvas<'_>, frame: &Frame) -> Result<(), ChartError> {
        let right_aligned = text_style(TEXT_SIZE, SOFT).pos(Pos::new(HPos::Right, VPos::Center));
        let mut bytes = Bytes::ZERO;
        while bytes <= frame.most {
            let y = frame.y(bytes);
            let line = if bytes == Bytes::ZERO { AXIS } else { GRID };
            canvas.draw(&PathElement::new([(PLOT_LEFT, y), (PLOT_RIGHT, y)], line))?;
            let label = format!("{} MiB", bytes.whole_mib());
            canvas.draw(&Text::new(label, (PLOT_LEFT - 8, y), right_aligned.clone()))?;
            bytes = bytes.saturating_add(frame.step);
        }
        let centred = text_style(TEXT_SIZE, SOFT).pos(Pos::new(HPos::Center, VPos::Top));
        let step = second_step(frame.to.saturating_since(frame.from).as_secs());
        let epoch = self.epoch.map_or(0, |epoch| epoch.as_secs());
        let second_of = |at: Timestamp| epoch + at.since_start().as_secs();
        let first = second_of(frame.from).next_multiple_of(step);
        for second in (first..=second_of(frame.to)).step_by(usize::try_from(step).unwrap_or(1)) {
            let at = Timestamp::from_millis((second - epoch) * 1000);
            let x = frame.x(at);
            canvas.draw(&PathElement::new(
                [(x, frame.bottom), (x, frame.bottom + 5)],
                AXIS,
            ))?;
            let label = match self.epoch {
                None => format!("{second} s"),
                Some(_) => self.time(at),
            };
            canvas.draw(&Text::new(label, (x, frame.bottom + 9), centred.clone()))?;
        }
        Ok(())
    }

    fn draw_areas(&self, canvas: &Canvas<'_>, frame: &Frame) -> Result<(), ChartError> {
        let owners = self.owners();
        let columns = self.columns(frame);
        let mut below: Vec<Bytes> = vec![Bytes::ZERO; columns.len()];
        for (owner, colour) in owners.iter().zip(colours(&owners)) {
            let above: Vec<Bytes> = below
                .iter()
                .zip(&columns)
                .map(|(below, (_, point))| below.saturating_add(point.of(owner)))
                .collect();
            let xs: Vec<i32> = columns.iter().map(|(x, _)| *x).collect();
            let upper = stairs(&xs, &above, frame);
            let mut outline = upper.clone();
            outline.extend(stairs(&xs, &below, frame).into_iter().rev());
            canvas.draw(&Polygon::new(outline, colour.mix(0.85)))?;
            // drawn only where the owner holds memory, so that an absent one leaves no line
            for piece in upper_edges(&xs, &below, &above, frame) {
                canvas.draw(&PathElement::new(piece, darker(colour)))?;
            }
            below = above;
        }
        Ok(())
    }

    /// Returns the distinguishable points: within each pixel, the one with the largest total, and the last one, which
    /// holds until the next point.
    fn columns(&self, frame: &Frame) -> Vec<(i32, &ChartPoint)> {
        let mut columns: Vec<(i32, &ChartPoint)> = Vec::new();
        for pixel in self
            .points
            .chunk_by(|one, other| frame.x(one.at) == frame.x(other.at))
        {
            let largest = pixel
                .iter()
                .enumerate()
                .max_by_key(|(_, point)| point.total());
            let (Some((place, largest)), Some(last)) = (largest, pixel.last()) else {
                continue;
            };
            let x = frame.x(last.at);
            columns.push((x, largest));
            if place + 1 < pixel.len() {
                columns.push((x, last));
            }
        }
        columns
    }

    fn draw_budget(&self, canvas: &Canvas<'_>, frame: &Frame) -> Result<(), ChartError> {
        let y = frame.y(self.budget);
        let line = BUDGET.stroke_width(2);
        canvas.draw(&PathElement::new(
            [(PLOT_LEFT, y), (PLOT_RIGHT + 6, y)],
            line,
        ))?;
        let style = text_style(TEXT_SIZE, BUDGET)
            .font_bold()
            .pos(Pos::new(HPos::Left, VPos::Center));
        let label = format!("{} {} MiB", self.budget_name, self.budget.whole_mib());
        canvas.draw(&Text::new(label, (PLOT_RIGHT + 12, y), style))?;
        Ok(())
    }

    /// Draws the owners from top to bottom, as stacked.
    fn draw_legend(&self, canvas: &Canvas<'_>, frame: &Frame) -> Result<(), ChartError> {
        let owners = self.owners();
        let entries: Vec<(&str, RGBColor)> = owners.iter().copied().zip(colours(&owners)).collect();
        let mut y = frame.y(self.budget).max(frame.top) + LEGEND_LINE;
        let name_style = text_style(TEXT_SIZE, INK).pos(Pos::new(HPos::Left, VPos::Center));
        let peak_style = text_style(SMALL_SIZE, SOFT).pos(Pos::new(HPos::Left, VPos::Center));
        for (owner, colour) in entries.into_iter().rev() {
            let x = PLOT_RIGHT + 12;
            let swatch = Rectangle::new([(x, y - 6), (x + 12, y + 6)], colour.mix(0.85).filled());
            canvas.draw(&swatch)?;
            let name = clipped(owner, LEGEND_CHARS);
            canvas.draw(&Text::new(name, (x + 20, y), name_style.clone()))?;
            let peak = format!("at most {} MiB", self.peak(owner).whole_mib());
            canvas.draw(&Text::new(peak, (x + 20, y + 16), peak_style.clone()))?;
            y += 2 * LEGEND_LINE;
        }
        Ok(())
    }
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Position and range of the plot.
struct Frame {
    from: Timestamp,
    to: Timestamp,
    top: i32,
    bottom: i32,
    step: Bytes,
    most: Bytes,
}

impl Frame {
    fn x(&self, at: Timestamp) -> i32 {
        let span = self.to.saturating_since(self.from).as_micros().max(1);
        let since = at.saturating_since(self.from).as_micros().min(span);
        PLOT_LEFT + scaled(since, span, PLOT_RIGHT - PLOT_LEFT)
    }

    fn y(&self, bytes: Bytes) -> i32 {
        let most = u128::from(self.most.get().max(1));
        self.bottom
            - scaled(
                u128::from(bytes.get()).min(most),
                most,
                self.bottom - self.top,
            )
    }
}

/// Returns `part / whole` of `pixels`, rounded.
fn scaled(part: u128, whole: u128, pixels: i32) -> i32 {
    let exact = (part * u128::from(pixels.unsigned_abs()) + whole / 2) / whole;
    i32::try_from(exact).unwrap_or(pixels)
}

/// Returns the line through values each of which holds until the next.
fn stairs(xs: &[i32], values: &[Bytes], frame: &Frame) -> Vec<(i32, i32)> {
    let mut line: Vec<(i32, i32)> = Vec::with_capacity(2 * xs.len());
    for (&x, &value) in xs.iter().zip(values) {
        let y = frame.y(value);
        if let Some(&(_, before)) = line.last() {
            line.push((x, before));
        }
        line.push((x, y));
    }
    line
}

/// Returns the sections of the upper edge that are above a non-empty area.
fn upper_edges(
    xs: &[i32],
    below: &[Bytes],
    above: &[Bytes],
    frame: &Frame,
) -> Vec<Vec<(i32, i32)>> {
    let mut pieces = Vec::new();
    let (mut piece_xs, mut piece_values) = (Vec::new(), Vec::new());
    for ((&x, below), &above) in xs.iter().zip(below).zip(above) {
        if above > *below {
            piece_xs.push(x);
            piece_values.push(above);
        } else if !piece_xs.is_empty() {
            let mut piece = stairs(&piece_xs, &piece_values, frame);
            if let Some(&(_, y)) = piece.last() {
                piece.push((x, y));
            }
            pieces.push(piece);
            (piece_xs, piece_values) = (Vec::new(), Vec::new());
        }
    }
    if !piece_xs.is_empty() {
        pieces.push(stairs(&piece_xs, &piece_values, frame));
    }
    pieces
}

/// Label with its position.
struct PlacedLabel<'a> {
    mark: &'a ChartMark,
    text: String,
    x: i32,
    text_x: i32,
    /// Lane; 0 is next to the plot.
    lane: i32,
}

/// Places the labels above the plot so that neither labels nor lines cross a label.
///
/// An earlier label is above later ones that begin below it: lanes descend to the right.
fn lay_out_labels(
    marks: &[ChartMark],
    time_of: impl Fn(Timestamp) -> String,
    x_of: impl Fn(Timestamp) -> i32,
) -> Vec<PlacedLabel<'_>> {
    let mut sorted: Vec<&ChartMark> = marks.iter().collect();
    sorted.sort_by_key(|mark| mark.at);
    let mut placed: Vec<PlacedLabel<'_>> = Vec::new();
    for mark in sorted.into_iter().rev() {
        let text = clipped(&format!("{} {}", time_of(mark.at), mark.label), LABEL_CHARS);
        let width = text_width(&text);
        let x = x_of(mark.at);
        let text_x = (x - 1).min(PICTURE_RIGHT - width);
        let end = text_x + width + LABEL_GAP;
        let lane = placed
            .iter()
            .filter(|other| other.text_x <= end || other.x <= end)
            .map(|other| other.lane + 1)
            .max()
            .unwrap_or(0);
        placed.push(PlacedLabel {
            mark,
            text,
            x,
            text_x,
            lane,
        });
    }
    placed
}

fn draw_marks(
    canvas: &Canvas<'_>,
    frame: &Frame,
    labels: &[PlacedLabel<'_>],
) -> Result<(), ChartError> {
    let y_of = |label: &PlacedLabel<'_>| frame.top - ABOVE_PLOT - label.lane * LANE;
    for label in labels {
        let colour = mark_colour(label.mark.kind);
        let line = [(label.x, y_of(label)), (label.x, frame.bottom)];
        canvas.draw(&PathElement::new(line, colour.mix(0.55)))?;
    }
    for label in labels {
        let colour = mark_colour(label.mark.kind);
        let y = y_of(label);
        let behind = [
            (label.text_x - 2, y - LANE + 2),
            (label.text_x + text_width(&label.text), y),
        ];
        canvas.draw(&Rectangle::new(behind, PAPER.filled()))?;
        let style = text_style(SMALL_SIZE, darker(colour)).pos(Pos::new(HPos::Left, VPos::Bottom));
        canvas.draw(&Text::new(
            label.text.as_str(),
            (label.text_x, y - 2),
            style,
        ))?;
        canvas.draw(&Circle::new((label.x, frame.top), 3, colour.filled()))?;
    }
    Ok(())
}

const fn mark_colour(kind: MarkKind) -> RGBColor {
    match kind {
        MarkKind::Alarm => RGBColor(201, 42, 42),
        MarkKind::Note => RGBColor(90, 100, 120),
        MarkKind::Regrow => RGBColor(30, 130, 76),
        MarkKind::Shed => RGBColor(176, 96, 0),
    }
}

/// Returns a colour for each owner, as on the page and in `top`: the LLM has the first hue, others follow by name, and
/// unaccounted memory is grey. Owners with the same first word share a hue: `llm weights`, `llm KV`.
fn colours(owners: &[&str]) -> Vec<RGBColor> {
    let group_of = |owner: &&str| {
        owner
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let mut groups: BTreeMap<String, u8> =
        owners.iter().map(|owner| (group_of(owner), 0)).collect();
    groups.remove(UNACCOUNTED);
    let others = groups.keys().filter(|name| *name != ENGINE_TENANT);
    let names: Vec<String> = [ENGINE_TENANT.to_owned()]
        .into_iter()
        .chain(others.cloned())
        .collect();
    let colour = |owner: &&str| {
        let group = group_of(owner);
        let index = names.iter().position(|name| *name == group);
        let Some((index, seen)) = index.zip(groups.get_mut(&group)) else {
            return UNHELD;
        };
        *seen += 1;
        let base = HUES.get(index % HUES.len()).copied().unwrap_or(SOFT);
        lighter(base, *seen - 1)
    };
    owners.iter().map(colour).collect()
}

/// Mixes a colour with white, a third of the way per step.
fn lighter(colour: RGBColor, steps: u8) -> RGBColor {
    (0..steps.min(3)).fold(colour, |RGBColor(r, g, b), _| {
        let towards_white = |part: u8| part + (255 - part) / 3;
        RGBColor(towards_white(r), towards_white(g), towards_white(b))
    })
}

const fn darker(RGBColor(r, g, b): RGBColor) -> RGBColor {
    RGBColor(r / 4 * 3, g / 4 * 3, b / 4 * 3)
}

fn text_style(size: i32, colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size, FontStyle::Normal)
        .into_font()
        .transform(FontTransform::None)
        .color(&colour)
}

trait Bold {
    fn font_bold(self) -> Self;
}

impl Bold for TextStyle<'_> {
    fn font_bold(mut self) -> Self {
        self.font = self.font.style(FontStyle::Bold);
        self
    }
}

/// Formats `12.3 s`.
fn seconds(at: Timestamp) -> String {
    let tenths = (at.as_micros() + 50_000) / 100_000;
    format!("{}.{} s", tenths / 10, tenths % 10)
}

/// Truncates to at most `max` characters, with an ellipsis if text is omitted.
pub(super) fn clipped(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    let mut clipped: String = text.chars().take(max.saturating_sub(1)).collect();
    clipped.truncate(clipped.trim_end().len());
    clipped.push('…');
    clipped
}

/// Estimates the width of a label, as an upper bound for common fonts.
fn text_width(text: &str) -> i32 {
    i32::try_from(text.chars().count()).unwrap_or(0) * LABEL_CHAR_WIDTH_TENTHS / 10
}

/// Returns the distance of horizontal lines: a power of two that gives about four to eight of them.
pub(super) fn mib_step(most: Bytes) -> Bytes {
    let mut step = Bytes::from_mib(1);
    while step.saturating_mul(8) < most {
        step = step.saturating_mul(2);
    }
    step
}

/// Returns the distance of time labels: a round number that gives about six to twelve of them.
pub(super) fn second_step(span: u64) -> u64 {
    const ROUND: [u64; 16] = [
        1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10_800, 21_600, 43_200,
    ];
    ROUND
        .into_iter()
        .find(|step| span / step <= 12)
        .unwrap_or_else(|| (span / 12).max(1))
}

// Size of the picture in pixels, chosen by eye for the width of a README.
/// Columns and lines of a table.
const LEFT: i32 = 24;
const VALUES: i32 = 560;
const NOTES: i32 = 720;
const LINE: i32 = 26;
const NOTE_CHARS: usize = 56;

const PICTURE_WIDTH: u32 = 1120;
const PICTURE_RIGHT: i32 = 1112;
const PLOT_LEFT: i32 = 84;
const PLOT_RIGHT: i32 = 944;
const PLOT_HEIGHT: i32 = 330;
const HEADING: i32 = 62;
const ABOVE_PLOT: i32 = 8;
const BELOW_PLOT: u32 = 40;
const LANE: i32 = 19;
const LABEL_GAP: i32 = 8;
const LABEL_CHARS: usize = 64;
const LABEL_CHAR_WIDTH_TENTHS: i32 = 68;
const LEGEND_LINE: i32 = 20;
const LEGEND_CHARS: usize = 18;
// Text sizes, which the SVG backend divides by 1.24.
const TITLE_SIZE: i32 = 24;
const TEXT_SIZE: i32 = 16;
const SMALL_SIZE: i32 = 15;

const PAPER: RGBColor = RGBColor(255, 255, 255);
const INK: RGBColor = RGBColor(28, 34, 48);
const SOFT: RGBColor = RGBColor(102, 112, 133);
const AXIS: RGBColor = RGBColor(152, 162, 179);
const GRID: RGBColor = RGBColor(228, 231, 236);
const BUDGET: RGBColor = RGBColor(201, 42, 42);
/// Owner of memory without a lease.
pub(super) const UNACCOUNTED: &str = "unaccounted";
const UNHELD: RGBColor = RGBColor(138, 147, 166);
/// Hues with different brightness, distinguishable in print and with most colour blindness; equal to those of
/// `http/page.js`.
const HUES: [RGBColor; 8] = [
    RGBColor(59, 111, 212),
    RGBColor(240, 154, 62),
    RGBColor(47, 158, 121),
    RGBColor(154, 95, 199),
    RGBColor(201, 72, 91),
    RGBColor(74, 163, 199),
    RGBColor(138, 122, 60),
    RGBColor(208, 111, 168),
];

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a run like that of the demo: two workers, the LLM, and a temporary neighbour.
    pub(crate) fn sample() -> Chart {
        let mib = |weights, kv, asr, tts, neighbour| {
            [
                ("llm weights", weights),
                ("llm KV", kv),
                ("asr", asr),
                ("tts", tts),
                ("neighbour", neighbour),
            ]
            .map(|(owner, mib)| (owner.to_owned(), Bytes::from_mib(mib)))
            .into()
        };
        let at = Timestamp::from_millis;
        let phases = [
            (0, mib(0, 0, 0, 0, 0)),
            (400, mib(0, 0, 92, 0, 0)),
            (900, mib(0, 0, 92, 41, 0)),
            (1500, mib(168, 96, 92, 41, 0)),
            (6000, mib(168, 96, 92, 41, 20)),
            (6200, mib(168, 96, 92, 41, 50)),
            (6480, mib(168, 24, 92, 41, 110)),
            (6900, mib(72, 24, 92, 41, 200)),
            (14_000, mib(72, 24, 92, 41, 0)),
            (17_000, mib(120, 24, 92, 41, 0)),
            (18_200, mib(168, 24, 92, 41, 0)),
            (19_000, mib(168, 96, 92, 41, 0)),
            (22_000, mib(168, 96, 92, 41, 0)),
        ];
        let mark = |millis, kind, label: &str| ChartMark {
            at: at(millis),
            label: label.to_owned(),
            kind,
        };
        Chart {
            title: "One budget, three tenants, one neighbour".to_owned(),
            subtitle: "memory by owner, as booked and measured; nothing was killed".to_owned(),
            points: phases
                .map(|(millis, owners)| ChartPoint {
                    at: at(millis),
                    owners,
                })
                .into(),
            budget: Bytes::from_mib(448),
            budget_name: "session",
            epoch: None,
            marks: vec![
                mark(400, MarkKind::Note, "lease asr#1 granted"),
                mark(
                    2200,
                    MarkKind::Note,
                    "question spoken, heard, answered, spoken",
                ),
                mark(6000, MarkKind::Alarm, "a neighbour takes 200 MiB"),
                mark(
                    6480,
                    MarkKind::Shed,
                    "KV 4096 to 1024 tokens, 72 MiB verified back",
                ),
                mark(6900, MarkKind::Shed, "8 of 14 layers streamed, 96 MiB back"),
                mark(9000, MarkKind::Note, "the same question: identical answer"),
                mark(14_000, MarkKind::Note, "neighbour gone"),
                mark(17_000, MarkKind::Regrow, "layers come back"),
                mark(19_000, MarkKind::Regrow, "KV back at 4096 tokens"),
            ],
            order: ["llm weights", "llm KV", "asr", "tts"]
                .map(str::to_owned)
                .into(),
        }
    }

    #[test]
    fn a_chart_shows_every_owner_the_budget_and_every_mark() {
        let svg = sample().to_svg().unwrap();
        assert!(svg.starts_with("<svg "), "{}", svg.get(..40).unwrap());
        for text in [
            "llm weights",
            "neighbour",
            "session 448 MiB",
            "KV back at 4096 tokens",
            "20 s",
            "at most 168 MiB",
        ] {
            assert!(svg.contains(text), "{text} is not in the chart");
        }
        if let Some(path) = std::env::var_os("COTENANT_SAMPLE_CHART") {
            std::fs::write(path, svg).unwrap();
        }
    }

    #[test]
    fn owners_are_stacked_as_reported_and_the_rest_by_name() {
        assert_eq!(
            sample().owners(),
            ["llm weights", "llm KV", "asr", "tts", "neighbour"]
        );
    }

    #[test]
    fn labels_lie_neither_on_each_other_nor_on_a_line() {
        let chart = sample();
        let frame = chart.frame(0);
        let labels = lay_out_labels(&chart.marks, seconds, |at| frame.x(at));
        for label in &labels {
            let span = label.text_x..label.text_x + text_width(&label.text);
            for other in labels.iter().filter(|other| other.mark != label.mark) {
                let same_lane = other.lane == label.lane
                    && other.text_x < span.end
                    && label.text_x < other.text_x + text_width(&other.text);
                assert!(!same_lane, "`{}` and `{}`", label.text, other.text);
                let crossed = span.contains(&other.x) && other.lane >= label.lane;
                assert!(
                    !crossed,
                    "the line of `{}` runs through `{}`",
                    other.text, label.text
                );
            }
        }
    }

    #[test]
    fn times_of_a_journal_are_those_of_the_clock() {
        let chart = Chart {
            epoch: Some(Duration::from_secs(1_790_000_000)),
            ..sample()
        };
        assert_eq!(chart.time(Timestamp::from_millis(21_600)), "14:13:41");
        let svg = chart.to_svg().unwrap();
        assert!(svg.contains("14:13:30") && !svg.contains("20 s"), "{svg}");
    }

    #[test]
    fn a_chart_of_nothing_and_of_one_point_is_drawn() {
        Chart::default().to_svg().unwrap();
        let mut chart = sample();
        chart.points.truncate(1);
        chart.marks.clear();
        chart.to_svg().unwrap();
    }

    #[test]
    fn text_from_elsewhere_cannot_break_the_file() {
        let mut chart = sample();
        chart.title = "</svg><script>alert(1)</script> & \"".to_owned();
        let svg = chart.to_svg().unwrap();
        assert!(!svg.contains("<script>"));
    }

    #[test]
    fn steps_are_round() {
        assert_eq!(mib_step(Bytes::from_mib(448)), Bytes::from_mib(64));
        assert_eq!(mib_step(Bytes::from_gib(12)), Bytes::from_mib(2048));
        assert_eq!(
            (second_step(22), second_step(60), second_step(0)),
            (2, 5, 1)
        );
        assert_eq!(second_step(24 * 3600), 7200);
    }

    #[test]
    fn an_owner_has_the_colour_that_the_page_gives_it() {
        let page = include_str!("../http/page.js");
        let hexadecimal = |RGBColor(r, g, b): RGBColor| format!("#{r:02x}{g:02x}{b:02x}");
        let hues: Vec<String> = HUES.map(|hue| format!("{:?}", hexadecimal(hue))).into();
        assert!(page.contains(&format!("const hues = [{}]", hues.join(", "))));
        assert!(page.contains(&hexadecimal(UNHELD)));
        assert_eq!(
            colours(&["tts", "asr", "llm", UNACCOUNTED]),
            [HUES[2], HUES[1], HUES[0], UNHELD]
        );
        assert_eq!(colours(&["llm weights", "llm KV", "asr"])[2], HUES[1]);
        assert_eq!(colours(&["asr"]), [HUES[1]]);
    }

    #[test]
    fn a_peak_shorter_than_a_pixel_is_shown() {
        let mut chart = sample();
        let spike = ChartPoint {
            at: Timestamp::from_millis(10_001),
            owners: [("asr".to_owned(), Bytes::from_gib(1))].into(),
        };
        let back = ChartPoint {
            at: Timestamp::from_millis(10_002),
            ..ChartPoint::default()
        };
        chart.points.splice(10..10, [spike.clone(), back]);
        let frame = chart.frame(0);
        assert!(
            chart
                .columns(&frame)
                .iter()
                .any(|(_, point)| **point == spike)
        );
    }
}
