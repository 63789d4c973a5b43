//! Export by OTLP, over gRPC or HTTP, and the exporter of spans.
//!
//! A batch is sent once. If the collector is unreachable, slow or refuses, its spans are lost, which is logged once
//! until spans are accepted again. With TLS both protocols use HTTP/2; without it OTLP over HTTP uses HTTP/1.1.

use std::{collections::BTreeMap, fs, io, path::PathBuf, time::Duration};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::{Body, Bytes as Piece},
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use prost::Message as _;
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tower::ServiceExt as _;

use self::logs::v1::{ExportLogsServiceRequest, logs_service_client::LogsServiceClient};
use self::v1::{
    AnyValue, ArrayValue, ExportTraceServiceRequest, ExportTraceServiceResponse,
    InstrumentationScope, KeyValue, Resource, ResourceSpans, ScopeSpans, Status,
    any_value::Value,
    span::{Event, SpanKind as WireKind},
    status::StatusCode as WireStatus,
    trace_service_client::TraceServiceClient,
};
use super::span::{Attribute, EndedSpan, SpanKind, SpanValue, Tracer};
use cotenant_threads::blocking;
use cotenant_units::causes::in_one_line;

/// Messages, client and server of the part of OTLP for traces, generated from `proto/opentelemetry`.
pub mod trace {
    /// Its version.
    #[expect(
        unused_qualifications,
        clippy::allow_attributes,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    #[allow(clippy::large_enum_variant, reason = "generated code")]
    pub mod v1 {
        tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
    }
}

/// The same for logs.
pub mod logs {
    /// Its version.
    #[expect(
        unused_qualifications,
        clippy::allow_attributes,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    pub mod v1 {
        tonic::include_proto!("opentelemetry.proto.collector.logs.v1");
    }
}

pub use trace::v1;

/// Destination of spans and events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// Protocol.
    pub protocol: OtlpProtocol,
    /// Certificates of the trusted authorities; `None` without TLS.
    pub ca: Option<PathBuf>,
    /// `host:port`.
    pub authority: String,
    /// Path of spans for HTTP.
    pub path: String,
}

/// The protocols of OTLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpProtocol {
    /// gRPC.
    Grpc,
    /// Protobuf in the bodies of HTTP requests.
    Http,
}

/// What is sent.
pub(super) enum Export {
    Spans(ExportTraceServiceRequest),
    Logs(ExportLogsServiceRequest),
}

impl Export {
    fn encoded(&self) -> Vec<u8> {
        match self {
            Self::Spans(request) => request.encode_to_vec(),
            Self::Logs(request) => request.encode_to_vec(),
        }
    }

    /// Path for HTTP, from that of spans.
    fn path(&self, spans: &str) -> String {
        match (self, spans.strip_suffix("/v1/traces")) {
            (Self::Logs(_), Some(base)) => format!("{base}/v1/logs"),
            _ => spans.to_owned(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ExportError {
    #[error("cannot read the CA certificates, `{}`", .path.display())]
    Authorities { path: PathBuf, source: io::Error },
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    #[error("cannot use the connection")]
    Transport(#[source] tonic::transport::Error),
    #[error("the connection failed")]
    Http(#[source] hyper::Error),
    #[error("cannot build the request")]
    Request(#[source] hyper::http::Error),
    #[error("it returned {0}")]
    Answer(StatusCode),
    #[error("it returned {}: {}", .0.code(), .0.message())]
    Rpc(Box<tonic::Status>),
    #[error("it rejected {rejected} of them: {message}")]
    Partly { rejected: i64, message: String },
    #[error("no answer within {} s", SEND_MAX.as_secs())]
    Late,
}

impl ExportError {
    /// Whether the same batch would be rejected again (OTLP's list of retryable failures).
    pub(super) fn is_final(&self) -> bool {
        use tonic::Code;
        match self {
            Self::Answer(status) => !matches!(status.as_u16(), 429 | 502 | 503 | 504),
            Self::Rpc(status) => !matches!(
                status.code(),
                Code::Cancelled
                    | Code::DeadlineExceeded
                    | Code::ResourceExhausted
                    | Code::Aborted
                    | Code::OutOfRange
                    | Code::Unavailable
                    | Code::DataLoss
            ),
            Self::Partly { .. } => true,
            _ => false,
        }
    }
}

/// Sends ended spans to `collector`, with these resource attributes. Never returns.
pub async fn export(tracer: Tracer, collector: Collector, resource: BTreeMap<String, String>) {
    let mut sender = Sender::new(collector);
    let mut reported = false;
    loop {
        tracer.ended().await;
        // Gathers spans that end together into one batch.
        sleep(GATHER).await;
        loop {
            let batch = tracer.batch();
            if batch.spans.is_empty() {
                break;
            }
            let request = request_of(&batch.spans, &resource);
            let sent = timeout(SEND_MAX, sender.send(Export::Spans(request)))
                .await
                .unwrap_or(Err(ExportError::Late));
            let Err(error) = sent else {
                batch.settled(0);
                if std::mem::take(&mut reported) {
                    let (_, dropped) = tracer.counts();
                    tracing::info!(dropped, "spans are exported again");
                }
                continue;
            };
            let all = batch.spans.len();
            let lost = match &error {
                ExportError::Partly { rejected, .. } => usize::try_from(*rejected).unwrap_or(all),
                _ => all,
            };
            batch.settled(lost);
            if !std::mem::replace(&mut reported, true) {
                let reason = in_one_line(&error);
                tracing::warn!(
                    collector = sender.collector.authority,
                    reason,
                    "cannot export spans; they are dropped"
                );
            }
            sender.disconnect();
            sleep(PAUSE).await;
        }
    }
}

pub(super) struct Sender {
    pub(super) collector: Collector,
    /// Reused between batches.
    channel: Option<Channel>,
}

impl Sender {
    pub(super) const fn new(collector: Collector) -> Self {
        Self {
            collector,
            channel: None,
        }
    }

    /// Ends the connection.
    pub(super) fn disconnect(&mut self) {
        self.channel = None;
    }

    pub(super) async fn send(&mut self, export: Export) -> Result<(), ExportError> {
        let (rejected, message) = match (self.collector.protocol, &self.collector.ca) {
            (OtlpProtocol::Grpc, _) => by_grpc(self.channel().await?, export).await?,
            (OtlpProtocol::Http, None) => self.post(&export).await?,
            (OtlpProtocol::Http, Some(_)) => {
                let posted = self.posted(&export, "https")?.map(tonic::body::Body::new);
                let channel = self.channel().await?;
                answer_of(
                    channel
                        .oneshot(posted)
                        .await
                        .map_err(ExportError::Transport)?,
                )
                .await?
            }
        };
        if rejected > 0 {
            return Err(ExportError::Partly { rejected, message });
        }
        Ok(())
    }

    async fn channel(&mut self) -> Result<Channel, ExportError> {
        if let Some(channel) = &self.channel {
            return Ok(channel.clone());
        }
        let scheme = if self.collector.ca.is_some() {
            "https"
        } else {
            "http"
        };
        let address = format!("{scheme}://{}", self.collector.authority);
        let mut endpoint = Endpoint::from_shared(address)
            .map_err(ExportError::Transport)?
            .connect_timeout(SEND_MAX);
        if let Some(path) = &self.collector.ca {
            let file = path.clone();
            let pem = blocking(move || fs::read(file)).await;
            let pem = pem.map_err(io::Error::other).flatten().map_err(|source| {
                ExportError::Authorities {
                    path: path.clone(),
                    source,
                }
            })?;
            let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem));
            endpoint = endpoint.tls_config(tls).map_err(ExportError::Transport)?;
        }
        let channel = endpoint.connect().await.map_err(ExportError::Transport)?;
        Ok(self.channel.insert(channel).clone())
    }

    /// The request over HTTP; HTTP/1.1 omits `scheme`.
    fn posted(&self, export: &Export, scheme: &str) -> Result<Request<Full<Piece>>, ExportError> {
        let Collector {
            authority, path, ..
        } = &self.collector;
        let path = export.path(path);
        let address = if scheme.is_empty() {
            path
        } else {
            format!("{scheme}://{authority}{path}")
        };
        Request::post(address)
            .header(HOST, authority)
            .header(CONTENT_TYPE, "application/x-protobuf")
            .body(Full::new(Piece::from(export.encoded())))
            .map_err(ExportError::Request)
    }

    /// Sends a batch on a new connection.
    async fn post(&self, export: &Export) -> Result<Rejected, ExportError> {
        let stream = TcpStream::connect(&self.collector.authority)
            .await
            .map_err(ExportError::Connect)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(ExportError::Http)?;
        let request = self.posted(export, "")?;
        let exchange = async {
            let response = sender
                .send_request(request)
                .await
                .map_err(ExportError::Http)?;
            answer_of(response).await
        };
        tokio::pin!(connection);
        tokio::select! {
            answer = exchange => answer,
            // `exchange` reports its own failures; an orderly end of the connection adds nothing.
            Err(error) = &mut connection => Err(ExportError::Http(error)),
        }
    }
}

/// Number of rejected spans or events, and the reason.
type Rejected = (i64, String);

async fn by_grpc(channel: Channel, export: Export) -> Result<Rejected, ExportError> {
    let failed = |status| ExportError::Rpc(Box::new(status));
    let rejected = match export {
        Export::Spans(request) => {
            let mut client = TraceServiceClient::new(channel).max_decoding_message_size(ANSWER_MAX);
            let answer = client.export(request).await.map_err(failed)?;
            let partial = answer.into_inner().partial_success;
            partial.map(|partial| (partial.rejected_spans, partial.error_message))
        }
        Export::Logs(request) => {
            let mut client = LogsServiceClient::new(channel).max_decoding_message_size(ANSWER_MAX);
            let answer = client.export(request).await.map_err(failed)?;
            let partial = answer.into_inner().partial_success;
            partial.map(|partial| (partial.rejected_log_records, partial.error_message))
        }
    };
    Ok(rejected.unwrap_or_default())
}

/// The collector's response over HTTP, which has the same fields for spans and events. An unreadable body counts as full
/// acceptance.
async fn answer_of<B>(response: Response<B>) -> Result<Rejected, ExportError>
where
    B: Body<Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    if !response.status().is_success() {
        return Err(ExportError::Answer(response.status()));
    }
    let body = Limited::new(response.into_body(), ANSWER_MAX)
        .collect()
        .await;
    let body = body
        .map(http_body_util::Collected::to_bytes)
        .unwrap_or_default();
    let answer = ExportTraceServiceResponse::decode(body).unwrap_or_default();
    let partial = answer.partial_success.unwrap_or_default();
    Ok((partial.rejected_spans, partial.error_message))
}

fn request_of(
    spans: &[EndedSpan],
    resource: &BTreeMap<String, String>,
) -> ExportTraceServiceRequest {
    let scope_spans = ScopeSpans {
        scope: Some(scope()),
        spans: spans.iter().map(span_of).collect(),
    };
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(resource_of(resource)),
            scope_spans: vec![scope_spans],
        }],
    }
}

pub(super) fn scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "cotenant".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

pub(super) fn resource_of(resource: &BTreeMap<String, String>) -> Resource {
    Resource {
        attributes: resource
            .iter()
            .map(|(key, text)| pair(key, Value::StringValue(text.clone())))
            .collect(),
    }
}

fn span_of(span: &EndedSpan) -> v1::Span {
    let begin = nanos(span.began);
    let attributes = |attributes: &[Attribute]| {
        attributes
            .iter()
            .map(|(key, value)| pair(key, value.into()))
            .collect()
    };
    v1::Span {
        trace_id: span.context.trace_id.to_be_bytes().to_vec(),
        span_id: span.context.span_id.to_be_bytes().to_vec(),
        parent_span_id: span
            .parent
            .map(|parent| parent.to_be_bytes().to_vec())
            .unwrap_or_default(),
        name: span.name.clone(),
        kind: match span.kind {
            SpanKind::Internal => WireKind::Internal.into(),
            SpanKind::Server => WireKind::Server.into(),
        },
        start_time_unix_nano: begin,
        end_time_unix_nano: begin.saturating_add(nanos(span.took)),
        attributes: attributes(&span.attributes),
        // The sum of omitted attributes and events.
        dropped_attributes_count: span.left_out,
        events: span
            .events
            .iter()
            .map(|event| Event {
                time_unix_nano: begin.saturating_add(nanos(event.after)),
                name: event.name.to_owned(),
                attributes: attributes(&event.attributes),
            })
            .collect(),
        dropped_events_count: 0,
        status: span.failure.as_ref().map(|message| Status {
            message: message.clone(),
            code: WireStatus::Error.into(),
        }),
    }
}

pub(super) fn pair(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
    }
}

impl From<&SpanValue> for Value {
    fn from(value: &SpanValue) -> Self {
        match value {
            SpanValue::Text(text) => Self::StringValue(text.clone()),
            SpanValue::Whole(number) => Self::IntValue(*number),
            SpanValue::Real(number) => Self::DoubleValue(*number),
            SpanValue::Texts(text) => Self::ArrayValue(ArrayValue {
                values: vec![AnyValue {
                    value: Some(Self::StringValue(text.clone())),
                }],
            }),
        }
    }
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Gathering time of a batch (our choice: visible soon, with few requests).
const GATHER: Duration = Duration::from_millis(500);

/// Time limit for a collector (our choice; OTLP's default of 10 s is too long for a batch).
pub(super) const SEND_MAX: Duration = Duration::from_secs(5);

/// Pause after a failure (our choice).
pub(super) const PAUSE: Duration = Duration::from_secs(5);

/// Longest response read.
const ANSWER_MAX: usize = 64 << 10;
