//! Spans of requests and voice turns, in a bounded buffer for the exporter.
//!
//! ```text
//! begin ─► open ──(set, event)──► dropped ─► ended ─► exporter
//! ```
//!
//! Open and ended spans share [`BYTES_MAX`]; spans that do not fit are counted and omitted. No operation waits for a
//! collector.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque, hash_map::RandomState},
    hash::BuildHasher as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use cotenant_units::lock::locked;
use tokio::sync::Notify;

/// Identity of a span in its trace, in the format of [W3C Trace Context](https://www.w3.org/TR/trace-context/).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    /// The trace; never zero.
    pub trace_id: u128,
    /// The span; never zero.
    pub span_id: u64,
    /// Whether the trace is recorded.
    pub sampled: bool,
    /// Whether the caller began the trace.
    pub from_caller: bool,
}

impl SpanContext {
    /// Parses the header `traceparent`; `None` if malformed, which starts a new trace.
    ///
    /// ```
    /// use cotenant_telemetry::SpanContext;
    /// let context = SpanContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").unwrap();
    /// assert_eq!((context.span_id, context.sampled), (0x00f0_67aa_0ba9_02b7, true));
    /// assert!(SpanContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01").is_none());
    /// ```
    pub fn parse(traceparent: &str) -> Option<Self> {
        let mut fields = traceparent.trim().split('-');
        let (version, trace, span, flags) = (
            fields.next()?,
            fields.next()?,
            fields.next()?,
            fields.next()?,
        );
        let hex = |text: &str, digits: usize| {
            text.len() == digits
                && text
                    .bytes()
                    .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let well_formed = hex(version, 2) && hex(trace, 32) && hex(span, 16) && hex(flags, 2);
        // Later versions may have more fields.
        if !well_formed || version == "ff" || (version == "00" && fields.next().is_some()) {
            return None;
        }
        let trace_id = u128::from_str_radix(trace, 16).ok().filter(|id| *id > 0)?;
        let span_id = u64::from_str_radix(span, 16).ok().filter(|id| *id > 0)?;
        let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        Some(Self {
            trace_id,
            span_id,
            sampled,
            from_caller: true,
        })
    }
}

/// Position of a span relative to other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// Work in this program.
    Internal,
    /// A client's request.
    Server,
}

/// Value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum SpanValue {
    /// Text, truncated to `TEXT_MAX` bytes.
    Text(String),
    /// An integer.
    Whole(i64),
    /// Another number.
    Real(f64),
    /// A list with one text.
    Texts(String),
}

impl From<&str> for SpanValue {
    fn from(text: &str) -> Self {
        Self::Text(
            text.get(..text.floor_char_boundary(TEXT_MAX))
                .unwrap_or_default()
                .to_owned(),
        )
    }
}

impl From<u64> for SpanValue {
    fn from(number: u64) -> Self {
        Self::Whole(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<u32> for SpanValue {
    fn from(number: u32) -> Self {
        Self::Whole(number.into())
    }
}

impl From<u16> for SpanValue {
    fn from(number: u16) -> Self {
        Self::Whole(number.into())
    }
}

impl From<f64> for SpanValue {
    fn from(number: f64) -> Self {
        Self::Real(number)
    }
}

impl SpanValue {
    fn size(&self) -> usize {
        size_of::<Attribute>()
            + match self {
                Self::Text(text) | Self::Texts(text) => text.len(),
                Self::Whole(_) | Self::Real(_) => 0,
            }
    }
}

/// A name and a value.
pub type Attribute = (&'static str, SpanValue);

#[derive(Clone, Debug, PartialEq)]
pub(super) struct SpanEvent {
    /// Time since the start of the span.
    pub after: Duration,
    /// Name of the event.
    pub name: &'static str,
    /// Its attributes.
    pub attributes: Vec<Attribute>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct EndedSpan {
    /// Its identity.
    pub context: SpanContext,
    /// The parent span.
    pub parent: Option<u64>,
    /// Name of the operation.
    pub name: String,
    /// Its position relative to other programs.
    pub kind: SpanKind,
    /// Start, since 1970.
    pub began: Duration,
    /// Duration.
    pub took: Duration,
    /// Attributes known so far.
    pub attributes: Vec<Attribute>,
    /// Events during the span.
    pub events: Vec<SpanEvent>,
    /// Number of omitted attributes and events.
    pub left_out: u32,
    /// Cause of a failure.
    pub failure: Option<String>,
}

impl EndedSpan {
    fn size(&self) -> usize {
        let attributes = self
            .attributes
            .iter()
            .map(|(_, value)| value.size())
            .sum::<usize>();
        let events = self.events.iter().map(event_size).sum::<usize>();
        size_of::<Self>()
            + self.name.len()
            + attributes
            + events
            + self.failure.as_ref().map_or(0, String::len)
    }
}

fn event_size(event: &SpanEvent) -> usize {
    size_of::<SpanEvent>()
        + event
            .attributes
            .iter()
            .map(|(_, value)| value.size())
            .sum::<usize>()
}

/// Starts spans; clones share one bound. Without an exporter it starts none, at no cost.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    spans: Mutex<Spans>,
    /// Random per process.
    keys: RandomState,
    count: AtomicU64,
    exported: AtomicU64,
    dropped: AtomicU64,
    ended: Notify,
}

#[derive(Debug, Default)]
struct Spans {
    open: BTreeMap<u64, Open>,
    ended: VecDeque<EndedSpan>,
    /// Of open and ended spans, and of a batch being sent.
    bytes: usize,
}

#[derive(Debug)]
struct Open {
    span: EndedSpan,
    since: Instant,
    /// Set when the work has ended but may resume.
    paused: Option<Duration>,
}

impl Open {
    fn now(&self) -> Duration {
        self.since.elapsed()
    }
}

/// Reserves bytes of the bound; `false` if it would be exceeded.
fn charge(taken: &mut usize, bytes: usize) -> bool {
    let fits = *taken + bytes <= BYTES_MAX;
    if fits {
        *taken += bytes;
    }
    fits
}

impl Spans {
    fn set(&mut self, id: u64, key: &'static str, value: SpanValue) {
        let Some(open) = self.open.get_mut(&id) else {
            return;
        };
        if open.span.attributes.len() < ATTRIBUTES_MAX && charge(&mut self.bytes, value.size()) {
            open.span.attributes.push((key, value));
        } else {
            open.span.left_out += 1;
        }
    }

    fn event(&mut self, id: u64, name: &'static str, attributes: Vec<Attribute>) {
        let Some(open) = self.open.get_mut(&id) else {
            return;
        };
        let event = SpanEvent {
            after: open.now(),
            name,
            attributes,
        };
        if open.span.events.len() < EVENTS_MAX && charge(&mut self.bytes, event_size(&event)) {
            open.span.events.push(event);
        } else {
            open.span.left_out += 1;
        }
    }
}

impl Tracer {
    /// A tracer that stores spans for an exporter.
    pub fn recording() -> Self {
        Self(Some(Arc::new(Shared {
            spans: Mutex::default(),
            keys: RandomState::new(),
            count: AtomicU64::new(0),
            exported: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            ended: Notify::new(),
        })))
    }

    /// Starts a child span of `parent`, or a trace. The span ends on drop.
    pub fn begin(&self, name: &str, kind: SpanKind, parent: Option<SpanContext>) -> Span {
        let nothing = Span {
            shared: None,
            context: parent,
        };
        let Some(shared) = self
            .0
            .as_ref()
            .filter(|_| parent.is_none_or(|parent| parent.sampled))
        else {
            return nothing;
        };
        let context = SpanContext {
            trace_id: parent.map_or_else(
                || u128::from(shared.fresh()) << 64 | u128::from(shared.fresh()),
                |parent| parent.trace_id,
            ),
            span_id: shared.fresh(),
            sampled: true,
            from_caller: parent.is_some_and(|parent| parent.from_caller),
        };
        let span = EndedSpan {
            context,
            parent: parent.map(|parent| parent.span_id),
            name: name
                .get(..name.floor_char_boundary(TEXT_MAX))
                .unwrap_or_default()
                .to_owned(),
            kind,
            began: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
            took: Duration::ZERO,
            attributes: Vec::new(),
            events: Vec::new(),
            left_out: 0,
            failure: None,
        };
        let mut spans = locked(&shared.spans);
        if !charge(&mut spans.bytes, span.size()) {
            shared.dropped.fetch_add(1, Ordering::Relaxed);
            return nothing;
        }
        spans.open.insert(
            context.span_id,
            Open {
                span,
                since: Instant::now(),
                paused: None,
            },
        );
        Span {
            shared: Some(Arc::clone(shared)),
            context: Some(context),
        }
    }

    /// Adds an event to every open span without an open child: an event of the device belongs to the current stage of
    /// each request.
    pub fn event_in_stages(&self, name: &'static str, attributes: &[Attribute]) {
        let Some(shared) = &self.0 else {
            return;
        };
        let mut spans = locked(&shared.spans);
        let parents: BTreeSet<u64> = spans
            .open
            .values()
            .filter_map(|open| open.span.parent)
            .collect();
        let stages: Vec<u64> = spans
            .open
            .iter()
            .filter(|(id, open)| open.paused.is_none() && !parents.contains(id))
            .map(|(id, _)| *id)
            .collect();
        for id in stages {
            spans.event(id, name, attributes.to_vec());
        }
    }

    /// Spans accepted by a collector, and lost spans.
    pub fn counts(&self) -> (u64, u64) {
        let count = |count: fn(&Shared) -> &AtomicU64| {
            self.0
                .as_ref()
                .map_or(0, |shared| count(shared).load(Ordering::Relaxed))
        };
        (
            count(|shared| &shared.exported),
            count(|shared| &shared.dropped),
        )
    }

    pub(super) async fn ended(&self) {
        match &self.0 {
            Some(shared) => shared.ended.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Takes the oldest ended spans; they count against the bound until the batch is dropped.
    pub(super) fn batch(&self) -> Batch {
        let Some(shared) = &self.0 else {
            return Batch::default();
        };
        let mut spans = locked(&shared.spans);
        let count = spans.ended.len().min(BATCH_MAX);
        Batch {
            spans: spans.ended.drain(..count).collect(),
            shared: Some(Arc::clone(shared)),
        }
    }
}

impl Shared {
    /// A random id; never zero, which means none.
    fn fresh(&self) -> u64 {
        self.keys
            .hash_one(self.count.fetch_add(1, Ordering::Relaxed))
            .max(1)
    }
}

/// Spans being sent to the collector.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) spans: Vec<EndedSpan>,
    shared: Option<Arc<Shared>>,
}

impl Batch {
    /// Records the outcome of the batch: the number of lost spans.
    pub(super) fn settled(self, lost: usize) {
        let Some(shared) = &self.shared else {
            return;
        };
        let lost = lost.min(self.spans.len());
        shared.dropped.fetch_add(lost as u64, Ordering::Relaxed);
        shared
            .exported
            .fetch_add((self.spans.len() - lost) as u64, Ordering::Relaxed);
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            let bytes = self.spans.iter().map(EndedSpan::size).sum();
            let mut spans = locked(&shared.spans);
            spans.bytes = spans.bytes.saturating_sub(bytes);
        }
    }
}

/// Work in progress; ends on drop.
#[derive(Debug, Default)]
pub struct Span {
    shared: Option<Arc<Shared>>,
    context: Option<SpanContext>,
}

impl Span {
    /// Context for child spans; the parent's if this span is not recorded.
    pub fn context(&self) -> Option<SpanContext> {
        self.context
    }

    /// Adds an attribute.
    pub fn set(&self, key: &'static str, value: impl Into<SpanValue>) {
        self.with(|spans, id| spans.set(id, key, value.into()));
    }

    /// Adds an attribute that is a list with one text.
    pub fn set_list(&self, key: &'static str, text: &str) {
        self.with(|spans, id| spans.set(id, key, SpanValue::Texts(text.to_owned())));
    }

    /// Records an event.
    pub fn event(&self, name: &'static str) {
        self.with(|spans, id| spans.event(id, name, Vec::new()));
    }

    /// Records a failure: its class and its message.
    pub fn fail(&self, class: &'static str, message: &str) {
        self.with(|spans, id| {
            let SpanValue::Text(message) = SpanValue::from(message) else {
                return;
            };
            spans.set(id, "error.type", class.into());
            if let Some(open) = spans.open.get_mut(&id)
                && open.span.failure.is_none()
                && charge(&mut spans.bytes, message.len())
            {
                open.span.failure = Some(message);
            }
        });
    }

    /// Records a provisional end, which applies unless the span [resumes](Self::resume) before it is dropped.
    pub fn pause(&self) {
        self.with(|spans, id| {
            if let Some(open) = spans.open.get_mut(&id) {
                open.paused = Some(open.now());
            }
        });
    }

    /// Cancels a provisional end.
    pub fn resume(&self) {
        self.with(|spans, id| {
            if let Some(open) = spans.open.get_mut(&id) {
                open.paused = None;
            }
        });
    }

    fn with(&self, act: impl FnOnce(&mut Spans, u64)) {
        if let (Some(shared), Some(context)) = (&self.shared, self.context) {
            act(&mut locked(&shared.spans), context.span_id);
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        self.with(|spans, id| {
            if let Some(open) = spans.open.remove(&id) {
                let took = open.paused.unwrap_or_else(|| open.now());
                spans.ended.push_back(EndedSpan { took, ..open.span });
            }
        });
        if let Some(shared) = &self.shared {
            shared.ended.notify_one();
        }
    }
}

/// Memory of all spans (our choice: some 500, twenty minutes of a device in conversation).
const BYTES_MAX: usize = 512 << 10;

/// Spans of a batch (our choice: some 64 KiB).
const BATCH_MAX: usize = 64;

/// Attributes and events of one span (our choice, above any observed number; sheds may be frequent).
const ATTRIBUTES_MAX: usize = 24;
const EVENTS_MAX: usize = 32;

/// Longest name or value, in bytes (our choice).
const TEXT_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(tracer: &Tracer) -> Vec<EndedSpan> {
        let batch = tracer.batch();
        let spans = batch.spans.clone();
        batch.settled(0);
        spans
    }

    fn bytes(tracer: &Tracer) -> usize {
        locked(&tracer.0.as_ref().unwrap().spans).bytes
    }

    #[test]
    fn only_well_formed_parents_are_honoured() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        for (header, taken) in [
            (format!("00-{trace}-00f067aa0ba902b7-00"), true),
            (format!("cc-{trace}-00f067aa0ba902b7-01-more"), true),
            (format!("00-{trace}-00f067aa0ba902b7-01-more"), false),
            (format!("ff-{trace}-00f067aa0ba902b7-01"), false),
            (format!("00-{trace}-00F067AA0BA902B7-01"), false),
            (format!("00-{trace}-00f067aa0ba902b-01"), false),
            (format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), false),
            (format!("00-{trace}"), false),
            (String::new(), false),
            ("é-é-é-é".to_owned(), false),
        ] {
            assert_eq!(SpanContext::parse(&header).is_some(), taken, "{header}");
        }
    }

    #[test]
    fn a_span_below_another_is_of_its_trace_and_an_unsampled_trace_is_not_recorded() {
        let tracer = Tracer::recording();
        let root = tracer.begin("request", SpanKind::Server, None);
        let stage = tracer.begin("chat", SpanKind::Internal, root.context());
        stage.set("tokens", 7u32);
        drop(stage);
        drop(root);
        let spans = ended(&tracer);
        assert_eq!(
            spans
                .iter()
                .map(|span| span.name.as_str())
                .collect::<Vec<_>>(),
            ["chat", "request"]
        );
        assert_eq!(spans[0].context.trace_id, spans[1].context.trace_id);
        assert_eq!(spans[0].parent, Some(spans[1].context.span_id));
        let quiet = SpanContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00");
        let span = tracer.begin("request", SpanKind::Server, quiet);
        assert_eq!(span.context(), quiet);
        drop(span);
        assert!(ended(&tracer).is_empty());
        assert_eq!(bytes(&tracer), 0);
    }

    #[test]
    fn a_shed_is_an_event_of_the_stages_and_not_of_what_is_around_them() {
        let tracer = Tracer::recording();
        let root = tracer.begin("request", SpanKind::Server, None);
        let stage = tracer.begin("chat", SpanKind::Internal, root.context());
        let over = tracer.begin("turn", SpanKind::Server, None);
        over.pause();
        tracer.event_in_stages("shed", &[("bytes", 5u64.into())]);
        drop((stage, root, over));
        let events: Vec<usize> = ended(&tracer)
            .iter()
            .map(|span| span.events.len())
            .collect();
        assert_eq!(events, [1, 0, 0]);
    }

    #[test]
    fn what_finds_no_room_is_counted_and_every_byte_is_given_back() {
        let tracer = Tracer::recording();
        let long = "x".repeat(1000);
        for _ in 0..10_000 {
            let span = tracer.begin(&long, SpanKind::Internal, None);
            span.set("text", long.as_str());
            span.fail("long", &long);
            (0..100).for_each(|_| span.event("again"));
        }
        assert!(bytes(&tracer) <= BYTES_MAX);
        let mut taken = 0;
        loop {
            let spans = ended(&tracer);
            assert!(
                spans
                    .iter()
                    .all(|span| span.name.len() == TEXT_MAX && span.events.len() <= EVENTS_MAX)
            );
            taken += spans.len() as u64;
            if spans.is_empty() {
                break;
            }
        }
        let (exported, dropped) = tracer.counts();
        assert_eq!((exported, exported + dropped), (taken, 10_000));
        assert!(taken > 10, "{taken}");
        assert_eq!(bytes(&tracer), 0);
    }

    #[test]
    fn without_an_exporter_nothing_is_kept() {
        let tracer = Tracer::default();
        let span = tracer.begin("request", SpanKind::Server, None);
        assert_eq!(span.context(), None);
        drop(span);
        assert_eq!(tracer.counts(), (0, 0));
    }
}
