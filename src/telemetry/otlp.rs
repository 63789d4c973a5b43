//! Exporter of spans by OTLP, over gRPC or HTTP.
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

/// Messages, client and server of the part of OTLP that is used, generated from `proto/opentelemetry`.
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

/// Destination of spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// Protocol.
    pub protocol: OtlpProtocol,
    /// Certificates of the trusted authorities; `None` without TLS.
    pub ca: Option<PathBuf>,
    /// `host:port`.
    pub authority: String,
    /// Path for HTTP.
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

#[derive(Debug, thiserror::Error)]
enum ExportError {
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
    #[error("it rejected {rejected} spans: {message}")]
    Partly { rejected: i64, message: String },
    #[error("no answer within {} s", SEND_MAX.as_secs())]
    Late,
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
            let sent = timeout(SEND_MAX, sender.send(request))
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
            sender.channel = None;
            sleep(PAUSE).await;
        }
    }
}

struct Sender {
    collector: Collector,
    /// Reused between batches.
    channel: Option<Channel>,
}

impl Sender {
    fn new(collector: Collector) -> Self {
        Self {
            collector,
            channel: None,
        }
    }

    async fn send(&mut self, request: ExportTraceServiceRequest) -> Result<(), ExportError> {
        let answer = match (self.collector.protocol, &self.collector.ca) {
            (OtlpProtocol::Grpc, _) => {
                let mut client = TraceServiceClient::new(self.channel().await?)
                    .max_decoding_message_size(ANSWER_MAX);
                client
                    .export(request)
                    .await
                    .map_err(|status| ExportError::Rpc(Box::new(status)))?
                    .into_inner()
            }
            (OtlpProtocol::Http, None) => self.post(&request).await?,
            (OtlpProtocol::Http, Some(_)) => {
                let posted = self.posted(&request, "https")?.map(tonic::body::Body::new);
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
        match answer.partial_success {
            Some(partial) if partial.rejected_spans > 0 => Err(ExportError::Partly {
                rejected: partial.rejected_spans,
                message: partial.error_message,
            }),
            _ => Ok(()),
        }
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
    fn posted(
        &self,
        request: &ExportTraceServiceRequest,
        scheme: &str,
    ) -> Result<Request<Full<Piece>>, ExportError> {
        let Collector {
            authority, path, ..
        } = &self.collector;
        let address = if scheme.is_empty() {
            path.clone()
        } else {
            format!("{scheme}://{authority}{path}")
        };
        Request::post(address)
            .header(HOST, authority)
            .header(CONTENT_TYPE, "application/x-protobuf")
            .body(Full::new(Piece::from(request.encode_to_vec())))
            .map_err(ExportError::Request)
    }

    /// Sends a batch on a new connection.
    async fn post(
        &self,
        request: &ExportTraceServiceRequest,
    ) -> Result<ExportTraceServiceResponse, ExportError> {
        let stream = TcpStream::connect(&self.collector.authority)
            .await
            .map_err(ExportError::Connect)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(ExportError::Http)?;
        let request = self.posted(request, "")?;
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

/// The collector's response over HTTP. An unreadable body counts as full acceptance.
async fn answer_of<B>(response: Response<B>) -> Result<ExportTraceServiceResponse, ExportError>
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
    Ok(ExportTraceServiceResponse::decode(body).unwrap_or_default())
}

fn request_of(
    spans: &[EndedSpan],
    resource: &BTreeMap<String, String>,
) -> ExportTraceServiceRequest {
    let scope_spans = ScopeSpans {
        scope: Some(InstrumentationScope {
            name: "cotenant".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }),
        spans: spans.iter().map(span_of).collect(),
    };
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource {
                attributes: resource
                    .iter()
                    .map(|(key, text)| pair(key, Value::StringValue(text.clone())))
                    .collect(),
            }),
            scope_spans: vec![scope_spans],
        }],
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

fn pair(key: &str, value: Value) -> KeyValue {
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

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Gathering time of a batch (our choice: visible soon, with few requests).
const GATHER: Duration = Duration::from_millis(500);

/// Time limit for a collector (our choice; OTLP's default of 10 s is too long for a batch).
const SEND_MAX: Duration = Duration::from_secs(5);

/// Pause after a failure (our choice).
const PAUSE: Duration = Duration::from_secs(5);

/// Longest response read.
const ANSWER_MAX: usize = 64 << 10;
