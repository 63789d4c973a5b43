//! Adapter between the embedding APIs and workers for embeddings.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use tokio::time::sleep;

use super::{
    control_handle::ControlHandle,
    reach::{self, refusal_of},
    workers::Speaker,
};
use cotenant_conversation::{
    refusal::Refusal,
    refusals::{not_configured, worker_lost},
};
use cotenant_http::backend::{EmbedRequest, EmbeddingBackend, RequestMeta};
use cotenant_speech::{
    client::{ClientError, ClientTimeouts, Endpoint},
    embeddings::{EmbeddingInput, Embeddings},
    http::{HttpClient, HttpShape},
};
use cotenant_telemetry::{SpanKind, Tracer};

/// Continuation of "cannot".
const ACT: &str = "embed text";

/// How often a request is sent to a worker that ends meanwhile. Our choice: one that dies each time is at fault itself.
const TRIES: u32 = 3;

/// Pause before the next one, in which the end of the worker is noticed.
const PAUSE: Duration = Duration::from_millis(100);

/// Workers for embeddings as used by the APIs.
pub(super) struct Embedder {
    control: Arc<ControlHandle>,
    workers: Vec<Speaker>,
    tracer: Tracer,
}

impl Embedder {
    pub(super) fn new(
        control: Arc<ControlHandle>,
        workers: Vec<Speaker>,
        tracer: Tracer,
    ) -> Arc<Self> {
        Arc::new(Self {
            control,
            workers,
            tracer,
        })
    }

    async fn embed_in(&self, request: EmbedRequest) -> Result<Embeddings, Refusal> {
        let named = |worker: &&Speaker| worker.handle.name() == request.model;
        let worker = self.workers.iter().find(named);
        let worker = worker.ok_or_else(|| not_configured(ACT, "model for embeddings"))?;
        let name = worker.handle.name().to_owned();
        let input = EmbeddingInput {
            texts: &request.texts,
            dimensions: request.dimensions,
            truncate: request.truncate,
        };
        let mut tries = 1;
        let embedded = loop {
            let embedded = self.ask(worker, input, &request.meta).await?;
            match embedded {
                // It has ended: vectors are computed again by the next one.
                Err(ClientError::Connect { .. } | ClientError::Broken { .. }) if tries < TRIES => {
                    tries += 1;
                    sleep(PAUSE).await;
                }
                embedded => break embedded,
            }
        };
        match &embedded {
            Ok(_) => worker.hangs.answered(),
            Err(error) => worker.hangs.failed(error),
        }
        let embedded = embedded.map_err(|error| refusal_of(error, name.clone(), "input"))?;
        let (found, wanted) = (
            embedded.vectors.first().map_or(0, Vec::len),
            request.dimensions.map(|dimensions| dimensions as usize),
        );
        match wanted.filter(|wanted| *wanted != found) {
            Some(wanted) => {
                let ignored = format!("it returned {found} numbers instead of {wanted}");
                Err(worker_lost(&name, ignored))
            }
            None => Ok(embedded),
        }
    }
}

impl Embedder {
    /// Asks a worker once it accepts requests.
    async fn ask(
        &self,
        worker: &Speaker,
        input: EmbeddingInput<'_>,
        meta: &RequestMeta,
    ) -> Result<Result<Embeddings, ClientError>, Refusal> {
        let (endpoint, _at_work) = reach::worker(&self.control, worker, ACT, meta).await?;
        let Endpoint::Tcp(address) = endpoint else {
            // The configuration gives HTTP workers a port.
            let name = worker.handle.name();
            return Err(worker_lost(name, "it has no port".to_owned()));
        };
        let timeouts = ClientTimeouts {
            embed: worker.way.answer_timeout,
            ..ClientTimeouts::default()
        };
        let model = worker.way.model.clone();
        let client = HttpClient::new(address, HttpShape::Openai, model, timeouts);
        Ok(client.embed(input).await)
    }
}

impl EmbeddingBackend for Embedder {
    fn embed(&self, request: EmbedRequest) -> BoxFuture<'_, Result<Embeddings, Refusal>> {
        async move {
            let span = self
                .tracer
                .begin("embeddings", SpanKind::Internal, request.meta.trace);
            span.set("gen_ai.operation.name", "embeddings");
            span.set("gen_ai.provider.name", "cotenant");
            span.set("gen_ai.request.model", request.model.as_str());
            let embedded = self.embed_in(request).await;
            if let Err(refusal) = &embedded {
                span.fail("refused", &refusal.to_string());
            }
            embedded
        }
        .boxed()
    }
}
